"""Fills results into README.md and docs/reproduction.md, and times into the files of conf/.

<!-- figure-01 -->9 hold<!-- /figure-01 --> is replaced by the verdicts of Figure 1. In the first
line of a spec, "about 2 min on two cores" is replaced by the time of its runs; in that of an
experiment, what follows the command by its time and its result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import pandas as pd

from experiments.config.compose import compose
from experiments.config.paths import CONF, ROOT
from experiments.products.claims import marks, reduced_scale, summary
from experiments.products.markdown import markdown_table
from experiments.products.report import CsvRow, Product
from experiments.products.specs import spec_path
from experiments.records.estimate import rough_duration
from experiments.records.files import write_if_changed
from experiments.records.run import Run

PAGES = (ROOT / "README.md", ROOT / "docs" / "reproduction.md")
BLOCK = re.compile(r"<!-- ([\w-]+) -->(\n?).*?\n?<!-- /\1 -->", re.DOTALL)
TIME = re.compile(r"about [^)\n]* on two cores")
ADASHIFT = ("AdaShift", "max-AdaShift")
EXAMPLE = re.compile(r"(?m)^(# python run\.py (experiment=\S+ optimizer=\S+)     )\(.*\)$")


def fill_pages(products: Sequence[Product], pages: Sequence[Path] = PAGES) -> None:
    blocks = results(products)
    for page in pages:
        write_if_changed(page, filled(page.read_text(), blocks).encode())


def fill_times(products: Sequence[Product]) -> None:
    """Write how long the runs of each product took to its spec, if all of them are published."""
    for product in products:
        if product.seconds is not None and product.records == "yes":
            path = spec_path(product.kind, product.number)
            write_if_changed(path, timed(path.read_text(), product.seconds).encode())


def fill_examples(index: Mapping[str, CsvRow]) -> None:
    """Write time and result of the first command of each experiment, if its runs are published."""
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        write_if_changed(path, with_outcome(path.read_text(), index).encode())


def with_outcome(experiment: str, index: Mapping[str, CsvRow]) -> str:
    """The file of an experiment with the median time and the mean result of its first command."""
    if not (command := EXAMPLE.search(experiment)):
        return experiment
    words = command[2].split()
    config = compose([*words, f"scale={compose(words).cpu_scale}"])
    setting = f"{config.experiment}/{Run(config).setting}/"
    rows = [row for name, row in index.items() if name.startswith(setting) and row["seconds"]]
    if not rows:
        return experiment
    cores = " on one core" if config.threads == 1 else ""
    said = [rough_duration(median(float(row["seconds"]) for row in rows)) + cores]
    for name in config.metrics[:1] if config.best else ():
        found = [re.search(rf"(?:^| ){re.escape(name)}=(\S+)", row["metrics"]) for row in rows]
        said += [f"{name} {fmean(float(x[1]) for x in found if x):.3g}"] if all(found) else []
    return EXAMPLE.sub(rf"\1({config.scale} scale: {', '.join(said)})", experiment, count=1)


def timed(spec: str, seconds: float) -> str:
    """The spec with the time of its runs, two at once."""
    return TIME.sub(f"about {rough_duration(seconds / 2)} on two cores", spec, count=1)


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
        "tally": summary(claims),
        "effort": effort(products),
        "rates": markdown_table(pd.DataFrame(rates(products))),
        "holds": by_product(products, "holds"),
        "fails": claim_table(claims, "fails"),
        "inconclusive": claim_table(claims, "inconclusive"),
    }


def effort(products: Sequence[Product]) -> str:
    """How many runs there are and how long they were trained."""
    rows = {row["run"]: row for product in products for row in product.runs}.values()
    timed = [float(row["seconds"]) for row in rows if row["seconds"]]
    machines = sorted({row["machine"] for row in rows if row["machine"]})
    earlier = len(rows) - len(timed)
    unknown = f"; {earlier} earlier runs have no time, commit and machine on record" * bool(earlier)
    return (
        f"{len(timed):,} runs, {sum(timed) / 3600:.1f} hours of training on a CPU "
        f"({'; '.join(machines)}){unknown}"
    )


def rates(products: Sequence[Product]) -> Iterator[dict[str, str]]:
    """A row for each problem: the paper's learning rates and the best ones of the search."""
    for product in products:
        if product.kind == "table" and product.spec.rule and product.number.isdigit():
            page = product.results / f"tables/table-{product.number}"
            table = pd.read_csv(page.with_suffix(".csv"))
            link = f"[{product.label}]({page.relative_to(ROOT).as_posix()}.md)"
            subject = product.subject.partition(", the paper's settings")[0]
            table[["problem", "_", "name"]] = [x.rpartition(": ") for x in table["optimizer"]]
            for problem, rows in table.groupby("problem", sort=False):
                adam, adashift = rows[rows["name"] == "Adam"], rows[rows["name"].isin(ADASHIFT)]
                usual = adashift[adashift["paper"]].iloc[0]
                yield {
                    "problem": f"{link}: {problem or subject}",
                    "Adam, paper": rate_of(adam, "paper"),
                    "AdaShift, paper": rate_of(adashift, "paper"),
                    "Adam, best": rate_of(adam, "best"),
                    "AdaShift, best": rate_of(adashift, "best"),
                    "paper's betas and n": f"{usual['betas']}, {usual['n']:g}",
                }


def rate_of(rows: pd.DataFrame, column: str) -> str:
    """The learning rate of the marked row."""
    row = rows[rows[column]].iloc[0]
    return f"{row['lr']:g}" + (" (edge of the grid)" if row["edge"] and column == "best" else "")


def by_product(products: Sequence[Product], verdict: str) -> str:
    """A line for each product with such claims."""
    cells = [
        {
            "": product.label,
            "claims": ", ".join(
                row["id"] + marks(row) for row in product.claims if row["verdict"] == verdict
            ),
            "scale": product.scale,
        }
        for product in products
    ]
    return markdown_table(pd.DataFrame([cell for cell in cells if cell["claims"]]))


def claim_table(claims: Sequence[CsvRow], verdict: str) -> str:
    return markdown_table(pd.DataFrame([cells(r) for r in claims if r["verdict"] == verdict]))


def cells(row: CsvRow) -> dict[str, str]:
    shown = {
        "id": row["id"] + marks(row),
        "claim": row["claim"],
        "numbers": row["numbers"].replace("; ", "<br>"),
        "margin": row["margin"],
        "seeds": row["seeds"],
        "scale": reduced_scale(row) or row["scale"],
    }
    return shown | ({"seeds needed": row["seeds_needed"]} if row["verdict"] != "fails" else {})
