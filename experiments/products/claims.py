"""Judges claims from records: a verdict for each, corrections for many, claims.csv and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.products import inference
from experiments.products.comparison import PartResult, judge_part, verdict_of
from experiments.products.inference import ALPHA, MOST_SEEDS, SMALLEST_P
from experiments.products.markdown import markdown_table
from experiments.products.names import Names, comparison_name, run_names
from experiments.products.schema import Claim, Comparison, Spec
from experiments.records.files import write_if_changed
from experiments.records.index import read_rows
from experiments.records.run import Groups, Run

VERDICTS = ("holds", "inconclusive", "fails", "not run")
COLUMNS = (
    "id", "place", "claim", "main", "ours", "exploratory", "verdict", "numbers", "margin", "p",
    "p_holm", "p_bh", "seeds", "seeds_needed", "scale", "why", "commit", "earlier",
)  # fmt: skip
REDUCED_SCALES = ("laptop", "desktop")


# -- a claim -----------------------------------------------------------------------------------


def judge_claim(claim: Claim, groups: Groups, names: Names) -> dict[str, str]:
    """A row of claims.csv; `names` are those of the runs in words."""
    about = verdict_row(claim, groups)
    parts = [judge_part(claim, part, groups) for part in claim.parts]
    p_holds = inference.all_hold([part.p_holds for part in parts])
    p_fails = inference.any_fails([part.p_fails for part in parts])
    verdict = "holds" if p_holds <= ALPHA else "fails" if p_fails <= ALPHA else "inconclusive"
    is_exact = all(part.is_exact for part in parts)
    return about | {
        "verdict": verdict,
        "numbers": numbers_text(claim, map(str, parts), names),
        "p": "" if is_exact else f"{max(SMALLEST_P, min(p_holds, p_fails)):.6g}",
        "seeds": str(max(part.n for part in parts)),
        "seeds_needed": seeds_text(claim, parts) if verdict == "inconclusive" else "",
        "commit": " ".join(sorted({str(r.info.get("commit")) for r in needed(claim, groups)})),
    }


def seeds_text(claim: Claim, parts: Sequence[PartResult]) -> str:
    """The seeds that would settle a claim: one part that fails is enough, or all must hold."""
    pairs = [*zip(claim.parts, parts, strict=True)]
    open_parts = [result for _, result in pairs if result.is_open]
    failing = [result for part, result in pairs if is_outside(claim, part, result.effect)]
    if not all(result.noise.sd > 0 for result in failing or open_parts):
        return ""  # a diverged run: no standard deviation
    if failing:
        count = min(result.seeds_to_fail(len(parts)) for result in failing)
    else:
        count = max(result.seeds_to_hold(len(open_parts)) for result in open_parts)
    return str(count) if count <= MOST_SEEDS else f"more than {MOST_SEEDS}"


def is_outside(claim: Claim, part: Comparison, effect: float) -> bool:
    """Whether the effect itself, without its interval, contradicts the claim."""
    return verdict_of(part.relation, effect, effect, claim.margin_of(part)) == "fails"


def verdict_row(claim: Claim, groups: Groups) -> dict[str, str]:
    scales = {run.config.shown_scale for run in needed(claim, groups)}
    margins = dict.fromkeys(f"{claim.margin_of(part):g}" for part in claim.parts)
    return dict.fromkeys(COLUMNS, "") | {
        "id": claim.id,
        "place": claim.place,
        "claim": claim.text,
        "main": "yes" if claim.main else "",
        "ours": "yes" if claim.ours else "",
        "exploratory": "yes" if claim.exploratory else "",
        "verdict": "not run",
        "margin": ", ".join(margins),
        "scale": " and ".join(sorted(scales)),
        "why": claim.why,
    }


def numbers_text(claim: Claim, values: Iterable[str], names: Names) -> str:
    parts = zip(claim.parts, values, strict=True)
    return "; ".join(f"{comparison_name(claim, part, names)}: {value}" for part, value in parts)


def needed(claim: Claim, groups: Groups) -> list[Run]:
    return [run for name in groups if name in claim.runs() for run in groups[name]]


def judge_spec(spec: Spec, groups: Groups) -> list[dict[str, str]]:
    """Judge every claim whose runs are finished; the others are not run."""
    names = run_names(spec)
    return [
        judge_claim(claim, groups, names)
        if claim.runs() <= groups.keys() and all(run.done for run in needed(claim, groups))
        else verdict_row(claim, groups)
        for claim in spec.claims
    ]


def kept(row: dict[str, str], published: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """The row, or the published verdict from earlier runs, if these runs are not published yet."""
    old = published.get(row["id"])
    if row["verdict"] != "not run" or old is None or old["verdict"] == "not run":
        return row
    same = ("verdict", "numbers", "seeds", "scale", "commit")
    # The earlier rule had no margin.
    return row | {name: old[name] for name in same} | {"margin": "", "earlier": "yes"}


# -- all claims --------------------------------------------------------------------------------


def with_corrections(rows: Sequence[dict[str, str]], family: Family) -> list[dict[str, str]]:
    """The rows with p values for many claims: Holm over the main ones, Benjamini–Hochberg over all.

    Exact claims have no p value and are not counted; those that are not run yet are.
    """
    tested = [row for row in rows if row["p"]]
    main = [row for row in tested if row["main"]]
    wide = inference.benjamini_hochberg([float(row["p"]) for row in tested], family.all)
    strict = inference.holm([float(row["p"]) for row in main], family.main)
    p_bh = {row["id"]: f"{p:.6g}" for row, p in zip(tested, wide, strict=True)}
    p_holm = {row["id"]: f"{p:.6g}" for row, p in zip(main, strict, strict=True)}
    return [
        row | {"p_holm": p_holm.get(row["id"], ""), "p_bh": p_bh.get(row["id"], "")} for row in rows
    ]


class Family(NamedTuple):
    """How many claims with a p value there are, run or not: the main ones, and all."""

    main: int
    all: int


def family_of(specs: Iterable[Spec]) -> Family:
    claims = [c for spec in specs for c in spec.claims if not c.runs() <= {*spec.once}]
    return Family(sum(claim.main for claim in claims), len(claims))


def read_verdicts(path: Path) -> dict[str, dict[str, str]]:
    """Return id → row; columns that an older file does not have are empty."""
    return {name: dict.fromkeys(COLUMNS, "") | row for name, row in read_rows(path, "id").items()}


def write_verdicts(rows: Sequence[dict[str, str]], stem: Path, family: Family) -> None:
    """Write stem.csv, the record, and stem.md, the page to read."""
    rows = with_corrections(rows, family)
    table = pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False)
    write_if_changed(stem.with_suffix(".csv"), table.encode())
    write_if_changed(stem.with_suffix(".md"), claims_page(rows).encode())


def said(row: Mapping[str, str]) -> str:
    """The verdict, marked if a larger scale may change it, and with what else to know of it."""
    small = reduced_scale(row) if row["verdict"] != "not run" else None
    return row["verdict"] + (f" at {small} scale" if small else "") + marks(row)


def marks(row: Mapping[str, str]) -> str:
    return " (exploratory)" * bool(row["exploratory"]) + " †" * bool(row["earlier"])


def reduced_scale(row: Mapping[str, str]) -> str | None:
    """The smallest scale of its runs, if they are smaller than the paper's."""
    return next((scale for scale in REDUCED_SCALES if scale in row["scale"]), None)


def tally(rows: Iterable[Mapping[str, str]]) -> str:
    """Return counts such as 7 hold, 1 fails."""
    counts = Counter(row["verdict"] for row in rows)
    words = {"holds": ("holds", "hold"), "fails": ("fails", "fail")}
    return ", ".join(
        f"{counts[v]} {words.get(v, (v, v))[counts[v] > 1]}" for v in VERDICTS if counts[v]
    )


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """The tally of the paper's claims, and that of our own."""
    paper, ours = ([r for r in rows if bool(r["ours"]) == own] for own in (False, True))
    more = f"; {len(ours)} of our own: {tally(ours)}" if ours else ""
    return f"{len(paper)} claims of the paper: {tally(paper)}{more}"


def claims_page(rows: Sequence[dict[str, str]]) -> str:
    lines = [
        "# Which claims hold",
        "",
        "Generated; do not edit. Each claim is judged from recorded runs: the mean difference",
        "over the seeds, its 95 % confidence interval in brackets (none for a single exact",
        "value), and the verdict. *holds*: all of the interval is on the claimed side of the",
        "margin; *fails*: none of it is; *inconclusive*: a part of it is. *detectable*: the",
        "distance from the margin that this part alone would have shown in at least 80 % of",
        "such experiments. *p*: of the verdict; *Holm*: corrected for the number of main",
        "claims; *BH*: for the number of all claims, run or not. *exploratory*: worded or",
        "bounded after runs had been seen. *ours*: not in the paper. See docs/statistics.md.",
        "†: by an earlier rule, from earlier runs of which not all have records; its new runs,",
        "on fresh seeds, are not published yet.",
        "",
        f"**{summary(rows)}.** {robust(rows)}",
        "",
    ]
    return "\n".join([*lines, markdown_table(pd.DataFrame(map(cells, rows)))]) + "\n"


def robust(rows: Sequence[Mapping[str, str]]) -> str:
    """How many verdicts stay after the corrections."""
    words = []
    for column, name in (("p_holm", "main verdicts, Holm"), ("p_bh", "verdicts, BH")):
        definite = [row for row in rows if row[column] and row["verdict"] != "inconclusive"]
        kept = sum(float(row[column]) <= ALPHA for row in definite)
        words.append(f"{kept} of {len(definite)} {name}")
    return f"At the 5 % level after correction: {'; '.join(words)}."


def p_text(value: str) -> str:
    """Two digits."""
    return value and ("<" if float(value) <= SMALLEST_P else "") + f"{float(value):.2g}"


def cells(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row of the page."""
    more = f" ({row['seeds_needed']} needed)" if row["seeds_needed"] else ""
    return {
        "id": row["id"],
        "place": row["place"] + " (ours)" * bool(row["ours"]),
        "claim": row["claim"] + (f" *({row['why']})*" if row["why"] else ""),
        "verdict": f"**{said(row)}**",
        "numbers": row["numbers"].replace("; ", "<br>"),
        "margin": row["margin"],
        "p": p_text(row["p"]),
        "Holm": p_text(row["p_holm"]),
        "BH": p_text(row["p_bh"]),
        "seeds": row["seeds"] + more,
        "scale": row["scale"],
    }
