"""Composes command-line overrides into the resolved config of one run, with Hydra."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, cast

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.config.command_line import explain_unknown_key, parse_override
from experiments.config.errors import ConfigError, invalid, one_line_errors, unknown_choice
from experiments.config.gpus import gpus_of_a_job, jobs_at_once, uses_gpu
from experiments.config.paths import CONF, ROOT, described
from experiments.config.schema import PARTS, SCALES, Config, leaves


def at_scale(*given: Any, _root_: DictConfig) -> Any:
    """`${at_scale:{paper:50,laptop:6,smoke:1}}` in a YAML file: the value at the run's scale.

    A scale without a value has that of the next larger one.
    """
    values = given[0] if len(given) == 1 and isinstance(given[0], dict) else {}
    if "paper" not in values or values.keys() - SCALES:
        raise ValueError(
            f"${{at_scale:…}} got {', '.join(map(str, given))}; expected values such as "
            f"{{paper:50,smoke:1}}, of {', '.join(SCALES)}"
        )
    larger = SCALES[: SCALES.index(_root_.scale) + 1]
    value = values[next(scale for scale in reversed(larger) if scale in values)]
    return OmegaConf.create(value) if isinstance(value, list) else value  # --resolve needs nodes


def auto_scale(*, _root_: DictConfig) -> str:
    """scale=auto; published results must not depend on what this machine can train."""
    on_gpu = uses_gpu(_root_.device) and _root_.records != "published"
    return "paper" if on_gpu else str(_root_.get("cpu_scale", "laptop"))


OmegaConf.register_new_resolver("at_scale", at_scale, replace=True)

OmegaConf.register_new_resolver("auto_scale", auto_scale, replace=True)

OmegaConf.register_new_resolver("root", lambda: str(ROOT), replace=True)

OmegaConf.register_new_resolver("described", described, replace=True)

OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, replace=True)

OmegaConf.register_new_resolver("cores_of_a_job", lambda threads: threads or 1, replace=True)

OmegaConf.register_new_resolver("gpus_of_a_job", gpus_of_a_job, replace=True)


def compose(overrides: Sequence[str]) -> Config:
    """Return the config of one run, from overrides as typed on the command line of `run.py`.

    >>> compose(["experiment=counterexample_stochastic", "optimizer=adam"]).steps
    10000000
    """
    with one_line_errors(), config_source() as loader:
        words = [parse_override(word) for word in overrides]
        loader.validate_sweep_overrides_legal(words, RunMode.RUN, from_shell=False)
        groups = [word for word in words if selects_file(word, loader)]
        files, choices = merge_files(tuple(str(word.input_line) for word in groups))
        cfg = copy.deepcopy(files)
        for word in words:
            if word not in groups:
                set_value(word, cfg, choices)
        return resolve(cfg, choices)


def set_value(word: Override, cfg: DictConfig, choices: dict[str, Any]) -> None:
    adds = word.is_add() or word.is_force_add()
    if not adds and (problem := explain_unknown_key(word.key_or_group, cfg, choices)):
        raise ConfigError(problem)
    ConfigLoaderImpl._apply_overrides_to_config([word], cfg)


class CachedFiles(CachingConfigRepository):
    """The files in conf/, each parsed once per process."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        return copy.deepcopy(super().load_config(config_path))  # Hydra changes what it gets


CACHED_FILES: dict[Path, CachedFiles] = {}


def selects_file(word: Override, loader: ConfigLoaderImpl) -> bool:
    """Whether an override selects a file in conf/, as optimizer=adam does."""
    return loader.repository.group_exists(word.key_or_group) and not isinstance(word.value(), dict)


@cache
def merge_files(groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    """Return the merged content of the selected files, and the choice of each group.

    Hydra's own `compose` also loads its settings for logging and launching, which takes eight times
    as long; a figure or a status composes hundreds of runs.
    """
    with config_source() as loader:
        files = CACHED_FILES.setdefault(CONF, CachedFiles(loader.repository))
        words = [parse_override(word) for word in groups]
        defaults = create_defaults_list(
            files, "config", words, prepend_hydra=False, skip_missing=False
        )
        cfg = loader._compose_config_from_defaults_list(defaults.defaults, files)
        OmegaConf.set_struct(cfg, True)
        return cfg, defaults.overrides.known_choices


def file_chosen(group: str, overrides: Sequence[str]) -> tuple[str, DictConfig]:
    """Which file of a group overrides choose, and the config with it, before values are set."""
    chosen, choices = merge_files(tuple(word for word in overrides if word.startswith(f"{group}=")))
    return choices[group], chosen


@cache
def sweep_points(name: str) -> list[list[str]]:
    """Return the overrides of every run of `run.py -m sweep=<name>`.

    >>> sweep_points("lr_1e-4_to_1e-2")[0]
    ['optimizer.lr=0.0001']
    """
    path = CONF / "sweep" / f"{name}.yaml"
    if not path.exists():
        raise ConfigError(unknown_choice("sweep", name))
    with one_line_errors():
        sweeper = OmegaConf.load(path).sweeper
        params = [f"{key}={values}" for key, values in sweeper.get("params", {}).items()]
        return expand(params, sweeper.get("points", []))


def expand(words: Sequence[str], points: Sequence[str] = ()) -> list[list[str]]:
    """Return the overrides of every run: each point with the product of the lists in the words.

    >>> expand(["seed=0,1"], ["optimizer.n=5 optimizer.m=1", "optimizer.n=9 optimizer.m=2"])[1]
    ['optimizer.n=5', 'optimizer.m=1', 'seed=1']
    """
    overrides = [parse_override(word) for word in words]
    (product,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [[*shlex.split(point), *rest] for point in points or [""] for rest in product]


@contextmanager
def config_source() -> Iterator[ConfigLoaderImpl]:
    """Hydra's loader of conf/; inside run.py it is already initialized."""
    if GlobalHydra.instance().is_initialized():
        yield cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())


def resolve(cfg: DictConfig, choices: dict[str, Any]) -> Config:
    """Fill in names and scale, and check every type and range. Changes `cfg`."""
    OmegaConf.set_struct(cfg, False)
    cfg.pop("runs", None)  # of a sweep
    if isinstance(cfg.get("experiment"), DictConfig):  # then its keys are not top-level keys
        raise ConfigError(
            f"conf/experiment/{choices['experiment']}.yaml has no package: its first line must be "
            "# @package _global_"
        )
    cfg.experiment, cfg.optimizer_name = choices["experiment"], choices["optimizer"]
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    check_missing(values)
    values["results"] = folder_of("results", values["results"], ROOT / "results")
    values["published"] = folder_of("published", values["published"], ROOT / "results/published")
    move_parts(values)
    config = Config.model_validate(values)
    check_ranges(config.optimizer)
    return config


def move_parts(values: dict[Any, Any]) -> None:
    """Move the parts of the task from the top level into `task`."""
    for part in PARTS:
        if part not in values:
            continue
        if part in values["task"]:
            raise ConfigError(f"task.{part} is unknown: {part} is a top-level key, set {part}.…=")
        values["task"][part] = values.pop(part)


def folder_of(key: str, given: Any, default: Path) -> Path:
    """The given folder, relative to the current one, or the default."""
    if given is None:
        return default
    if not str(given).strip():
        raise ConfigError(f"{key}= is empty: expected a folder; drop {key}= to use the default")
    return Path(str(given)).expanduser().absolute()


def check_missing(values: dict[Any, Any]) -> None:
    missing = sorted(key for key, value in leaves(values).items() if value == "???")
    if missing and missing[0].endswith("._target_"):
        raise ConfigError(f"{missing[0]} has no value: set {missing[0]}=module.Class")
    if missing:
        raise ConfigError(
            f"{missing[0]} has no value: conf/tuned/{values['experiment']}/"
            f"{values['optimizer_name']}.yaml does not set it; add it there or set {missing[0]}=…"
        )


# Ranges that all optimizers share, so that the message can name the key; other errors of an
# optimizer, such as beta1 = 1 for all but AdaShift, are reported in its own words.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda x: x >= 0, "a number that is 0 or more"),
    "betas": (lambda x: all(0 <= b <= 1 for b in x), "a list of numbers with 0 <= beta < 1"),
    "eps": (lambda x: x >= 0, "a number that is 0 or more"),
    "momentum": (lambda x: x >= 0, "a number that is 0 or more"),
    "n": (lambda x: x >= 1, "a whole number that is 1 or more"),
}

MAX_NUMBER = 1e20  # torch cannot multiply float32 tensors by much more; the margin is for 1/(1−β)


def check_ranges(optimizer: dict[str, Any]) -> None:
    for name, value in optimizer.items():
        parts = value if isinstance(value, list) else [value]
        if (name, value) == ("m", inf):  # AdaShift's first moment without a window
            continue
        if any(isinstance(x, int | float) and not abs(x) <= MAX_NUMBER for x in parts):
            expected = f"expected numbers up to {MAX_NUMBER:g}"
            raise ConfigError(invalid(f"optimizer.{name}", value, expected))
    for name, (in_range, expected) in RANGES.items():
        value = optimizer.get(name)
        if value is None:
            continue
        try:
            good = in_range(value)
        except TypeError:
            good = False
        if not good:
            also = ", or beta1 = 1" if takes_beta1_of_1(name, optimizer) else ""
            raise ConfigError(invalid(f"optimizer.{name}", value, f"expected {expected}{also}"))


def takes_beta1_of_1(name: str, optimizer: dict[str, Any]) -> bool:
    return name == "betas" and optimizer.get("_target_") == "adashift.AdaShift"
