"""Builds the objects that `_target_` nodes describe, with every argument checked."""

from __future__ import annotations

import importlib
import inspect
import typing
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from pydantic import (
    ConfigDict,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from experiments.config.errors import ConfigError, last_line, shown
from experiments.config.schema import FLAGS


def build(node: dict[str, Any], key: str, **extra: Any) -> Any:
    """Make the object that a config node describes; a bad argument is named by its key."""
    checked = check_call(node, key, extra)
    try:
        return hydra.utils.instantiate(checked, **extra)
    except HydraException as error:
        if isinstance(error.__cause__, OSError):  # data or disk: no setting is to blame
            raise error.__cause__ from None
        raise ConfigError(f"{key}: {last_line(error.__cause__ or error)}") from error


def check_call(node: dict[str, Any], key: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The node with every argument in the type that its `_target_` asks for, or a refusal."""
    checked = {k: as_type(f"{key}.{k}", node[k], hint) for k, hint in FLAGS.items() if k in node}
    checked.pop("_version_", None)  # Hydra would pass it on
    if "_target_" not in checked:
        raise ConfigError(f"{key}._target_ is missing: name the class or function")
    target = find(checked["_target_"], key)
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = type_hints(target)
    for name, value in node.items():
        if name in FLAGS:
            continue
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"{key}.{name} is unknown: {node['_target_']} takes "
                f"{', '.join(p for p in parameters if p not in extra and p != 'params')}"
            )
        if isinstance(value, dict) and "_target_" in value:
            checked[name] = check_call(value, f"{key}.{name}", {})
        else:
            checked[name] = as_type(f"{key}.{name}", value, hints.get(name, Any))
    return checked


def find(path: str, key: str) -> Any:
    """The class or function with a dotted name."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}._target_={path} cannot be imported: {error}") from error


def type_hints(target: Any) -> dict[str, Any]:
    try:
        function = target.__init__ if inspect.isclass(target) else target
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # a hint that only its own module's type checker can read
        return {}


def as_type(key: str, value: Any, hint: Any) -> Any:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except PydanticUserError as error:  # the hint is a class of ours
        raise ConfigError(f"{key}={shown(value)} is refused: its _target_ is missing") from error
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{key}={shown(value)} is refused: {problem['msg'].lower()}") from error
