"""Factors of the learning rate, as functions of the fraction of training done (0 to 1)."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt


def drops(done: float, at: list[PositiveFloat], factor: PositiveFloat) -> float:
    """Multiply by `factor` at each of the given points.

    >>> [drops(done, at=[0.5, 0.75], factor=0.5) for done in (0, 0.5, 0.9)]
    [1.0, 0.5, 0.25]
    """
    return float(factor ** sum(done >= point for point in at))


def halvings(done: float, start: NonNegativeInt, every: PositiveInt, of: PositiveInt) -> float:
    """Halve after every `every` of `of` steps, starting at step `start`.

    >>> [halvings(step / 30, start=8, every=1, of=30) for step in (0, 8, 9, 10)]
    [1.0, 1.0, 0.5, 0.25]
    """
    step = int(done * of + 1e-6)  # rounding may leave an integer slightly smaller
    return float(0.5 ** max(0, (step - start) // every))


def linear(done: float) -> float:
    """Decrease linearly from 1 to 0.

    >>> [linear(done) for done in (0, 0.5, 0.75)]
    [1, 0.5, 0.25]
    """
    return 1 - done


def exponential(done: float, end: PositiveFloat) -> float:
    """Decrease exponentially from 1 to `end`.

    >>> [exponential(done, end=0.0625) for done in (0, 0.5, 0.75)]
    [1.0, 0.25, 0.125]
    """
    return float(end**done)
