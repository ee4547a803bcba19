"""Text as token numbers: files with one sentence per line, vocabularies, length buckets."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.data.files import DataError

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
UNKNOWN, START, END = range(3)

Line = tuple[str, str]  # a sentence and its translation


def split_words(line: str) -> list[str]:
    """Split at spaces only: a non-breaking space is part of a word."""
    return [word for word in line.split(" ") if word]


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 text file, plain or gzip."""
    content = read_bytes(path)
    try:
        text = content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte {content[error.start]:#04x} is not UTF-8: "
            "save the file in UTF-8"
        ) from error
    if not text.strip():
        raise DataError(f"{path} is empty: expected one sentence per line")
    # splitlines() would also split at characters that occur inside sentences.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"{path} is missing: add it, or set data.path to another folder") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or not gzip: replace it") from error


def read_pairs(source: Path, target: Path) -> list[Line]:
    """Read the lines of two files that are translations of each other."""
    ours, theirs = read_lines(source), read_lines(target)
    if len(ours) != len(theirs):
        longer = source if len(ours) > len(theirs) else target
        raise DataError(
            f"{source} has {len(ours):,} lines and {target} has {len(theirs):,}: "
            f"{longer}, line {min(len(ours), len(theirs)) + 1} has no translation: "
            "make line k of one the translation of line k of the other"
        )
    return list(zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Vocabulary:
    """The words that have a token number; all others are <unk>."""

    words: tuple[str, ...]

    @classmethod
    def of_file(cls, path: Path) -> Vocabulary:
        """Read one word per line, as in the tutorial's files: <unk>, <s> and </s> come first."""
        words = read_lines(path)
        for line, mark in enumerate(SPECIAL_TOKENS, 1):
            if words[line - 1 : line] != [mark]:
                found = repr(words[line - 1]) if line <= len(words) else "nothing"
                raise DataError(
                    f"{path}, line {line} is {found}; expected a vocabulary that starts with the "
                    f"lines {' '.join(SPECIAL_TOKENS)}: add them"
                )
        first = dict[str, int]()
        for line, word in enumerate(words, 1):
            if first.setdefault(word, line) != line:
                raise DataError(
                    f"{path}, line {line}: {word!r} is already in line {first[word]}: remove it"
                )
        return cls(tuple(words))

    @classmethod
    def of_text(cls, lines: Iterable[str], size: int | None = None) -> Vocabulary:
        """Return the `size` most frequent words, special tokens included; None: all words."""
        counts = Counter(word for line in lines for word in split_words(line))
        by_count = sorted(
            counts.keys() - set(SPECIAL_TOKENS), key=lambda word: (-counts[word], word)
        )
        return cls((*SPECIAL_TOKENS, *by_count)[:size])

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, line: str, longest: int | None = None) -> list[int]:
        """Return the token numbers of the first `longest` words.

        >>> Vocabulary.of_text(["a man", "a dog"]).encode("a cat")
        [3, 0]
        """
        return [self.numbers.get(word, UNKNOWN) for word in split_words(line)[:longest]]

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the sentence up to its end token."""
        words = list[str]()
        for number in numbers:
            if number == END:
                break
            words.append(self.words[number])
        return " ".join(words)


@dataclass(frozen=True)
class Sentences:
    tokens: Tensor  # count × longest, int64, on the device, padded with END
    lengths: Tensor  # count, int64, on the CPU, where sequences are packed

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], device: torch.device) -> Sentences:
        lengths = [len(sentence) for sentence in sentences]
        tokens = np.full((len(lengths), max([1, *lengths])), END)
        for row, sentence in zip(tokens, sentences, strict=True):
            row[: len(sentence)] = sentence
        return cls(torch.from_numpy(tokens).to(device), torch.tensor(lengths))


@dataclass(frozen=True)
class Pairs:
    """Sentences with their translations, which start with START and end with END."""

    source: Sentences
    target: Sentences
    references: list[str]  # the translations as text

    @classmethod
    def of(
        cls,
        lines: Sequence[Line],
        source: Vocabulary,
        target: Vocabulary,
        device: torch.device,
        longest: int | None = None,
    ) -> Pairs:
        """Return all pairs of lines, truncated to `longest` words."""
        ours = [source.encode(line, longest) for line, _ in lines]
        theirs = [[START, *target.encode(line, longest), END] for _, line in lines]
        references = [line for _, line in lines]
        return cls(Sentences.of(ours, device), Sentences.of(theirs, device), references)

    def __len__(self) -> int:
        return len(self.references)

    @property
    def whole(self) -> Tensor:
        """Return the rows in which neither line is empty."""
        return ((self.source.lengths > 0) & (self.target.lengths > 2)).nonzero().flatten()


class Buckets:
    """Divides pairs into batches of similar lengths.

    Every epoch is a new permutation of all rows; the last batch of a bucket may be smaller.
    """

    def __init__(self, lengths: Tensor, buckets: int, width: int, size: int) -> None:
        """`lengths` are of the longer side of each pair; the first bucket is 0 … width − 1."""
        self.bucket = (lengths // width).clamp(max=buckets - 1)
        self.size = size

    def draw_epoch(self, source: torch.Generator) -> list[Tensor]:
        """Return the rows of every batch."""
        order = torch.randperm(len(self.bucket), generator=source)
        members = [order[self.bucket[order] == b] for b in self.bucket.unique()]
        batches = [batch for rows in members for batch in rows.split(self.size)]
        turn = torch.randperm(len(batches), generator=source)
        return [batches[i] for i in turn]
