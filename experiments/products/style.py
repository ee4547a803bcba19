"""The colour and dashes of a curve, in figures and in the report: one colour per optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from experiments.config.paths import CONF

# Curves of one optimizer: its colour mixed with black (0) or white (1), and dashes (on, off, …).
SHADES = ((0, 0.0), (0, 0.45), (1, 0.45), (0, 0.7), (1, 0.65), (0, 0.25))
DASHES: tuple[tuple[float, ...], ...] = (
    (), (3.7, 1.6), (6.4, 1.6, 1, 1.6), (1, 1.65), (6, 1, 1, 1, 1, 1), (2, 1),
)  # fmt: skip
OF_OTHERS = "#ea4fe0"  # optimizers without an entry; always dashed


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


def looks_of(optimizers: Sequence[str]) -> list[Look]:
    """The looks of the curves of one panel; those of one colour differ in shade and dashes."""
    looks, seen = [], dict[str, int]()
    for color in map(color_of, optimizers):
        count = seen.get(color, 0)
        towards, part = SHADES[count % len(SHADES)]
        dashes = DASHES[(count + (color == OF_OTHERS)) % len(DASHES)]
        looks.append(Look(mixed(color, towards, part), dashes))
        seen[color] = count + 1
    return looks


def mixed(color: str, towards: int, part: float) -> str:
    """The colour mixed with a part of black (0) or white (1)."""
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + part * (255 * towards - c)):02x}" for c in channels)
