"""Names in words of runs, metrics and statistics, for the numbers of claims."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from yaml import safe_load

from experiments.config.paths import CONF
from experiments.products.schema import Claim, Comparison, Spec
from experiments.products.style import label_of


class RunName(NamedTuple):
    """The label of a run as in the legend, and the title of the first panel that draws it."""

    label: str
    panel: str = ""


Names = Mapping[str, RunName]  # by the name in conf/


@cache
def declared() -> dict[str, Any]:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / "figure" / "_names.yaml"))
    return dict(loaded)


# -- runs --------------------------------------------------------------------------------------


def run_names(spec: Spec) -> dict[str, RunName]:
    panels = {name: panel.subject for panel in reversed(spec.panels) for name in panel.runs}
    names = {name: RunName(run_label(spec, name), panels.get(name, "")) for name in spec.runs}
    return names | {name: RunName(spec.search[name.split()[0]].label) for name in spec.awaited}


def run_label(spec: Spec, name: str) -> str:
    """The label in conf/, or that of the legend, or the optimizer with its overridden settings."""
    legend = [panel.runs[name] for panel in spec.panels if panel.runs.get(name)]
    if label := spec.labels.get(name) or next(iter(legend), None):
        return label
    if search := spec.search.get(name.partition(" ")[0]):
        head, words = search.label, spec.runs[name][len(search.paper) :]
    else:
        head, words = label_of(optimizer_in([*spec.base, *spec.runs[name]])), spec.runs[name]
    return ", ".join([head, *settings_in(words)])


def optimizer_in(overrides: Iterable[str]) -> str:
    chosen = [word for word in overrides if word.startswith("optimizer=")]
    return chosen[-1].removeprefix("optimizer=")


def settings_in(overrides: Iterable[str]) -> Iterator[str]:
    """β1 = 0.9, β2 = 0.999, n = 10"""
    for word in overrides:
        key, _, value = word.partition("=")
        symbols = declared()["settings"].get(key.rpartition(".")[2], [])
        values = safe_load(value)
        pairs = zip(symbols, values if isinstance(values, list) else [values], strict=False)
        yield from (f"{symbol} = {number}" for symbol, number in pairs)


# -- comparisons -------------------------------------------------------------------------------


def comparison_name(claim: Claim, part: Comparison, names: Names) -> str:
    """What is compared: the quantity and the difference of the sides, after the panel if needed."""
    shared = Counter(names[name].label for name in claim.runs())
    panels = [names[name].panel for name in part.runs() if shared[names[name].label] > 1]
    quantity = quantity_name(claim.metric_of(part), claim.statistic_of(part))
    return ", ".join([*filter(None, dict.fromkeys(panels)), quantity, difference_name(part, names)])


def difference_name(part: Comparison, names: Names) -> str:
    left, right = side_name(part.left, names), part.right
    if right == 0:
        return left
    if isinstance(right, float):
        return f"{grouped(left)} {'−' if right > 0 else '+'} {abs(right):g}"
    return f"{grouped(left)} − {grouped(side_name(right, names))}"


def side_name(side: str | list[str], names: Names) -> str:
    if isinstance(side, str):
        return names[side].label
    return f"range over {', '.join(grouped(side_name(name, names)) for name in side)}"


def grouped(label: str) -> str:
    """In parentheses if it has a comma outside of parentheses."""
    outside = re.sub(r"\(.*?\)", "", label)
    return f"({label})" if ", " in outside else label


def quantity_name(metric: str, statistic: str) -> str:
    """test accuracy (mean over the last tenth)"""
    template = declared()["statistics"].get(statistic, f"{statistic} {{}}")
    return str(template.replace("{}", metric_name(metric)))


def metric_name(metric: str) -> str:
    for pattern, name in declared()["metrics"].items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), metric):
            return str(name.replace("{}", "".join(match.groups())))
    return metric
