"""execute(): from a config to a finished record. run.py does it once, a figure often."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, cast

import torch

from experiments.archive import Published
from experiments.checkpoint import Checkpoint
from experiments.config import Config, ConfigError, build, last_line
from experiments.loop import train
from experiments.parallel import is_first, size
from experiments.progress import progress
from experiments.record import KILLED, Record, is_tracked, locked
from experiments.runs import Run, figures_using
from experiments.stopping import ASKED, answered_at_once, end_with_parent
from experiments.task import Task
from experiments.team import Following, Leading, Team, Unwritten, team

ALL_THREADS = torch.get_num_threads()  # the cores, or what OMP_NUM_THREADS allows


def execute(
    run: Run, announce: Callable[[str], None] = lambda line: None, wait: bool = True
) -> str:
    """Train the run, or what is left of it, unless it is there already; return how it ended.

    Where another process is training it, wait for that one, or return "busy".
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
        return execute_on(device, run, announce, wait, members, before)


def execute_on(
    device: torch.device,
    run: Run,
    announce: Callable[[str], None],
    wait: bool,
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
        with (
            Record(run.folder, config, run.command(), tags_of(run)) as record,
            noted_kernels() as kernels,
        ):
            record.about = {"deterministic": deterministic}
            kept = Leading(checkpoint, members) if task.resumable else None
            record.status = training(record=record, checkpoint=kept)
            same = deterministic and not kernels
            record.about = {"deterministic": same, "not_deterministic": kernels}
        if record.status == "interrupted":
            raise KeyboardInterrupt
        checkpoint.remove()
    if record.status == "diverged":
        announce(f"a loss or a parameter was no number at step {record.step:,}")
    return record.status


def tags_of(run: Run) -> list[str]:
    """For W&B alone, since it takes most of a second to find them."""
    return figures_using(run) if is_tracked(run.config) else []


def follow(device: torch.device, config: Config, members: Team) -> str:
    """Take part in what the first process trains, which alone writes and speaks."""
    set_up_torch(config, device)
    _, training = prepare(config, device)
    ASKED.follows = True
    begun = members.hear()
    if begun is None:
        return "left to the first process"
    return training(record=Unwritten(config), checkpoint=Following(begun["state"]))


def prepare(config: Config, device: torch.device) -> tuple[Task, partial[str]]:
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


def set_up_torch(config: Config, device: torch.device) -> bool:
    """Return whether the run is to have the same bits every time."""
    torch.set_num_threads(config.threads or ALL_THREADS)
    # Softmax of large numbers gives some below 1e-38, with which a CPU is ten times slower.
    torch.set_flush_denormal(True)
    same = device.type == "cpu" if config.deterministic is None else config.deterministic
    torch.use_deterministic_algorithms(same, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = same
        if same:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    return same


@contextmanager
def noted_kernels() -> Iterator[list[str]]:
    """Inside, torch's kernels that have no deterministic form are noted and not warned of."""
    names, show = list[str](), warnings.showwarning

    def note(message: Warning | str, *about: Any) -> None:
        found = re.match(r"(\S+) does not have a deterministic implementation", str(message))
        if not found:
            show(message, *about)
        elif found[1] not in names:
            names.append(found[1])

    with warnings.catch_warnings():
        warnings.showwarning = note  # type: ignore[assignment]
        yield names


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


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={wanted} is not to be had: torch sees no GPU; use device=cpu")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps is not to be had: torch sees no Apple GPU; use device=cpu")
    return torch.device(wanted)


@contextmanager
def device_for(wanted: str) -> Iterator[torch.device]:
    """What is asked for; `auto` is, of several GPUs, one that no other run has on this machine."""
    device = pick_device(wanted)
    with ExitStack() as held:
        for number in range(torch.cuda.device_count()) if wanted == "auto" else ():
            name = torch.cuda.get_device_properties(number).uuid  # the same in every process
            place = Path(tempfile.gettempdir()) / f"adashift-{os.getuid()}" / f"gpu-{name}"
            if held.enter_context(locked(place)):
                device = torch.device("cuda", number)
                break
        yield device


def side_by_side(runs: Sequence[Run]) -> int:
    """How many of these runs the cores can take at once."""
    if all(run.config.scale == "smoke" for run in runs):
        return 1  # such a run is over before a worker has started
    on_cpu = all(pick_device(run.config.device).type == "cpu" for run in runs)
    most = max((run.config.threads or ALL_THREADS for run in runs), default=1)
    return max(1, min(ALL_THREADS // most, len(runs))) if on_cpu else 1


def execute_all(runs: Sequence[Run], title: str) -> None:
    """Train what is missing, as many at a time as fit, and show how far it is.

    A run that fails does not stop the others; at the end the failures are told.
    """
    missing = [run for run in runs if run.config.force or not run.done]
    ready = f", {len(runs) - len(missing)} are there already" if len(missing) < len(runs) else ""
    print(f"{title}: {len(missing)} runs to train at {size_of(runs[0].config)}{ready}", flush=True)
    with progress(total=len(missing), desc=title, unit="run") as bar, answered_at_once():
        ends = {}
        for run, end in in_turn(missing) if side_by_side(missing) == 1 else in_pool(missing):
            ends[run.folder] = end
            bar.update()
    failed = [run for run in missing if ends[run.folder].startswith("failed")]
    for run in failed:
        print(f"{ends[run.folder]}\n    {run.command()}", file=sys.stderr)
    if failed:
        raise ConfigError(f"{title}: {len(failed)} of {len(missing)} runs failed, see above")


def in_turn(runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
    """Those that another process is training come last."""
    busy = []
    for run in runs:
        end = try_to_execute(run)
        if end == "busy":
            busy.append(run)
        else:
            yield run, end
    for run in busy:
        yield run, try_to_execute(run, wait=True)


def in_pool(runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
    left = []
    with workers(side_by_side(runs)) as pool:
        futures = {pool.submit(try_to_execute, run): run for run in runs}
        for future in as_completed(futures):
            end = result_of(future)
            if end in ("busy", "killed"):
                left.append(futures[future])
            else:
                yield futures[future], end
    yield from one_by_one(left)


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that train, and that end when this one is asked to."""
    context = get_context("spawn")  # torch dislikes fork
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=end_with_parent)
    try:
        yield pool
    except BaseException:
        for worker in active_children():
            worker.terminate()  # it saves its run first
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(future: Future[str]) -> str:
    """How a run ended; a worker that dies takes the runs with it that wait for one."""
    try:
        return future.result()
    except BrokenProcessPool:
        return "killed"


def one_by_one(runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
    """Each in a process of its own, so that one that kills it, for want of memory, is found out."""
    for run in runs:
        with workers(1) as pool:
            end = result_of(pool.submit(try_to_execute, run, wait=True))
        yield run, end if end != "killed" else f"failed: {KILLED}"


def try_to_execute(run: Run, wait: bool = False) -> str:
    """How the run ended; "failed: …" for an error, which its record has too."""
    try:
        return execute(run, wait=wait)
    except (ConfigError, OSError):
        raise  # it is not the fault of this run alone
    except Exception as error:
        return f"failed: {type(error).__name__}: {last_line(error)}"
