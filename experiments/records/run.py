"""Run: the identity of one training, the place of its record, and its status."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.schema import PARTS, Config, leaves
from experiments.records import archive, record
from experiments.records.archive import Published
from experiments.records.status import Status

NAMED = {"experiment", "optimizer_name", "scale", "speed"}  # the first words of a command


@dataclass(frozen=True)
class Run:
    """One training: the same request finds the same folder, so nothing is trained twice."""

    config: Config

    @cached_property
    def folder(self) -> Path:
        c = self.config
        return (
            c.results
            / "runs"
            / c.experiment
            / f"{c.optimizer_name}-{c.digest()}"
            / f"seed={c.seed}"
        )

    @property
    def name(self) -> str:
        """The run in words, independent of its folder."""
        return f"{self.config.experiment} {self.config.digest()} seed {self.config.seed}"

    @property
    def setting(self) -> str:
        """What its seeds share, such as adam-0cd7570d."""
        return self.folder.parent.name

    @property
    def entry(self) -> str:
        """Its name within the experiment, such as adam-0cd7570d/seed=0."""
        return f"{self.setting}/{self.folder.name}"

    @property
    def twin(self) -> Published | None:
        """The published run of the same identity and seed."""
        return self.published_runs.get(self.entry)

    @property
    def published_runs(self) -> archive.Runs:
        """All published runs of its experiment."""
        return archive.load(self.config.published, self.config.experiment)

    @property
    def source(self) -> Path | Published | None:
        """The place of its record, chosen by `records`: its folder or the published records."""
        wanted = self.config.records
        if wanted == "own" or (wanted == "all" and record.is_final(self.folder)):
            return self.folder
        return self.twin or (self.folder if wanted == "all" else None)

    @property
    def info(self) -> dict[str, Any]:
        match self.source:
            case Published() as twin:
                return twin.info
            case Path() as folder:
                return record.read_info(folder)
        return {}

    @property
    def status(self) -> Status:
        match self.source:
            case Published() as twin:
                return twin.status
            case Path() as folder:
                return record.status_of(folder)
        return Status.MISSING

    @property
    def done(self) -> bool:
        source = self.source
        return record.is_final(source) if isinstance(source, Path) else source is not None

    @property
    def needs_training(self) -> bool:
        return self.config.force or not self.done

    def metrics(self) -> pd.DataFrame:
        source = self.source
        return source.metrics if isinstance(source, Published) else record.read_metrics(self.folder)

    def command(self) -> str:
        """Return the shortest command line that trains this run."""
        return shlex.join(["python", "run.py", *self.words()])

    def words(self) -> list[str]:
        """Return the overrides of that command line."""
        c = self.config
        named = {"experiment": c.experiment, "optimizer": c.optimizer_name, "scale": c.scale}
        named |= {"speed": c.speed} if c.speed == "fast" else {}
        names = tuple(f"{key}={value}" for key, value in named.items())
        values = leaves(c.model_dump(mode="json", include=c.identity().keys() - NAMED))
        try:
            plain = leaves(cached_config(names).identity())
        except ConfigError:  # no tuned values for this pair, so its settings are overrides
            own = {k: v for k, v in values.items() if k.startswith("optimizer.")}
            usual = leaves(cached_config((*names, *map(given, own, own.values()))).identity())
            plain = {k: v for k, v in usual.items() if k not in own}
        changed = {k: v for k, v in values.items() if plain.get(k, ...) != v}
        more = [given(k, v, "" if k in plain else "++") for k, v in changed.items()]
        gone = [without(k, c) for k in plain if k not in values and k not in NAMED]
        return [*names, *more, *dict.fromkeys(gone), f"seed={c.seed}"]

    def with_seed(self, seed: int) -> Run:
        return Run(self.config.model_copy(update={"seed": seed}))


Groups = Mapping[str, Sequence[Run]]


def all_runs(groups: Groups) -> list[Run]:
    """Return every run once, even if several groups share it."""
    return list({run.folder: run for runs in groups.values() for run in runs}.values())


def typed(key: str) -> str:
    """Return a key as typed on the command line: the parts of a task are top-level keys."""
    short = key.removeprefix("task.")
    return short if short.split(".")[0] in PARTS else key


def given(key: str, value: Any, plus: str = "++") -> str:
    """Return an override that sets a value."""
    text = json.dumps(value, separators=(",", ":"))
    return f"{plus}{typed(key)}={'inf' if value == 'inf' else text}"


def without(key: str, config: Config) -> str:
    """Return an override that removes a value, or the group that contains it."""
    top = key.split(".")[0]
    return f"{top}=null" if getattr(config, top) is None else f"~{typed(key)}"


@cache
def cached_config(overrides: tuple[str, ...]) -> Config:
    return compose(overrides)
