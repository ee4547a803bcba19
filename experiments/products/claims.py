"""Judges claims from records: compares numbers over the seeds and gives a verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from experiments.config.errors import ConfigError
from experiments.products.markdown import markdown_table
from experiments.products.names import Names, comparison_name, run_names
from experiments.products.schema import Claim, Comparison, Spec
from experiments.products.summaries import STATISTICS
from experiments.records.files import write_if_changed
from experiments.records.index import WITHOUT, read_rows
from experiments.records.run import Groups, Run
from experiments.records.status import Status

WORST_FIRST = ("not run", "fails", "inconclusive", "holds")
REDUCED_SCALES = ("laptop", "desktop")


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison: the mean difference, its 95 % interval and the verdict."""

    effect: float
    low: float
    high: float
    n: int
    verdict: str

    def __str__(self) -> str:
        span = "" if self.low == self.high else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.effect:.4g}{span}"


@np.errstate(divide="ignore", invalid="ignore")  # log10 of 0; a run that diverged
def judge_part(claim: Claim, part: Comparison, groups: Groups) -> ComparisonResult:
    metric, statistic = claim.metric_of(part), claim.statistic_of(part)
    left = side(part.left, groups, metric, statistic)
    right = part.right
    difference = left - (
        right if isinstance(right, float) else side(right, groups, metric, statistic)
    )
    low, high = interval(difference)
    verdict = verdict_of(part.relation, low, high, part.margin)
    effect, n = float(difference.mean()), len(difference)
    return ComparisonResult(effect, low, high, n, verdict)


def side(
    names: str | list[str], groups: Groups, metric: str, statistic: str
) -> NDArray[np.float64]:
    """A number per seed: that of the named run, or the spread over several runs."""
    if isinstance(names, str):
        return values(groups[names], metric, statistic)
    table = np.broadcast_arrays(*(values(groups[name], metric, statistic) for name in names))
    return np.asarray(np.ptp(table, axis=0))


def values(runs: Sequence[Run], metric: str, statistic: str) -> NDArray[np.float64]:
    """The statistic of every run."""
    function = STATISTICS[statistic]
    try:
        return np.array(
            [np.nan if r.status == Status.DIVERGED else function(r.metrics(), metric) for r in runs]
        )
    except KeyError as error:
        raise ConfigError(
            f"{runs[0].folder} has no metric {metric}: train it again with force=true"
        ) from error


def interval(difference: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean (Student's t); a point if nothing varies."""
    n, middle = len(difference), float(difference.mean())
    error = float(difference.std(ddof=1)) / n**0.5 if n > 1 else 0.0
    half = float(stdtrit(n - 1, 0.975)) * error if error > 0 else 0.0
    return middle - half, middle + half


def verdict_of(relation: str, low: float, high: float, margin: float) -> str:
    """holds if all of the interval is on the claimed side of the margin, fails if none of it is."""
    if not np.isfinite([low, high]).all():
        return "inconclusive"
    if relation == "above":
        low, high = -high, -low
    if relation == "near":
        inside, outside = max(-low, high) <= margin, low > margin or high < -margin
    else:
        inside, outside = high < -margin, low >= -margin
    return "holds" if inside else "fails" if outside else "inconclusive"


def judge_claim(claim: Claim, groups: Groups, names: Names) -> dict[str, str]:
    """A row of claims.csv; `names` are those of the runs in words."""
    about = verdict_row(claim, groups)
    outcomes = [judge_part(claim, part, groups) for part in claim.parts]
    verdict = min((o.verdict for o in outcomes), key=WORST_FIRST.index)
    return about | {
        "verdict": verdict,
        "numbers": numbers_text(claim, map(str, outcomes), names),
        "seeds": str(max(o.n for o in outcomes)),
        "commit": " ".join(sorted({str(r.info.get("commit")) for r in needed(claim, groups)})),
        "records": "yes",
    }


def verdict_row(claim: Claim, groups: Groups) -> dict[str, str]:
    scales = {run.config.shown_scale for run in needed(claim, groups)}
    return {
        "id": claim.id,
        "place": claim.place,
        "claim": claim.text,
        "verdict": "not run",
        "numbers": "",
        "seeds": "",
        "scale": " and ".join(sorted(scales)),
        "why": claim.why,
        "commit": "",
        "records": "",
        "key": key(claim, groups),
    }


def numbers_text(claim: Claim, values: Iterable[str], names: Names) -> str:
    parts = zip(claim.parts, values, strict=True)
    return "; ".join(f"{comparison_name(claim, part, names)}: {value}" for part, value in parts)


def reworded(row: Mapping[str, str], claim: Claim, names: Names) -> dict[str, str]:
    """The row with the text that conf/ has now; its verdict and its numbers stay the same."""
    values = [number.rpartition(": ")[2] for number in row["numbers"].split("; ")]
    text = {"place": claim.place, "claim": claim.text, "why": claim.why}
    return {**row, **text, "numbers": numbers_text(claim, values, names)}


def needed(claim: Claim, groups: Groups) -> list[Run]:
    return [run for name in groups if name in claim.runs() for run in groups[name]]


def key(claim: Claim, groups: Groups) -> str:
    """A hash of what the verdict depends on: not the wording, not the names of the runs."""

    def identity(side: float | str | list[str]) -> object:
        if isinstance(side, str):
            return [f"{run.config.digest()} {run.config.seed}" for run in groups[side]]
        return [identity(name) for name in side] if isinstance(side, list) else side

    parts = [
        [
            claim.metric_of(part),
            claim.statistic_of(part),
            part.relation,
            part.margin,
            identity(part.left),
            identity(part.right),
        ]
        for part in claim.parts
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def judge_spec(
    spec: Spec, groups: Groups, published: Mapping[str, dict[str, str]]
) -> list[dict[str, str]]:
    """Judge every claim whose runs are finished.

    For the others, a verdict on the same claim that was `published` without records is kept.
    """
    rows, names = [], run_names(spec)
    for claim in spec.claims:
        new, old = verdict_row(claim, groups), published.get(claim.id, {})
        if all(run.done for run in needed(claim, groups)):
            rows.append(judge_claim(claim, groups, names))
        else:
            same = old.get("records") == WITHOUT and old.get("key") == new["key"]
            rows.append(reworded(old, claim, names) if same else new)
    return rows


def read_verdicts(path: Path) -> dict[str, dict[str, str]]:
    return read_rows(path, "id")


def write_verdicts(rows: Sequence[dict[str, str]], stem: Path) -> None:
    """Write stem.csv, the record, and stem.md, the page to read."""
    table = pd.DataFrame(rows).to_csv(index=False)
    write_if_changed(stem.with_suffix(".csv"), table.encode())
    write_if_changed(stem.with_suffix(".md"), claims_page(rows).encode())


def said(row: Mapping[str, str]) -> str:
    """The verdict, marked if a larger scale may change it or if it has no records."""
    small = reduced_scale(row) if row["verdict"] in ("fails", "inconclusive") else None
    mark = " †" if row["records"] == WITHOUT else ""
    return row["verdict"] + (f" at {small} scale" if small else "") + mark


def reduced_scale(row: Mapping[str, str]) -> str | None:
    """The smallest scale of its runs, if they are smaller than the paper's."""
    return next((scale for scale in REDUCED_SCALES if scale in row["scale"]), None)


def claims_page(rows: Sequence[dict[str, str]]) -> str:
    counts = [f"{v}: {sum(r['verdict'] == v for r in rows)}" for v in reversed(WORST_FIRST)]
    lines = [
        "# Which claims hold",
        "",
        "Generated; do not edit. Each claim is judged from recorded runs: the mean difference over",
        "the seeds, its 95 % confidence interval in brackets (none if nothing varies), and the",
        "verdict. *holds*: all of the interval is on the claimed side of the margin; *fails*: none",
        "of it is; *inconclusive*: a part of it is. †: published before records were kept.",
        "",
        f"**{len(rows)} claims. {', '.join(counts)}.**",
        "",
    ]
    return "\n".join([*lines, markdown_table(pd.DataFrame(map(cells, rows)))]) + "\n"


def cells(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row of the page."""
    return {
        "id": row["id"],
        "place": row["place"],
        "claim": row["claim"] + (f" *({row['why']})*" if row["why"] else ""),
        "verdict": f"**{said(row)}**",
        "numbers": row["numbers"].replace("; ", "<br>"),
        "seeds": row["seeds"],
        "scale": row["scale"],
    }
