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

CYCLE = 40  # steps after which every window (m = 1, 2, 10, 40) has closed a whole number of blocks
MEMORY_BUDGET = 7e9  # bytes for the contenders that are timed together
PEER = "pytorch_optimizer"


@dataclass(frozen=True)
class Contender:
    name: str
    style: str  # a name of conf/figure/_style.yaml for its color; grey if unknown
    make: Make | None  # None: the package is not installed
    words: float  # the fewest reads and writes per element and step, see `window_words`
    buffers: float  # gradient-sized buffers of state, to stay within the memory budget
    warm_up: int = 3
    cycle: int = 1  # every so many steps one is more expensive: it sums up the window


@dataclass(frozen=True)
class Goal:
    """The time of `name` over a cycle is at most `limit` times that of `reference`."""

    name: str
    reference: str
    limit: float


def window_words(m: int) -> float:
    """Return the reads and writes per element and step of a single pass over the window's rule.

    θ and g are read and θ is written. For m > 1, over a block of m steps: each gradient is written
    to its slot, the block's sum is read m − 1 and written m − 2 times, a slot of the last block is
    read m − 2 times, and when the block is full m − 1 slots are read and m − 3 written. φ(g²), one
    number per tensor, is not counted.

    >>> window_words(1), window_words(2), window_words(10)
    (3.0, 5.0, 8.1)
    """
    if m == 1:
        return 3.0
    return (4 * m + (m - 1) + 2 * (m - 2) + (m - 1) + max(m - 3, 0)) / m


def adashift_contender(
    n: int, m: int | None = None, path: str = "default", **options: Any
) -> Contender:
    m = m or n
    make = partial(AdaShift, n=n, m=m, **options)
    buffers = m + 1 if m > 1 else 0
    return Contender(
        f"AdaShift {path} n={n} m={m}", "adashift", make, window_words(m), buffers, n + m + 1, m
    )


def adam_contender(path: str, **options: Any) -> Contender:
    return Contender(f"Adam {path}", "adam", partial(torch.optim.Adam, **options), 7, 2)


def peer_contender(n: int) -> Contender:
    """Return pytorch-optimizer's AdaShift, whose m is always n; make is None if not installed."""
    make = None
    if importlib.util.find_spec(PEER):
        make = partial(importlib.import_module(PEER).AdaShift, keep_num=n)
    name = f"pytorch-optimizer AdaShift n={n}"
    return Contender(name, "peer", make, window_words(n), n + 3, 2 * n + 1)


# torch's default on the CPU is the loop over tensors, foreach=False.
CONTENDERS = (
    adam_contender("default"),
    adam_contender("foreach", foreach=True),
    adam_contender("fused", fused=True),
    Contender("SGD default", "sgd", torch.optim.SGD, 3, 0),
    adashift_contender(n=1),
    adashift_contender(n=2),
    adashift_contender(n=10, m=1),
    adashift_contender(n=10),
    adashift_contender(n=40, m=1),
    adashift_contender(n=40),
    *(
        adashift_contender(n, m, "fused", fused=True)
        for n, m in ((1, 1), (2, 2), (10, 1), (10, 10), (40, 40))
    ),
    peer_contender(n=10),
)
REFERENCE, FUSED, COPY = "Adam default", "Adam fused", "copy"
SPEED_GOALS = (
    Goal("AdaShift default n=10 m=10", REFERENCE, 1.0),
    Goal("AdaShift fused n=10 m=10", FUSED, 1.3),
    Goal("AdaShift default n=40 m=40", "AdaShift default n=2 m=2", 1.15),
    Goal("AdaShift fused n=40 m=40", "AdaShift fused n=2 m=2", 1.15),
    Goal("AdaShift fused n=10 m=10", "pytorch-optimizer AdaShift n=10", 0.2),
    Goal("AdaShift default n=10 m=10", "pytorch-optimizer AdaShift n=10", 0.2),
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
            "one tensor": ([(100_000,)], CYCLE),
            "ResNet-18": (shapes_of("resnet18")[:12], CYCLE),
            "DenseNet-121": (shapes_of("densenet121")[:30], CYCLE),
        }
    return {
        "one tensor": ([(25_000_000,)], 2 * CYCLE),
        "ResNet-18": (shapes_of("resnet18"), 2 * CYCLE),
        "DenseNet-121": (shapes_of("densenet121"), 2 * CYCLE),
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


def cycle_mean(t: pd.Series, contender: Contender) -> float:
    """Return the seconds per step over a cycle: weighted medians of expensive and other steps.

    A mean would include the few steps in which the machine was busy, and a median of all steps
    would exclude the expensive ones.
    """
    expensive = (np.arange(len(t)) + contender.warm_up) % contender.cycle == 0
    if expensive.all():
        return float(t.median())
    others = (contender.cycle - 1) * t[~expensive].median()
    return float(t[expensive].median() + others) / contender.cycle


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


def time_group(members: Sequence[Contender], shapes: Shapes, rounds: int) -> list[dict[str, Any]]:
    gc.collect()  # free the last group
    optimizers = {c.name: warmed_up(c, shapes) for c in members}
    copy = MemoryCopy(max(numel(shapes), min(25_000_000, 4 * numel(shapes))))
    times = interleave(optimizers | {COPY: copy}, rounds)
    bandwidth = 4 * copy.words() / times[COPY].median()
    adam = {"adam": times[REFERENCE].median(), "fused": times[FUSED].median()}
    rows = []
    for c in members:
        t, cycle = times[c.name], cycle_mean(times[c.name], c)
        least = 4 * c.words * numel(shapes)
        rows.append(
            {"contender": c.name, "median_ms": 1e3 * t.median()}
            | {f"q{q}_ms": 1e3 * t.quantile(q / 100) for q in (25, 75)}
            | {
                "mean_ms": 1e3 * t.mean(),
                "cycle_ms": 1e3 * cycle,
                **{f"median_to_{name}": t.median() / by for name, by in adam.items()},
                **{f"cycle_to_{name}": cycle / by for name, by in adam.items()},
                "state_per_parameter_byte": state_bytes(optimizers[c.name]) / (4 * numel(shapes)),
                "words": c.words,
                "bandwidth_share": least / cycle / bandwidth,
                "copy_gb_s": bandwidth / 1e9,
                "rounds": rounds,
            }
        )
    return rows


def time_list(name: str, shapes: Shapes, rounds: int) -> pd.DataFrame:
    """Return one row per contender, without numbers if it is not installed."""
    parts = [
        pd.DataFrame(time_group(members, shapes, rounds)).assign(group=i)
        for i, members in enumerate(memory_groups(CONTENDERS, numel(shapes)), 1)
    ]
    rows = pd.concat(parts).drop_duplicates("contender").set_index("contender")
    rows = rows.reindex([c.name for c in CONTENDERS]).reset_index()
    rows["note"] = ["" if c.make else "not installed" for c in CONTENDERS]
    rows.insert(0, "list", name)
    return rows.assign(tensors=len(shapes), elements=numel(shapes))


def goal_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the ratio of cycle times of each goal on each list, both relative to Adam fused."""
    ratios = table.pivot(index="contender", columns="list", values="cycle_to_fused")
    ratios = ratios[list(dict.fromkeys(table["list"]))]
    rows = []
    for goal in SPEED_GOALS:
        ratio = ratios.loc[goal.name] / ratios.loc[goal.reference]
        label = {"time of": goal.name, "over": goal.reference, "goal": f"≤ {goal.limit:g}"}
        middle = float(np.exp(np.log(ratio).mean(skipna=False)))
        rows.append(label | ratio.to_dict() | {"geometric mean": middle})
    return pd.DataFrame(rows)


def optimizer_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table as it is printed."""
    t = table
    columns = {
        "list": t["list"],
        "contender": t["contender"],
        "median ms": [f"{x:.2f}" for x in t["median_ms"]],
        "quartiles": [f"{a:.2f}–{b:.2f}" for a, b in zip(t["q25_ms"], t["q75_ms"], strict=True)],
        "mean ms": [f"{x:.2f}" for x in t["mean_ms"]],
        "cycle ms": [f"{x:.2f}" for x in t["cycle_ms"]],
        "÷ Adam": median_and_cycle(t, "adam"),
        "÷ Adam fused": median_and_cycle(t, "fused"),
        "state": [f"{x:.3f}" for x in t["state_per_parameter_byte"]],
        "words": [f"{x:.4g}" for x in t["words"]],
        "bandwidth": [f"{x:.0%}" for x in t["bandwidth_share"]],
    }
    shown = pd.DataFrame(columns)
    shown.loc[t["note"] != "", shown.columns[2:]] = "–"
    shown.loc[t["note"] != "", "median ms"] = t["note"]
    return shown


def median_and_cycle(table: pd.DataFrame, reference: str) -> list[str]:
    pairs = zip(table[f"median_to_{reference}"], table[f"cycle_to_{reference}"], strict=True)
    return [f"{median:.2f} ({cycle:.2f})" for median, cycle in pairs]


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

- cycle: AdaShift sums up its window every m steps, which a median ignores. This is the average over
  m steps of the median of that step and the median of the others, so that the few steps in which
  the machine was busy, which affect the mean, do not count.
- ÷ Adam, ÷ Adam fused: ratio of medians; in parentheses, ratio of the times over a cycle.
- state: bytes of state per byte of parameters.
- words: the fewest float32 reads and writes per element and step that a single pass over memory
  needs. SGD 3: reads θ, g, writes θ. Adam 7: reads θ, g, m, v, writes θ, m, v. AdaShift 3 for
  m = 1; for m > 1 it also reads and writes its running sum and one slot of the window, and makes
  its sums every m steps (`window_words` in benchmarks/optimizer.py). φ needs no further pass.
- bandwidth: words · 4 bytes · elements / cycle time, as a share of the bandwidth of a copy that is
  timed in the same turns (reads and writes counted). The copy reached {copies}, list by list. A
  copy also fetches the cache lines that it overwrites, which is not counted, so that a rule that
  reads what it writes can reach 150%."""


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
    goals = goal_rows(table)
    for column in goals.columns[3:]:
        goals[column] = [f"{x:.2f}" if np.isfinite(x) else "–" for x in goals[column]]
    return [
        bullet_list(facts),
        "\n".join(sizes),
        markdown_table(optimizer_summary(table)),
        OPTIMIZER_EXPLANATION.format(copies=copies),
        "## Goals",
        "Ratios of times over a cycle; – if a contender is not installed.",
        markdown_table(goals),
    ]


def bars(ax: Axes, rows: pd.DataFrame, colors: Sequence[str]) -> None:
    """Draw medians with quartiles, and a diamond for the average over a cycle."""
    rows = rows.reset_index(drop=True)
    y, middle = np.arange(len(rows)), rows["median_ms"].to_numpy()
    spread = [middle - rows["q25_ms"], rows["q75_ms"] - middle]
    ax.barh(y, middle, xerr=spread, color=colors, alpha=0.85, error_kw={"lw": 1, "capsize": 2})
    ax.plot(rows["cycle_ms"], y, "D", ms=3.5, color="black")
    limit = 1.2 * rows[["q75_ms", "cycle_ms"]].max(axis=None)
    for i, row in rows.iterrows():
        text = row["note"] or f"{row['cycle_to_adam']:.2f}×"
        end = np.nanmax([0, row["q75_ms"], row["cycle_ms"]])
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
    note = "bar: median and quartiles · ◆: average over a cycle of m steps, as × of Adam's default"
    note += f" · {processor()}, "
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
