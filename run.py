"""One training run, or a sweep of them with -m.

python run.py experiment=counterexample_stochastic optimizer=adashift
python run.py -m experiment=counterexample_stochastic optimizer=adam,adashift seed=range(0,4)
python run.py -m sweep=lr_1e-4_to_1e-2 experiment=mnist_mlp optimizer=adam
python run.py -m runs=figure-9
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.config.command_line import read_command_line
from experiments.config.compose import compose, resolve
from experiments.config.errors import ConfigError, one_line_errors
from experiments.config.paths import CONF
from experiments.progress import print_line
from experiments.records.run import Run
from experiments.training.scheduler import UnfinishedRunError
from experiments.training.signals import closed_pipe, end_with_parent, exit_interrupted
from experiments.training.torchrun import exit_with

WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"
os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, so that clean_exit can reword them


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def main(cfg: DictConfig) -> float | None:
    """Train one run; inside a sweep, return the number that the sweeper optimizes."""
    about = HydraConfig.get()
    if parent_process() is not None:  # a worker of joblib
        end_with_parent()
    in_sweep = not OmegaConf.is_missing(about.job, "num")  # which reports errors
    with one_line_errors() if in_sweep else clean_exit():
        run = Run(resolve(cfg.copy(), about.runtime.choices))
    # Imported late, with torch: mistakes are reported at once, and a launcher trains nothing.
    from experiments.products.specs import figures_using
    from experiments.products.summaries import score
    from experiments.training.execute import execute
    from experiments.training.pool import attempt

    if in_sweep:
        outcome = attempt(run, figures_using, announce=say)
        say(str(outcome))
        if not outcome.status.is_final:
            raise UnfinishedRunError(outcome)  # the sweeper finds it in Hydra's JobReturn
        return score(run)
    with clean_exit(), summarized(run):
        execute(run, announce=say, tags=figures_using, shown=True)
    return None


@contextmanager
def summarized(run: Run) -> Iterator[None]:
    """Print how the run ended, also if it failed or was interrupted after it began."""
    from experiments.training.collectives import is_first
    from experiments.training.run_summary import run_summary

    before = run.info
    try:
        yield
    except BaseException:
        if is_first() and run.info != before:
            say(run_summary(run))
        raise
    if is_first():  # the other processes of torchrun would read an incomplete record
        say(run_summary(run))


def say(line: str) -> None:
    from experiments.training.collectives import is_first  # process of torchrun

    if is_first():
        print_line(line)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Print one line instead of a traceback for errors that the user can fix."""
    try:
        with one_line_errors():
            yield
    except (ConfigError, OSError) as error:
        if WANTS_TRACEBACK:
            raise
        exit_with(error)
    except KeyboardInterrupt:
        exit_interrupted()


def start() -> None:
    with clean_exit(), closed_pipe():
        command_line = read_command_line(sys.argv[1:])
        if command_line.checkable:
            compose(command_line.of_the_run)  # Hydra reports the same mistakes in other words
        sys.argv[1:] = command_line.for_hydra
        main()


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # for the imports of a user's module
    start()
