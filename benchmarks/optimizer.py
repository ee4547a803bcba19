"""Time per step, state and bandwidth of AdaShift and of what it is compared with, on the CPU.

    python -m benchmarks.optimizer [--quick] [--results FOLDER]

All contenders of a parameter list are timed in one run, a step of each in turn, so that whatever
else the machine does falls on all of them. A contender is a line of CONTENDERS.
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
from benchmarks.common import command, interleave, listed, machine, markdown, write
from experiments.products.style import styles
from experiments.records.provenance import processor

Make = Callable[[list[Tensor]], Any]
Shapes = list[tuple[int, ...]]

CYCLE = 40  # steps after which every window (m = 1, 2, 10, 40) has closed a whole number of blocks
BUDGET = 7e9  # bytes that the contenders of one shift may hold together
PEER = "pytorch_optimizer"


@dataclass(frozen=True)
class Contender:
    name: str
    style: str  # its colour, by a name of conf/figure/_style.yaml; else grey
    make: Make | None  # None: the package is not installed
    words: float  # least reads and writes per element and step, see `window_words`
    buffers: float  # gradient-sized buffers of state, to plan the memory
    warm_up: int = 3
    cycle: int = 1  # one step in so many is dearer: the one that sums up the window


@dataclass(frozen=True)
class Goal:
    """Time of `name` over a cycle ÷ that of `reference`: at most `limit` on every list."""

    name: str
    reference: str
    limit: float


def window_words(m: int) -> float:
    """Reads and writes per element and step of a single pass over the rule of adashift.window.

    θ and g are read and θ is written. For m > 1, over a block of m steps: each gradient is written
    to its slot, the block's sum is read m − 1 and written m − 2 times, a slot of the last block is
    read m − 2 times, and when the block is full m − 1 slots are read and m − 3 written. φ(g²) is
    one number per tensor and not counted.

    >>> window_words(1), window_words(2), window_words(10)
    (3.0, 5.0, 8.1)
    """
    if m == 1:
        return 3.0
    return (4 * m + (m - 1) + 2 * (m - 2) + (m - 1) + max(m - 3, 0)) / m


def ours(n: int, m: int | None = None, path: str = "default", **options: Any) -> Contender:
    m = m or n
    make = partial(AdaShift, n=n, m=m, **options)
    buffers = m + 1 if m > 1 else 0
    return Contender(
        f"AdaShift {path} n={n} m={m}", "adashift", make, window_words(m), buffers, n + m + 1, m
    )


def adam(path: str, **options: Any) -> Contender:
    return Contender(f"Adam {path}", "adam", partial(torch.optim.Adam, **options), 7, 2)


def peer(n: int) -> Contender:
    """pytorch-optimizer's AdaShift, where that package is installed; its m is always n."""
    make = None
    if importlib.util.find_spec(PEER):
        make = partial(importlib.import_module(PEER).AdaShift, keep_num=n)
    name = f"pytorch-optimizer AdaShift n={n}"
    return Contender(name, "peer", make, window_words(n), n + 3, 2 * n + 1)


# torch's own default on the CPU is the loop over tensors, as foreach=False.
CONTENDERS = (
    adam("default"),
    adam("foreach", foreach=True),
    adam("fused", fused=True),
    Contender("SGD default", "sgd", torch.optim.SGD, 3, 0),
    ours(n=1),
    ours(n=2),
    ours(n=10, m=1),
    ours(n=10),
    ours(n=40, m=1),
    ours(n=40),
    *(ours(n, m, "fused", fused=True) for n, m in ((1, 1), (2, 2), (10, 1), (10, 10), (40, 40))),
    peer(n=10),
)
REFERENCE, FUSED, COPY = "Adam default", "Adam fused", "copy"
GOALS = (
    Goal("AdaShift default n=10 m=10", REFERENCE, 1.0),
    Goal("AdaShift fused n=10 m=10", FUSED, 1.3),
    Goal("AdaShift default n=40 m=40", "AdaShift default n=2 m=2", 1.15),
    Goal("AdaShift fused n=40 m=40", "AdaShift fused n=2 m=2", 1.15),
    Goal("AdaShift fused n=10 m=10", "pytorch-optimizer AdaShift n=10", 0.2),
    Goal("AdaShift default n=10 m=10", "pytorch-optimizer AdaShift n=10", 0.2),
)


class Copy:
    """A copy of memory, timed like an optimizer: the bandwidth that a step can hope for."""

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
    """Shapes and number of rounds, whole cycles, by the name of the list."""
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


def shifts(contenders: Iterable[Contender], size: int) -> list[list[Contender]]:
    """Contenders that fit in memory together; Adam's two ways are in each, to compare them by."""
    there = [c for c in contenders if c.make]
    references = [c for c in there if c.name in (REFERENCE, FUSED)]
    free = BUDGET - sum(4 * size * (2 + c.buffers) for c in references)
    room, parts = 0.0, list[list[Contender]]()
    for c in there:
        need = 4 * size * (2 + c.buffers)
        if c in references:
            continue
        if not parts or need > room:
            parts, room = [*parts, [*references]], free
        parts[-1].append(c)
        room -= need
    return parts


def warmed_up(contender: Contender, shapes: Shapes) -> Any:
    """The optimizer over parameters and gradients of its own, past the steps without motion."""
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
    """Seconds per step over a cycle: the median of the dear step and of the others, weighted.

    A plain mean would show the few steps in which the machine was away, and a median of all steps
    would not show the dear ones.
    """
    dear = (np.arange(len(t)) + contender.warm_up) % contender.cycle == 0
    if dear.all():
        return float(t.median())
    return float(t[dear].median() + (contender.cycle - 1) * t[~dear].median()) / contender.cycle


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


def run_shift(members: Sequence[Contender], shapes: Shapes, rounds: int) -> list[dict[str, Any]]:
    gc.collect()  # what the last shift held
    entrants = {c.name: warmed_up(c, shapes) for c in members}
    copy = Copy(max(numel(shapes), min(25_000_000, 4 * numel(shapes))))
    times = interleave(entrants | {COPY: copy}, rounds)
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
                "state_per_parameter_byte": state_bytes(entrants[c.name]) / (4 * numel(shapes)),
                "words": c.words,
                "bandwidth_share": least / cycle / bandwidth,
                "copy_gb_s": bandwidth / 1e9,
                "rounds": rounds,
            }
        )
    return rows


def run_list(name: str, shapes: Shapes, rounds: int) -> pd.DataFrame:
    """A row per contender; what has not been installed has a row without numbers."""
    parts = [
        pd.DataFrame(run_shift(members, shapes, rounds)).assign(shift=i)
        for i, members in enumerate(shifts(CONTENDERS, numel(shapes)), 1)
    ]
    rows = pd.concat(parts).drop_duplicates("contender").set_index("contender")
    rows = rows.reindex([c.name for c in CONTENDERS]).reset_index()
    rows["note"] = ["" if c.make else "not installed" for c in CONTENDERS]
    rows.insert(0, "list", name)
    return rows.assign(tensors=len(shapes), elements=numel(shapes))


def goal_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The ratio of times over a cycle of each goal on each list, by way of Adam fused."""
    ratios = table.pivot(index="contender", columns="list", values="cycle_to_fused")
    ratios = ratios[list(dict.fromkeys(table["list"]))]
    rows = []
    for goal in GOALS:
        ratio = ratios.loc[goal.name] / ratios.loc[goal.reference]
        label = {"time of": goal.name, "over": goal.reference, "goal": f"≤ {goal.limit:g}"}
        middle = float(np.exp(np.log(ratio).mean(skipna=False)))
        rows.append(label | ratio.to_dict() | {"geometric mean": middle})
    return pd.DataFrame(rows)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table as it is printed."""
    t = table
    columns = {
        "list": t["list"],
        "contender": t["contender"],
        "median ms": [f"{x:.2f}" for x in t["median_ms"]],
        "quartiles": [f"{a:.2f}–{b:.2f}" for a, b in zip(t["q25_ms"], t["q75_ms"], strict=True)],
        "mean ms": [f"{x:.2f}" for x in t["mean_ms"]],
        "cycle ms": [f"{x:.2f}" for x in t["cycle_ms"]],
        "÷ Adam": both(t, "adam"),
        "÷ Adam fused": both(t, "fused"),
        "state": [f"{x:.3f}" for x in t["state_per_parameter_byte"]],
        "words": [f"{x:.4g}" for x in t["words"]],
        "bandwidth": [f"{x:.0%}" for x in t["bandwidth_share"]],
    }
    shown = pd.DataFrame(columns)
    shown.loc[t["note"] != "", shown.columns[2:]] = "–"
    shown.loc[t["note"] != "", "median ms"] = t["note"]
    return shown


def both(table: pd.DataFrame, reference: str) -> list[str]:
    pairs = zip(table[f"median_to_{reference}"], table[f"cycle_to_{reference}"], strict=True)
    return [f"{median:.2f} ({cycle:.2f})" for median, cycle in pairs]


def sources() -> str:
    """Changes when the optimizer or this file changes."""
    files = [*sorted(Path(adashift.__file__).parent.glob("*.[cp]*")), Path(__file__)]
    return hashlib.sha256(b"\n".join(f.read_bytes() for f in files)).hexdigest()[:16]


def provenance(quick: bool) -> str:
    facts = machine() | {
        "command": f"python -m benchmarks.optimizer{' --quick' if quick else ''}",
        "sources": f"{sources()} (SHA-256 of adashift and benchmarks/optimizer.py)",
    }
    return listed(facts)


EXPLANATION = """\
Milliseconds per `step()`, float32. Within a list one step of each contender is timed in turn, in an
order that is rotated and turned round; each has parameters and gradients of its own and is past its
first n steps. Where memory does not hold all at once they run in shifts with Adam's default and
fused ways in each, and ratios are taken within a shift or go by way of these.

- cycle: AdaShift sums up its window once in m steps, which the median does not see. This is the
  average over m steps, of the median of that step and the median of the others, so that the few
  steps in which the machine was busy elsewhere, which are in the mean, do not decide.
- ÷ Adam, ÷ Adam fused: ratio of medians, in brackets of the times over a cycle.
- state: bytes of state per byte of parameters.
- words: the fewest float32 reads and writes per element and step that a single pass over memory
  needs. SGD 3: θ, g read, θ written. Adam 7: θ, g, m, v read, θ, m, v written. AdaShift 3 for
  m = 1; for m > 1 also its running sum and one slot of the window, read and written, and the sums
  made once in m steps (`window_words` in benchmarks/optimizer.py). φ is had in the same pass.
- bandwidth: words · 4 bytes · elements / cycle time, as a share of what a copy reaches that is
  timed in the same turns (its reads and writes counted). List by list the copy had {copies}.
  A copy also fetches the lines that it overwrites, which is not counted, so that a rule that reads
  what it writes can come to 150%.
"""


def document(table: pd.DataFrame, quick: bool) -> str:
    lists = table.drop_duplicates("list")
    sizes = [
        f"- {r.list}: tensors {r.tensors}, elements {r.elements:,}" for r in lists.itertuples()
    ]
    copies = ", ".join(f"{r.copy_gb_s:.1f} GB/s" for r in lists.itertuples())
    goals = goal_rows(table)
    for column in goals.columns[3:]:
        goals[column] = [f"{x:.2f}" if np.isfinite(x) else "–" for x in goals[column]]
    parts = ["# Time per step of the optimizers"]
    parts += ["**Small lists, for the tests: these times mean nothing.**"] if quick else []
    parts += [provenance(quick), "\n".join(sizes), markdown(readable(table))]
    parts += [EXPLANATION.format(copies=copies).strip()]
    parts += ["## Goals", "Ratios of times over a cycle; – where a contender is not installed."]
    return "\n\n".join([*parts, markdown(goals)]) + "\n"


def bars(ax: Axes, rows: pd.DataFrame, colors: Sequence[str]) -> None:
    """Medians with quartiles; a diamond is the average over a cycle."""
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


def draw(table: pd.DataFrame, stem: Path, quick: bool) -> None:
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
    figure.supxlabel(("small lists, for the tests · " if quick else "") + note, fontsize=7.5)
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".png"), dpi=160)
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})


def bench(results: Path, quick: bool) -> pd.DataFrame:
    parts = []
    for name, (shapes, rounds) in parameter_lists(quick).items():
        print(f"{name}: tensors {len(shapes)}, elements {numel(shapes):,} …", flush=True)
        parts.append(run_list(name, shapes, rounds))
    table = pd.concat(parts, ignore_index=True)
    write(table, document(table, quick), results / "benchmarks" / "bench-optimizer")
    draw(table, results / "benchmarks" / "bench-optimizer", quick)
    return table


def main(words: Sequence[str] | None = None) -> None:
    command(bench, readable, "Time the optimizers' steps.", "bench-optimizer", words)


if __name__ == "__main__":
    main()
