"""execute(): from a config to a finished record. run.py does it once, a figure often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch

from experiments.config import Config, ConfigError, build
from experiments.loop import train
from experiments.progress import progress
from experiments.record import Record
from experiments.runs import Run, figures_using
from experiments.task import Task

ALL_THREADS = torch.get_num_threads()  # the cores, or what OMP_NUM_THREADS allows


def execute(run: Run, announce: Callable[[str], None] = lambda line: None) -> str:
    """Train the run unless it is there already; return how it ended."""
    config = run.config
    if run.done and not config.force:
        announce(f"nothing to do, it is there (force=true trains again): {shown(run.folder)}")
        return run.status
    # Everything that can be refused is built before the first file is written.
    device = pick_device(config.device)
    set_up_torch(config)
    task: Task = build(config.task, "task", seed=config.seed, device=device)
    optimizers = make_optimizers(config, task)
    schedule = make_schedule(config)
    steps, log_every = length_of(config, task)
    torch.manual_seed(config.seed)  # dropout has no generator of its own
    length = "" if task.ends else f", {steps:,} steps"
    announce(f"{size_of(config)}{length}: {shown(run.folder)}")
    with Record(run.folder, config, run.command(), figures_using(run)) as record:
        record.status = train(
            task,
            optimizers,
            record,
            steps=steps,
            log_every=log_every,
            schedule=schedule,
            title=f"{config.experiment} {config.optimizer_name} seed {config.seed}",
        )
    return record.status


def set_up_torch(config: Config) -> None:
    torch.set_num_threads(config.threads or ALL_THREADS)
    # Softmax of large numbers gives some below 1e-38, with which a CPU is ten times slower.
    torch.set_flush_denormal(True)


def length_of(config: Config, task: Task) -> tuple[int, int]:
    """How many steps, and how many between two records."""
    steps, log_every = config.steps or task.total_steps, config.log_every or task.epoch_steps
    if steps is None or log_every is None:
        key = "steps" if steps is None else "log_every"
        raise ConfigError(f"{key}=null is refused: {config.experiment} knows no epochs; give it")
    return steps, log_every


def size_of(config: Config) -> str:
    """The scale, and how to have the paper's where it is another."""
    cure = "" if config.scale == "paper" else " (scale=paper for the paper's size)"
    return f"{config.scale} scale{cure}"


def shown(path: Path) -> str:
    """As one would type it here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def make_optimizers(config: Config, task: Task) -> dict[str, torch.optim.Optimizer]:
    make_optimizer = build(config.optimizer, "optimizer")
    try:
        optimizers = {name: make_optimizer(params) for name, params in task.players().items()}
        task.check_optimizers(optimizers)
        return optimizers
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer={config.optimizer_name} is refused with these settings: {error}"
        ) from error


def make_schedule(config: Config) -> Callable[[float], float] | None:
    if config.schedule is None:
        return None
    schedule = build(config.schedule, "schedule")
    schedule(0.0)
    if isinstance(schedule, partial):
        # Hydra's own checks its target in every call, which takes longer than a small step.
        schedule = partial(schedule.func, *schedule.args, **schedule.keywords)
    return cast(Callable[[float], float], schedule)


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={wanted} is not to be had: torch sees no GPU; use device=cpu")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps is not to be had: torch sees no Apple GPU; use device=cpu")
    return torch.device(wanted)


def side_by_side(runs: Sequence[Run]) -> int:
    """How many of these runs the cores can take at once."""
    if all(run.config.scale == "smoke" for run in runs):
        return 1  # such a run is over before a worker has started
    on_cpu = all(pick_device(run.config.device).type == "cpu" for run in runs)
    most = max((run.config.threads or ALL_THREADS for run in runs), default=1)
    return max(1, min(ALL_THREADS // most, len(runs))) if on_cpu else 1


def execute_all(runs: Sequence[Run], title: str) -> None:
    """Train what is missing, as many at a time as fit, and show how far it is."""
    missing = [run for run in runs if run.config.force or not run.done]
    ready = f", {len(runs) - len(missing)} are there already" if len(missing) < len(runs) else ""
    print(f"{title}: {len(missing)} runs to train at {size_of(runs[0].config)}{ready}", flush=True)
    workers = side_by_side(missing)
    about = dict(total=len(missing), desc=title, unit="run")
    if workers == 1:
        for run in progress(missing, **about):
            execute(run)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))  # torch dislikes fork
    try:
        for _ in progress(pool.map(execute, missing), **about):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # what has begun ends; after an error nothing new begins
