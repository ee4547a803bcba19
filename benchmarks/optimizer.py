"""Time per step, state and bandwidth of AdaShift and other optimizers on the CPU.

    python -m benchmarks.optimizer [--quick] [--results FOLDER]

The contenders, one line each in CONTENDERS, take turns step by step, so that whatever else the
machine does affects all of them alike.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torchvision
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import adashift
from adashift import AdaShift
from benchmarks.common import Benchmark, bullet_list, environment, interleave
from experiments.products.markdown import markdown_table
from experiments.products.style import styles
from experiments.records.provenance import processor

Make = Callable[[list[Tensor]], Any]
Shapes = list[tuple[int, ...]]

CYCLE = 10  # steps after which the default window (m = 10) uses the same slot again
MEMORY_BUDGET = 12e9  # bytes for the contenders that are timed together; m = 100 alone needs 10e9
PEER = "pytorch_optimizer"


@dataclass(frozen=True)
class Contender:
    name: str
    style: str  # a name of conf/figure/_style.yaml for its color; grey if unknown
    make: Make | None  # None: the package is not installed
    words: float  # the fewest reads and writes per element and step, see `window_words`
    buffers: float  # gradient-sized buffers of state, to stay within the memory budget
    warm_up: int = 3


@dataclass(frozen=True)
class Goal:
    """The time of `name` is at most `limit` times that of `reference` on each list.

    `mean` limits the geometric mean of the lists. The reference MEDIAN_STEP compares the slowest
    step of a cycle with the median one.
    """

    name: str
    reference: str
    limit: float
    mean: float = inf


def window_words(m: float, slot: float = 1) -> float:
    """Return the reads and writes per element and step of a single pass over the window's rule.

    θ and g are read and θ is written. For m > 1 the running sum is also read and written, and for
    a finite m so is one slot, of `slot` words. φ(g²), one number per block, is not counted.

    >>> window_words(1), window_words(inf), window_words(10)
    (3, 5, 7)
    """
    return {1: 3, inf: 5}.get(m, 5 + 2 * slot)


def adashift_contender(
    n: int, m: float | None = None, variant: str = "", slot: float = 1, **options: Any
) -> Contender:
    m, path = m or n, "fused" if options.get("fused") else "default"
    name = f"AdaShift {path} n={n} m={m} {variant}".rstrip()
    make = partial(AdaShift, n=n, m=m, **options)
    buffers = {1: 0, inf: 1}.get(m, 1 + m * slot)
    return Contender(name, "adashift", make, window_words(m, slot), buffers, n + 1)


def adam_contender(path: str, **options: Any) -> Contender:
    return Contender(f"Adam {path}", "adam", partial(torch.optim.Adam, **options), 7, 2)


def peer_contender(n: int) -> Contender:
    """Return pytorch-optimizer's AdaShift, whose m is always n; make is None if not installed."""
    make = None
    if importlib.util.find_spec(PEER):
        make = partial(importlib.import_module(PEER).AdaShift, keep_num=n)
    name = f"pytorch-optimizer AdaShift n={n}"
    return Contender(name, "peer", make, window_words(n), n + 3, n + 1)


fused_contender = partial(adashift_contender, fused=True)
# torch's default on the CPU is the loop over tensors, foreach=False.
CONTENDERS = (
    adam_contender("default"),
    adam_contender("foreach", foreach=True),
    adam_contender("fused", fused=True),
    adashift_contender(n=10),
    fused_contender(n=10),
    fused_contender(n=40),
    fused_contender(n=100),
    fused_contender(n=2),  # in the same memory group as n=100, with which a goal compares it
    fused_contender(n=10, m=1),
    fused_contender(n=44, m=inf),
    fused_contender(n=10, variant="phi=row", phi="row"),
    fused_contender(n=10, variant="bf16 slots", slot=0.5, state_dtype=torch.bfloat16),
    peer_contender(n=10),
)
REFERENCE, FUSED, COPY, MEDIAN_STEP = "Adam default", "Adam fused", "copy", "its median step"
ADASHIFT = "AdaShift fused n=10 m=10"
SPEED_GOALS = (
    Goal(ADASHIFT, FUSED, 1.1, mean=1.0),
    Goal("AdaShift fused n=44 m=inf", FUSED, 0.75),
    Goal("AdaShift fused n=10 m=1", FUSED, 0.55),
    Goal("AdaShift fused n=100 m=100", "AdaShift fused n=2 m=2", 1.15),
    Goal(ADASHIFT, "pytorch-optimizer AdaShift n=10", 0.2),
    Goal(ADASHIFT, MEDIAN_STEP, 1.5),
)


class MemoryCopy:
    """A copy of memory, timed like an optimizer: the bandwidth that a step can reach."""

    def __init__(self, size: int) -> None:
        self.source, self.target = torch.randn(size), torch.zeros(size)

    def step(self) -> None:
        self.target.copy_(self.source)

    def words(self) -> int:
        return 2 * self.source.numel()


def shapes_of(net: str) -> Shapes:
    with torch.device("meta"):
        return [tuple(p.shape) for p in getattr(torchvision.models, net)().parameters()]


def parameter_lists(quick: bool) -> dict[str, tuple[Shapes, int]]:
    """Return shapes and number of rounds (whole cycles) by the name of the list."""
    if quick:
        return {
            "one tensor": ([(250, 400)], 2 * CYCLE),
            "ResNet-18": (shapes_of("resnet18")[:12], 2 * CYCLE),
            "DenseNet-121": (shapes_of("densenet121")[:30], 2 * CYCLE),
        }
    return {
        "one tensor": ([(5000, 5000)], 8 * CYCLE),
        "ResNet-18": (shapes_of("resnet18"), 8 * CYCLE),
        "DenseNet-121": (shapes_of("densenet121"), 8 * CYCLE),
    }


def numel(shapes: Shapes) -> int:
    return sum(int(np.prod(shape)) for shape in shapes)


def memory_groups(contenders: Iterable[Contender], size: int) -> list[list[Contender]]:
    """Return groups that fit in memory; each has Adam default and fused as references."""
    installed = [c for c in contenders if c.make]
    references = [c for c in installed if c.name in (REFERENCE, FUSED)]
    budget = MEMORY_BUDGET - sum(4 * size * (2 + c.buffers) for c in references)
    free, groups = 0.0, list[list[Contender]]()
    for c in installed:
        need = 4 * size * (2 + c.buffers)
        if c in references:
            continue
        if not groups or need > free:
            groups, free = [*groups, [*references]], budget
        groups[-1].append(c)
        free -= need
    return groups


def warmed_up(contender: Contender, shapes: Shapes) -> Any:
    """Return the optimizer with parameters and gradients, past the steps without an update."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    assert contender.make
    optimizer = contender.make(params)
    for _ in range(contender.warm_up):
        optimizer.step()
    return optimizer


def steps_of_a_cycle(t: pd.Series) -> pd.Series:
    """Return the seconds of each step of a cycle, the median of all cycles.

    A median ignores the few steps in which the machine was busy, but only if steps that do the same
    work are compared: an expensive step of each cycle must count.
    """
    return t.groupby(np.arange(len(t)) % CYCLE).median()


def tensors_in(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        yield from tensors_in(list(x.values()))
    elif isinstance(x, Iterable) and not isinstance(x, str):
        for part in x:
            yield from tensors_in(part)


def state_bytes(optimizer: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(optimizer.state))


def time_group(members: Sequence[Contender], shapes: Shapes, rounds: int) -> pd.DataFrame:
    gc.collect()  # free the last group
    optimizers, size = {c.name: warmed_up(c, shapes) for c in members}, numel(shapes)
    copy = MemoryCopy(max(size, min(25_000_000, 4 * size)))
    times = interleave(optimizers | {COPY: copy}, rounds)
    bandwidth = 4 * copy.words() / times.pop(COPY).median()
    cycles = times.apply(steps_of_a_cycle)
    step, words = cycles.mean(), pd.Series({c.name: c.words for c in members})
    columns = {
        "step_ms": 1e3 * step,
        "q25_ms": 1e3 * times.quantile(0.25),
        "q75_ms": 1e3 * times.quantile(0.75),
        "to_adam": step / step[REFERENCE],
        "to_fused": step / step[FUSED],
        "slowest_to_median": cycles.max() / cycles.median(),
        "state_bytes": pd.Series({name: state_bytes(o) for name, o in optimizers.items()}) / size,
        "words": words,
        "bandwidth_share": 4 * words * size / step / bandwidth,
    }
    table = pd.DataFrame(columns).rename_axis("contender").reset_index()
    return table.assign(copy_gb_s=bandwidth / 1e9, rounds=rounds)


def time_list(name: str, shapes: Shapes, rounds: int) -> pd.DataFrame:
    """Return one row per contender, without numbers if it is not installed."""
    parts = [
        time_group(members, shapes, rounds).assign(group=i)
        for i, members in enumerate(memory_groups(CONTENDERS, numel(shapes)), 1)
    ]
    rows = pd.concat(parts).drop_duplicates("contender").set_index("contender")
    rows = rows.reindex([c.name for c in CONTENDERS]).reset_index()
    rows["note"] = ["" if c.make else "not installed" for c in CONTENDERS]
    rows.insert(0, "list", name)
    return rows.assign(tensors=len(shapes), elements=numel(shapes))


def goal_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the ratios of each goal, list by list, and whether it is met."""
    return pd.DataFrame([goal_row(goal, table) for goal in SPEED_GOALS])


def goal_row(goal: Goal, table: pd.DataFrame) -> dict[str, Any]:
    rows = table.set_index(["contender", "list"])
    if goal.reference == MEDIAN_STEP:
        ratio = rows.loc[goal.name, "slowest_to_median"]
    else:  # both relative to Adam fused, as they may be in different groups
        ratio = rows.loc[goal.name, "to_fused"] / rows.loc[goal.reference, "to_fused"]
    mean = float(np.exp(np.log(ratio).mean(skipna=False)))
    met = (ratio <= goal.limit).all() and mean <= goal.mean
    return {
        "time of": goal.name + ", slowest step" * (goal.reference == MEDIAN_STEP),
        "over": goal.reference,
        "goal": f"≤ {goal.limit:g}" + f", mean ≤ {goal.mean:g}" * (goal.mean < inf),
        **{name: or_dash(x) for name, x in ratio.items()},
        "geometric mean": or_dash(mean),
        "met": "–" if np.isnan(mean) else "yes" if met else "no",
    }


def or_dash(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) else "–"


SUMMARY = {
    "ms": ("step_ms", "{:.2f}"),
    "quartile 1": ("q25_ms", "{:.2f}"),
    "quartile 3": ("q75_ms", "{:.2f}"),
    "÷ Adam": ("to_adam", "{:.2f}"),
    "÷ Adam fused": ("to_fused", "{:.2f}"),
    "slowest ÷ median": ("slowest_to_median", "{:.2f}"),
    "state": ("state_bytes", "{:.2f}"),
    "words": ("words", "{:g}"),
    "bandwidth": ("bandwidth_share", "{:.0%}"),
}


def optimizer_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table as it is printed."""
    shown = table[["list", "contender"]].copy()
    for title, (column, text) in SUMMARY.items():
        shown[title] = table[column].map(text.format)
    shown.loc[table["note"] != "", shown.columns[2:]] = "–"
    shown.loc[table["note"] != "", "ms"] = table["note"]
    return shown


def source_hash() -> str:
    """Return a hash of the optimizer and of this file."""
    package = sorted(Path(adashift.__file__).parent.rglob("*"))
    files = [*(f for f in package if f.suffix in (".py", ".c")), Path(__file__)]
    return hashlib.sha256(b"\n".join(f.read_bytes() for f in files)).hexdigest()[:16]


OPTIMIZER_EXPLANATION = """\
Milliseconds per `step()`, float32. The contenders of a list take turns step by step, in an order
that is rotated and reversed; each has its own parameters and gradients and is past its first n
steps. If memory cannot hold all of them, they are timed in groups; each group has Adam default and
Adam fused, and ratios are taken within a group or through these two.

- ms: the average of the {cycle} steps of a cycle, each the median of all cycles, so that the few
  steps in which the machine was busy do not count. Quartiles are those of all steps.
- slowest ÷ median: of the {cycle} steps of a cycle. The rows of Adam, whose steps all do the same
  work, show how much of it is noise.
- state: bytes of state per parameter.
- words: the fewest float32 reads and writes per element and step that a single pass over memory
  needs. Adam 7: reads θ, g, m, v, writes θ, m, v. AdaShift 3 for m = 1: reads θ, g, writes θ. For
  m = inf it also reads and writes its sum (5), for a finite m > 1 also one slot of the window (7;
  6 with bfloat16 slots). φ needs no further pass.
- bandwidth: words · 4 bytes · elements / time, as a share of the bandwidth of a copy that is
  timed in the same turns (reads and writes counted). The copy reached {copies},
  list by list. A copy also fetches the cache lines that it overwrites, which is not counted, so
  that a rule that reads what it writes can reach 150%."""


def optimizer_sections(table: pd.DataFrame) -> list[str]:
    facts = environment() | {
        "command": "python -m benchmarks.optimizer",
        "sources": f"{source_hash()} (SHA-256 of adashift and benchmarks/optimizer.py)",
    }
    lists = table.drop_duplicates("list")
    sizes = [
        f"- {r.list}: tensors {r.tensors}, elements {r.elements:,}" for r in lists.itertuples()
    ]
    copies = ", ".join(f"{r.copy_gb_s:.1f} GB/s" for r in lists.itertuples())
    return [
        bullet_list(facts),
        "\n".join(sizes),
        markdown_table(optimizer_summary(table)),
        OPTIMIZER_EXPLANATION.format(copies=copies, cycle=CYCLE),
        "## Goals",
        "Ratios of times. A goal is for each list. – if a contender is not installed.",
        markdown_table(goal_rows(table)),
    ]


def bars(ax: Axes, rows: pd.DataFrame, colors: Sequence[str]) -> None:
    """Draw the time per step with the quartiles."""
    rows = rows.reset_index(drop=True)
    y, middle = np.arange(len(rows)), rows["step_ms"].to_numpy()
    spread = [(middle - rows["q25_ms"]).clip(0), (rows["q75_ms"] - middle).clip(0)]
    ax.barh(y, middle, xerr=spread, color=colors, alpha=0.85, error_kw={"lw": 1, "capsize": 2})
    limit = 1.2 * rows[["q75_ms", "step_ms"]].max(axis=None)
    for i, row in rows.iterrows():
        text = row["note"] or f"{row['to_fused']:.2f}×"
        end = np.nanmax([0, row["q75_ms"], row["step_ms"]])
        ax.text(end + 0.02 * limit, i, text, va="center", fontsize=7)
    ax.set(
        xlim=(0, limit), ylim=(len(rows) - 0.4, -0.6), xlabel="ms per step", title=rows["list"][0]
    )
    ax.grid(axis="x", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)


def draw_chart(table: pd.DataFrame, stem: Path, quick: bool) -> None:
    """Write stem.png and stem.pdf."""
    colors = [styles().get(c.style, {"color": "0.35"})["color"] for c in CONTENDERS]
    groups = [rows for _, rows in table.groupby("list", sort=False)]
    figure = Figure(figsize=(4 * len(groups) + 1.6, 4), layout="constrained")
    axes = figure.subplots(1, len(groups), sharey=True)
    for ax, rows in zip(axes, groups, strict=True):
        bars(ax, rows, colors)
    axes[0].set_yticks(range(len(CONTENDERS)), [c.name for c in CONTENDERS], fontsize=8)
    note = f"bar: time per step and quartiles, as × of Adam fused · {processor()}, "
    note += f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    figure.supxlabel(("quick mode, for the tests · " if quick else "") + note, fontsize=7.5)
    figure.savefig(stem.with_suffix(".png"), dpi=160)
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})


def time_optimizers(quick: bool) -> pd.DataFrame:
    parts = []
    for name, (shapes, rounds) in parameter_lists(quick).items():
        print(f"{name}: tensors {len(shapes)}, elements {numel(shapes):,} …", flush=True)
        parts.append(time_list(name, shapes, rounds))
    return pd.concat(parts, ignore_index=True)


OPTIMIZER_BENCHMARK = Benchmark(
    "bench-optimizer",
    "Time per step of the optimizers",
    time_optimizers,
    optimizer_summary,
    optimizer_sections,
    draw_chart,
)

if __name__ == "__main__":
    OPTIMIZER_BENCHMARK.main()
