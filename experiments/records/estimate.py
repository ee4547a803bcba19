"""How long runs will take, from the times of finished runs: your own, else the published ones."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.config.errors import ConfigError
from experiments.config.gpus import device_name, runs_at_once
from experiments.config.schema import Config, canonical
from experiments.records import archive, index, provenance, record
from experiments.records.costs import Rates, device_key, known_costs
from experiments.records.run import Run, cached_config
from experiments.records.speed import probe
from experiments.records.status import Status

START = 4.0  # seconds until the processes of a pool have imported torch
UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True)
class Timing:
    """The time of a finished run."""

    seconds: float
    scale: str
    speed: str
    device: str  # cpu, or the name of a GPU
    steps: int | None  # None: decided by epochs, or unknown
    task: Any  # in canonical form
    optimizer: str
    setting: str
    machine: Mapping[str, Any]  # may lack keys
    own: bool

    @property
    def is_local(self) -> bool:
        here = {"processor": provenance.processor(), "cores": os.cpu_count()}
        return self.own and all(self.machine.get(key) == here[key] for key in here)

    def seconds_here(self, run: Run) -> float:
        """Convert to this machine, if the speed of the other one is known, and to other steps."""
        there = self.machine.get("probe")
        speed = 1.0 if self.is_local or not there else probe() / there
        steps = None if self.setting == run.setting else run.config.steps
        return self.seconds * speed * (steps / self.steps if steps and self.steps else 1.0)


@dataclass(frozen=True)
class Estimate:
    """The time of several runs; `unknown` is the number of runs whose time is not included."""

    seconds: float
    at_once: int
    unknown: int = 0
    source: str = ""  # in words

    def words(self, after: str = "") -> str:
        """
        >>> Estimate(90, at_once=2, unknown=1).words(" left")
        'about 1.5 min left and 1 of unknown length'
        """
        known = [f"about {rough_duration(self.seconds)}{after}"] if self.seconds else []
        return " and ".join(known + [f"{self.unknown} of unknown length"] * bool(self.unknown))


def estimate(
    runs: Sequence[Run], at_once: int | None = None, known: Mapping[Path, float] | None = None
) -> Estimate:
    """Estimate the time of runs of which `at_once` are trained in parallel.

    `known` has the seconds of settings that were measured, by folder.
    """
    seconds, sources = dict(known or {}), set[str]()
    for setting, run in {run.folder.parent: run for run in runs}.items():  # seeds are alike
        if setting not in seconds and (found := guess(run)) is not None:
            seconds[setting] = found[0]
            sources |= found[1]
    timed = [run for run in runs if run.folder.parent in seconds]
    parts = [seconds[run.folder.parent] * fraction_left(run) for run in timed]
    parallel = [min(at_once or runs_at_once([run.config]), len(runs)) for run in timed]
    shared = sum(part / count for part, count in zip(parts, parallel, strict=True))
    most = max(parallel, default=1)
    whole = max(shared, *parts) + START * (most > 1) if parts else 0.0
    return Estimate(whole, most, len(runs) - len(timed), " and ".join(sorted(sources)))


def guess(run: Run) -> tuple[float, set[str]] | None:
    """Return the seconds of a run, and what they are estimated from."""
    if alike := similar(run):
        sources = {"your runs" if timing.own else "published runs" for timing in alike}
        return usual(alike, run), sources
    model = modelled(run)
    return None if model is None else (model, {"counted operations"})


def usual(timings: Sequence[Timing], run: Run) -> float:
    """Return the median of different settings, and the first quartile of the seeds of one setting.

    Other work on a machine makes runs slower, and never faster.
    """
    ordered = sorted(timing.seconds_here(run) for timing in timings)
    is_one_setting = len({timing.setting for timing in timings}) == 1
    return ordered[len(ordered) // (4 if is_one_setting else 2)]


def fraction_left(run: Run) -> float:
    """Return the part of a run that is not done; force=true starts it again."""
    done, total = (0, None) if run.config.force else steps_done(run)
    return max(0.0, 1.0 - done / total) if total else 1.0


def steps_done(run: Run) -> tuple[int, int | None]:
    """Return how many steps an unfinished run has taken, and how many it has, if that is known.

    run.json has no step until a run ends, and `steps` is null if the length is given in epochs.
    """
    try:
        state = json.loads((run.folder / record.PROGRESS).read_text())
        return state["done"], state["total"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is being written
        info = run.info
        step = info["step"] if Status.in_info(info) == Status.INTERRUPTED else 0
        return step, run.config.steps


def similar(run: Run) -> list[Timing]:
    """Return the times of the most similar runs: first by machine, then setting, optimizer.

    They have the same scale, speed and device, and the same task; the time of another task, such as
    more epochs, is only converted if both numbers of steps are known.
    """
    c, task = run.config, task_of(run.config)
    alike = [t for t in timings(c.results, c.published, c.experiment) if t.scale == c.scale]
    alike = [t for t in alike if (t.speed, t.device) == (c.speed, device_name(c.device))]
    alike = [t for t in alike if t.task == task or (t.steps and c.steps)]
    alike = [t for t in alike if t.is_local] or alike
    alike = [t for t in alike if t.task == task] or alike
    alike = [t for t in alike if t.setting == run.setting] or alike
    return [t for t in alike if t.optimizer == c.optimizer_name] or alike


def modelled(run: Run) -> float | None:
    """Return the time of a run from its counted operations; None if `make plan` has not run.

    The model is corrected by the times of the same experiment at another scale, if there are any.
    """
    known, config = known_costs(), run.config
    cost, rates = known.of(config), known.rates.get(device_key(config))
    if cost is None or rates is None:
        return None
    return rates.seconds(cost.work) * correction(run, rates)


def correction(run: Run, rates: Rates) -> float:
    """Return the time of a run of this experiment at another scale, divided by the model's."""
    for other in other_scales(run):
        alike, cost = similar(other), known_costs().of(other.config)
        if alike and cost is not None:
            return usual(alike, other) / rates.seconds(cost.work)
    return 1.0


def other_scales(run: Run) -> list[Run]:
    """Return the same experiment and optimizer at other scales, with usual settings."""
    c = run.config
    places = (f"results={c.results}", f"published={c.published}")
    names = (f"experiment={c.experiment}", f"optimizer={c.optimizer_name}")
    found = list[Run]()
    for scale in ("laptop", "paper"):
        with suppress(ConfigError):  # no tuned values for this pair
            if scale != c.scale:
                found.append(Run(cached_config((*names, f"scale={scale}", *places))))
    return found


def is_timed(config: Config) -> bool:
    """Whether a run of this experiment and optimizer was ever finished."""
    known = timings(config.results, config.published, config.experiment)
    return any(t.optimizer == config.optimizer_name for t in known)


@cache
def timings(results: Path, published: Path, experiment: str) -> list[Timing]:
    """Return the times of all finished runs of an experiment."""
    folder = results / "runs" / experiment
    own = (own_timing(path.parent) for path in folder.glob(f"*/*/{record.INFO}"))
    recorded = (
        timing_of(info, info["run"].split("/")[0], own=False)
        for info in archive.load_infos(published, experiment)
    )
    listed = map(listed_timing, listed_rows(published / "runs.csv").get(experiment, []))
    return [timing for timing in (*own, *recorded, *listed) if timing is not None]


def own_timing(folder: Path) -> Timing | None:
    info = record.read_info(folder)
    return timing_of(info, folder.parent.name, own=True) if info else None


def timing_of(info: Mapping[str, Any], setting: str, own: bool) -> Timing | None:
    if Status.in_info(info) != Status.FINISHED:
        return None
    config = info["config"]
    return Timing(
        seconds=info["seconds"],
        scale=config["scale"],
        speed=config.get("speed", "exact"),  # older runs lack it, and the device
        device=info.get("device", "cpu"),
        steps=config["steps"],
        task=canonical(config["task"]),
        optimizer=config["optimizer_name"],
        setting=setting,
        machine=info["machine"],
        own=own,
    )


def task_of(config: Config) -> Any:
    return canonical(config.model_dump(mode="json", include={"task"})["task"])


@cache
def listed_rows(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the runs that were published before records were kept, by experiment."""
    found = dict[str, list[dict[str, str]]]()
    for row in index.read_index(path).values():
        if row["records"] == index.WITHOUT and row["status"] == Status.FINISHED and row["seconds"]:
            found.setdefault(row["experiment"], []).append(row)
    return found


def listed_timing(row: dict[str, str]) -> Timing | None:
    """Return the time of a run of which only its command and its results are known."""
    words = [word for word in shlex.split(row["command"])[2:] if not word.startswith("seed=")]
    reached = re.match(r"step=(\d+)", row["metrics"])
    try:
        task = task_of(cached_config(tuple(words)))
    except ConfigError:  # of a setting that no longer exists
        return None
    return Timing(
        seconds=float(row["seconds"]),
        scale=row["scale"],
        speed="exact",
        device="cpu",
        steps=int(reached[1]) if reached else None,
        task=task,
        optimizer=row["optimizer"],
        setting=row["run"].split("/")[1],
        machine={},
        own=False,
    )


def rough_duration(seconds: float) -> str:
    """
    >>> rough_duration(5000)
    '1.4 h'
    """
    unit, length = next(((u, n) for u, n in UNITS if seconds >= n), ("s", 1))
    return f"{float(f'{seconds / length:.2g}'):,g} {unit}"
