"""The engines of this machine: one run after another, or a pool of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context

from experiments.config.errors import one_line_errors
from experiments.config.gpus import runs_at_once
from experiments.data.files import DataError
from experiments.records.files import WriteError
from experiments.records.record import KILLED
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.execute import Announce, Tags, execute, no_tags
from experiments.training.scheduler import Engine, RunOutcome, describe, train_all
from experiments.training.signals import answered_at_once, end_with_parent, stop_request

# By data set, because a download that times out for one run would for all others.
without_data: dict[str, RunOutcome] = {}


def execute_all(runs: Sequence[Run], title: str, tags: Tags = no_tags) -> None:
    """Train the runs that are not finished on this machine, as many at a time as it can take."""
    without_data.clear()
    with answered_at_once():
        count = side_by_side([run for run in runs if run.needs_training])
        train_all(runs, engine_for(count, tags), title, at_once=count)


def engine_for(count: int, tags: Tags) -> Engine:
    return partial(in_turn, tags) if count == 1 else partial(in_pool, tags, count)


def side_by_side(runs: Sequence[Run]) -> int:
    """Return how many of these runs the GPUs or the cores can take at once."""
    return max(1, min(runs_at_once(run.config for run in runs), len(runs)))


def in_turn(tags: Tags, runs: Sequence[Run]) -> Iterator[tuple[Run, RunOutcome]]:
    for run in runs:
        yield run, attempt(run, tags)


def in_pool(tags: Tags, count: int, runs: Sequence[Run]) -> Iterator[tuple[Run, RunOutcome]]:
    with workers(min(count, len(runs))) as pool:
        futures = {pool.submit(attempt_in_worker, run, tags): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], outcome_in(future)


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that train; they stop when this process is interrupted."""
    context = get_context("spawn")  # torch does not support fork
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=end_with_parent)
    try:
        yield pool
    except BaseException:
        for worker in active_children():
            worker.terminate()  # it saves its checkpoint first
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def outcome_in(future: Future[RunOutcome]) -> RunOutcome:
    """Return how a run ended; a worker that is killed breaks the pool for all that have not."""
    try:
        return future.result()
    except BrokenProcessPool:
        return RunOutcome(Status.KILLED, KILLED)


def attempt_in_worker(run: Run, tags: Tags) -> RunOutcome:
    try:
        return attempt(run, tags)
    finally:
        if stop_request.received is not None:
            os._exit(0)  # else it waits for another run, and the interrupted pool waits for it


def attempt(run: Run, tags: Tags, announce: Announce = lambda line: None) -> RunOutcome:
    """Execute the run; return an error as an outcome, unless it concerns all runs: a full disk."""
    data = str(run.config.task.get("data", run.config.task))
    if data in without_data:
        return without_data[data]
    try:
        with one_line_errors():
            return RunOutcome(execute(run, announce, wait=False, tags=tags))
    except WriteError:
        raise
    except DataError as error:
        return without_data.setdefault(
            data, RunOutcome(Status.FAILED, describe(error), lacks_data=True)
        )
    except Exception as error:
        return RunOutcome(Status.FAILED, describe(error))
