"""What the learning rate is multiplied by, from the part of the training that is done (0 to 1)."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt


def drops(done: float, at: list[PositiveFloat], factor: PositiveFloat) -> float:
    """Multiplied by `factor` at each of the given points.

    >>> [drops(done, at=[0.5, 0.75], factor=0.5) for done in (0, 0.5, 0.9)]
    [1.0, 0.5, 0.25]
    """
    return float(factor ** sum(done >= point for point in at))


def halvings(done: float, start: NonNegativeInt, every: PositiveInt, of: PositiveInt) -> float:
    """Halved whenever `every` of `of` steps have gone by since step `start`.

    >>> [halvings(step / 30, start=8, every=1, of=30) for step in (0, 8, 9, 10)]
    [1.0, 1.0, 0.5, 0.25]
    """
    step = int(done * of + 1e-6)  # a whole number may have come out a little smaller
    return float(0.5 ** max(0, (step - start) // every))


def linear(done: float) -> float:
    """A straight line from 1 to 0.

    >>> [linear(done) for done in (0, 0.5, 0.75)]
    [1, 0.5, 0.25]
    """
    return 1 - done


def exponential(done: float, end: PositiveFloat) -> float:
    """The same part of it lost with every step, and `end` of it left at the end.

    >>> [exponential(done, end=0.0625) for done in (0, 0.5, 0.75)]
    [1.0, 0.25, 0.125]
    """
    return float(end**done)
