"""Checks of a spec before anything is trained: keys, types, names of runs, metrics and settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from experiments.config.compose import file_chosen
from experiments.config.errors import ConfigError, shortened_value
from experiments.products.schema import Spec, nearest
from experiments.products.summaries import OTHER_METRICS

# kind → the keys of which at least one is required
CONTENT = {"figure": ("panels",), "table": ("rows", "search", "contest"), "claim": ("claims",)}


def checked(raw: Any) -> Spec:
    """The spec with all keys and types checked."""
    try:
        return Spec.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain_problem(error.errors()[0], raw)) from error


def explain_problem(problem: ErrorDetails, raw: Any) -> str:
    """One line on what pydantic found: the key, what is wrong, what is expected."""
    key, message = key_path(problem["loc"], raw), problem["msg"]
    match problem["type"]:
        case "unknown_key":
            return f"{key}.{message}".removeprefix(".")
        case "missing":
            return f"{key}.{problem['loc'][-1]} is missing: add it".removeprefix(".")
        case "value_error":
            return f"{key}: {problem['ctx']['error']}".removeprefix(": ")
        case "model_type" | "model_attributes_type":
            message = "expected a mapping of keys to values"
        case "union_tag_invalid":
            tag, expected = problem["ctx"]["tag"], problem["ctx"]["expected_tags"]
            return f"{key}.draw={tag} is invalid: expected one of {expected}"
    value = f"{key}={shortened_value(problem['input'])}".removeprefix("=")
    return f"{value} is invalid: {message[0].lower()}{message[1:]}"


def key_path(keys: Sequence[str | int], raw: Any) -> str:
    """panels[1].metric; what pydantic adds, the names of the members of a union, is left out."""
    path = ""
    for key in keys:
        if isinstance(raw, list) and isinstance(key, int):
            path, raw = f"{path}[{key}]", raw[key]
        elif isinstance(raw, dict) and key in raw:
            path, raw = f"{path}.{key}", raw[key]
    return path.removeprefix(".")


def check_content(spec: Spec, kind: str) -> None:
    """Raise an error if a spec lacks content, or names a run or a metric that does not exist."""
    wanted = CONTENT.get(kind, ())
    if wanted and not any(getattr(spec, key) for key in wanted):
        raise ConfigError(f"a {kind} needs {' or '.join(wanted)}: add them")
    if not spec.runs:
        raise ConfigError("it names no runs: add `runs`")
    for key, names in (("once", spec.once), ("labels", spec.labels)):
        for name in names:
            check_name(key, "runs", name, spec.runs)
    for place, run, metric in metrics_read(spec):
        if run in spec.awaited:
            continue
        check_name(place, "runs", run, spec.runs)
        check_metric(place, metric, (*spec.base, *spec.runs[run]))
    check_rule(spec)
    check_seeds(spec)


def metrics_read(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """Every use of a metric: where in the spec, of which run, which metric."""
    for i, panel in enumerate(spec.panels):
        for run in panel.runs:
            yield from ((f"panels[{i}]", run, metric) for metric in panel.metrics())
    for i, row in enumerate(spec.rows):
        for cell in row.cells().values():
            names = [cell.metric.replace("{}", str(item)) for item in row.over]
            names += OTHER_METRICS.get(cell.statistic, [])
            yield from ((f"rows[{i}]", cell.run, name) for name in names)
    for i, claim in enumerate(spec.claims):
        for j, part in enumerate(claim.parts):
            names = [claim.metric_of(part), *OTHER_METRICS.get(claim.statistic_of(part), [])]
            for run in part.runs():
                yield from ((f"claims[{i}].parts[{j}]", run, name) for name in names)
    for i, task in enumerate(spec.contest.tasks if spec.contest else ()):
        yield from (
            (f"contest.tasks[{i}]", run, task.metric) for run in task.runs() if run in spec.runs
        )
    if spec.rule:
        yield from (("rule", run, metric) for run in spec.search for metric in spec.rule.metrics())


def check_name(place: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(
            f"{place} names {name}, which is unknown; the {what} are {nearest(name, known)}"
        )


def check_metric(place: str, metric: str, overrides: Sequence[str]) -> None:
    """Raise an error if the experiment that these overrides choose does not declare the metric."""
    experiment, config = file_chosen("experiment", overrides)
    declared = config.get("metrics") or []
    if not any(fnmatchcase(metric, pattern) for pattern in declared):
        known = f"declares {nearest(metric, declared)}" if declared else "has no `metrics`"
        raise ConfigError(
            f"{place} reads {metric}, but conf/experiment/{experiment}.yaml {known}: fix the name, "
            "or add it to `metrics` there if the experiment records it"
        )


def check_rule(spec: Spec) -> None:
    """Raise an error if a rule names a search or a setting that does not exist."""
    if spec.rule is None:
        return
    for i, panel in enumerate(spec.rule.panels):
        for name in panel.runs:
            check_name(f"rule.panels[{i}].runs", "searches", name, spec.search)
    searched = [(*spec.base, *search.paper) for search in spec.search.values()]
    known = {key for words in searched for key in file_chosen("optimizer", words)[1].optimizer}
    for name in spec.rule.settings:
        check_name("rule.settings", "settings", name, known)


def check_seeds(spec: Spec) -> None:
    """Raise an error for a claim on one seed: an interval needs more, unless one settles it."""
    for claim in spec.claims if spec.seeds == 1 else ():
        names = claim.runs() - {*spec.once}
        if names:
            raise ConfigError(
                f"claim {claim.id} compares {' and '.join(sorted(names))} with one seed: raise "
                "`seeds`, or list under `once` what one seed settles"
            )
