"""What a training costs in operations and bytes, and how long that takes at given rates.

`training.costs` counts and measures, which needs torch; here is what it found, kept in a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from experiments.config.gpus import cores, device_name, uses_gpu
from experiments.config.schema import Config, canonical
from experiments.records.files import write_text
from experiments.records.provenance import processor
from experiments.records.speed import cache_folder

FILE = "costs.json"  # in the cache folder


@dataclass(frozen=True)
class Work:
    """What one step or one evaluation does."""

    flops: float  # floating-point operations of products and convolutions
    moved: float  # bytes that operations read and write
    calls: float  # operations that are started

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.moved * times, self.calls * times)

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.moved + other.moved, self.calls + other.calls)


@dataclass(frozen=True)
class Rates:
    """The speed of a device."""

    flops: float  # per second
    bandwidth: float  # bytes per second
    calls: float  # per second

    def seconds(self, work: Work) -> float:
        return work.flops / self.flops + work.moved / self.bandwidth + work.calls / self.calls


@dataclass(frozen=True)
class Cost:
    """What the training of one run costs, without its optimizer."""

    steps: int
    samples: int  # per step
    unit: str  # of the samples: images, tokens
    step: Work
    evaluation: Work
    evaluations: int
    parameters: int  # how many
    activations: int  # bytes that the forward pass saves for the backward pass

    @property
    def work(self) -> Work:
        """Return the work of the whole run."""
        return self.step * self.steps + self.evaluation * self.evaluations

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cost:
        works = {name: Work(**values[name]) for name in ("step", "evaluation")}
        return cls(**{**values, **works})


def cost_key(config: Config) -> str:
    """Return what determines the cost of a run: not the optimizer, and not the seed."""
    parts = config.model_dump(mode="json", include={"task", "steps", "log_every"})
    text = json.dumps([canonical(parts), version("torch")], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def device_key(config: Config) -> str:
    """Return what the rates of this machine are measured for."""
    if uses_gpu(config.device):
        return device_name(config.device)
    return f"{processor()}, {config.threads or cores()} threads"


class Costs:
    """The costs that were counted and the rates of this machine, kept in the cache folder."""

    def __init__(self) -> None:
        self.path = cache_folder() / FILE
        self.costs, self.rates = dict[str, Cost](), dict[str, Rates]()
        self.measured = set[str]()  # rates of this process
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = json.loads(self.path.read_text())
            self.costs = {key: Cost.from_dict(values) for key, values in kept["costs"].items()}
            self.rates = {key: Rates(**values) for key, values in kept["rates"].items()}

    def of(self, config: Config) -> Cost | None:
        return self.costs.get(cost_key(config))

    def save(self) -> None:
        kept = {
            "costs": {key: asdict(cost) for key, cost in self.costs.items()},
            "rates": {key: asdict(rates) for key, rates in self.rates.items()},
        }
        with suppress(OSError):  # they are counted again
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(self.path, json.dumps(kept))


@cache
def known_costs() -> Costs:
    return Costs()
