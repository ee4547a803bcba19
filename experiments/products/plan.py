"""What figures and tables cost before anything is trained: runs, operations, memory and time.

Networks are counted on the meta device (`training.costs`); all times come from `records.estimate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import log10
from typing import Any

from omegaconf import OmegaConf

from experiments.config.build import arguments_of, import_target
from experiments.config.paths import CONF
from experiments.products.specs import asked_for, everything, load_spec
from experiments.progress import aligned, count_of
from experiments.records.costs import Cost, Rates, known_costs
from experiments.records.estimate import Estimate, estimate, other_scales, rough_duration, similar
from experiments.records.run import Run, all_runs
from experiments.training.costs import count_all, state_bytes

FLOAT = 4  # bytes
PREFIXES = ("", "k", "M", "G", "T", "P")


@dataclass(frozen=True)
class Gpu:
    """A GPU of conf/plan.yaml: peak rates in TFLOP/s, memory in GB, bandwidth in GB/s."""

    name: str
    float32: float
    tf32: float
    bfloat16: float
    memory: float
    bandwidth: float

    def seconds(self, cost: Cost, precision: str) -> float:
        """Return the time of a run whose products and convolutions have this precision."""
        shares = settings()
        rates = Rates(
            flops=getattr(self, precision) * 1e12 * shares["share_of_peak"],
            bandwidth=self.bandwidth * 1e9 * shares["share_of_bandwidth"],
            calls=shares["calls_per_second"],
        )
        return rates.seconds(cost.work)


@cache
def settings() -> dict[str, Any]:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / "plan.yaml"))
    return dict(loaded)


def gpus() -> list[Gpu]:
    return [Gpu(name, **rates) for name, rates in settings()["gpus"].items()]


def plan(names: Sequence[str], overrides: Sequence[str]) -> Iterator[str]:
    """Yield a table with a line for each figure and table, and one for all of them."""
    asked = list(asked_for(names) if names else everything())
    products = {f"{k} {n}": all_runs(load_spec(k, n).expand(overrides)) for k, n in asked}
    left = {name: [r for r in runs if r.needs_training] for name, runs in products.items()}
    distinct = list({run.folder: run for runs in left.values() for run in runs}.values())
    count_all(configs_to_count(distinct))
    rows = [["", *HEADER, *(gpu.name for gpu in gpus())]]
    rows += [[name, *cells(runs)] for name, runs in left.items()]
    if len(products) > 1:
        rows.append(["all, each run once", *cells(distinct)])
    yield from aligned(rows)
    yield from notes(distinct)


HEADER = ["runs", "steps", "samples", "FLOP", "memory", "this machine"]


def configs_to_count(runs: Iterable[Run]) -> Iterator[Any]:
    """Yield the configs of these runs and, to correct their times, of the same at other scales."""
    for run in {run.setting: run for run in runs}.values():
        yield run.config
        if not similar(run):
            yield from (other.config for other in other_scales(run))


def cells(runs: Sequence[Run]) -> list[str]:
    costs = {run.folder: cost for run in runs if (cost := known_costs().of(run.config))}
    steps = sum(c.steps for c in costs.values())
    units = sorted({c.unit for c in costs.values()})
    samples = sum(c.steps * c.samples for c in costs.values())
    flops = sum(c.work.flops for c in costs.values())
    memory = max((memory_of(r, costs[r.folder]) for r in runs if r.folder in costs), default=0.0)
    return [
        f"{len(runs)}",
        amount(steps),
        f"{amount(samples)} {' and '.join(units)}".rstrip(),
        f"{flops:.1e}".replace("e+", "e") if flops else "-",
        amount(memory, "B"),
        duration_cell(estimate(runs)),
        *(gpu_cell(gpu, runs, costs, memory) for gpu in gpus()),
    ]


def amount(value: float, unit: str = "") -> str:
    """
    >>> amount(234_000), amount(4.8e9, "B"), amount(0)
    ('230 k', '4.8 GB', '-')
    """
    if not value:
        return "-"
    power = min(int(log10(value) // 3), len(PREFIXES) - 1)
    return f"{float(f'{value / 1000**power:.2g}'):g} {PREFIXES[power]}{unit}".rstrip()


def duration_cell(found: Estimate) -> str:
    return rough_duration(found.seconds) if found.seconds else "unknown" if found.unknown else "-"


def gpu_cell(gpu: Gpu, runs: Sequence[Run], costs: dict[Any, Cost], memory: float) -> str:
    """Return the time on one GPU, one run after another; runs without networks use the CPU."""
    if memory > gpu.memory * 1e9:
        return "too small"
    others = estimate([run for run in runs if run.folder not in costs]).seconds
    own = (gpu.seconds(costs[r.folder], precision(r)) for r in runs if r.folder in costs)
    return duration_cell(Estimate(sum(own) + others, at_once=1))


def precision(run: Run) -> str:
    """Return what training/speed.py and the trainer make of float32 on a GPU."""
    trainer = run.config.task.get("trainer", {})
    if run.config.speed == "exact":
        return "bfloat16" if trainer.get("autocast") else "float32"
    known = arguments_of(import_target(trainer["_target_"], "trainer")) if trainer else []
    return "bfloat16" if "autocast" in known else "tf32"


def memory_of(run: Run, cost: Cost) -> float:
    """Return the bytes of parameters, gradients, the optimizer's state and activations."""
    state = state_of(OmegaConf.to_yaml(OmegaConf.create(run.config.optimizer)))
    return cost.parameters * (2 * FLOAT + state) + cost.activations


@cache
def state_of(optimizer: str) -> float:
    """Return the bytes of state per parameter; the argument is YAML, so that it can be cached."""
    node: Any = OmegaConf.to_container(OmegaConf.create(optimizer))
    return state_bytes(node)


def notes(runs: Sequence[Run]) -> Iterator[str]:
    yield ""
    found = estimate(runs)
    source = f", estimated from {found.source}" if found.source else ""
    most = count_of(found.at_once, "run")
    yield f"this machine: up to {most} at a time{source}; a GPU: one run at a time"
    shares = settings()
    yield (
        f"assumed for GPUs (conf/plan.yaml): {shares['share_of_peak']:.0%} of the peak rate, "
        f"{shares['share_of_bandwidth']:.0%} of the bandwidth, "
        f"{shares['calls_per_second']:,} operations started per second"
    )
    yield "not counted: data in memory, beam search; runs without networks have only a time"
