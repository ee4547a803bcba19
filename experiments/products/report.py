"""Writes the results page, report.html, and the README of the published results.

Both are made from the files of a results folder: nothing is trained or judged, and no run is read.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
from PIL import Image

from experiments.products.claims import (
    VERDICTS,
    p_text,
    read_verdicts,
    reduced_scale,
    said,
    summary,
    tally,
)
from experiments.products.figures import crosses, prefix_of
from experiments.products.markdown import as_html, markdown_table
from experiments.products.schema import CurvesPanel, Spec
from experiments.products.specs import everything, load_spec
from experiments.products.style import label_of, looks_of
from experiments.records import index
from experiments.records.estimate import rough_duration
from experiments.records.files import write_text

VERDICT_MARKS = {"holds": "✓", "fails": "✗", "inconclusive": "~", "not run": "–"}
MAX_POINTS = 300  # of a curve on the page; the csv has all of them
HEADINGS = {"figure": "Figures", "table": "Tables", "claim": "Theory and surprises"}
CsvRow = dict[str, str]
YOURS, PUBLISHED, BOTH = "yours", "published", "yours and published"  # origin of a result


@dataclass(frozen=True)
class Product:
    """A figure, a table or a set of claims, with its files, verdicts and runs."""

    kind: str
    number: str
    results: Path
    verdicts: dict[str, CsvRow]
    index: dict[str, CsvRow]
    suffix: str = ""  # of its files: -smoke
    place_origin: str = ""

    @cached_property
    def spec(self) -> Spec:
        return load_spec(self.kind, self.number)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def label(self) -> str:
        """Such as Figure 3."""
        return self.number.capitalize() if self.kind == "claim" else self.spec.title.split(". ")[0]

    @property
    def subject(self) -> str:
        return self.spec.title.split(". ", 1)[-1]

    @property
    def command(self) -> str:
        if self.kind == "claim":
            return f"make {self.number}"
        return f"make {self.kind}-{self.number.lstrip('0')}"

    @property
    def claims(self) -> list[CsvRow]:
        return [self.verdicts[c.id] for c in self.spec.claims if c.id in self.verdicts]

    @property
    def runs(self) -> list[CsvRow]:
        return [row for row in self.index.values() if self.name in row["serves"].split()]

    @property
    def made(self) -> list[CsvRow]:
        """The runs with a time in the index; a few were published without."""
        return [row for row in self.runs if row["seconds"]]

    @property
    def picture(self) -> Path | None:
        path = self.results / "figures" / f"{self.name}{self.suffix}.png"
        return path if path.exists() else None

    @property
    def page(self) -> Path | None:
        path = self.results / "tables" / f"{self.name}{self.suffix}.md"
        return path if path.exists() else None

    @property
    def origin(self) -> str:
        """That of its files; without files, or if they may be of both, that of its runs."""
        if (self.picture or self.page) and self.place_origin != BOTH:
            return self.place_origin
        found = {row["origin"] for row in self.runs or self.claims}
        return found.pop() if len(found) == 1 else BOTH

    @property
    def is_made(self) -> bool:
        return bool(self.picture or self.page or self.made)

    @property
    def scale(self) -> str:
        return " and ".join(sorted({row["scale"] for row in self.runs or self.claims}))

    @property
    def seconds(self) -> float | None:
        """Training time of all its runs, if all of them are in the index."""
        if not self.runs or len(self.made) < len(self.runs):
            return None
        return sum(float(row["seconds"]) for row in self.made)

    @property
    def time(self) -> str:
        """The training time of all runs, if it is known."""
        return "" if self.seconds is None else rough_duration(self.seconds)

    @property
    def records(self) -> str:
        """How many of its runs have records."""
        if not self.runs:
            return ""
        kept = sum(row["records"] == "yes" for row in self.runs)
        return {0: "no", len(self.runs): "yes"}.get(kept, f"{kept} of {len(self.runs)} runs")

    @property
    def seeds(self) -> int:
        """The seeds of a setting: an earlier result may have fewer than conf/ asks for."""
        settings = Counter(row["run"].rpartition("/")[0] for row in self.runs)
        return min(max(settings.values(), default=self.spec.seeds), self.spec.seeds)

    @property
    def verdict(self) -> str:
        earlier = sum(bool(row["earlier"]) for row in self.claims)
        return tally(self.claims) + (f" (†: {earlier})" if earlier else "")

    @property
    def seen(self) -> str:
        """What we see: the claims that do not hold."""
        if not self.is_made:
            return "Not run yet."
        if not self.claims:
            return "No claim to judge; the page has the numbers."
        hold = sum(row["verdict"] == "holds" for row in self.claims)
        if hold == len(self.claims):
            return "It holds." if hold == 1 else f"All {hold} claims hold."
        missed = [row for row in self.claims if row["verdict"] != "holds"]
        words = [f"{row['verdict'].capitalize()}: {row['claim']} ({row['id']})" for row in missed]
        of_many = [f"{hold} of {len(self.claims)} claims hold."] if len(self.claims) > 1 else []
        return " ".join([*of_many, *words])


class Place(NamedTuple):
    """A folder with results."""

    folder: Path
    suffix: str = ""  # of its files: -smoke
    origin: str = PUBLISHED

    def verdicts(self) -> dict[str, CsvRow]:
        return read_verdicts(self.folder / f"claims{self.suffix}.csv")

    def runs(self) -> dict[str, CsvRow]:
        return index.read_index(self.folder / f"runs{self.suffix}.csv")


def write_report(places: Sequence[Place], page: Path) -> None:
    """Write the results page of these places."""
    write_text(page, render(load_products(*places)))


def load_products(*places: Place) -> list[Product]:
    """Return every product, from the first place that has it."""
    verdicts, rows = dict[str, CsvRow](), dict[str, CsvRow]()
    for place in reversed(places):
        found = with_origin(place, place.verdicts(), verdicts, "commit").items()
        verdicts |= {i: row for i, row in found if row["verdict"] != "not run" or i not in verdicts}
        rows |= with_origin(place, place.runs(), rows, "started")
    products = []
    for kind, name in everything():
        each = [Product(kind, name, folder, verdicts, rows, *rest) for folder, *rest in places]
        products.append(next((p for p in each if p.picture or p.page), each[0]))
    return products


def with_origin(
    place: Place, rows: dict[str, CsvRow], known: dict[str, CsvRow], key: str
) -> dict[str, CsvRow]:
    """Mark the rows of a place; if it has rows of both origins, `key` recognizes the known ones."""

    def origin(name: str, row: CsvRow) -> str:
        same = name in known and known[name][key] == row[key]
        return known[name]["origin"] if same else YOURS

    return {
        name: row | {"origin": origin(name, row) if place.origin == BOTH else place.origin}
        for name, row in rows.items()
    }


# -- results/published/README.md ---------------------------------------------------------------


def overview(products: Sequence[Product]) -> str:
    claims = [row for product in products for row in product.claims]
    lines = [
        "# Results",
        "",
        "Generated by `make publish`; do not edit. [claims.md](claims.md) has every claim with its",
        "numbers, [runs.csv](runs.csv) every run, [records](records) the metrics of every run.",
        "`make report RECORDS=published` writes one page with all results, with zoomable curves",
        "and filters for claims and runs.",
        "",
        f"**{summary(claims)}.**",
        "",
        "The column *what we see* lists the claims that do not hold. The time is the training time",
        "of all runs. †: the number of claims that were judged by an earlier rule, from earlier",
        "runs; their new runs are not published yet.",
    ]
    for kind, heading in HEADINGS.items():
        if rows := [overview_row(product) for product in products if product.kind == kind]:
            lines += ["", f"## {heading}", "", markdown_table(pd.DataFrame(rows))]
    return "\n".join(lines) + "\n"


def overview_row(product: Product) -> CsvRow:
    return {
        "": link(product),
        "the paper": product.spec.shows or product.subject,
        "what we see": product.seen,
        "scale": product.scale,
        "seeds": str(product.seeds),
        "time": product.time,
        "command": f"`{product.command}`",
        "verdict": product.verdict,
        "records": product.records,
    }


def link(product: Product) -> str:
    target = product.page or product.picture
    if target is None:
        return product.label
    return f"[{product.label}]({target.relative_to(product.results).as_posix()})"


# -- results/report.html -----------------------------------------------------------------------


def render(products: Sequence[Product]) -> str:
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"embedded": embedded, "page_as_html": page_as_html}
    claims = [row for product in products for row in product.claims]
    owner = {row["id"]: product for product in products for row in product.claims}
    main = main_claims(products)
    rows = list(products[0].index.values()) if products else []
    origins = {p.origin for p in products if p.is_made} | {row["origin"] for row in rows}
    columns = [*index.INDEX_COLUMNS, "origin"]
    data = {
        "panels": {p.name: panels_of(p) for p in products},
        "columns": columns,
        "runs": [[row[column] for column in columns] for row in rows],
    }
    filters = ("experiment", "optimizer", "status", *(["origin"] if len(origins) > 1 else []))
    return environment.get_template("report.html").render(
        products=products,
        headings=HEADINGS,
        title=headline(claims),
        answer=answer(claims),
        main=main,
        hero=next((owner[row["id"]] for row in main if owner[row["id"]].picture), None),
        origins=origins,
        origin_text=ORIGIN_TEXTS.get("".join(origins), ORIGIN_TEXTS[BOTH]) if origins else "",
        claims=claims,
        paper=paper_claims(claims),
        counts=Counter(row["verdict"] for row in paper_claims(claims)),
        verdicts=VERDICTS,
        marks=VERDICT_MARKS,
        said=said,
        p_text=p_text,
        owner=owner,
        distinct_settings=distinct_settings,
        distinct=distinct,
        rows=rows,
        choices={key: sorted({row[key] for row in rows}) for key in filters},
        most=MAX_POINTS,
        data=embeddable(data),
    )


ORIGIN_TEXTS = {
    YOURS: "All results on this page are from your runs.",
    PUBLISHED: "All results on this page are published ones.",
    BOTH: "Results from your runs are marked as yours; all others are published ones.",
}
VERBS = {
    "fails": ("fails", "fail"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "not run": ("has not been run", "have not been run"),
}


def headline(claims: Sequence[CsvRow]) -> str:
    if not is_judged(claims):
        return "No claim has been judged yet"
    paper = paper_claims(claims)
    count = sum(row["verdict"] == "holds" for row in paper)
    return f"{count} of the paper's {len(paper)} claims {'holds' if count == 1 else 'hold'}"


def paper_claims(claims: Iterable[CsvRow]) -> list[CsvRow]:
    return [row for row in claims if not row["ours"]]


def is_judged(claims: Iterable[CsvRow]) -> bool:
    return any(row["verdict"] != "not run" for row in claims)


def answer(claims: Sequence[CsvRow]) -> str:
    """What the headline does not say: how many claims do not hold, at which scale, which rule."""
    if not is_judged(claims):
        return "Run make figure-1 to train, draw and judge the first figure."
    paper = paper_claims(claims)
    counts = Counter(row["verdict"] for row in paper)
    parts = [f"{counts[v]} {verb[counts[v] > 1]}" for v, verb in VERBS.items() if counts[v]]
    judged = [row for row in claims if row["verdict"] != "not run"]
    small = Counter(scale for row in judged if (scale := reduced_scale(row)))
    earlier = sum(bool(row["earlier"]) for row in judged)
    notes = [f"{', '.join(parts)}."] if parts else []
    if ours := [row for row in claims if row["ours"]]:
        count = sum(row["verdict"] == "holds" for row in ours)
        notes.append(f"Of {len(ours)} claims of our own, {count} hold{'s' * (count == 1)}.")
    if small:
        size = "small networks and little data" if "laptop" in small else "smaller networks"
        notes.append(
            f"{small.total()} of the {len(judged)} verdicts are for "
            f"{' or '.join(sorted(small))} scale, with {size}; they may differ at paper scale."
        )
    if earlier:
        notes.append(f"†: {earlier} are by an earlier rule; their new runs are not published yet.")
    return " ".join(notes)


def main_claims(products: Iterable[Product]) -> list[CsvRow]:
    """The verdicts on the main claims of the paper; `main` in conf/ marks them."""
    main = {claim.id for product in products for claim in product.spec.claims if claim.main}
    rows = [row for product in products for row in product.claims if row["id"] in main]
    return sorted(rows, key=lambda row: VERDICTS.index(row["verdict"]))


def embedded(path: Path) -> str:
    """Return an image as a data URL; WebP is a third as large as PNG."""
    with Image.open(path) as image:
        smaller = image.convert("RGB")
    smaller.thumbnail((1400, 4000))
    file = io.BytesIO()
    smaller.save(file, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def embeddable(data: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def distinct_settings(product: Product) -> list[CsvRow]:
    """Return the distinct hyperparameters of a product."""
    seen = {(r["experiment"], r["optimizer"], r["settings"]): r for r in product.runs}
    return [row | {"label": label_of(row["optimizer"])} for row in seen.values()]


def distinct(rows: Iterable[CsvRow], column: str) -> str:
    return ", ".join(sorted({row[column] for row in rows if row[column]}))


def panels_of(product: Product) -> list[dict[str, Any]]:
    """Return the panels of a figure that have curves; others, such as heat maps, stay images."""
    curves = [panel for panel in product.spec.panels if isinstance(panel, CurvesPanel)]
    if product.picture is None or not curves:
        return []
    table = pd.read_csv(product.picture.with_suffix(".csv"))
    return [panel_of(product.spec, panel, table) for panel in curves]


def panel_of(spec: Spec, panel: CurvesPanel, table: pd.DataFrame) -> dict[str, Any]:
    table = table[table["panel"] == panel.letter]
    configs = {name: run.config for name, run in spec.settings(()).items()}
    drawn = [(configs[name].optimizer_name, configs[name].optimizer) for name in panel.runs]
    prefix = prefix_of(panel.smooth, panel.orders)
    if f"{prefix}mean" not in table:  # the csv is older than `smooth` in conf/
        prefix = prefix.replace("smooth_", "")
    curves = []
    for label, (optimizer, _), look in zip(
        panel.runs.values(), drawn, looks_of(drawn), strict=True
    ):
        label = label or label_of(optimizer)
        part = table[table["curve"] == label]
        if part.empty:
            continue  # the csv is older than this curve in conf/
        about = {"label": label, "color": look.color, "dashes": look.dashes}
        curves.append(about | curve_points(part, prefix, panel.axes.xscale == "log"))
    axes = panel.axes.model_dump(exclude_unset=True)
    return {"title": panel.title, "orders": panel.orders, "curves": curves, **axes}


def curve_points(part: pd.DataFrame, prefix: str, is_log: bool) -> dict[str, Any]:
    """Return at most MAX_POINTS points, evenly spread on the axis, with the first and the last."""
    space = np.geomspace if is_log else np.linspace
    spread = space(1, len(part), MAX_POINTS)
    thin = part.iloc[np.unique(spread.round().astype(int)) - 1]
    crossed = [
        (step, value) for step, vs in crosses(part.set_index("step")) for value in map(rounded, vs)
    ]
    return {
        "x": [int(step) for step in thin["step"]],
        "y": [rounded(value) for value in thin[f"{prefix}mean"]],
        "sd": [rounded(value) for value in thin[f"{prefix}sd"]],
        "crosses": crossed,
    }


def rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def page_as_html(path: Path) -> str:
    """Return a Markdown page of this project as HTML, without its title in the first line."""
    return as_html(path.read_text().partition("\n")[2])
