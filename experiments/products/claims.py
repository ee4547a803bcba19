"""Judges claims from records: a sentence of the paper, a number per seed, a verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import hydra.utils
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.special import stdtrit

from experiments.config.errors import ConfigError, one_line_errors
from experiments.products.specs import Spec
from experiments.records.files import write_if_changed
from experiments.records.index import WITHOUT, read_rows
from experiments.records.run import Groups, Run
from experiments.records.status import Status

WORST_FIRST = ("not run", "fails", "inconclusive", "holds")


class Part(BaseModel):
    """One comparison: left is above, below or near right, by a margin.

    A side names runs, which are compared seed by seed; several names stand for the spread over
    them, the largest minus the smallest.
    """

    model_config = ConfigDict(extra="forbid")
    left: str | list[str]
    relation: Literal["above", "below", "near"]
    right: float | str | list[str] = 0.0
    margin: float = 0.0
    metric: str | None = None
    statistic: str | None = None


class Claim(BaseModel):
    """A sentence of the paper; it holds if every part does."""

    model_config = ConfigDict(extra="forbid")
    id: str
    place: str
    text: str
    metric: str
    statistic: str = "last"  # a function of experiments/products/summaries.py
    parts: list[Part]
    why: str = ""  # the reason for a margin, or what a careful reader should know


class Outcome(BaseModel):
    """A part, judged: the mean difference, its 95 % interval and the verdict."""

    words: str
    effect: float
    low: float
    high: float
    n: int
    verdict: str

    def __str__(self) -> str:
        span = "" if self.low == self.high else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.words}: {self.effect:.4g}{span}"


def claims_of(spec: Spec) -> list[Claim]:
    with one_line_errors():
        return [Claim.model_validate(raw) for raw in spec.claims]


@np.errstate(divide="ignore", invalid="ignore")  # log10 of 0; a run that diverged
def judge_part(claim: Claim, part: Part, groups: Groups) -> Outcome:
    metric, statistic = part.metric or claim.metric, part.statistic or claim.statistic
    left = side(part.left, groups, metric, statistic)
    words = f"{spoken(part.left)}, {statistic} {metric}"
    if isinstance(part.right, float):
        difference = left - part.right
        words += f" {'−' if part.right > 0 else '+'} {abs(part.right):g}" if part.right else ""
    else:
        difference = left - side(part.right, groups, metric, statistic)
        words = f"{spoken(part.left)} − {spoken(part.right)}, {statistic} {metric}"
    low, high = interval(difference)
    verdict = weigh(part.relation, low, high, part.margin)
    effect, n = float(difference.mean()), len(difference)
    return Outcome(words=words, effect=effect, low=low, high=high, n=n, verdict=verdict)


def side(
    names: str | list[str], groups: Groups, metric: str, statistic: str
) -> NDArray[np.float64]:
    """A number per seed: of the named runs, or of how far several of them are apart."""
    if isinstance(names, str):
        return values(groups[names], metric, statistic)
    table = np.broadcast_arrays(*(values(groups[name], metric, statistic) for name in names))
    return np.asarray(np.ptp(table, axis=0))


def spoken(names: str | list[str]) -> str:
    return names if isinstance(names, str) else f"spread over {', '.join(names)}"


def names_of(part: Part) -> list[str]:
    """Every run that a part compares."""
    sides = [[x] if isinstance(x, str) else x for x in (part.left, part.right) if x]
    return [name for side in sides if isinstance(side, list) for name in side]


def values(runs: Sequence[Run], metric: str, statistic: str) -> NDArray[np.float64]:
    """The statistic of every run."""
    try:
        function = hydra.utils.get_method(f"experiments.products.summaries.{statistic}")
        return np.array(
            [np.nan if r.status == Status.DIVERGED else function(r.metrics(), metric) for r in runs]
        )
    except (ImportError, KeyError) as error:
        raise ConfigError(
            f"a claim asks for {statistic} of {metric}, which {runs[0].folder} does not have"
        ) from error


def interval(difference: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean (Student's t); a point if there is nothing that varies."""
    n, middle = len(difference), float(difference.mean())
    error = float(difference.std(ddof=1)) / n**0.5 if n > 1 else 0.0
    half = float(stdtrit(n - 1, 0.975)) * error if error > 0 else 0.0
    return middle - half, middle + half


def weigh(relation: str, low: float, high: float, margin: float) -> str:
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


def judge(claim: Claim, groups: Groups) -> dict[str, str]:
    """A row of claims.csv."""
    about = row(claim, groups)
    outcomes = [judge_part(claim, part, groups) for part in claim.parts]
    verdict = min((o.verdict for o in outcomes), key=WORST_FIRST.index)
    return about | {
        "verdict": verdict,
        "numbers": "; ".join(map(str, outcomes)),
        "seeds": str(max(o.n for o in outcomes)),
        "commit": " ".join(sorted({str(r.info.get("commit")) for r in needed(claim, groups)})),
        "records": "yes",
    }


def row(claim: Claim, groups: Groups) -> dict[str, str]:
    scales = {run.config.scale for run in needed(claim, groups)}
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


def wording(row: Mapping[str, str]) -> dict[str, str]:
    return {key: row[key] for key in ("place", "claim", "why")}


def needed(claim: Claim, groups: Groups) -> list[Run]:
    names = {name for part in claim.parts for name in names_of(part)}
    unknown = names - groups.keys()
    if unknown:
        raise ConfigError(f"claim {claim.id} compares {sorted(unknown)[0]}, which no run is named")
    return [run for name in groups if name in names for run in groups[name]]


def refuse_one_seed(claim: Claim, spec: Spec, groups: Groups) -> None:
    """An interval needs seeds, and seeds that are compared must be the same ones."""
    for part in claim.parts:
        names = [name for name in names_of(part) if name not in spec.once]
        counts = {len(groups[n]) for n in names}
        if len(counts) > 1 or counts == {1}:
            raise ConfigError(
                f"claim {claim.id} compares {' and '.join(names)} over {sorted(counts)} seeds: "
                "raise `seeds`, or list under `once` what one seed settles"
            )


def key(claim: Claim, groups: Groups) -> str:
    """What the verdict rests on, whatever its runs are named and however the claim is worded."""

    def identity(side: float | str | list[str]) -> object:
        if isinstance(side, str):
            return [f"{run.config.digest()} {run.config.seed}" for run in groups[side]]
        return [identity(name) for name in side] if isinstance(side, list) else side

    needed(claim, groups)  # refuses unknown names
    parts = [
        [
            part.metric or claim.metric,
            part.statistic or claim.statistic,
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
    """Judge every claim whose runs are there.

    Of the others, a verdict on the same claim and runs that was `published` without records stands.
    """
    rows = []
    for claim in claims_of(spec):
        refuse_one_seed(claim, spec, groups)
        new, old = row(claim, groups), published.get(claim.id, {})
        if all(run.done for run in needed(claim, groups)):
            rows.append(judge(claim, groups))
        else:
            stands = old.get("records") == WITHOUT and old.get("key") == new["key"]
            rows.append({**old, **wording(new)} if stands else new)
    return rows


def read_verdicts(path: Path) -> dict[str, dict[str, str]]:
    return read_rows(path, "id")


def write_verdicts(rows: Sequence[dict[str, str]], stem: Path) -> None:
    """stem.csv, the record, and stem.md, the page to read."""
    table = pd.DataFrame(rows).to_csv(index=False)
    write_if_changed(stem.with_suffix(".csv"), table.encode())
    write_if_changed(stem.with_suffix(".md"), page(rows).encode())


def said(row: Mapping[str, str]) -> str:
    """The verdict; one that a larger scale may change, or that has no records, says so."""
    small = "laptop" in row["scale"] and row["verdict"] in ("fails", "inconclusive")
    mark = " †" if row["records"] == WITHOUT else ""
    return row["verdict"] + (" at laptop scale" if small else "") + mark


def page(rows: Sequence[dict[str, str]]) -> str:
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
        "| id | place | claim | verdict | numbers | seeds | scale |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        claim = r["claim"] + (f" *({r['why']})*" if r["why"] else "")
        numbers = r["numbers"].replace("; ", "<br>")
        verdict = f"**{said(r)}**"
        cells = (r["id"], r["place"], claim, verdict, numbers, r["seeds"], r["scale"])
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
