"""Copies records to W&B. No other module imports wandb."""

from __future__ import annotations

import netrc
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config.errors import ConfigError
from experiments.config.schema import Config, Tracking
from experiments.records.provenance import commit

if TYPE_CHECKING:
    import wandb


class Mirror:
    """A W&B run; does nothing if tracking is off."""

    def __init__(self, run: wandb.Run | None) -> None:
        self.run = run
        self.known: set[str] = set()

    @classmethod
    def of_run(cls, config: Config, folder: Path, tags: Sequence[str]) -> Mirror:
        if not is_tracked(config):
            return cls(None)
        private = {"results", "published", "records", "tracking", "force"}
        plain = config.model_dump(mode="json", exclude=private)
        return cls.start(
            config.tracking,
            config.results,
            group=f"{config.experiment} {folder.parent.name}",  # a setting; its runs are the seeds
            job_type=config.optimizer_name,
            name=f"{folder.parent.name}-seed{config.seed}",
            tags=list(tags),
            config=plain | {"commit": commit()},
        )

    @classmethod
    def start(cls, tracking: Tracking, results: Path, **settings: Any) -> Mirror:
        mode = decide_mode(tracking.mode)
        if mode == "off":
            return cls(None)
        import wandb

        results.mkdir(parents=True, exist_ok=True)
        settings |= {
            "project": tracking.project,
            "entity": tracking.entity,
            "dir": str(results),
            "reinit": "create_new",
            "settings": wandb.Settings(
                silent=True,
                console="off",
                x_save_requirements=False,
                disable_code=True,
                disable_git=True,  # the URL of a remote can contain a token
            ),
        }
        try:
            return cls(wandb.init(mode=mode, **settings))
        except wandb.errors.Error as error:
            if tracking.mode == "online":
                raise ConfigError(
                    f"tracking=online failed: {error}; log in with `wandb login`, "
                    "or set tracking=offline"
                ) from error
            print(f"W&B is not available ({error}); this run is tracked offline", file=sys.stderr)
            return cls(wandb.init(mode="offline", **settings))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.run is None:
            return
        for name in metrics.keys() - self.known:
            self.run.define_metric(name, step_metric="step")
            self.known.add(name)
        self.run.log({"step": step, **metrics})

    def keep(self, path: Path) -> None:
        """Log an image to the page of the run; upload any other file."""
        if path.suffix == ".png":
            self.log_image(path.stem, path)
        elif self.run is not None:
            copy = shutil.copy(path, self.run.dir)  # W&B would make a link and warn
            self.run.save(copy, base_path=self.run.dir, policy="now")

    def log_image(self, name: str, path: Path) -> None:
        if self.run is not None:
            import wandb

            self.run.log({name: wandb.Image(str(path))})

    def finish(self, failed: bool = False) -> None:
        # Call it inside the job: otherwise all jobs of a sweep share one W&B run.
        if self.run is not None:
            self.run.finish(exit_code=int(failed))


def is_tracked(config: Config) -> bool:
    """Return whether a run is tracked; `auto` skips smoke runs: W&B would take longer than they."""
    return config.tracking.mode not in ("off", *["auto"] * (config.scale == "smoke"))


def decide_mode(wanted: str) -> Any:
    """Return the mode for wandb.init; `auto` is online after `wandb login`, else offline."""
    if wanted != "auto":
        return wanted
    asked = os.environ.get("WANDB_MODE")
    if asked:
        modes = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}
        if asked not in modes:
            raise ConfigError(f"WANDB_MODE={asked} is unknown: expected one of {', '.join(modes)}")
        return modes[asked]
    return "online" if logged_in() else "offline"


def logged_in() -> bool:
    """Return whether W&B has an API key, in the environment or in a netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    host = wandb.Settings().base_url.split("//")[-1].split("/")[0]
    places = [os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc"]
    for place in places:
        if place and Path(place).exists():
            try:
                return netrc.netrc(str(place)).authenticators(host) is not None
            except netrc.NetrcParseError:
                return False
    return False


def account(tracking: Tracking) -> str:
    """Return the W&B account of the runs."""
    if not logged_in():
        raise ConfigError("W&B needs an account: log in with `wandb login`")
    import wandb

    return tracking.entity or str(wandb.Api().default_entity)


def publish_figure(config: Config, name: str, image: Path) -> None:
    """Upload a figure to W&B as an image."""
    if not is_tracked(config):
        return
    mirror = Mirror.start(
        config.tracking, config.results, group="figures", job_type="figure", name=name, tags=[name]
    )
    mirror.log_image(name, image)
    mirror.finish()
