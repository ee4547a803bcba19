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

from experiments.config.compose import resolve
from experiments.config.errors import ConfigError, one_line_errors
from experiments.config.paths import CONF
from experiments.records.agreement import compare
from experiments.records.run import Run
from experiments.training.scheduler import RunOutcome
from experiments.training.signals import end_with_parent, exit_interrupted

WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"
os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, so that clean_exit can reword them


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def main(cfg: DictConfig) -> RunOutcome | None:
    about = HydraConfig.get()
    if parent_process() is not None:  # a worker of joblib
        end_with_parent()
    in_sweep = not OmegaConf.is_missing(about.job, "num")  # which reports errors
    with one_line_errors() if in_sweep else clean_exit():
        run = Run(resolve(cfg.copy(), about.runtime.choices))
    # Imported late, with torch: mistakes are reported at once, and a launcher trains nothing.
    from experiments.products.specs import figures_using
    from experiments.training.execute import execute
    from experiments.training.pool import attempt

    if in_sweep:
        outcome = attempt(run, figures_using, announce=say)
        say(str(outcome))
        return outcome
    with clean_exit():
        say(execute(run, announce=say, tags=figures_using))
        if agreement := compare(run):
            say(f"compared with the published run: {agreement}")
    return None


def say(line: str) -> None:
    from experiments.training.collectives import is_first  # process of torchrun

    if is_first():
        print(line)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Print one line instead of a traceback for errors that the user can fix."""
    try:
        with one_line_errors():
            yield
    except (ConfigError, OSError) as error:
        if WANTS_TRACEBACK:
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        exit_interrupted()


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # for optimizer._target_=my_module.MyOptimizer
    with clean_exit():
        main()
