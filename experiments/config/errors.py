"""Errors of the user, each in one line: what is wrong, what was expected, how to fix it."""

from __future__ import annotations

import difflib
import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    ValidationError,
)

from experiments.config.paths import CONF, choices_of
from experiments.config.schema import PARTS, Config

LONGEST = 80  # characters of a value in a message

GUESSABLE = ("experiment", "optimizer", "tracking")


class ConfigError(Exception):
    """A request that cannot be run. The message is one line: the key, what is wrong, the cure."""


class NotPublishedError(ConfigError):
    """A product whose runs are not all published, where only published ones may be used."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what Hydra, OmegaConf and pydantic say into a ConfigError of one line."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        value = shown(problem["input"])
        if problem["type"] == "extra_forbidden":
            raise ConfigError(f"{key} is an unknown key; known are {known_keys()}") from error
        if problem["type"] == "missing":
            raise ConfigError(f"{key} has no value: give {key}=…") from error
        raise ConfigError(f"{key}={value} is refused: {problem['msg'].lower()}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(str(error))) from error
    except MemoryError as error:
        raise ConfigError(f"memory is not enough: {last_line(error)}") from error
    except Exception as error:
        if "Config group override" in str(error):
            raise ConfigError(
                "experiment, optimizer, scale and tracking cannot be null: name one of their files"
            ) from error
        if isinstance(error, RuntimeError) and "memory" in str(error):  # torch's own
            raise ConfigError(f"memory is not enough: {last_line(error)}") from error
        if not raised_by_hydra(error):
            raise
        raise ConfigError(f"cannot read the arguments: {last_line(error)}") from error


def raised_by_hydra(error: BaseException) -> bool:
    """Whether it comes from inside of Hydra, which trips over some arguments."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4")


def explain(text: str) -> str:
    """One line with the cure for what Hydra spreads over many."""
    launcher = re.search(r"'hydra/launcher/(\w+)'|hydra/launcher=(\w+)", text)
    if launcher:
        return "this engine's launcher is not installed: make setup-cluster"
    unknown_choice = re.search(r"Could not find '([\w-]+)/([^']+)'", text)
    if unknown_choice:
        group, choice = unknown_choice.groups()
        return f"{group}={choice} is unknown: choose one of {', '.join(choices_of(group))}"
    unknown_key = re.search(r"Could not override '([^']+)'", text)
    if unknown_key:
        key = unknown_key.group(1)
        add = f" (+{key}=… adds a key that its class takes)" if "." in key else ""
        return f"{key} is an unknown key{guess(key)}{add}"
    line = " ".join(text.split("\n")[0].split())
    return f"cannot read an argument: {line}" if "override_grammar" in text else line


def known_keys() -> str:
    return ", ".join(sorted({*Config.model_fields, *PARTS} - {"optimizer_name"}))


def guess(key: str) -> str:
    """A near miss among the names that appear in conf/."""
    names = set(Config.model_fields)
    for path in (p for group in GUESSABLE for p in (CONF / group).glob("*.yaml")):
        names.update(re.findall(r"^\s*(?:- )?([A-Za-z]\w*):", path.read_text(), re.MULTILINE))
    if key in names:
        return f" here: +{key}=… adds it"
    near = difflib.get_close_matches(key.split(".")[-1], names, n=1)
    return f": did you mean {near[0]}?" if near else f"; known at the top are {known_keys()}"


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def shown(value: Any) -> str:
    text = json.dumps(value, default=str).strip('"')
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
