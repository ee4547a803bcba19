"""What the learning rate is multiplied by, from the part of the training that is done (0 to 1)."""

from __future__ import annotations

from pydantic import PositiveFloat


def drops(done: float, at: list[PositiveFloat], factor: PositiveFloat) -> float:
    """Multiplied by `factor` at each of the given points.

    >>> [drops(done, at=[0.5, 0.75], factor=0.5) for done in (0, 0.5, 0.9)]
    [1.0, 0.5, 0.25]
    """
    return float(factor ** sum(done >= point for point in at))
