"""execute(): from a config to a finished record. run.py calls it once, a figure for each run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from experiments.config.build import build
from experiments.config.errors import ConfigError
from experiments.config.gpus import runs_on_a_gpu
from experiments.config.paths import shown_path
from experiments.config.schema import Config
from experiments.progress import message
from experiments.records.archive import Published
from experiments.records.files import locked
from experiments.records.record import Record
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.records.tracking import is_tracked
from experiments.task import Measurement, Task
from experiments.training.checkpoint import Checkpoint
from experiments.training.collectives import is_first, world_size
from experiments.training.device import device_for, noted_kernels, set_up_torch
from experiments.training.graphs import GraphedSteps, can_be_captured, make_capturable
from experiments.training.leader import FollowerLog, ProcessGroup, process_group
from experiments.training.loop import train
from experiments.training.measure import measure
from experiments.training.scheduler import scale_notice
from experiments.training.signals import answered_after_a_step, stop_request
from experiments.training.speed import task_node
from experiments.training.watch import RunProgress

Announce = Callable[[str], None]
Tags = Callable[[Run], list[str]]
Schedule = Callable[[float], float]


def no_tags(run: Run) -> list[str]:
    return []


def execute(
    run: Run,
    announce: Announce = lambda line: None,
    wait: bool = True,
    tags: Tags = no_tags,
    shown: bool = False,
) -> Status:
    """Train the run, or the rest of it, unless it is finished; return its status.

    If another process is training the run, wait for that process or, with wait=False, return
    RUNNING. `tags` gives the tags of a run that is tracked. With shown=True, its progress is shown.
    """
    if stop_request.received:
        raise KeyboardInterrupt
    before = run.info
    if run.done and not run.config.force:
        return report_done(run, announce)
    check_trainable(run)
    with on_device(run.config, announce) as device, process_group(device) as group:
        deterministic = set_up_torch(run.config, device)
        # Everything that can be invalid is built before the first file is written.
        execution = Execution(run, device, deterministic, *prepare(run.config, device))
        if not is_first():
            return execution.follow(group)
        with locked(run.folder, announce if wait else None) as mine:
            if not mine:
                return Status.RUNNING
            if run.done and run.info != before:
                announce(f"another process has trained it: {shown_path(run.folder)}")
                return run.status
            return execution.lead(group, announce, tags, shown)


def on_device(config: Config, announce: Announce) -> AbstractContextManager[torch.device]:
    runs_per_gpu = runs_on_a_gpu(config.runs_per_gpu, config.gpu_memory)
    return device_for(config.device, runs_per_gpu, announce)


@dataclass(frozen=True)
class Execution:
    """A run that is ready to be trained in this process."""

    run: Run
    device: torch.device
    deterministic: bool
    task: Task | Measurement
    training: partial[Status]  # lacks the record and the checkpoint

    def lead(self, group: ProcessGroup, announce: Announce, tags: Tags, shown: bool) -> Status:
        """Train, and write the record and checkpoints; the caller holds the lock."""
        run, checkpoint = self.run, checkpoint_of(self.run, self.device)
        if run.config.force or not self.task.resumable:
            checkpoint.remove()
        announce(f"{scale_notice(run.config)}{self.length()}: {shown_path(run.folder)}")
        labels = tags(run) if is_tracked(run.config) else []
        # A second signal must not end the process before the record is closed.
        with (
            answered_after_a_step(),
            Record(run.folder, run.config, run.command(), labels) as record,
        ):
            self.train_into(record, checkpoint, group, RunProgress(run, self.unit, shown))
        if record.status == Status.INTERRUPTED:
            raise KeyboardInterrupt
        checkpoint.remove()
        if record.status == Status.DIVERGED:
            announce(f"diverged: a loss or a parameter was NaN or inf at step {record.step:,}")
        return record.status

    def train_into(
        self, record: Record, checkpoint: Checkpoint, group: ProcessGroup, progress: RunProgress
    ) -> None:
        record.about = {"device": self.device_name, "deterministic": self.deterministic}
        load = {"load": lambda: group.broadcast(checkpoint.load()), "checkpoint": checkpoint}
        resuming = load if self.task.resumable else {}
        group.start()
        if self.device.type == "cuda":  # of this run, not of the one before in this process
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        with noted_kernels() as kernels:
            record.status = self.training(record=record, progress=progress, **resuming)
        if record.status.is_final:
            progress.remove()
        same = self.deterministic and not kernels
        record.about |= {"deterministic": same, "not_deterministic": kernels}
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(self.device)
            record.about["gpu_memory_used"] = round(peak / 2**30, 2)  # GiB, without CUDA's own

    def follow(self, group: ProcessGroup) -> Status:
        """Take part in the training of the leader, which alone writes and prints."""
        stop_request.ignored = True
        if not group.broadcast():  # nothing to train
            return self.run.status
        resuming = {"load": group.broadcast} if self.task.resumable else {}
        return self.training(record=FollowerLog(), **resuming)

    def length(self) -> str:
        return f", {self.training.keywords['steps']:,} steps" if isinstance(self.task, Task) else ""

    @property
    def device_name(self) -> str:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if on_gpu else self.device.type

    @property
    def unit(self) -> str:
        return "step" if isinstance(self.task, Task) else "row"


def report_done(run: Run, announce: Announce) -> Status:
    if isinstance(run.source, Published):
        announce(f"already published (use records=own to train it here): {run.name}")
    else:
        announce(f"already finished (use force=true to train it again): {shown_path(run.folder)}")
        remove_stale_checkpoint(run)
    return run.status


def check_trainable(run: Run) -> None:
    if run.config.records == "published":
        state = "already published, and force=true trains" if run.done else "not published"
        raise ConfigError(f"{run.name} is {state}: use records=own to train it")


def prepare(config: Config, device: torch.device) -> tuple[Task | Measurement, partial[Status]]:
    """Return the task or measurement and its loop, which lacks the record and the checkpoint."""
    task = build(task_node(config, device), "task", seed=config.seed, device=device)
    if not isinstance(task, Task | Measurement):
        raise ConfigError(
            f"task._target_={config.task['_target_']} builds a {type(task).__name__}; "
            "expected a Task or a Measurement: see experiments/task.py"
        )
    if world_size() > 1 and not task.divisible:
        raise ConfigError(f"{config.experiment} supports one process: start it without torchrun")
    if isinstance(task, Measurement):
        loop = prepare_measurement(config, task)
    else:
        loop = prepare_training(config, task, device)
    torch.manual_seed(config.seed)  # for dropout, which uses the global generator
    return task, loop


def prepare_training(config: Config, task: Task, device: torch.device) -> partial[Status]:
    optimizers = make_optimizers(config, task)
    steps, log_every = length_of(config, task)
    warn_without_moves(optimizers.values(), steps)
    schedule = make_schedule(config)
    loop = partial(train, task, optimizers, steps=steps, log_every=log_every, schedule=schedule)
    if config.speed == "fast" and device.type == "cuda" and uses_graphs(task, optimizers, schedule):
        for optimizer in optimizers.values():
            make_capturable(optimizer)
        loop = partial(loop, take_step=GraphedSteps())
    return loop


def uses_graphs(
    task: Task, optimizers: Mapping[str, torch.optim.Optimizer], schedule: Schedule | None
) -> bool:
    """Whether steps can be CUDA graphs; a graph keeps the learning rate of its capture."""
    return task.capturable and schedule is None and all(map(can_be_captured, optimizers.values()))


def warn_without_moves(optimizers: Iterable[torch.optim.Optimizer], steps: int) -> None:
    """The first n steps of AdaShift only fill its window."""
    n = max(group.get("n", 0) for opt in optimizers for group in opt.param_groups)
    if n >= steps and is_first():
        message(
            f"warning: AdaShift does not move the parameters in this run: its first n={n} steps "
            f"only fill the window, and the run has {steps}; set steps= or optimizer.n="
        )


def prepare_measurement(config: Config, task: Measurement) -> partial[Status]:
    if config.schedule is not None:
        raise ConfigError(f"schedule is set, but {config.experiment} trains nothing: remove it")
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    make_optimizer = build(config.optimizer, "optimizer")
    with optimizer_errors(config):
        optimizer = make_optimizer([theta])
        task.check_optimizer(optimizer)
    return partial(measure, task, optimizer, steps=config.steps, log_every=config.log_every or 1)


def checkpoint_of(run: Run, device: torch.device) -> Checkpoint:
    # Devices round differently, so a run that began on one does not resume on another.
    of = f"{run.name} on {device.type}"
    return Checkpoint(run.folder, of, device, run.config.checkpoint_every)


def remove_stale_checkpoint(run: Run) -> None:
    """Remove the checkpoint of a process that was killed after it had finished the record."""
    checkpoint = checkpoint_of(run, torch.device("cpu"))
    if checkpoint.path.exists():
        with locked(run.folder) as mine:
            if mine:
                checkpoint.remove()


def length_of(config: Config, task: Task) -> tuple[int, int]:
    """Return the number of steps, and the number of steps between two rows of the record."""
    steps, log_every = config.steps or task.total_steps, config.log_every or task.epoch_steps
    if steps is None or log_every is None:
        key = "steps" if steps is None else "log_every"
        raise ConfigError(
            f"{key}=null is invalid: {config.experiment} has no epochs; set {key} explicitly"
        )
    return steps, log_every


def make_optimizers(config: Config, task: Task) -> dict[str, torch.optim.Optimizer]:
    make_optimizer = build(config.optimizer, "optimizer")
    with optimizer_errors(config):
        optimizers = {name: make_optimizer(task.parameter_groups(name)) for name in task.players()}
        if not task.gives_closure and any(map(needs_closure, optimizers.values())):
            raise ValueError("its step() needs a closure, which this experiment does not pass")
        task.check_optimizers(optimizers)
    return optimizers


@contextmanager
def optimizer_errors(config: Config) -> Iterator[None]:
    """Report what an optimizer, or the check of a task, raises as an error of the config."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer={config.optimizer_name} is invalid with these settings: {error}"
        ) from error


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def make_schedule(config: Config) -> Schedule | None:
    if config.schedule is None:
        return None
    schedule = build(config.schedule, "schedule")
    schedule(0.0)
    if isinstance(schedule, partial):
        # Hydra's wrapper checks its target in every call, which takes longer than a small step.
        schedule = partial(schedule.func, *schedule.args, **schedule.keywords)
    return cast(Schedule, schedule)
