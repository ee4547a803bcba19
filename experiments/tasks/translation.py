"""Translation by a network with attention (Section 5.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from sacrebleu import corpus_bleu
from torch import Tensor
from torch.nn import Parameter

from experiments.data.batches import Epochs, generator, moved
from experiments.data.text import END, START, Buckets, Pairs
from experiments.data.translation import MAX_WORDS, Corpus
from experiments.models.beam import Found, beam_search
from experiments.models.compiled import compiled
from experiments.models.seq2seq import Lengths, Translator
from experiments.task import Step, Task
from experiments.tasks.images import initialised

MAX_BEAMS = 640  # of all sentences that are translated together
MAX_LENGTH_RATIO = 2  # words of a translation per word of its source, as in the tutorial


@dataclass(frozen=True)
class TranslationTrainer:
    batch: PositiveInt
    buckets: PositiveInt  # of sentences of similar length
    clip: PositiveFloat  # maximum norm of all gradients together
    compile: bool = False  # torch.compile, of a step of the decoder; does not change the maths


@dataclass(frozen=True)
class Batch:
    """Some rows of pairs, with all that depends on their lengths: no step waits for the device."""

    pairs: Pairs
    rows: Tensor
    lengths: Lengths  # of the sources
    longest: int  # of the targets
    words: Tensor  # places of the words to predict, in time × sentences

    @property
    def source(self) -> Tensor:
        return self.pairs.source.tokens[self.rows, : max(1, int(self.lengths.sorted[0]))]

    @property
    def target(self) -> Tensor:
        return self.pairs.target.tokens[self.rows, : self.longest]


class Translation(Task):
    """Cross-entropy of every word, summed over a sentence; evaluated by BLEU.

    Evaluations use the first `bleu_sentences` (None: all) of the dev and test sets. The last one
    uses all, keeps the translations, and adds reference values (`reference_scores`).
    """

    def __init__(
        self,
        data: Callable[[torch.device], Corpus],
        model: Callable[..., Translator],
        trainer: TranslationTrainer,
        beam: PositiveInt,
        bleu_sentences: PositiveInt | None,
        seed: int,
        device: torch.device,
        embedding_phi: str | None = None,
    ) -> None:
        self.data, self.trainer, self.device = data(device), trainer, device
        self.beam, self.bleu_sentences = beam, bleu_sentences
        self.embedding_phi = embedding_phi
        words = {
            "source_words": len(self.data.source),
            "target_words": len(self.data.target),
        }
        self.net = initialised(partial(model, **words), seed)
        self.net.to(device)
        if trainer.compile:
            self.net.step = compiled(self.net.step, dynamic=True)  # type: ignore[method-assign]
        train = self.data.train
        lengths = torch.maximum(train.source.lengths, train.target.lengths - 2)
        width = -(-MAX_WORDS // trainer.buckets)
        buckets = Buckets(lengths, trainer.buckets, width, trainer.batch)
        self.batches = Epochs[Batch](
            generator(seed, "order"),
            lambda source: self.batches_of(train, buckets.draw_epoch(source)),
        )
        self.epoch_steps = self.batches.per_epoch
        self.translated: dict[str, list[str]] = {}

    def players(self) -> dict[str, list[Parameter]]:
        return {"translator": list(self.net.parameters())}

    def parameter_groups(self, player: str) -> list[Any]:
        """The embeddings are a group of their own if they have another φ than the rest."""
        if self.embedding_phi is None:
            return super().parameter_groups(player)
        rows = [m.weight for m in self.net.modules() if isinstance(m, torch.nn.Embedding)]
        others = [p for p in self.net.parameters() if all(p is not row for row in rows)]
        return [{"params": rows, "phi": self.embedding_phi}, {"params": others}]

    def steps(self) -> Iterator[Step]:
        for batch in self.batches:
            yield Step("translator", partial(self.loss, batch), clip=self.trainer.clip)

    def loss(self, batch: Batch) -> Tensor:
        return self.summed(batch) / len(batch.rows)

    def summed(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of all words of these sentences, end tokens included."""
        target = batch.target
        vectors = self.net(batch.source, batch.lengths, target[:, :-1])
        wanted = target[:, 1:].t().flatten()[batch.words]
        predicted = self.net.output(vectors.flatten(0, 1)[batch.words])
        return F.cross_entropy(predicted, wanted, reduction="sum")

    def batches_of(self, pairs: Pairs, portions: Sequence[Tensor]) -> list[Batch]:
        """Return a batch for each of these lists of rows, moved to the device at once."""
        lengths = [Lengths.of(pairs.source.lengths[rows]) for rows in portions]
        ends = [pairs.target.lengths[rows] for rows in portions]
        drawn = [
            (rows, *known[:3], places_of_words(end))
            for rows, known, end in zip(portions, lengths, ends, strict=True)
        ]
        on_device = moved(drawn, self.device)
        return [
            Batch(pairs, rows, Lengths(each, order, places, known.sorted), int(end.max()), words)
            for (rows, each, order, places, words), known, end in zip(
                on_device, lengths, ends, strict=True
            )
        ]

    def evaluate(self) -> dict[str, float]:
        return self.scores(self.bleu_sentences)

    def evaluate_at_end(self) -> dict[str, float]:
        metrics = self.scores(None)
        return metrics | self.reference_scores(metrics["test_score"])

    @torch.no_grad()
    def scores(self, bleu_sentences: int | None) -> dict[str, float]:
        """Return BLEU of the first `bleu_sentences`, and the cross-entropy (log perplexity)."""
        self.net.eval()
        metrics = {"dev_loss": self.cross_entropy(self.data.dev)}
        for name, pairs in (("dev", self.data.dev), ("test", self.data.test)):
            rows = torch.arange(len(pairs))[:bleu_sentences]
            lines, metrics[f"{name}_score"] = self.translate(pairs, rows, self.beam)
            metrics[f"{name}_bleu"] = bleu(lines, pairs.references[: len(lines)])
            self.translated[name] = lines
        self.net.train()
        return metrics

    @torch.no_grad()
    def reference_scores(self, score: float) -> dict[str, float]:
        """Return the gain by beam search on the test set, and BLEU of two trivial translators."""
        test, train = self.data.test, self.data.train
        self.net.eval()
        _, greedy = self.translate(test, torch.arange(len(test)), width=1)
        self.net.train()
        copied = [self.data.source.decode(row) for row in test.source.tokens.tolist()]
        [(usual, _)] = Counter(train.references).most_common(1)
        return {
            "test_beam_gain": score - greedy,
            "test_copy_bleu": bleu(copied, test.references),
            "test_constant_bleu": bleu([usual] * len(test), test.references),
        }

    def files(self) -> dict[str, bytes]:
        return {
            f"{name}.translated.txt": "".join(f"{line}\n" for line in lines).encode()
            for name, lines in self.translated.items()
        }

    def cross_entropy(self, pairs: Pairs) -> float:
        """Return the mean over words and end tokens, of pairs without an empty line."""
        rows = pairs.whole
        portions = by_length(pairs, rows).split(self.trainer.batch)
        sums = [self.summed(batch) for batch in self.batches_of(pairs, portions)]
        return float(torch.stack(sums).sum() / (pairs.target.lengths[rows] - 1).sum())

    def translate(self, pairs: Pairs, rows: Tensor, width: int) -> tuple[list[str], float]:
        """Return one line per row (empty for an empty source), and the mean score."""
        lines, scores = dict.fromkeys(rows.tolist(), ""), []
        for row, found in self.translations(pairs, rows, width):
            lines[row] = self.data.target.decode(found.words)
            scores.append(found.score)
        return list(lines.values()), fmean(scores)

    def translations(self, pairs: Pairs, rows: Tensor, width: int) -> Iterator[tuple[int, Found]]:
        """Yield rows that are not empty, each with its translation."""
        rows = by_length(pairs, rows[pairs.source.lengths[rows] > 0])
        portions = rows.split(max(1, MAX_BEAMS // width))
        for portion, batch in zip(portions, self.batches_of(pairs, portions), strict=True):
            state = self.net.encode(batch.source, batch.lengths)
            limits = MAX_LENGTH_RATIO * batch.lengths.each
            found = beam_search(self.net.advance, state, limits, width, START, END)
            yield from zip(portion.tolist(), found, strict=True)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])


def places_of_words(lengths: Tensor) -> Tensor:
    """Return the places, in time × sentences, of the words after the first of each sentence."""
    time = torch.arange(1, int(lengths.max()))[:, None]
    return (time < lengths).flatten().nonzero().flatten()


def by_length(pairs: Pairs, rows: Tensor) -> Tensor:
    """Sort rows by source length, so that batches need little padding."""
    return rows[pairs.source.lengths[rows].argsort(stable=True)]


def bleu(lines: list[str], references: list[str]) -> float:
    """Return BLEU (0 to 100) of tokenized text, without smoothing.

    >>> round(bleu(["a man rides a horse ."], ["a man rides a brown horse ."]), 1)
    48.2
    """
    score = corpus_bleu(lines, [references], tokenize="none", smooth_method="none", force=True)
    return float(score.score)
