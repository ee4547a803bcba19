"""Trains many runs, as many at a time as this machine takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from experiments.config.errors import ConfigError, last_line
from experiments.progress import progress
from experiments.records.record import KILLED
from experiments.records.run import Run
from experiments.training import device
from experiments.training.execute import Tags, execute, no_tags, size_of
from experiments.training.signals import answered_at_once, end_with_parent


def side_by_side(runs: Sequence[Run]) -> int:
    """How many of these runs the cores can take at once."""
    if all(run.config.scale == "smoke" for run in runs):
        return 1  # such a run is over before a worker has started
    on_cpu = all(device.pick_device(run.config.device).type == "cpu" for run in runs)
    most = max((run.config.threads or device.ALL_THREADS for run in runs), default=1)
    return max(1, min(device.ALL_THREADS // most, len(runs))) if on_cpu else 1


def execute_all(runs: Sequence[Run], title: str, tags: Tags = no_tags) -> None:
    """Train what is missing, as many at a time as fit, and show how far it is.

    A run that fails does not stop the others; at the end the failures are told.
    """
    missing = [run for run in runs if run.config.force or not run.done]
    ready = f", {len(runs) - len(missing)} are there already" if len(missing) < len(runs) else ""
    print(f"{title}: {len(missing)} runs to train at {size_of(runs[0].config)}{ready}", flush=True)
    with progress(total=len(missing), desc=title, unit="run") as bar, answered_at_once():
        ends = {}
        for run, end in run_all(missing, tags):
            ends[run.folder] = end
            bar.update()
    failed = [run for run in missing if ends[run.folder].startswith("failed")]
    for run in failed:
        print(f"{ends[run.folder]}\n    {run.command()}", file=sys.stderr)
    if failed:
        raise ConfigError(f"{title}: {len(failed)} of {len(missing)} runs failed, see above")


def run_all(runs: Sequence[Run], tags: Tags) -> Iterator[tuple[Run, str]]:
    return in_turn(runs, tags) if side_by_side(runs) == 1 else in_pool(runs, tags)


def in_turn(runs: Sequence[Run], tags: Tags) -> Iterator[tuple[Run, str]]:
    """Those that another process is training come last."""
    busy = []
    for run in runs:
        end = try_to_execute(run, tags)
        if end == "busy":
            busy.append(run)
        else:
            yield run, end
    for run in busy:
        yield run, try_to_execute(run, tags, wait=True)


def in_pool(runs: Sequence[Run], tags: Tags) -> Iterator[tuple[Run, str]]:
    left = []
    with workers(side_by_side(runs)) as pool:
        futures = {pool.submit(try_to_execute, run, tags): run for run in runs}
        for future in as_completed(futures):
            end = result_of(future)
            if end in ("busy", "killed"):
                left.append(futures[future])
            else:
                yield futures[future], end
    yield from one_by_one(left, tags)


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


def one_by_one(runs: Sequence[Run], tags: Tags) -> Iterator[tuple[Run, str]]:
    """Each in a process of its own, so that one that kills it, for want of memory, is found out."""
    for run in runs:
        with workers(1) as pool:
            end = result_of(pool.submit(try_to_execute, run, tags, wait=True))
        yield run, end if end != "killed" else f"failed: {KILLED}"


def try_to_execute(run: Run, tags: Tags, wait: bool = False) -> str:
    """How the run ended; "failed: …" for an error, which its record has too."""
    try:
        return execute(run, wait=wait, tags=tags)
    except (ConfigError, OSError):
        raise  # it is not the fault of this run alone
    except Exception as error:
        return f"failed: {type(error).__name__}: {last_line(error)}"
