"""Draws curves as text: braille dots in color on a terminal, elsewhere one symbol per curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Grid = NDArray[np.bool_]
Range = tuple[float, float]

BRAILLE, DOTS = 0x2800, np.array([[1, 8], [2, 16], [4, 32], [64, 128]])  # Unicode's order
SYMBOLS, COLORS = "*o+x#@%&", (34, 31, 32, 35, 36, 33)  # ANSI; black and white are backgrounds
LOG_RATIO = 1e3  # positive values that span more are drawn on a logarithmic axis


def text_plot(curves: Mapping[str, pd.Series], width: int, height: int, color: bool) -> list[str]:
    """Return the lines of a plot of curves, each a series step → value; labels are not drawn."""
    known = [curve[np.isfinite(curve)] for curve in curves.values()]
    everything = pd.concat(known)
    if everything.empty:
        return ["no finite values"]
    log = is_log(everything)
    shown = [np.log10(curve) if log else curve for curve in known]
    xs, ys = limits(everything.index), limits(np.log10(everything) if log else everything)
    numbers = tick_labels(ys, height, log)
    margin = max(map(len, numbers))
    shape = (height, width - margin - 2)
    cells = colored(shown, xs, ys, shape) if color else plain(shown, xs, ys, shape)
    left = [f"{number:>{margin}} {'┤' if number else '│'}" for number in numbers]
    space = " " * (margin + 1)
    below = [f"{space}└{'─' * shape[1]}", f"{space} {step_labels(xs, shape[1])}"]
    return [a + b.rstrip() for a, b in zip(left, cells, strict=True)] + below


def is_log(values: pd.Series) -> bool:
    return bool(values.min() > 0 and values.max() / values.min() > LOG_RATIO)


def limits(values: pd.Series | pd.Index) -> Range:
    """The range of an axis; never empty."""
    low, high = float(values.min()), float(values.max())
    margin = (abs(low) / 10 or 1.0) if low == high else 0.0
    return low - margin, high + margin


def colored(
    curves: Sequence[pd.Series], xs: Range, ys: Range, shape: tuple[int, int]
) -> Iterator[str]:
    """Yield the rows of a plot in braille; of curves in the same cell, the last has its color."""
    rows, columns = shape
    dots, owner = np.zeros(shape, int), np.zeros(shape, int)
    for number, curve in enumerate(curves):
        grid = raster(curve, xs, ys, (4 * rows, 2 * columns))
        own = (grid.reshape(rows, 4, columns, 2) * DOTS[:, None]).sum(axis=(1, 3))
        dots, owner = dots | own, np.where(own > 0, number, owner)
    for line, owners in zip(dots, owner, strict=True):
        yield "".join(
            paint(chr(BRAILLE + d), o) if d else " " for d, o in zip(line, owners, strict=True)
        )


def plain(
    curves: Sequence[pd.Series], xs: Range, ys: Range, shape: tuple[int, int]
) -> Iterator[str]:
    """Yield the rows of a plot in symbols; of curves in the same cell, the last is drawn."""
    cells = np.full(shape, " ")
    for number, curve in enumerate(curves):
        cells[raster(curve, xs, ys, shape)] = symbol(number)
    yield from map("".join, cells)


def raster(curve: pd.Series, xs: Range, ys: Range, shape: tuple[int, int]) -> Grid:
    """Return the points of a grid that a curve covers: its mean in each column, connected."""
    rows, columns = shape
    grid = np.zeros(shape, bool)
    column = np.rint((curve.index - xs[0]) / (xs[1] - xs[0]) * (columns - 1)).astype(int)
    means = curve.groupby(column).mean().reindex(range(columns)).interpolate(limit_area="inside")
    levels = np.rint((ys[1] - means.dropna()) / (ys[1] - ys[0]) * (rows - 1)).astype(int)
    for (x, level), before in zip(levels.items(), levels.shift(fill_value=-1), strict=True):
        start = level if before < 0 else before + np.sign(level - before)
        grid[min(start, level) : max(start, level) + 1, x] = True
    return grid


def symbol(number: int) -> str:
    """The symbol of a curve in a plot without color."""
    return SYMBOLS[number % len(SYMBOLS)]


def paint(text: str, number: int) -> str:
    """The text in the color of a curve."""
    return f"\x1b[{COLORS[number % len(COLORS)]}m{text}\x1b[0m"


def tick_labels(ys: Range, height: int, log: bool) -> list[str]:
    """The number beside each row: at the top, in the middle and at the bottom."""
    labels = [""] * height
    for row in (0, height // 2, height - 1):
        value = ys[1] - (ys[1] - ys[0]) * row / (height - 1)
        labels[row] = f"{10**value if log else value:.4g}"
    return labels


def step_labels(xs: Range, width: int) -> str:
    """The first and the last step below the axis."""
    first, last = (f"{round(x):,}" for x in xs)
    return f"{first}{'step':^{width - len(first) - len(last)}}{last}"
