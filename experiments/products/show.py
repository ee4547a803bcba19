"""Shows the curves of runs, in the terminal or as a picture, without training anything.

Runs are given as folders, or as the overrides of the command that trained them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from experiments.config.compose import compose, expand
from experiments.config.errors import ConfigError, one_line_errors
from experiments.config.schema import Config
from experiments.products.schema import CurvesPanel, PanelAxes, Spec, nearest
from experiments.products.style import label_of
from experiments.products.sweep_table import Request, has_metrics, metrics_of, status_text, varied
from experiments.products.text_plot import is_log, paint, symbol, text_plot
from experiments.records.files import write_bytes
from experiments.records.record import INFO, METRICS, read_info
from experiments.records.run import Groups, Run, all_runs
from experiments.records.status import Status

HEIGHT = 12  # lines of a plot
FORMATS = (".png", ".pdf", ".csv")


def show_curves(words: Sequence[str], metrics: Sequence[str], out: Path | None) -> None:
    """Show the runs that the words name; `metrics` is empty for those of the experiment."""
    if out is not None and out.suffix not in FORMATS:
        expected = ", ".join(FORMATS)
        raise ConfigError(f"--out {out} is invalid: expected a name that ends in {expected}")
    groups = by_setting(requested(words))
    names = chosen_metrics(groups, metrics)
    if out is not None:
        write_picture(groups, names, out)
        print(out)
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # see no-color.org
    width = shutil.get_terminal_size().columns
    print("\n\n".join("\n".join(plot(groups, metric, width, color)) for metric in names))


# -- which runs --------------------------------------------------------------------------------


def requested(words: Sequence[str]) -> list[Request]:
    """Return the runs of folders, and those that overrides ask for, with their overrides."""
    folders = [Path(word) for word in words if is_path(word)]
    overrides = [word for word in words if not is_path(word)]
    found = [request for folder in folders for request in in_folder(folder)]
    if overrides or not folders:
        found += with_overrides(overrides)
    return found


def is_path(word: str) -> bool:
    """Whether a word is a folder and not an override; the folder of a run ends in seed=0."""
    return "/" in word.partition("=")[0] or "=" not in word


def in_folder(folder: Path) -> list[Request]:
    """Return the run of a folder, or all runs below it: the seeds of a setting."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give the folder of a run, or key=value words")
    places = sorted(path.parent for path in folder.rglob(INFO))
    if not places:
        raise ConfigError(f"{folder} has no runs: expected a folder with {INFO}, or one above it")
    return [(run, run.words()) for run in map(run_in, places)]


def run_in(folder: Path) -> Run:
    """Return the run whose record is in a folder, wherever the folder is."""
    config = read_info(folder).get("config", {})
    places = {"results": folder, "published": folder, "records": "own"}
    try:
        with one_line_errors():
            run = Run(Config.model_validate({**config, **places}))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{folder / INFO} was written by an incompatible version") from error
    vars(run)["folder"] = folder.absolute()
    if not (folder / METRICS).exists():
        raise ConfigError(f"{folder} has no {METRICS}: it is {run.status}; run {run.command()}")
    return run


def with_overrides(overrides: Sequence[str]) -> list[Request]:
    if not overrides:
        raise ConfigError(
            "which runs? Give folders of runs, or the words of a command: "
            "python -m experiments show experiment=mnist_lr optimizer=adam,adashift"
        )
    with one_line_errors():
        points = expand(overrides)
    return [(recorded_run(words), words) for words in points]


def recorded_run(words: Sequence[str]) -> Run:
    """Return the run that overrides ask for; it must have been trained."""
    run = Run(compose(words))
    if has_metrics(run):
        return run
    if run.config.records == "published":
        raise ConfigError(f"{run.name} is not published: train it with {run.command()}")
    published = "; records=published shows the published run" if run.twin else ""
    raise ConfigError(f"{run.name} is {run.status}: train it with {run.command()}{published}")


def by_setting(requests: Sequence[Request]) -> dict[str, list[Run]]:
    """Return label → the runs of one curve, one per seed."""
    groups = dict[tuple[str, str], dict[int, Run]]()
    for (run, _), settings in zip(requests, varied(requests), strict=True):
        curve = groups.setdefault((label(run, settings), run.config.digest()), {})
        curve[run.config.seed] = run
    names = Counter(name for name, _ in groups)
    return {
        (name if names[name] == 1 else f"{name} ({digest})"): list(runs.values())
        for (name, digest), runs in groups.items()
    }


def label(run: Run, settings: Mapping[str, str]) -> str:
    """AdaShift, lr 0.01"""
    values = {key.removeprefix("optimizer."): value for key, value in settings.items()}
    values.pop("optimizer", None)
    return ", ".join([label_of(run.config.optimizer_name), *map(" ".join, values.items())])


# -- which metrics -----------------------------------------------------------------------------


def chosen_metrics(groups: Groups, wanted: Sequence[str]) -> list[str]:
    """Return the wanted metrics, or those that the experiment names; all experiments record them.

    A name may contain *. A family of metrics, declared with a *, is shown only if it is wanted.
    """
    experiments = dict[str, list[Run]]()
    for run in all_runs(groups):
        experiments.setdefault(run.config.experiment, []).append(run)
    recorded = [metrics_of(runs, ["*"]) for runs in experiments.values()]
    shared = [name for name in recorded[0] if all(name in more for more in recorded)]
    named = [name for name in all_runs(groups)[0].config.metrics if "*" not in name]
    found = [[n for n in shared if fnmatchcase(n, p)] for p in wanted or named or ["*"]]
    for pattern, matches in zip(wanted, found, strict=False):
        if not matches:
            known = nearest(pattern, shared)
            raise ConfigError(f"{names(experiments)} has no metric {pattern}: choose from {known}")
    if not any(found):
        raise ConfigError(f"{names(experiments)} have no metric in common: show one of them")
    return list(dict.fromkeys(name for matches in found for name in matches))


def names(experiments: Iterable[str]) -> str:
    return " and ".join(experiments)


# -- in the terminal ---------------------------------------------------------------------------


def plot(groups: Groups, metric: str, width: int, color: bool) -> Iterator[str]:
    """Yield the lines of one plot: title, curves, legend with the last and the best values."""
    curves = {name: mean_curve(runs, metric) for name, runs in groups.items()}
    finite = pd.concat([*curves.values()]).dropna()
    yield f"{metric} (log scale)" if is_log(finite) else metric
    yield from text_plot(curves, width, HEIGHT, color)
    longest = max(map(len, groups))
    for number, (name, runs) in enumerate(groups.items()):
        mark = paint("━━", number) if color else symbol(number)
        yield f"  {mark} {name:{longest}}  {summary(curves[name], runs, metric)}".rstrip()


def mean_curve(runs: Sequence[Run], metric: str) -> pd.Series:
    """Return step → mean over the seeds; it ends where the first of them has ended."""
    tables = [run.metrics().set_index("step") for run in runs]
    columns = {i: table[metric] for i, table in enumerate(tables) if metric in table}
    return pd.DataFrame(columns, dtype=float).mean(axis=1, skipna=False).dropna()


def summary(curve: pd.Series, runs: Sequence[Run], metric: str) -> str:
    parts = [f"last {curve.iloc[-1]:.4g}"] if len(curve) else []
    config = runs[0].config
    if len(curve) and config.best and metric == config.metrics[0]:
        step = curve.idxmax() if config.best == "highest" else curve.idxmin()
        parts.append(f"best {curve[step]:.4g} at step {step:,}")
    parts += [f"mean of {len(runs)} seeds"] if len(runs) > 1 else []
    parts += [status_text(runs)] if any(r.status != Status.FINISHED for r in runs) else []
    return ", ".join(parts)


# -- as a picture ------------------------------------------------------------------------------


def write_picture(groups: Groups, metrics: Sequence[str], out: Path) -> None:
    """Draw the curves like a figure of the paper; the name of the file says in which format."""
    from experiments.products.figures import draw_figure  # slow to import

    with TemporaryDirectory() as folder:
        stem = Path(folder) / "figure"
        draw_figure(as_spec(groups, metrics), groups, stem)
        write_bytes(out, stem.with_suffix(out.suffix).read_bytes())


def as_spec(groups: Groups, metrics: Sequence[str]) -> Spec:
    """Return a figure with a panel for each metric."""
    title = names(dict.fromkeys(run.config.experiment for run in all_runs(groups)))
    seeds = max(map(len, groups.values()))
    return Spec(title=title, seeds=seeds, panels=[panel(groups, metric) for metric in metrics])


def panel(groups: Groups, metric: str) -> CurvesPanel:
    drawn = {name: runs for name, runs in groups.items() if all(has(run, metric) for run in runs)}
    values = pd.concat([mean_curve(runs, metric) for runs in drawn.values()])
    axes = PanelAxes(xlabel="step", yscale="log" if is_log(values) else "linear")
    return CurvesPanel(title=metric, metric=metric, runs=with_seeds(drawn), axes=axes)


def with_seeds(groups: Groups) -> dict[str, str | None]:
    """Return name → label; with the number of seeds if it differs between the curves."""
    counts = {len(runs) for runs in groups.values()}
    return {
        name: name if len(counts) == 1 else f"{name} (seeds: {len(runs)})"
        for name, runs in groups.items()
    }


def has(run: Run, metric: str) -> bool:
    """Whether a figure can draw it; a run may diverge before its first evaluation."""
    return run.status == Status.DIVERGED or metric in run.metrics()
