"""Beam search: find a likely sentence by extending the `width` most likely prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Selectable(Protocol):
    """The decoder state of every beam of every sentence."""

    def select(self, sentences: Tensor, beams: Tensor) -> Self:
        """Return these sentences, with these beams of each (sentences × beams)."""


class Found(NamedTuple):
    words: list[int]  # with the end token, unless the limit was reached
    score: float  # sum of log-probabilities


S = TypeVar("S", bound=Selectable)


@torch.no_grad()
def beam_search(
    advance: Callable[[Tensor, S], tuple[Tensor, S]],
    state: S,
    limits: Tensor,
    width: int,
    start: int,
    end: int,
) -> list[Found]:
    """Return the best sentence that `width` beams find, for each of len(limits) sentences.

    `advance` maps the last word of each beam (sentences × beams) and the state to the
    log-probabilities of the next word (sentences × beams × words) and the next state. No sentence
    is longer than its limit. Scores are not divided by lengths, so they only decrease: once the
    best beam has ended, its sentence is final and leaves the batch.
    """
    found = [Found([], 0.0)] * len(limits)
    row = torch.arange(len(limits), device=limits.device)
    words = torch.full_like(limits, start)[:, None, None]
    scores = torch.zeros(words.shape[:2], device=limits.device)
    for length in range(1, int(limits.max()) + 1):
        gains, state = advance(words[..., -1], state)
        ended = (words[..., -1] == end) & (length > 1)
        totals = scores[..., None] + only_end(gains, ended, end)
        scores, best = totals.flatten(1).topk(min(width, totals[0].numel()))
        beams, new = best // gains.shape[-1], best % gains.shape[-1]
        words = torch.cat([words.take_along_dim(beams[..., None], 1), new[..., None]], -1)
        done = (new[:, 0] == end) | (length >= limits)
        for i in done.nonzero().flatten().tolist():
            sentence = words[i, 0, 1:].tolist()
            found[int(row[i])] = Found(cut(sentence, end), float(scores[i, 0]))
        left = (~done).nonzero().flatten()
        if not len(left):
            break
        state = state.select(left, beams[left])
        row, words, scores, limits = row[left], words[left], scores[left], limits[left]
    return found


def only_end(gains: Tensor, ended: Tensor, end: int) -> Tensor:
    """Return log-probabilities that extend a sentence that has ended only by its end token."""
    gains = gains.masked_fill(ended[..., None], -torch.inf)
    gains[..., end].masked_fill_(ended, 0)
    return gains


def cut(words: list[int], end: int) -> list[int]:
    return words[: words.index(end) + 1] if end in words else words
