"""A W&B report with a section for every figure: curves by setting, with a band over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.config.errors import ConfigError
from experiments.products.specs import Spec

TITLE = "AdaShift: every figure of the paper"


def publish_dashboard(specs: dict[str, Spec], entity: str, project: str) -> str:
    """Save the report and return its URL; the keys of `specs` are the tags of the figures."""
    report = make_report(specs, entity, project)
    report.save()
    return str(report.url)


def make_report(specs: dict[str, Spec], entity: str, project: str) -> Any:
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise ConfigError("wandb-workspaces is not installed: run make setup-cluster") from error
    blocks: list[Any] = [wr.TableOfContents()]
    for tag, spec in specs.items():
        runs = wr.Runset(
            entity=entity,
            project=project,
            name=tag,
            filters=f"Tags() in ['{tag}']",
            groupby=["group"],  # a setting; its runs are the seeds
        )
        panels = [line_plot(wr, panel) for panel in spec.panels if "metric" in panel]
        panels.append(wr.MediaBrowser(media_keys=[tag]))  # as `make` has drawn it
        blocks += [wr.H2(spec.title), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(entity=entity, project=project, title=TITLE, blocks=blocks, width="fluid")


def line_plot(wr: Any, panel: dict[str, Any]) -> Any:
    axes = panel.get("axes", {})
    return wr.LinePlot(
        title=panel.get("title"),
        x="step",
        y=[panel["metric"]],
        log_x=axes.get("xscale") == "log",
        log_y=axes.get("yscale") == "log",
        range_y=limits(axes.get("ylim", ())),
        title_x=axes.get("xlabel"),
        title_y=axes.get("ylabel"),
        groupby_aggfunc="mean",
        groupby_rangefunc="stddev",
        max_runs_to_show=50,
    )


def limits(given: Sequence[float | None]) -> tuple[float | None, float | None]:
    low, high = given or (None, None)
    return low, high
