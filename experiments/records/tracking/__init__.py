"""Trackers: copies of the records in W&B or TensorBoard, one module each.

No other package imports a tracker, and a tracker is imported only if a run uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config.schema import Config
from experiments.records.provenance import commit


class Tracker:
    """Receives a copy of a record; this one ignores it (tracking=off)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one value per metric."""

    def log_image(self, name: str, path: Path) -> None:
        """Add an image."""

    def save(self, path: Path) -> None:
        """Add a file of another kind."""

    def finish(self, failed: bool = False) -> None:
        """Close the copy; call it inside the job, so that every job of a sweep has its own."""

    def keep(self, path: Path) -> None:
        if path.suffix == ".png":
            self.log_image(path.stem, path)
        else:
            self.save(path)


@dataclass(frozen=True)
class Description:
    """What a tracker shows of a run."""

    name: str
    group: str  # a setting; its runs are the seeds
    job_type: str
    tags: Sequence[str]
    config: dict[str, Any] = field(default_factory=dict)


def track_run(config: Config, folder: Path, tags: Sequence[str]) -> Tracker:
    """Start the copy of a run's record."""
    private = {"results", "published", "records", "tracking", "force"}
    return start(
        config,
        Description(
            name=f"{folder.parent.name}-seed{config.seed}",
            group=f"{config.experiment} {folder.parent.name}",
            job_type=config.optimizer_name,
            tags=tags_at_scale(config, tags),
            config=config.model_dump(mode="json", exclude=private) | {"commit": commit()},
        ),
    )


def publish_figure(config: Config, name: str, image: Path) -> None:
    """Add a figure as an image."""
    tags = tags_at_scale(config, [name])
    tracker = start(config, Description(image.stem, group="figures", job_type="figure", tags=tags))
    tracker.log_image(name, image)
    tracker.finish()


def start(config: Config, about: Description) -> Tracker:
    if not is_tracked(config):
        return Tracker()
    if config.tracking.mode == "tensorboard":
        from experiments.records.tracking.tensorboard import TensorBoardRun

        return TensorBoardRun(config.results / "tensorboard", about)
    from experiments.records.tracking.wandb import start_wandb

    return start_wandb(config.tracking, config.results, about)


def prepare(configs: Iterable[Config]) -> None:
    """Check once whether W&B answers, before worker processes start: they inherit the result."""
    tracked = [c.tracking for c in configs if is_tracked(c) and c.tracking.mode != "tensorboard"]
    if tracked:
        from experiments.records.tracking.wandb import decide_mode

        decide_mode(tracked[0].mode)


def is_tracked(config: Config) -> bool:
    """Return whether a run is tracked.

    `auto` skips smoke runs: W&B would take longer than the run itself.
    """
    return config.tracking.mode not in ("off", *["auto"] * (config.scale == "smoke"))


def tags_at_scale(config: Config, tags: Sequence[str]) -> Sequence[str]:
    """Return the tags, which select the runs of a figure; smoke runs are not results."""
    return [] if config.scale == "smoke" else tags
