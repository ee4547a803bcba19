"""A W&B report with a section for every figure: curves by setting, with a band over the seeds."""

from __future__ import annotations

from typing import Any

from experiments.config.errors import ConfigError, last_line
from experiments.products.schema import Panel, Spec

TITLE = "AdaShift: every figure of the paper"


def publish_dashboard(specs: dict[str, Spec], entity: str, project: str) -> str:
    """Save the report and return its URL; the keys of `specs` are the tags of the figures."""
    report = make_report(specs, entity, project)
    try:
        report.save()
    except ValueError as error:  # of each section, if the project does not exist
        raise ConfigError(
            f"W&B cannot build a report of {entity}/{project} ({last_line(error)}): "
            "upload runs first, for example with make wandb-sync"
        ) from error
    return str(report.url)


def make_report(specs: dict[str, Spec], entity: str, project: str) -> Any:
    import wandb_workspaces.reports.v2 as wr  # late: it imports wandb

    blocks: list[Any] = [wr.TableOfContents()]
    for tag, spec in specs.items():
        runs = wr.Runset(
            entity=entity,
            project=project,
            name=tag,
            filters=f"Tags() in ['{tag}']",
            groupby=["group"],  # a setting; its runs are the seeds
        )
        panels = [line_plot(wr, panel) for panel in spec.panels]
        panels.append(wr.MediaBrowser(media_keys=[tag]))  # as `make` has drawn it
        blocks += [wr.H2(spec.title), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(entity=entity, project=project, title=TITLE, blocks=blocks, width="fluid")


def line_plot(wr: Any, panel: Panel) -> Any:
    axes = panel.axes
    return wr.LinePlot(
        title=panel.title,
        x="step",
        y=[panel.metric],
        log_x=axes.xscale == "log",
        log_y=axes.yscale == "log",
        range_y=axes.ylim or (None, None),
        title_x=axes.xlabel or None,
        title_y=axes.ylabel or None,
        groupby_aggfunc="mean",
        groupby_rangefunc="stddev",
        max_runs_to_show=50,
    )
