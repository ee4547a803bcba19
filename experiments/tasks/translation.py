"""Translation by a network with attention (Section 5.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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

from experiments.data.batches import generator
from experiments.data.text import END, START, Buckets, Pairs
from experiments.data.translation import MAX_WORDS, Corpus
from experiments.models.beam import Found, beam_search
from experiments.models.seq2seq import Translator
from experiments.task import Step, Task
from experiments.tasks.images import initialised

MAX_BEAMS = 640  # of all sentences that are translated together
MAX_LENGTH_RATIO = 2  # words of a translation per word of its source, as in the tutorial


@dataclass(frozen=True)
class TranslationTrainer:
    batch: PositiveInt
    buckets: PositiveInt  # of sentences of similar length
    clip: PositiveFloat  # maximum norm of all gradients together


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
        train = self.data.train
        lengths = torch.maximum(train.source.lengths, train.target.lengths - 2)
        width = -(-MAX_WORDS // trainer.buckets)
        order = generator(seed, "order")
        self.batches = Buckets(lengths, trainer.buckets, width, trainer.batch, order)
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
        for rows in self.batches:
            yield Step("translator", partial(self.loss, rows), clip=self.trainer.clip)

    def loss(self, rows: Tensor) -> Tensor:
        return self.summed(self.data.train, rows) / len(rows)

    def summed(self, pairs: Pairs, rows: Tensor) -> Tensor:
        """Return the cross-entropy of all words of these sentences, end tokens included."""
        source, target = pairs.source[rows], pairs.target[rows]
        vectors = self.net(source.tokens, source.lengths, target.tokens[:, :-1])
        places = torch.arange(1, target.tokens.shape[1])[:, None]
        inside = (places < target.lengths).to(self.device)  # time × sentences
        wanted = target.tokens[:, 1:].t()[inside]
        return F.cross_entropy(self.net.output(vectors[inside]), wanted, reduction="sum")

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
        sums = [self.summed(pairs, portion) for portion in portions]
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
        for portion in rows.split(max(1, MAX_BEAMS // width)):
            source = pairs.source[portion]
            state = self.net.encode(source.tokens, source.lengths)
            limits = MAX_LENGTH_RATIO * source.lengths.to(self.device)
            found = beam_search(self.net.advance, state, limits, width, START, END)
            yield from zip(portion.tolist(), found, strict=True)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])


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
