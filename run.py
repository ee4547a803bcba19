"""One training run, or a sweep of them with -m.

python run.py experiment=counterexample_stochastic optimizer=adashift
python run.py -m experiment=counterexample_stochastic optimizer=adam,adashift seed=range(0,4)
python run.py -m sweep=lr_1e-4_to_1e-2 experiment=mnist_mlp optimizer=adam
python run.py -m runs=figure-9
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments.config.compose import resolve
from experiments.config.errors import ConfigError, one_line_errors
from experiments.config.paths import CONF
from experiments.records.run import Run
from experiments.training.signals import ASKED, end_with_parent

WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"
os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, so that clean_exit can word them


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def main(cfg: DictConfig) -> str:
    # Here, for it imports torch: a slip is told at once, and a launcher trains nothing itself.
    from experiments.products.specs import figures_using
    from experiments.records.agreement import compare
    from experiments.training.execute import execute

    about = HydraConfig.get()
    alone = about.mode != RunMode.MULTIRUN
    if parent_process() is not None:  # a worker of joblib
        end_with_parent()
    with clean_exit() if alone else one_line_errors():  # a sweep goes on after an error
        run = Run(resolve(cfg.copy(), about.runtime.choices))
        # A sweep does its other runs while another process trains this one.
        end = execute(run, announce=say, wait=alone, tags=figures_using)
        say(end)
        if alone and (agreement := compare(run)):
            say(f"compared with the published run: {agreement}")
    return end


def say(line: str) -> None:
    from experiments.training.collectives import is_first  # of the processes of torchrun

    if is_first():
        print(line)


@contextmanager
def clean_exit() -> Iterator[None]:
    """One line instead of a traceback for what the user can mend."""
    try:
        with one_line_errors():
            yield
    except (ConfigError, OSError) as error:
        if WANTS_TRACEBACK:
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(128 + (ASKED.by or signal.SIGINT))


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # optimizer._target_=my_module.MyOptimizer, whoever's it is
    with clean_exit():
        main()
