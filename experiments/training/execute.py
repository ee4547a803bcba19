"""execute(): from a config to a finished record. run.py does it once, a figure often."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from experiments.config.build import build
from experiments.config.errors import ConfigError
from experiments.config.schema import Config
from experiments.records.archive import Published
from experiments.records.files import locked
from experiments.records.record import Record
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.records.tracking import is_tracked
from experiments.task import Task
from experiments.training.checkpoint import Checkpoint
from experiments.training.collectives import is_first, size
from experiments.training.device import device_for, noted_kernels, set_up_torch
from experiments.training.leader import Following, Leading, Team, Unwritten, team
from experiments.training.loop import train
from experiments.training.signals import ASKED

Tags = Callable[[Run], list[str]]


def no_tags(run: Run) -> list[str]:
    return []


def execute(
    run: Run,
    announce: Callable[[str], None] = lambda line: None,
    wait: bool = True,
    tags: Tags = no_tags,
) -> str:
    """Train the run, or what is left of it, unless it is there already; return how it ended.

    Where another process is training it, wait for that one, or return "busy". `tags` gives the tags
    of a run that is tracked.
    """
    if ASKED.by:
        raise KeyboardInterrupt
    config, before = run.config, run.info
    if run.done and not config.force:
        if isinstance(run.source, Published):
            announce(f"already published (records=own trains it here): {run.name}")
        else:
            announce(f"already finished (force=true trains again): {shown(run.folder)}")
            remove_left_over(run)
        return run.status
    if config.records == "published":
        state = "published, and force=true trains" if run.done else "not published"
        raise ConfigError(f"{run.name} is {state}: use records=own to train it")
    with device_for(config.device) as device, team(device) as members:
        if not is_first():
            return follow(device, config, members)
        return execute_on(device, run, announce, wait, tags, members, before)


def execute_on(
    device: torch.device,
    run: Run,
    announce: Callable[[str], None],
    wait: bool,
    tags: Tags,
    members: Team,
    before: dict[str, Any],  # run.json as it was when this process decided to train
) -> str:
    # Everything that can be refused is built before the first file is written.
    config = run.config
    deterministic = set_up_torch(config, device)
    task, training = prepare(config, device)
    with locked(run.folder, announce if wait else None) as mine:
        if not mine:
            return "busy"
        if run.done and run.info != before:
            announce(f"another process has trained it: {shown(run.folder)}")
            return run.status
        checkpoint = checkpoint_of(run, device)
        if config.force or not task.resumable:
            checkpoint.remove()
        length = "" if task.ends else f", {training.keywords['steps']:,} steps"
        announce(f"{size_of(config)}{length}: {shown(run.folder)}")
        labels = tags(run) if is_tracked(config) else []
        with (
            Record(run.folder, config, run.command(), labels) as record,
            noted_kernels() as kernels,
        ):
            record.about = {"deterministic": deterministic}
            kept = Leading(checkpoint, members) if task.resumable else None
            record.status = training(record=record, checkpoint=kept)
            same = deterministic and not kernels
            record.about = {"deterministic": same, "not_deterministic": kernels}
        if record.status == Status.INTERRUPTED:
            raise KeyboardInterrupt
        checkpoint.remove()
    if record.status == Status.DIVERGED:
        announce(f"a loss or a parameter was no number at step {record.step:,}")
    return record.status


def follow(device: torch.device, config: Config, members: Team) -> str:
    """Take part in what the first process trains, which alone writes and speaks."""
    set_up_torch(config, device)
    _, training = prepare(config, device)
    ASKED.follows = True
    begun = members.hear()
    if begun is None:
        return "left to the first process"
    return training(record=Unwritten(config), checkpoint=Following(begun["state"]))


def prepare(config: Config, device: torch.device) -> tuple[Task, partial[Status]]:
    """The task, and its training, which lacks the record and the checkpoint."""
    task: Task = build(config.task, "task", seed=config.seed, device=device)
    if size() > 1 and not task.divisible:
        raise ConfigError(f"{config.experiment} is for one process: start it without torchrun")
    optimizers = make_optimizers(config, task)
    steps, log_every = length_of(config, task)
    torch.manual_seed(config.seed)  # dropout has no generator of its own
    return task, partial(
        train,
        task,
        optimizers,
        steps=steps,
        log_every=log_every,
        schedule=make_schedule(config),
        title=f"{config.experiment} {config.optimizer_name} seed {config.seed}",
    )


def checkpoint_of(run: Run, device: torch.device) -> Checkpoint:
    # Another device has other bits, so a run is not begun on one and ended on another.
    return Checkpoint(run.folder, f"{run.name} on {device.type}", run.config.checkpoint_every)


def remove_left_over(run: Run) -> None:
    """The checkpoint of a process that was killed between the record's end and its own."""
    checkpoint = checkpoint_of(run, torch.device("cpu"))
    if checkpoint.path.exists():
        with locked(run.folder) as mine:
            if mine:
                checkpoint.remove()


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
        if not task.gives_closure and any(map(needs_closure, optimizers.values())):
            raise ValueError("its step() needs a closure, which this experiment does not give")
        task.check_optimizers(optimizers)
        return optimizers
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer={config.optimizer_name} is refused with these settings: {error}"
        ) from error


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def make_schedule(config: Config) -> Callable[[float], float] | None:
    if config.schedule is None:
        return None
    schedule = build(config.schedule, "schedule")
    schedule(0.0)
    if isinstance(schedule, partial):
        # Hydra's own checks its target in every call, which takes longer than a small step.
        schedule = partial(schedule.func, *schedule.args, **schedule.keywords)
    return cast(Callable[[float], float], schedule)
