"""User errors, each in one line: what is wrong, what was expected, how to fix it."""

from __future__ import annotations

import difflib
import json
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    ValidationError,
)
from yaml import MarkedYAMLError

from experiments.config.paths import CONF, choices_of
from experiments.config.schema import PARTS, Config

MAX_VALUE_LENGTH = 80  # characters of a value in a message
MAX_CHOICES = 6  # names in a message; more are listed by --help

# How pydantic's messages start → ours.
REPLACED = {
    "Input should be a valid integer": "expected an integer",
    "Input should be a valid number": "expected a number",
    "Input should be a valid boolean": "expected true or false",
    "Input should be a valid list": "expected a list, as in [a,b]",
    "Field required": "expected more values",
    "Tuple should have at most": "expected fewer values",
}
# How pydantic's messages start → how ours do; the first that fits is used.
EXPECTATIONS = {
    "Input should be greater": "expected a value greater",
    "Input should be less": "expected a value less",
    "Input should be": "expected",
}

TOP_LEVEL = {*Config.model_fields, *PARTS} - {"optimizer_name"}
BUILT = ("task", "optimizer", "schedule", *PARTS)  # nodes whose keys are arguments of a class
SUGGESTION_GROUPS = ("experiment", "optimizer", "tracking")


class ConfigError(Exception):
    """A request that cannot be run. The message is one line."""


class NotPublishedError(ConfigError):
    """A product that needs runs which are not published, when only published runs may be used."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and pydantic into a ConfigError of one line."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(validation_message(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_message(str(error))) from error
    except MarkedYAMLError as error:
        raise ConfigError(yaml_message(error)) from error
    except MemoryError as error:
        raise ConfigError(out_of_memory(error)) from error
    except Exception as error:
        if "Config group override" in str(error):
            raise ConfigError(
                "experiment, optimizer, scale and tracking cannot be null: expected the name of a "
                "file, as in optimizer=adam"
            ) from error
        if isinstance(error, RuntimeError) and "memory" in str(error):  # torch's own
            raise ConfigError(out_of_memory(error)) from error
        if not raised_by_hydra(error):
            raise
        raise ConfigError(f"cannot parse the overrides: {last_line(error)}") from error


def validation_message(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"{key} is an unknown key{expected_keys(key)}"
    if problem["type"] == "missing":
        return f"{key} has no value: set {key}=…"
    return invalid(key, problem["input"], expectation(error))


def expectation(error: ValidationError) -> str:
    """What pydantic expected, as in 'expected a value greater than 0'."""
    problem = error.errors()[0]
    if problem["type"] == "string_pattern_mismatch":
        return f"expected {Config.model_fields[str(problem['loc'][-1])].description}"
    message = problem["msg"]
    for start, words in REPLACED.items():
        if message.startswith(start):
            return words
    for start, words in EXPECTATIONS.items():
        if message.startswith(start):
            return words + message.removeprefix(start)
    return message[:1].lower() + message[1:]


def yaml_message(error: MarkedYAMLError) -> str:
    mark = error.problem_mark
    place = f"{short_path(mark.name)}: line {mark.line + 1}" if mark else "a config file"
    return f"{place} is not valid YAML: {error.problem}"


def short_path(file: str | Path) -> str:
    """The path of a file of conf/, as in conf/figure/01.yaml."""
    return "/".join(Path(file).parts[-3:])


def out_of_memory(error: BaseException) -> str:
    alone = "set runs_per_gpu=1 or " if "CUDA" in str(error) else ""
    return f"out of memory ({last_line(error)}): {alone}reduce the sizes of this run"


def raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra's own code raised it; some overrides break Hydra's parser."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4")


def hydra_message(text: str) -> str:
    """One line, with the fix, for a message of Hydra that has many lines."""
    text = text.removeprefix("ConfigError raised while resolving interpolation: ")
    launcher = re.search(r"'hydra/launcher/(\w+)'|hydra/launcher=(\w+)", text)
    if launcher:
        return "the launcher of this engine is not installed: run make setup-cluster"
    missing_file = re.search(r"Could not find '([\w-]+)/([^']+)'", text)
    if missing_file:
        group, choice = missing_file.groups()
        return unknown_choice(group, choice)
    unknown_key = re.search(r"Could not override '([^']+)'", text)
    if unknown_key:
        key = unknown_key.group(1)
        return f"{key} is an unknown key{suggestion(key)}"
    return " ".join(text.split("\n")[0].split())


def unknown_choice(group: str, choice: str) -> str:
    """Say what a group accepts: the nearest names, or all if they are few."""
    names = choices_of(group)
    what = f"{group}={shortened(choice)} is unknown" if choice else f"{group}= is empty"
    if len(names) <= MAX_CHOICES:
        return f"{what}: choose one of {', '.join(names)}"
    near = nearest(choice, names)
    return f"{what}:{near or f' expected a file of conf/{group};'} run.py --help describes all"


def nearest(name: str, names: Iterable[str]) -> str:
    """A question with the most similar names, or nothing."""
    names = list(names)
    near = [n for n in names if len(name) > 2 and n.startswith(name)]
    near += [n for n in difflib.get_close_matches(name[:50], names) if n not in near]
    return f" did you mean {' or '.join(near[:3])}?" if near else ""


def expected_keys(key: str) -> str:
    """The top-level keys, as the end of a message about an unknown one."""
    return "" if "." in key else f": expected one of {', '.join(sorted(TOP_LEVEL))}"


def suggestion(key: str) -> str:
    """The most similar key in conf/, as the end of a message about an unknown key."""
    if key in TOP_LEVEL:
        return f" here: +{key}=… adds it"
    names, last = set(Config.model_fields), key.split(".")[-1]
    for path in (p for group in SUGGESTION_GROUPS for p in (CONF / group).glob("*.yaml")):
        names.update(re.findall(r"^\s*(?:- )?([A-Za-z]\w*):", path.read_text(), re.MULTILINE))
    if last in names or last.startswith("_"):  # a key of another node, or of Hydra: no typo
        return expected_keys(key)
    near = difflib.get_close_matches(last, names, n=1)
    return f": did you mean {near[0]}?" if near else expected_keys(key)


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def invalid(key: str, value: Any, expected: str) -> str:
    return f"{key}={shortened_value(value)} is invalid: {expected}"


def shortened_value(value: Any) -> str:
    return shortened(json.dumps(value, default=str, ensure_ascii=False).strip('"'))


def shortened(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"
