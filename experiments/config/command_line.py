"""The arguments of run.py, checked before Hydra reads them, so that errors are in our words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, NoReturn, cast

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from experiments.config.build import arguments_of, import_target
from experiments.config.errors import BUILT, ConfigError, nearest, shortened, unknown_choice
from experiments.config.paths import choices_of
from experiments.config.schema import PARTS, SPECIAL_KEYS, leaves

GROUPS = ("experiment", "optimizer", "scale", "tracking", "sweep", "engine")  # folders of conf/
OF_A_SWEEP = ("runs", "sweep", "engine")  # keys that are not part of a run
MAX_NAME_LENGTH = 100  # of a file in conf/
EXAMPLE = "experiment=mnist_lr optimizer=adam"


@dataclass(frozen=True)
class CommandLine:
    """Arguments of run.py."""

    options: list[str]  # such as -m or --cfg job
    words: list[str]  # such as optimizer=adam
    is_sweep: bool
    checkable: bool  # whether the words are those of one run that uses only conf/

    @property
    def for_hydra(self) -> list[str]:
        expanded = self.is_sweep and not any(key_of(word) == "runs" for word in self.words)
        return [*self.options, *(map(as_choice, self.words) if expanded else self.words)]

    @property
    def of_the_run(self) -> list[str]:
        return [word for word in self.words if not key_of(word).startswith("hydra")]


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Return the checked arguments; print the version and exit if they ask for it."""
    if "--version" in arguments:
        print(f"adashift {version('adashift')}")
        raise SystemExit(0)
    parsed = option_parser().parse_intermixed_args(list(arguments))
    words = parsed.overrides
    options = [word for word in arguments if word not in words]
    check_repeated(words)
    check_sweep(words, parsed.multirun)
    if parsed.cfg == "job" and not parsed.resolve:
        options.append("--resolve")
    elsewhere = parsed.config_dir or parsed.config_path or parsed.config_name
    checkable = not (parsed.help or parsed.multirun or parsed.hydra_help or elsewhere)
    return CommandLine(options, words, parsed.multirun, checkable)


def option_parser() -> argparse.ArgumentParser:
    parser = get_args_parser()
    parser.allow_abbrev = False  # else --experiment is Hydra's --experimental-rerun
    parser.error = refuse_option  # type: ignore[method-assign, assignment]
    return parser


def refuse_option(problem: str) -> NoReturn:
    option = problem.removeprefix("unrecognized arguments: ")
    if option == problem:
        raise ConfigError(f"{problem}; see run.py --hydra-help")
    raise ConfigError(
        f"{shortened(option)} is not an option: write settings as key=value, as in {EXAMPLE}"
    )


def check_repeated(words: Sequence[str]) -> None:
    """Raise an error for two experiments or optimizers; of other settings, the last one counts."""
    for group in ("experiment", "optimizer"):
        if len(given := [word for word in words if key_of(word) == group]) > 1:
            raise ConfigError(
                f"{' and '.join(given)} exclude each other: drop one, or write "
                f"-m {group}={','.join(word.partition('=')[2] for word in given)} for a sweep"
            )


def check_sweep(words: Sequence[str], is_sweep: bool) -> None:
    """Raise an error for words that belong to a sweep, in a single run, or exclude each other."""
    found = {key_of(word): word for word in words if key_of(word) in OF_A_SWEEP}
    several = [word for word in words if parse_override(word).is_sweep_override()]
    for word in () if is_sweep else [*found.values(), *several]:
        raise ConfigError(f"{word} is for more than one run: add -m, as in run.py -m {word}")
    if {"runs", "sweep"} <= found.keys():
        raise ConfigError(
            f"{found['runs']} and {found['sweep']} exclude each other: each defines the runs of "
            "the sweep; drop one"
        )


def key_of(word: str) -> str:
    """optimizer.lr of +optimizer.lr=0.1"""
    return word.lstrip("+~").partition("=")[0]


def as_choice(word: str) -> str:
    """Write a value of a node as a list of one, which Hydra does not set before the sweep.

    Before it, the config has the default optimizer, which may not take the key:
    `-m optimizer=adam,sgd optimizer.momentum=0.9`.
    """
    key, _, value = word.partition("=")
    node, _, name = key.partition(".")
    fixed = name and node in BUILT and not parse_override(word).is_sweep_override()
    return f"{key}=choice({value})" if fixed else word


@cache
def parse_override(word: str) -> Override:
    """Parse a word of the command line: key=value, +key=value, ++key=value or ~key."""
    key, equals, value = word.partition("=")
    if not equals and not word.startswith("~"):
        raise ConfigError(
            f"{shortened(word)} is not key=value: write settings as in {example_with(word)}"
        )
    if not key.strip("+~"):
        raise ConfigError(f"{shortened(word)} has no key: write settings as in {EXAMPLE}")
    if key[0] in "+~" and (group := key.strip("+~")) in GROUPS:
        raise ConfigError(f"{shortened(word)} is invalid: write {group}=… without {key[0]}")
    if key in GROUPS and is_no_name(value):
        raise ConfigError(unknown_choice(key, value))
    try:
        return OverridesParser.create().parse_overrides([word])[0]
    except HydraException as error:
        raise ConfigError(
            f"cannot parse {shortened(word)}: check its brackets and quotes; a value with special "
            "characters needs two kinds of quotes, as in \"results='/tmp/my runs'\""
        ) from error


def is_no_name(value: str) -> bool:
    """Whether a value cannot be the name of a file in conf/, and is no syntax of Hydra."""
    longest = max(map(len, value.split(",")))
    return not value or not value.isascii() or ".." in value or longest > MAX_NAME_LENGTH


def example_with(word: str) -> str:
    """The setting that a bare word may stand for, else an example."""
    groups = [group for group in GROUPS if word in choices_of(group)]
    if "." in word.strip("."):
        return f"{shortened(word)}=…"
    return f"{groups[0]}={word}" if groups else EXAMPLE


def explain_unknown_key(key: str, cfg: DictConfig, choices: dict[str, Any]) -> str | None:
    """What is wrong with a key that is not in the config; None: it is, or Hydra reports it."""
    node, _, name = key.rpartition(".")
    parent = OmegaConf.select(cfg, node) if node else cfg
    top, _, part = key.partition(".")
    if top == "task" and part.split(".")[0] in PARTS:
        return f"{key} is unknown: {part.split('.')[0]} is a top-level key, set {part}="
    if parent is None and node in BUILT:
        return f"{key} is unknown: experiment={choices['experiment']} has no {node}"
    if not isinstance(parent, DictConfig) or name in parent.keys():  # noqa: SIM118  "???" is not in
        return None
    if node:
        return unknown_argument(node, name, parent, choices)
    settings = leaves(cast(dict[str, Any], OmegaConf.to_container(cfg)))
    inner = [leaf for leaf in settings if leaf.endswith(f".{name}")]
    return f"{name} is an unknown key: did you mean {inner[0]}?" if inner else None


def unknown_argument(node: str, name: str, parent: DictConfig, choices: dict[str, Any]) -> str:
    """Say which keys a node takes: the arguments of its class, or those in its file."""
    who, takes = node, [str(key) for key in parent if key not in SPECIAL_KEYS]
    if "_target_" in parent:
        target = str(parent._target_)
        who, takes = choices.get(node) or target, arguments_of(import_target(target, node))
    key = f"{node}.{name}"
    if name in takes:
        return f"{key} is not set in the files of this run: add it with +{key}=…"
    return (
        f"{key} is unknown:{nearest(name, takes)} {who} takes {', '.join(takes) or 'no arguments'}"
    )
