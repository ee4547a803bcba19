"""The paper's figures, tables and claims.

    python -m experiments figure 1      train the missing runs, draw, judge the claims, compare
    python -m experiments table 1       the same for a table
    python -m experiments theory        the same for the lemmas and theorems
    python -m experiments surprises     the same for results that differ from the paper
    python -m experiments claims        theory, then judge every claim whose runs exist
    python -m experiments status        finished, failed and missing runs, and the time left
    python -m experiments status figure-4 table-5    … of these, with commands for what is missing
    python -m experiments plan scale=paper      runs, operations, memory and hours of everything
    python -m experiments --extra lion,adamw figure 3      with curves of other optimizers
    python -m experiments show results/runs/mnist_lr/adam-f577cce9      curves in the terminal
    python -m experiments show experiment=mnist_lr optimizer=adam,adashift --out curves.png
    python -m experiments report        one page with all results, report.html
    python -m experiments verify        train a published run of every experiment again and compare
    python -m experiments publish       add your runs to the published records and results
    python -m experiments dashboard     a W&B report with a section for every figure

`all` instead of a number makes every figure or table. `show` takes folders of runs (the folder of a
setting has all its seeds), or the words of run.py that train them. For all others, words of the
form key=value go to every run as in run.py: scale=smoke tracking=off. records=published uses
published runs and never trains; records=all trains only what is neither yours nor published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from experiments.config.compose import compose
from experiments.config.errors import ConfigError, NotPublishedError, nearest
from experiments.config.paths import shown_path
from experiments.products.make import (
    groups_of,
    keep_index,
    make,
    make_figure_with,
    place,
    show,
    speed_suffix,
    train_missing,
    update_verdicts,
)
from experiments.products.show import show_curves
from experiments.products.specs import (
    all_specs,
    asked_for,
    everything,
    full_names,
    load_spec,
    refuse_other_runs,
    specs,
)
from experiments.records.run import Run, all_runs
from experiments.training.scheduler import FailedRunsError
from experiments.training.signals import closed_pipe, exit_interrupted
from experiments.training.torchrun import exit_with


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = refuse  # type: ignore[method-assign, assignment]
    parser.add_argument("what", metavar="what")
    parser.add_argument("words", nargs="*", metavar="number|all|folder|key=value")
    parser.add_argument("--extra", metavar="optimizer,…", help="more curves, for figures alone")
    parser.add_argument(
        "--metric", metavar="name,…", default="", help="what show draws; may have *"
    )
    parser.add_argument("--out", metavar="file", type=Path, help="of show: .png, .pdf or .csv")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.what not in (known := sorted([*COMMANDS, "show"])):
        near = nearest(parsed.what, known)
        raise ConfigError(f"{parsed.what} is unknown:{near} choose one of {', '.join(known)}")
    if parsed.what == "show":
        show_curves(parsed.words, listed(parsed.metric), parsed.out)
        return
    if parsed.metric or parsed.out:
        raise ConfigError(f"{parsed.what} takes neither --metric nor --out: only show does")
    overrides = [word for word in parsed.words if "=" in word]
    names = [word for word in parsed.words if "=" not in word]
    refuse_other_runs(overrides)
    if names and parsed.what not in TAKES_NAMES:
        raise ConfigError(f"{parsed.what} takes only key=value: drop {' '.join(names)}")
    if parsed.extra is None:
        COMMANDS[parsed.what](names, overrides)
    elif parsed.what != "figure" or "all" in names:
        raise ConfigError(
            f"--extra {parsed.extra} (EXTRA= of make) adds curves to one figure, as in make "
            "figure-3 EXTRA=lion: drop it"
        )
    else:
        extra = optimizers_in(parsed.extra)
        for name in full_names("figure", names):
            make_figure_with(extra, name, overrides)


def refuse(problem: str) -> NoReturn:
    raise ConfigError(f"{problem}; see python -m experiments --help")


def optimizers_in(extra: str) -> list[str]:
    """The names in the value of --extra."""
    names = listed(extra)
    if not names:
        raise ConfigError(
            "--extra (EXTRA= of make) is empty: expected files of conf/optimizer, as in lion,adamw"
        )
    return names


def listed(text: str) -> list[str]:
    """The names in a list with commas or spaces."""
    return text.replace(",", " ").split()


def product(kind: str, names: Sequence[str], overrides: Sequence[str]) -> None:
    failed, full = [], full_names(kind, names)
    all_specs()  # a mistake in one is reported before anything is trained
    for name in full:
        try:
            make(kind, name, overrides)
        except NotPublishedError as error:
            if "all" not in names:
                raise
            print(f"skipped {error}")
        except FailedRunsError as error:
            failed.append(str(error))
    if failed:
        raise ConfigError("; ".join(failed))


def claim_file(name: str, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Claims that belong to no figure."""
    make("claim", name, overrides)


def claims(names: Sequence[str], overrides: Sequence[str]) -> None:
    all_specs()  # a mistake in one is reported before anything is trained
    if compose(overrides).records != "published":
        train_missing(load_spec("claim", "theory").expand(overrides), "theory")
    for kind, name in everything():
        spec = load_spec(kind, name)
        groups = groups_of(spec, overrides)
        show(update_verdicts(spec, groups))
        keep_index(f"{kind}-{name}", groups)


def status(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.products.status import status_lines, strays

    known = set[Path]()
    for kind, name in asked_for(names) if names else everything():
        runs = all_runs(load_spec(kind, name).expand(overrides))
        known |= {run.folder for run in runs}
        print("\n".join(status_lines(f"{kind} {name}", runs, full=bool(names))), flush=True)
    for line in [] if names else strays(compose(overrides).results, known):
        print(line)


def plan_products(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.products.plan import plan

    for line in plan(names, overrides):
        print(line, flush=True)


def report(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.products.report import BOTH, PUBLISHED, YOURS, Place, write_report

    config = compose(overrides)
    suffix = ("-smoke" if config.scale == "smoke" else "") + speed_suffix(config)
    own = Place(config.results, suffix, YOURS)
    published = Place(config.published, suffix, PUBLISHED)
    places = {"own": [own], "published": [published]}
    places["all"] = [Place(config.results, f"{suffix}-all", BOTH), own, published]
    page = place({"": [Run(config)]}, "report").with_suffix(".html")
    write_report(places[config.records], page)
    print(shown_path(page))
    if config.records == "own" and not (config.results / f"runs{suffix}.csv").exists():
        print(
            "it is empty: nothing has been made here yet; to see the published results, use "
            "records=published (RECORDS=published with make)"
        )


def publish_results(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.products.publish import publish

    for line in publish(overrides):
        print(line, flush=True)


def verify_results(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.products.verify import verify

    if scales := [word for word in overrides if word.startswith("scale=")]:
        raise ConfigError(f"verify trains every run at its published scale: drop {scales[0]}")
    if not verify(overrides):
        raise ConfigError("some runs failed or differ from the published ones, see above")


def dashboard(names: Sequence[str], overrides: Sequence[str]) -> None:
    from experiments.products.dashboard import publish_dashboard
    from experiments.records.tracking.wandb import account

    tracking = compose(overrides).tracking
    entity = account(tracking)
    figures = {f"figure-{path.stem}": load_spec("figure", path.stem) for path in specs("figure")}
    print(publish_dashboard(figures, entity, tracking.project))


TAKES_NAMES = ("figure", "table", "status", "plan")

COMMANDS: dict[str, Callable[[Sequence[str], Sequence[str]], None]] = {
    "figure": partial(product, "figure"),
    "table": partial(product, "table"),
    "theory": partial(claim_file, "theory"),
    "surprises": partial(claim_file, "surprises"),
    "claims": claims,
    "status": status,
    "plan": plan_products,
    "report": report,
    "verify": verify_results,
    "publish": publish_results,
    "dashboard": dashboard,
}

if __name__ == "__main__":
    try:
        with closed_pipe():
            main(sys.argv[1:])
    except (ConfigError, OSError) as error:
        exit_with(error)
    except KeyboardInterrupt:
        exit_interrupted()
