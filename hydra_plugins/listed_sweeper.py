"""`run.py -m`: what runs a sweep stands for, and what becomes of them on any engine.

Hydra takes sweepers from a package of this name alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from experiments.config.compose import compose, expand
from experiments.config.errors import ConfigError, last_line
from experiments.config.paths import ROOT
from experiments.products.specs import asked_for, load_spec, refuse_other_runs
from experiments.records.files import WriteError, locked
from experiments.records.record import KILLED, Record
from experiments.records.run import Run, all_runs

FOR_THE_SWEEP = ("runs", "sweep", "engine")  # and not for a run


class Job(NamedTuple):
    """A run, and the words behind run.py that make it."""

    run: Run
    words: list[str]
    before: dict[str, Any]  # run.json when the sweep began

    @property
    def done(self) -> bool:
        return self.run.done and not (self.run.config.force and self.run.info == self.before)


class ListedSweeper(Sweeper):
    """Trains what is missing of a sweep; a run that fails does not stop the others."""

    def __init__(self, params: Mapping[str, Any], points: Sequence[str]) -> None:
        self.params, self.points = params, points
        self.launched = 0

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError("torchrun is for one run: -m has engines for many, engine=joblib …")
        # A job in another process finds the project wherever it is started from.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        every = list({job.run.folder: job for job in self.jobs(arguments)}.values())
        jobs = [job for job in every if not job.done]
        print(f"{len(every)} runs, {len(every) - len(jobs)} are there already", flush=True)
        failures = self.train(jobs)
        for job, error in failures:
            # Of a process that was killed an engine tells in its own words.
            killed = job.run.status == "killed" and not isinstance(error, WriteError)
            cause = KILLED if killed else f"{type(error).__name__}: {last_line(error)}"
            print(f"failed: {cause}\n    {job.run.command()}", file=sys.stderr)
            keep_word(job.run, error)
        if failures:
            raise ConfigError(f"{len(failures)} of {len(jobs)} runs failed, see above")

    def jobs(self, arguments: Sequence[str]) -> list[Job]:
        """What is asked for, composed here so that a slip stops it before anything is trained."""
        overrides = OverridesParser.create().parse_overrides(list(arguments))
        words = [str(o.input_line) for o in overrides if o.get_key_element() not in FOR_THE_SWEEP]
        names = [name for o in overrides if o.get_key_element() == "runs" for name in values_of(o)]
        if names:
            refuse_other_runs(words)
            return [job for kind, name in asked_for(names) for job in jobs_of(kind, name, words)]
        given = [f"{key}={values}" for key, values in self.params.items()]
        points = expand([*given, *words], self.points)
        return [job_of(Run(compose(point)), point) for point in points]

    def train(self, jobs: Sequence[Job]) -> list[tuple[Job, Exception]]:
        """Train the runs; return those that failed."""
        if not jobs:
            return []
        assert self.launcher is not None
        self.launched += len(jobs)
        try:
            returns = self.launcher.launch(
                [job.words for job in jobs], initial_job_idx=self.launched - len(jobs)
            )
        except Exception as error:  # a process was killed, for which an engine gives up all of them
            return self.train_the_rest(jobs, error)
        failures = []
        for job, returned in zip(jobs, returns, strict=True):
            if returned.status is JobStatus.FAILED:
                failures.append((job, returned._return_value))
            elif returned.return_value == "busy":
                failures += self.train_after_another(job)
        return failures

    def train_the_rest(self, jobs: Sequence[Job], error: Exception) -> list[tuple[Job, Exception]]:
        """Those that had not begun together, then the others one by one, to know which it was."""
        if len(jobs) == 1:
            return [(jobs[0], error)]
        left = [job for job in jobs if not job.done]
        waiting = [job for job in left if job.run.status == "missing"]
        if len(waiting) == len(jobs):  # none has begun
            raise ConfigError(f"the engine does not start: {last_line(error)}") from error
        failures = self.train(waiting)
        for job in left:
            if not job.done and job not in waiting:
                failures += self.train([job])
        return failures

    def train_after_another(self, job: Job) -> list[tuple[Job, Exception]]:
        """Once the process that is training it has ended, if it was not finished there."""
        with locked(job.run.folder, announce=print):
            done = job.done
        return [] if done else self.train([job])


def keep_word(run: Run, error: Exception) -> None:
    """`make status` tells of every failure, also of a run that could not begin."""
    with locked(run.folder) as mine:
        if mine and run.status == "missing":
            Record(run.folder, run.config, run.command()).note_failure(error)


def job_of(run: Run, words: list[str]) -> Job:
    """What depends on the machine is settled here: a job may find a GPU, or start elsewhere."""
    results = str(run.config.results).replace("'", "\\'")
    return Job(run, [*words, f"scale={run.config.scale}", f"results='{results}'"], run.info)


def values_of(override: Override) -> list[str]:
    """Those of runs=figure-9,figure-10, or the one that is there."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


def jobs_of(kind: str, name: str, words: list[str]) -> list[Job]:
    """Every run of a figure or a table."""
    runs = all_runs(load_spec(kind, name).expand(words))
    return [job_of(run, [*run.words(), *words]) for run in runs]
