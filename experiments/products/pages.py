"""Fills the results into README.md and docs/reproduction.md, between comments that name them.

<!-- figure-01 -->9 hold<!-- /figure-01 --> is replaced by the verdicts of Figure 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.config.paths import ROOT
from experiments.products.claims import reduced_scale
from experiments.products.markdown import markdown_table
from experiments.products.report import CsvRow, Product, tally
from experiments.records.files import write_if_changed

PAGES = (ROOT / "README.md", ROOT / "docs" / "reproduction.md")
BLOCK = re.compile(r"<!-- ([\w-]+) -->(\n?).*?\n?<!-- /\1 -->", re.DOTALL)


def fill_pages(products: Sequence[Product], pages: Sequence[Path] = PAGES) -> None:
    blocks = results(products)
    for page in pages:
        write_if_changed(page, filled(page.read_text(), blocks).encode())


def filled(text: str, blocks: Mapping[str, str]) -> str:
    """The text with every named block replaced; KeyError for an unknown name."""

    def block(found: re.Match[str]) -> str:
        name, line_end = found.groups()
        return f"<!-- {name} -->{line_end}{blocks[name]}{line_end}<!-- /{name} -->"

    return BLOCK.sub(block, text)


def results(products: Sequence[Product]) -> dict[str, str]:
    """Name → text: the verdicts of every product, and lists over all of them."""
    claims = [row for product in products for row in product.claims]
    return {
        **{product.name: product.verdict for product in products},
        "tally": f"{len(claims)} claims: {tally(claims)}",
        "effort": effort(products),
        "holds": by_product(products, "holds"),
        "fails": claim_table(claims, "fails"),
        "inconclusive": claim_table(claims, "inconclusive"),
    }


def effort(products: Sequence[Product]) -> str:
    """How many runs there are and how long they were trained."""
    rows = {row["run"]: row for product in products for row in product.runs}.values()
    timed = [float(row["seconds"]) for row in rows if row["seconds"]]
    machines = sorted({row["machine"] for row in rows if row["machine"]})
    return (
        f"{len(rows):,} runs, {sum(timed) / 3600:.1f} hours of training on a CPU "
        f"({'; '.join(machines)})"
    )


def by_product(products: Sequence[Product], verdict: str) -> str:
    """A line for each product with such claims."""
    cells = [
        {
            "": product.label,
            "claims": ", ".join(r["id"] for r in product.claims if r["verdict"] == verdict),
            "scale": product.scale,
        }
        for product in products
    ]
    return markdown_table(pd.DataFrame([cell for cell in cells if cell["claims"]]))


def claim_table(claims: Sequence[CsvRow], verdict: str) -> str:
    return markdown_table(pd.DataFrame([cells(r) for r in claims if r["verdict"] == verdict]))


def cells(row: CsvRow) -> dict[str, str]:
    marks = " (exploratory)" * bool(row["exploratory"]) + " †" * bool(row["earlier"])
    shown = {
        "id": row["id"] + marks,
        "claim": row["claim"],
        "numbers": row["numbers"].replace("; ", "<br>"),
        "margin": row["margin"],
        "seeds": row["seeds"],
        "scale": reduced_scale(row) or row["scale"],
    }
    return shown | ({"seeds needed": row["seeds_needed"]} if row["verdict"] != "fails" else {})
