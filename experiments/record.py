"""Record: what a run leaves behind, metrics.csv and run.json, mirrored to W&B.

The CSV is the truth and W&B a copy of it; nothing else reads or writes these files, and no other
file imports wandb.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import importlib.metadata
import json
import netrc
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pandas as pd

from experiments.config import ROOT, Config, ConfigError, Tracking

if TYPE_CHECKING:
    import wandb

FINAL = ("finished", "diverged")  # how a run ends that is not to be trained again
METRICS, INFO, LOCK = "metrics.csv", "run.json", ".lock"
KILLED = "its process was ended from outside; was there memory enough?"
COLUMNS = ("step", "metric", "value")
PACKAGES = ("torch", "torchvision", "numpy", "scipy", "pandas", "hydra-core", "wandb")


class WriteError(OSError):
    """A record that cannot be written. One line: which file, what is wrong, the cure."""


class Record:
    """The append-only log of one run, as a context that always says how it ended.

    >>> with Record(folder, config) as record:
    ...     record.log(100, {"theta": -0.5})
    ...     record.status = "finished"
    """

    def __init__(
        self, folder: Path, config: Config, command: str = "", tags: Sequence[str] = ()
    ) -> None:
        self.folder, self.config, self.command, self.tags = folder, config, command, list(tags)
        self.status, self.step = "interrupted", 0
        self.files: dict[str, bytes] = {}
        self.about: dict[str, Any] = {}  # what else run.json is to say

    def __enter__(self) -> Self:
        self.started, self.begun = time.time(), time.monotonic()
        self.mirror = Mirror.of_run(self.config, self.folder, self.tags)
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self.folder)
        if not is_final(self.folder):
            self.write_info("running")
        # A draft of its own: a finished record stays whole until another one is finished.
        self.draft = self.folder / f".{METRICS}"
        self.file = self.draft.open("w+", newline="")
        self.rows = csv.writer(self.file, lineterminator="\n")
        self.rows.writerow(COLUMNS)
        return self

    def state_dict(self) -> dict[str, Any]:
        """What was written so far: a checkpoint and its metrics cannot disagree."""
        with told(self.draft):
            self.file.seek(0)
        return {"metrics": self.file.read(), "step": self.step, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun, self.step = time.monotonic() - state["seconds"], state["step"]
        self.file.seek(0)
        self.file.truncate()
        self.file.write(state["metrics"])
        written = csv.DictReader(state["metrics"].splitlines())
        for step, rows in groupby(written, key=itemgetter("step")):  # W&B begins anew
            self.mirror.log(int(step), {row["metric"]: float(row["value"]) for row in rows})

    @property
    def seconds(self) -> float:
        """Of all processes that took part; a clock that is set does not change it."""
        return time.monotonic() - self.begun

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one value per metric; `step` is the x axis of all of them."""
        self.step = step
        # repr keeps every bit, so that equal runs give equal files.
        self.rows.writerows((step, name, repr(float(value))) for name, value in metrics.items())
        self.mirror.log(step, metrics)

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Files of these names beside the metrics, written when they are."""
        self.files |= files

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.status = "failed"
        try:
            self.close(error)
        finally:
            self.mirror.finish(failed=self.status != "finished")

    def close(self, error: BaseException | None) -> None:
        """Put the new record in the place of the old one, unless that is worth more."""
        with told(self.draft), self.file:
            self.file.flush()
            os.fsync(self.file.fileno())  # run.json must not call a torn file finished
        if self.status not in FINAL and is_final(self.folder):
            self.draft.unlink()
            return
        self.draft.replace(self.folder / METRICS)
        for name, content in self.files.items():
            write_bytes(self.folder / name, content)
            self.mirror.keep(self.folder / name)
        self.write_info(self.status, error=repr(error) if error else None)

    def note_failure(self, error: BaseException) -> None:
        """Word of a run that failed before it could begin, so that its status tells of it."""
        self.started, self.begun = time.time(), time.monotonic()
        self.write_info("failed", error=repr(error))

    def write_info(self, status: str, error: str | None = None) -> None:
        whole = status != "running" and (self.folder / METRICS).exists()
        info = {
            "status": status,
            "step": self.step,
            "error": error,
            "sha256": hash_metrics(self.folder) if whole else None,
            "seconds": round(self.seconds, 3),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.started)),
            "command": self.command,
            "machine": machine(),
            "commit": commit(),
            "versions": versions(),
            **self.about,
            "config": self.config.model_dump(mode="json", exclude={"results", "published"}),
        }
        write_text(self.folder / INFO, json.dumps(info, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def locked(folder: Path, announce: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Whether this process alone may write to the folder; with `announce`, wait until it may.

    The system takes the lock from a process that ends, however it ends.
    """
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if announce is None:
                yield False
                return
            announce(f"waiting for another process that is training it: {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock; asked without writing, for a folder may be read-only."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def status_of(folder: Path) -> str:
    """missing, running, killed, interrupted, failed, diverged or finished."""
    status = str(read_info(folder).get("status", "missing"))
    if status == "running" and not is_locked(folder):  # or it has ended in between
        status = str(read_info(folder).get("status", "missing"))
        return "killed" if status == "running" else status
    return status


def is_final(folder: Path) -> bool:
    return read_info(folder).get("status") in FINAL and (folder / METRICS).exists()


def read_info(folder: Path) -> dict[str, Any]:
    """run.json, or an empty dict if there is none that can be read."""
    try:
        info = json.loads((folder / INFO).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def read_metrics(folder: Path) -> pd.DataFrame:
    """metrics.csv with a row per step and a column per metric."""
    expected = read_info(folder).get("sha256")
    if expected is not None and expected != hash_metrics(folder):
        raise OSError(
            f"{folder / METRICS} is altered or cut short: delete it, and the same command "
            "trains the run again"
        )
    return read_table(folder / METRICS, (folder / METRICS).stat().st_mtime_ns)


@lru_cache(maxsize=512)  # a figure and each of its claims ask for the same
def read_table(path: Path, changed: int) -> pd.DataFrame:
    long = pd.read_csv(path)
    wide = long.pivot(index="step", columns="metric", values="value")
    return wide.reset_index().rename_axis(columns=None)


def hash_metrics(folder: Path) -> str:
    return hashlib.sha256((folder / METRICS).read_bytes()).hexdigest()


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # before the name, which must never be that of a torn file
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def write_if_changed(path: Path, content: bytes) -> bool:
    """Write a file unless it has this content already; return whether it was written."""
    if path.exists() and path.read_bytes() == content:
        return False
    write_bytes(path, content)
    return True


def remove_drafts(folder: Path) -> None:
    """What write_bytes left in processes that were killed; only for whoever holds the lock."""
    for draft in folder.glob(".*.*.[0-9]*"):
        draft.unlink()


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A full or read-only disk is told in one line, with the file and the cure."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written ({error.strerror or error}): mend that or name another "
            "folder with results=…; what was there is kept, and the same command goes on"
        ) from error


@cache
def commit() -> str | None:
    """The commit of the code that runs, marked if the code differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changes = [*git, "status", "--porcelain", "--", ":!results"]
        dirty = subprocess.run(changes, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("-dirty" if dirty.strip() else "")


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": processor(),  # its kernels decide the last digits
        "cores": os.cpu_count(),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),  # of this run, by torchrun
        "python": sys.version.split()[0],
    }


@cache
def processor() -> str:
    """AMD EPYC 7B13"""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


@cache
def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Mirror:
    """A W&B run, or nothing at all when tracking is off."""

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
            group=f"{config.experiment} {folder.parent.name}",  # a setting: its runs are the seeds
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
                disable_git=True,  # the address of a remote can hold a token
            ),
        }
        try:
            return cls(wandb.init(mode=mode, **settings))
        except wandb.errors.Error as error:
            if tracking.mode == "online":
                raise ConfigError(
                    f"tracking=online: W&B says: {error}; log in with `wandb login`, "
                    "or use tracking=offline"
                ) from error
            print(f"W&B cannot be reached ({error}); this run is kept offline", file=sys.stderr)
            return cls(wandb.init(mode="offline", **settings))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.run is None:
            return
        for name in metrics.keys() - self.known:
            self.run.define_metric(name, step_metric="step")
            self.known.add(name)
        self.run.log({"step": step, **metrics})

    def keep(self, path: Path) -> None:
        """A picture can be looked at on W&B's page of the run, any other file be loaded there."""
        if path.suffix == ".png":
            self.log_image(path.stem, path)
        elif self.run is not None:
            copy = shutil.copy(path, self.run.dir)  # W&B would take a link, and warn of it
            self.run.save(copy, base_path=self.run.dir, policy="now")

    def log_image(self, name: str, path: Path) -> None:
        if self.run is not None:
            import wandb

            self.run.log({name: wandb.Image(str(path))})

    def finish(self, failed: bool = False) -> None:
        # Inside the job: otherwise all jobs of a multirun land in one W&B run.
        if self.run is not None:
            self.run.finish(exit_code=int(failed))


def is_tracked(config: Config) -> bool:
    """A smoke run is not, unless it is asked for: W&B would take longer than the run."""
    return config.tracking.mode not in ("off", *["auto"] * (config.scale == "smoke"))


def decide_mode(wanted: str) -> Any:
    """What W&B calls the mode: `auto` is online for somebody who is logged in, else offline."""
    if wanted != "auto":
        return wanted
    asked = os.environ.get("WANDB_MODE")
    if asked:
        modes = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}
        if asked not in modes:
            raise ConfigError(f"WANDB_MODE={asked} is unknown: use one of {', '.join(modes)}")
        return modes[asked]
    return "online" if logged_in() else "offline"


def logged_in() -> bool:
    """Whether W&B has a key, in the environment or where `wandb login` puts it."""
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
    """The W&B account that runs go to."""
    if not logged_in():
        raise ConfigError("W&B is not to be reached without an account: wandb login")
    import wandb

    return tracking.entity or str(wandb.Api().default_entity)


def publish_figure(config: Config, name: str, image: Path) -> None:
    """Send a finished figure to W&B as an image."""
    if not is_tracked(config):
        return
    mirror = Mirror.start(
        config.tracking, config.results, group="figures", job_type="figure", name=name, tags=[name]
    )
    mirror.log_image(name, image)
    mirror.finish()
