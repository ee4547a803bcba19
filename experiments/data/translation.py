"""Sentences and their translations: IWSLT'15, Multi30k, your own files, and generated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt

from experiments.data.files import DataError, Download, FileSet, fetch, search_folders
from experiments.data.text import Line, Pairs, Vocabulary, read_pairs, split_words

MAX_WORDS = 50  # per sentence; the tutorial's limit
EMPTY_PAIRS = 512  # of a corpus without values; more than a batch
INVENTED = 20  # words of a generated language

Words = Annotated[int, Field(ge=4)]  # of a vocabulary: three special tokens and at least one word


@dataclass(frozen=True)
class Corpus:
    train: Pairs
    dev: Pairs
    test: Pairs
    source: Vocabulary
    target: Vocabulary


# The checksums of tst2012 and tst2013 were computed from the files and equal those of PaddleNLP;
# the others are PaddleNLP's.
IWSLT15 = FileSet(
    name="IWSLT'15",
    folder="iwslt15",
    checksums={
        "train.vi": "md5:858e884484885af5775068140ae85dab",
        "train.en": "md5:5b6300f46160ab5a7a995546d2eeb9e6",
        "tst2012.vi": "md5:dddf990faa149e980b11a36fca4a8898",
        "tst2012.en": "md5:c14a0955ed8b8d6929fdabf4606e3875",
        "tst2013.vi": "md5:a3185b00264620297901b647a4cacf38",
        "tst2013.en": "md5:c41c43cb6d3b122c093ee89608ba62bd",
        "vocab.vi": "md5:e8b05f8c26008a798073c619236712b4",
        "vocab.en": "md5:98b5011e1f579936277a273fd7f4e9b4",
    },
    sources=lambda: [Download("https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi/")],
    requirement="access to nlp.stanford.edu",
)

# Pinned to a commit, because a later one changes the training sentences.
MULTI30K = FileSet(
    name="Multi30k",
    folder="multi30k",
    checksums={
        "train.lc.norm.tok.de": "md5:4380018035b602bd0d0c4f369918dfde",
        "train.lc.norm.tok.en": "md5:11ac4eac7988e6bd46cabe9755b71d26",
        "val.lc.norm.tok.de": "md5:579f1cd1c81ae3917e4485613e0a62f7",
        "val.lc.norm.tok.en": "md5:02902c626a88ec3c0a56cca3c5bb77fe",
        "test_2016_flickr.lc.norm.tok.de": "md5:3054f8453b394c41d17df5c15849b5c8",
        "test_2016_flickr.lc.norm.tok.en": "md5:09aa5360d1e0ae3e03742297eb720d7d",
    },
    sources=lambda: [
        Download(
            "https://raw.githubusercontent.com/multi30k/dataset/"
            "7bee46bc74186b4b6254603143610f730d40bf66/data/task1/tok/"
        )
    ],
    requirement="access to raw.githubusercontent.com",
)

# The same text, compressed.
MULTI30K_PACKED = FileSet(
    name="Multi30k",
    folder="multi30k",
    checksums={
        "train.de.gz": "md5:db95bed9956107ab1df8a049ffff3fca",
        "train.en.gz": "md5:bc6c74896cdf1570e00767b0e51e0aa3",
        "val.de.gz": "md5:2f2a52681a11202fa1b56ba8da90be55",
        "val.en.gz": "md5:69e01ffbbdc15a76874b6e7c92440520",
        "test_2016_flickr.de.gz": "md5:17286836f8c77e7b18bb2bedd8d24809",
        "test_2016_flickr.en.gz": "md5:110b470e908017b19655b12b967de941",
    },
    sources=list,
)


@lru_cache(maxsize=1)  # shared by the runs of a figure, which only read it
def load_iwslt15(
    device: torch.device,
    words: Words | None = None,
    longest: PositiveInt = MAX_WORDS,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> Corpus:
    """Return talks, Vietnamese to English: 133,317 pairs, tst2012 as dev and tst2013 as test set.

    `words` is the size of each vocabulary; None: the official vocabularies.
    """
    if device.type == "meta":
        return empty_corpus(IWSLT15_SHAPE, words, device)
    paths = ordered_paths(IWSLT15, fetch(IWSLT15))
    vocabularies = paths[6:] if words is None else None
    return read_corpus(paths[:6], vocabularies, device, words, longest, limit, test_limit)


@lru_cache(maxsize=1)
def load_multi30k(
    device: torch.device,
    words: Words | None = None,
    longest: PositiveInt = MAX_WORDS,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> Corpus:
    """Return image captions, German to English: 29,000 pairs, 1,014 for dev, 1,000 for test."""
    if device.type == "meta":
        return empty_corpus(MULTI30K_SHAPE, words, device)
    return read_corpus(multi30k_files(), None, device, words, longest, limit, test_limit)


def load_by_heart(
    device: torch.device,
    limit: PositiveInt,
    words: Words | None = None,
    longest: PositiveInt = MAX_WORDS,
    test_limit: PositiveInt | None = None,
) -> Corpus:
    """Return the first training pairs of Multi30k, also used as dev and test set."""
    if device.type == "meta":
        return empty_corpus(BY_HEART_SHAPE, words, device)
    paths = 3 * multi30k_files()[:2]
    return read_corpus(paths, None, device, words, longest, limit, test_limit or limit)


def multi30k_files() -> list[Path]:
    packed = search_folders(MULTI30K_PACKED)
    if len(packed) == len(MULTI30K_PACKED.checksums):
        return ordered_paths(MULTI30K_PACKED, packed)
    return ordered_paths(MULTI30K, fetch(MULTI30K))


@dataclass(frozen=True)
class CorpusShape:
    """What the cost of a training step depends on."""

    vocabularies: tuple[int, int]
    lengths: tuple[int, int]  # mean words of a sentence and of its translation


IWSLT15_SHAPE = CorpusShape((7_709, 17_191), (24, 19))  # lengths: of tst2012 and tst2013
MULTI30K_SHAPE = CorpusShape((18_725, 10_214), (12, 13))
BY_HEART_SHAPE = CorpusShape((740, 706), (12, 13))  # 200 pairs


def empty_corpus(shape: CorpusShape, words: int | None, device: torch.device) -> Corpus:
    """Return sentences without values: the meta device needs shapes only, and no files."""
    lists = [Vocabulary(tuple(map(str, range(words or count)))) for count in shape.vocabularies]
    line = tuple(" ".join(["3"] * count) for count in shape.lengths)
    pairs = [(line[0], line[1])] * EMPTY_PAIRS
    few = pairs[:32]
    return corpus_of(pairs, few, few, lists, device, MAX_WORDS)


def load_sentences(
    device: torch.device,
    path: str,
    source: str,
    target: str,
    words: Words | None = None,
    longest: PositiveInt = MAX_WORDS,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> Corpus:
    """Return your own files in a folder: train.de, train.en, dev.de, dev.en, test.de, test.en.

    If `words` is None and the folder has vocab.de and vocab.en, these are the vocabularies.
    """
    folder = Path(path).expanduser()
    paths = [folder / f"{part}.{language}" for part in ("train", "dev", "test")
             for language in (source, target)]  # fmt: skip
    lists = [folder / f"vocab.{language}" for language in (source, target)]
    given = words is None and any(file.exists() for file in lists)
    return read_corpus(paths, lists if given else None, device, words, longest, limit, test_limit)


def ordered_paths(files: FileSet, found: Mapping[str, Path]) -> list[Path]:
    return [found[name] for name in files.checksums]


def read_corpus(
    paths: Sequence[Path],
    vocabularies: Sequence[Path] | None,
    device: torch.device,
    words: int | None,
    longest: int,
    limit: int | None,
    test_limit: int | None,
) -> Corpus:
    """Read train, dev and test files, each followed by its translation."""
    train = without_empty_lines(read_pairs(*paths[:2]))[:limit]
    dev, test = (read_pairs(*paths[at : at + 2])[:test_limit] for at in (2, 4))
    for at, part in ((0, train), (2, dev), (4, test)):
        if not without_empty_lines(part):
            raise DataError(
                f"{paths[at]} and {paths[at + 1]} have no pair of non-empty lines: add one"
            )
    if vocabularies is None:
        lists = [Vocabulary.of_text(side, words) for side in zip(*train, strict=True)]
    else:
        lists = [Vocabulary.of_file(path) for path in vocabularies]
    return corpus_of(train, dev, test, lists, device, longest)


def without_empty_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the pairs in which no line is empty."""
    return [line for line in lines if all(map(split_words, line))]


def corpus_of(
    train: Sequence[Line],
    dev: Sequence[Line],
    test: Sequence[Line],
    vocabularies: Sequence[Vocabulary],
    device: torch.device,
    longest: int,
) -> Corpus:
    """Return the corpus; dev and test sentences are not truncated, as in the tutorial."""
    source, target = vocabularies
    return Corpus(
        train=Pairs.of(train, source, target, device, longest),
        dev=Pairs.of(dev, source, target, device),
        test=Pairs.of(test, source, target, device),
        source=source,
        target=target,
    )


def generate_sentences(
    device: torch.device,
    words: Words | None = None,
    longest: PositiveInt = MAX_WORDS,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> Corpus:
    """Return random sentences of two invented languages; one has the reverse word order.

    For runs without a download. Like a data set, it does not depend on the run's seed.
    """
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[Line]:
        sentences = [rng.integers(INVENTED, size=rng.integers(2, 6)) for _ in range(count)]
        return [
            (" ".join(f"a{word}" for word in s), " ".join(f"b{word}" for word in s[::-1]))
            for s in sentences
        ]

    train, dev, test = draw(limit or 400), draw(test_limit or 50), draw(test_limit or 50)
    lists = [Vocabulary.of_text(side, words) for side in zip(*train, strict=True)]
    return corpus_of(train, dev, test, lists, device, longest)
