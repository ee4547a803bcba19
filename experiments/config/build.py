"""Builds the objects that `_target_` nodes describe, after checking every argument."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import typing
from importlib.machinery import PathFinder
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from pydantic import (
    ConfigDict,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from experiments.config.errors import ConfigError, expectation, invalid, last_line
from experiments.config.paths import ROOT
from experiments.config.schema import SPECIAL_KEYS

PASSED = ("params", "seed", "device")  # arguments that a run passes itself


def build(node: dict[str, Any], key: str, **extra: Any) -> Any:
    """Return the object that a config node describes; an error names the key of a bad argument."""
    checked = check_call(node, key, extra)
    try:
        return hydra.utils.instantiate(checked, **extra)
    except HydraException as error:
        if isinstance(error.__cause__, OSError):  # missing data or a full disk, not a bad setting
            raise error.__cause__ from None
        raise ConfigError(f"{key}: {last_line(error.__cause__ or error)}") from error


def check_call(node: dict[str, Any], key: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the node with every argument converted to the type that its `_target_` declares."""
    special = {k: hint for k, hint in SPECIAL_KEYS.items() if k in node}
    checked = {k: as_type(f"{key}.{k}", node[k], hint) for k, hint in special.items()}
    checked.pop("_version_", None)  # Hydra would pass it on
    if "_target_" not in checked:
        raise ConfigError(f"{key} has no _target_: set {key}._target_ to a class or function")
    target = import_target(checked["_target_"], key)
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = type_hints(target)
    for name, value in node.items():
        if name in SPECIAL_KEYS:
            continue
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"{key}.{name} is unknown: {node['_target_']} takes "
                f"{', '.join(arguments_of(target))}"
            )
        if isinstance(value, dict) and "_target_" in value:
            checked[name] = check_call(value, f"{key}.{name}", {})
        else:
            checked[name] = as_type(f"{key}.{name}", value, hints.get(name, Any))
    return checked


def arguments_of(target: Any) -> list[str]:
    """Return the arguments that a config can set."""
    return [name for name in inspect.signature(target).parameters if name not in PASSED]


def prefer_current_folder(package: str) -> None:
    """Import a module or package of the current folder, even if one of its name is installed."""
    if package in sys.modules:
        return
    spec = PathFinder.find_spec(package, [os.getcwd(), str(ROOT)])
    if spec is None:
        return
    sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        if spec.loader is not None:  # a folder without __init__.py has none
            spec.loader.exec_module(sys.modules[package])
    except BaseException:
        del sys.modules[package]
        raise


def import_target(path: str, key: str) -> Any:
    """Return the class or function with this dotted name."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"{key}._target_={path} is invalid: expected module.Class")
    try:
        prefer_current_folder(module.partition(".")[0])
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}._target_={path} cannot be imported: {error}") from error


def type_hints(target: Any) -> dict[str, Any]:
    try:
        function = target.__init__ if inspect.isclass(target) else target
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # a hint that exists only for a type checker
        return {}


def as_type(key: str, value: Any, hint: Any) -> Any:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except PydanticUserError as error:  # the hint is a class of this project
        raise ConfigError(invalid(key, value, "expected a node with a _target_")) from error
    except ValidationError as error:
        raise ConfigError(invalid(key, value, expectation(error))) from error
