"""The paper's figures, tables and claims.

    python -m experiments figure 1      train the runs that are missing, draw, judge the claims
    python -m experiments table 1       the same for a table
    python -m experiments theory        the same for the lemmas and theorems
    python -m experiments surprises     the same for what explains our surprises
    python -m experiments claims        theory, then judge every claim from the runs at hand
    python -m experiments status        what is there, what failed and why, the time that is left
    python -m experiments status figure-4 table-5    … of these, with commands for what is missing
    python -m experiments --extra lion,adamw figure 3      with curves of other optimizers
    python -m experiments redraw        after a change of looks: every picture from its csv
    python -m experiments report        results/README.md and results/report.html from what is there
    python -m experiments dashboard     a W&B report with a section for every figure

`all` instead of a number makes everything that is built. Words of the form key=value go to every
run as behind run.py: scale=smoke tracking=off.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from experiments.claims import judge_spec, read_verdicts, write_verdicts
from experiments.config import ConfigError, compose
from experiments.record import account, locked, publish_figure
from experiments.runs import (
    Groups,
    Spec,
    all_runs,
    asked_for,
    everything,
    load_spec,
    numbers,
    refuse_other_runs,
    specs,
)
from experiments.stopping import ASKED

PREFIXES = "TFCIJKLS"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=sorted(COMMANDS), metavar="what")
    parser.add_argument("words", nargs="*", metavar="number|all|key=value")
    parser.add_argument("--extra", metavar="optimizer,…", help="more curves, for figures alone")
    parsed = parser.parse_args(arguments)
    overrides = [word for word in parsed.words if "=" in word]
    names = [word for word in parsed.words if "=" not in word]
    refuse_other_runs(overrides)
    if parsed.extra and parsed.what != "figure":
        raise ConfigError(f"--extra {parsed.extra}: only a figure can have more curves")
    if parsed.extra:
        for name in numbers("figure", names):
            make_figure_with(parsed.extra.split(","), name, overrides)
    else:
        COMMANDS[parsed.what](names, overrides)


def figure(names: Sequence[str], overrides: Sequence[str]) -> None:
    for name in numbers("figure", names):
        make_figure(name, overrides)


def make_figure(name: str, overrides: Sequence[str]) -> None:
    spec = load_spec("figure", name)
    groups = spec.expand(overrides)
    trained = train_missing(groups, f"figure {name}")
    from experiments.figures import draw, up_to_date

    stem = place(groups, f"figures/figure-{name}")
    count = sum(map(len, groups.values()))
    if not trained and up_to_date(spec, groups, stem):
        print(f"{stem}.png is up to date: {count} finished runs, nothing was recomputed")
        return
    draw(spec, groups, stem)
    config = next(iter(groups.values()))[0].config
    publish_figure(config.tracking, config.results, f"figure-{name}", stem.with_suffix(".png"))
    print(f"{stem}.png, .pdf and .csv drawn from {count} runs")
    judge(spec, groups)
    keep_index("figure", name, groups)


def make_figure_with(extra: Sequence[str], name: str, overrides: Sequence[str]) -> None:
    """A copy of a figure with curves of other optimizers; the usual ones come from its csv."""
    usual = load_spec("figure", name)
    spec = usual.with_extra(extra)
    groups = spec.expand(overrides)
    if spec.runs == usual.runs:
        raise ConfigError(f"figure {name} has no panel of curves, so there is no place for another")
    drawn = place(groups, f"figures/figure-{name}").with_suffix(".csv")
    wanted = {n: runs for n, runs in groups.items() if n not in usual.runs or not drawn.exists()}
    train_missing(wanted, f"figure {name} with {', '.join(extra)}")
    from experiments.figures import draw, read_plotted

    stem = place(groups, f"figures/figure-{name}-with-{'-'.join(extra)}")
    draw(spec, groups, stem, read_plotted(drawn), source="with others")
    print(f"{stem}.png, .pdf and .csv drawn")


def table(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.tables import write_table

    for name in numbers("table", names):
        spec = load_spec("table", name)
        groups = spec.expand(overrides)
        train_missing(groups, f"table {name}")
        stem = place(groups, f"tables/table-{name}")
        if spec.search:
            from experiments.grids import write_grid  # with a picture

            write_grid(spec, groups, stem, place(groups, f"figures/table-{name}"))
        else:
            write_table(spec, groups, stem)
        print(stem.with_suffix(".md").read_text())
        judge(spec, groups)
        keep_index("table", name, groups)


def claim_file(name: str, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Train the runs behind claims that belong to no figure, and judge them."""
    spec = load_spec("claim", name)
    groups = spec.expand(overrides)
    train_missing(groups, name)
    judge(spec, groups)
    keep_index("claim", name, groups)


def claims(names: Sequence[str], overrides: Sequence[str]) -> None:
    train_missing(load_spec("claim", "theory").expand(overrides), "theory")
    for kind in ("claim", "figure", "table"):
        for path in specs(kind):
            spec = load_spec(kind, path.stem)
            groups = spec.expand(overrides)
            judge(spec, groups)
            keep_index(kind, path.stem, groups)


def redraw(names: Sequence[str], overrides: Sequence[str]) -> None:
    """Colours and dashes can change where the runs are not: the csv holds what is plotted."""
    from experiments import figures, grids

    for kind in ("figure", "table"):
        for path in specs(kind):
            spec = load_spec(kind, path.stem)
            groups = spec.expand(overrides)
            picture = place(groups, f"figures/{kind}-{path.stem}")
            if not picture.with_suffix(".csv").exists():
                continue
            if spec.search:
                rows = place(groups, f"tables/{kind}-{path.stem}")
                drawn = grids.redraw_grid(spec, groups, rows, picture)
            else:
                drawn = figures.redraw(spec, groups, picture)
            print(f"{picture}.png {'drawn again' if drawn else 'is up to date'}")


def status(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.status import lines_of, strays

    known = set[Path]()
    for kind, name in asked_for(names) if names else everything():
        runs = all_runs(load_spec(kind, name).expand(overrides))
        known |= {run.folder for run in runs}
        print("\n".join(lines_of(f"{kind} {name}", runs, full=bool(names))), flush=True)
    for line in [] if names else strays(compose(overrides).results, known):
        print(line)


def report(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.report import write_report

    for path in write_report(compose(overrides).results):
        print(path)


def dashboard(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.dashboard import publish

    tracking = compose(overrides).tracking
    entity = account(tracking)
    figures = {f"figure-{path.stem}": load_spec("figure", path.stem) for path in specs("figure")}
    print(publish(figures, entity, tracking.project))


def train_missing(groups: Groups, title: str) -> bool:
    """Train whatever runs are not there; return whether there were any."""
    runs = all_runs(groups)
    if all(run.done and not run.config.force for run in runs):
        return False
    from experiments.execute import execute_all  # torch is needed for this alone

    execute_all(runs, title)
    return True


def place(groups: Groups, name: str) -> Path:
    """Where a product goes; one of a scale that was asked for must not replace the usual one."""
    config = next(iter(groups.values()))[0].config
    usual = config.scale in ("paper", config.cpu_scale)
    return config.results / (name if usual else f"{name}-{config.scale}")


def keep_index(kind: str, name: str, groups: Groups) -> None:
    """Bring runs.csv up to date for one product."""
    from experiments import index

    made = {"figure": f"figures/figure-{name}.png", "table": f"tables/table-{name}.md"}
    is_made = kind in made and place(groups, made[kind]).exists()
    path = place(groups, "runs").with_suffix(".csv")
    with one_at_a_time(groups):
        index.update(path, f"{kind}-{name}", all_runs(groups), is_made)


def one_at_a_time(groups: Groups) -> AbstractContextManager[bool]:
    """runs.csv and claims.csv are read, changed and written by one process at a time."""
    return locked(next(iter(groups.values()))[0].config.results / "runs", lambda line: None)


def judge(spec: Spec, groups: Groups) -> None:
    """Judge the claims of a spec, print them, and bring claims.csv and claims.md up to date."""
    stem = place(groups, "claims")
    with one_at_a_time(groups):
        known = read_verdicts(stem.with_suffix(".csv"))
        rows = judge_spec(spec, groups, known)
        known |= {row["id"]: row for row in rows}
        if rows:
            write_verdicts(in_order(known), stem)
    for row in rows:
        print(f"{row['id']:12} {row['verdict']:12} {row['claim']}")
        for number in filter(None, row["numbers"].split("; ")):
            print(f"{'':25} {number}")


def in_order(known: Mapping[str, dict[str, str]]) -> list[dict[str, str]]:
    """The claims that conf/ has now; what it has no longer is dropped."""
    current = [
        claim["id"]
        for kind in ("claim", "figure", "table")
        for path in specs(kind)
        for claim in load_spec(kind, path.stem).claims
    ]
    return [known[i] for i in sorted(current, key=natural) if i in known]


def natural(name: str) -> list[str | int]:
    """T first, as the theory comes first; F2 before F10."""
    parts = re.split(r"(\d+)", name)
    return [PREFIXES.find(parts[0]), *(int(p) if p.isdigit() else p for p in parts[1:])]


COMMANDS: dict[str, Callable[[Sequence[str], Sequence[str]], None]] = {
    "figure": figure,
    "table": table,
    "theory": partial(claim_file, "theory"),
    "surprises": partial(claim_file, "surprises"),
    "claims": claims,
    "status": status,
    "redraw": redraw,
    "report": report,
    "dashboard": dashboard,
}

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # `… status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(128 + (ASKED.by or signal.SIGINT))
