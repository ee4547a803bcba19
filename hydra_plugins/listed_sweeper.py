"""`run.py -m`: which runs a sweep consists of; Hydra's launcher trains them.

Hydra finds sweepers only in a package of this name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from experiments.config.command_line import OF_A_SWEEP
from experiments.config.compose import compose, expand
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.products.specs import asked_for, load_spec, refuse_other_runs
from experiments.products.sweep_table import report_sweep
from experiments.records.files import WriteError
from experiments.records.record import KILLED
from experiments.records.run import Run, all_runs
from experiments.records.status import Status
from experiments.training.scheduler import (
    FailedRunsError,
    RunOutcome,
    UnfinishedRunError,
    describe,
    train_all,
)
from experiments.training.slurm import ask_squeue_without_accounting


class Job(NamedTuple):
    """A run, and the arguments of run.py that train it."""

    run: Run
    words: list[str]


class ListedSweeper(Sweeper):
    """Composes the runs of a sweep and passes them to the scheduler."""

    def __init__(self, params: Mapping[str, Any], points: Sequence[str]) -> None:
        self.params, self.points = params, points
        self.launched, self.in_turn, self.shared = 0, False, list[str]()
        self.at_once: int | None = None  # runs that the launcher trains in parallel, if it says so

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError(
                "torchrun trains one run: start a sweep without it, for example with engine=joblib"
            )
        # A job in another process must find the project from any working directory.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.hydra_context, self.config = hydra_context, config
        choices = config.hydra.runtime.choices
        self.in_turn = choices["hydra/launcher"] == "basic"
        limits = ("n_jobs", "array_parallelism")  # of joblib and Slurm
        limit = max(OmegaConf.select(config, f"hydra.launcher.{key}") or 0 for key in limits)
        in_parallel = limit if limit > 0 else None  # n_jobs=-1: all cores
        self.at_once = 1 if self.in_turn else in_parallel
        if choices["hydra/launcher"] == "submitit_slurm":
            ask_squeue_without_accounting()
        # Hydra composes a job with the hydra.launcher.… of the sweep: it needs the same engine.
        engine = [f"engine={choices['engine']}"] if choices["engine"] else []
        self.shared = ["hydra.mode=MULTIRUN", *engine]
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        jobs = {job.run.folder: job for job in self.jobs(arguments)}
        if not jobs:
            raise ConfigError("the sweep has no runs: check its ranges")
        self.words = {folder: job.words for folder, job in jobs.items()}
        try:
            train_all([job.run for job in jobs.values()], self.launch, "sweep", self.at_once)
        except FailedRunsError:
            print_report(jobs.values())
            raise
        print_report(jobs.values())

    def jobs(self, arguments: Sequence[str]) -> list[Job]:
        """Compose the runs here, so that a mistake stops the sweep before anything is trained."""
        overrides = OverridesParser.create().parse_overrides(list(arguments))
        words = [str(o.input_line) for o in overrides if o.get_key_element() not in OF_A_SWEEP]
        runs = [o for o in overrides if o.get_key_element() == "runs"]
        if runs:
            refuse_other_runs(words)
            names = [name for o in runs for name in override_values(o) if name]
            if not names:
                raise ConfigError("runs= is empty: expected figure-4, table-5, figure-all …")
            return [job for kind, name in asked_for(names) for job in jobs_of(kind, name, words)]
        given = [f"{key}={values}" for key, values in self.params.items()]
        points = expand([*given, *words], self.points)
        return [job_of(Run(compose(point)), point) for point in points]

    def launch(self, runs: Sequence[Run]) -> Iterator[tuple[Run, RunOutcome]]:
        """Train the runs with Hydra's launcher: an engine of the scheduler."""
        size = 1 if self.in_turn else len(runs)  # a full disk stops a sweep between two batches
        for start in range(0, len(runs), size):
            yield from self.launch_batch(runs[start : start + size])

    def launch_batch(self, runs: Sequence[Run]) -> list[tuple[Run, RunOutcome]]:
        assert self.launcher is not None
        words = [[*self.words[run.folder], *self.shared] for run in runs]
        self.launched += len(runs)
        try:
            jobs = self.launcher.launch(words, initial_job_idx=self.launched - len(runs))
        except Exception as error:  # a process was killed: launchers then give up all jobs
            return [(run, given_up(run, error)) for run in runs]
        return [(run, outcome_of(run, job)) for run, job in zip(runs, jobs, strict=True)]


def print_report(jobs: Iterable[Job]) -> None:
    print("\n".join(report_sweep([*jobs])), flush=True)


def outcome_of(run: Run, job: JobReturn) -> RunOutcome:
    """Return how the job of a run ended; what run.py returns is for other sweepers."""
    if job.status is not JobStatus.FAILED:
        return RunOutcome(run.status)
    match job._return_value:
        case WriteError() as error:
            raise error  # a full disk stops the sweep
        case UnfinishedRunError(outcome=outcome):
            return outcome
        case error:
            return RunOutcome(Status.FAILED, describe(error))


def given_up(run: Run, error: Exception) -> RunOutcome:
    """Return KILLED; each launcher has its own words for a process that was killed."""
    return RunOutcome(Status.KILLED, KILLED if run.status == Status.KILLED else describe(error))


def job_of(run: Run, words: list[str]) -> Job:
    """Fix what depends on this machine: a job may find a GPU or another working directory."""
    results = str(run.config.results).replace("'", "\\'")
    return Job(run, [*words, f"scale={run.config.scale}", f"results='{results}'"])


def override_values(override: Override) -> list[str]:
    """Return the values of an override: two of runs=figure-9,figure-10, one of runs=figure-9."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


def jobs_of(kind: str, name: str, words: list[str]) -> list[Job]:
    """Return every run of a figure or a table."""
    runs = all_runs(load_spec(kind, name).expand(words))
    return [job_of(run, [*run.words(), *words]) for run in runs]
