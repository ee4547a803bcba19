"""The color and dashes of a curve, in figures and in the report.

An optimizer has one color; a sweep over a number has a sequential color scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from experiments.config.paths import CONF

# Curves of one optimizer: its color mixed with black (0) or white (1), and dashes (on, off, …).
SHADES = ((0, 0.0), (0, 0.45), (1, 0.45), (0, 0.7), (1, 0.65), (0, 0.25))
DASHES: tuple[tuple[float, ...], ...] = (
    (), (3.7, 1.6), (6.4, 1.6, 1, 1.6), (1, 1.65), (6, 1, 1, 1, 1, 1), (2, 1),
)  # fmt: skip
# viridis without its yellow end, which is hard to see on white paper
SEQUENCE = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")
OF_OTHERS = "#ea4fe0"  # optimizers without an entry; always dashed


Curve = tuple[str, Mapping[str, Any]]  # the optimizer and its settings


@dataclass(frozen=True)
class Look:
    color: str
    dashes: tuple[float, ...]


@cache
def styles() -> dict[str, dict[str, str]]:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / "figure" / "_style.yaml"))
    return dict(loaded)


def label_of(optimizer: str) -> str:
    return styles().get(optimizer, {}).get("label", optimizer.replace("_", " "))


def color_of(optimizer: str) -> str:
    return styles().get(optimizer, {}).get("color", OF_OTHERS)


def looks_of(curves: Sequence[Curve]) -> list[Look]:
    """The looks of the curves of one panel, in the same order.

    Curves of one optimizer that sweep a number are colored in the order of its values; others
    share the color of the optimizer and differ in shade and dashes.
    """
    groups: dict[str, list[int]] = {}
    for i, (optimizer, _) in enumerate(curves):
        groups.setdefault(color_of(optimizer), []).append(i)
    looks = dict[int, Look]()
    for color, group in groups.items():
        found = sweep_looks([curves[i] for i in group]) or shades(color, len(group))
        looks |= zip(group, found, strict=True)
    return [looks[i] for i in range(len(curves))]


def shades(color: str, count: int) -> list[Look]:
    start = int(
        color == OF_OTHERS or color in {x["color"] for x in styles().values() if "dashed" in x}
    )
    return [
        Look(mixed(color, *SHADES[i % len(SHADES)]), DASHES[(i + start) % len(DASHES)])
        for i in range(count)
    ]


def sweep_looks(curves: Sequence[Curve]) -> list[Look]:
    """The looks of a sweep over three or more values; empty if these curves are none.

    Colors show the number with the most values; dashes show a second one.
    """
    tables = [numbers_in(settings) for _, settings in curves]
    columns = {ranks([table.get(key, 0.0) for table in tables]) for key in tables[0]}
    first, *others = sorted((c for c in columns if any(c)), key=max, reverse=True) or [(0,)]
    same = len({optimizer for optimizer, _ in curves}) == 1
    distinct = len({*zip(first, *others, strict=True)}) == len(curves)
    if not same or not distinct or max(first) < 2 or len(others) > 1:
        return []
    colors, dashes = sequence(max(first) + 1), others[0] if others else [0] * len(curves)
    return [Look(colors[i], DASHES[j % len(DASHES)]) for i, j in zip(first, dashes, strict=True)]


def numbers_in(settings: Mapping[str, Any]) -> dict[str, float]:
    """The settings of an optimizer that are numbers, each of the betas for itself."""
    betas = {f"beta{i}": beta for i, beta in enumerate(settings.get("betas") or (), 1)}
    window = settings.get("m") or settings.get("n")  # null means n
    found = {**settings, **betas, "m": window}
    return {key: value for key, value in found.items() if type(value) in (int, float)}


def ranks(values: Sequence[float]) -> tuple[int, ...]:
    ordered = sorted(set(values))
    return tuple(ordered.index(value) for value in values)


def sequence(count: int) -> list[str]:
    """Colors in equal steps: for values a factor apart, the scale is logarithmic."""
    return [on_scale(i / max(1, count - 1)) for i in range(count)]


def on_scale(position: float) -> str:
    """The color at a position from 0 to 1."""
    place = position * (len(SEQUENCE) - 1)
    i = min(int(place), len(SEQUENCE) - 2)
    return blend(SEQUENCE[i], SEQUENCE[i + 1], place - i)


def mixed(color: str, towards: int, part: float) -> str:
    """The color mixed with a part of black (0) or white (1)."""
    return blend(color, "#ffffff" if towards else "#000000", part)


def blend(color: str, other: str, part: float) -> str:
    pairs = zip(channels(color), channels(other), strict=True)
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in pairs)


def channels(color: str) -> list[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]
