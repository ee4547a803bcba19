"""W&B: uploads runs, or keeps them in results/wandb."""

from __future__ import annotations

import netrc
import os
import shutil
import ssl
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import wandb

from experiments.config.errors import ConfigError
from experiments.config.schema import Tracking
from experiments.records.tracking import Description, Tracker

ANSWER_SECONDS = 4  # for the first answer of the server, once per command
INIT_SECONDS = 15  # to create a run
FINISH_SECONDS = 30  # to upload the rest of a run

# At exit, error reporting waits 10 seconds for a server that does not answer.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


class WandbRun(Tracker):
    """A run of W&B."""

    def __init__(self, run: wandb.Run) -> None:
        self.run = run
        self.known: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics.keys() - self.known:
            self.run.define_metric(name, step_metric="step")
            self.known.add(name)
        self.run.log({"step": step, **metrics})

    def log_image(self, name: str, path: Path) -> None:
        self.run.log({name: wandb.Image(str(path))})

    def save(self, path: Path) -> None:
        copy = shutil.copy(path, self.run.dir)  # W&B would make a link and warn
        self.run.save(copy, base_path=self.run.dir, policy="now")

    def finish(self, failed: bool = False) -> None:
        try:
            self.run.finish(exit_code=int(failed))
        except TimeoutError:
            mark_offline(Path(self.run.dir).parent)
            go_offline(f"the upload of {self.run.name} took more than {FINISH_SECONDS} s")


def start_wandb(tracking: Tracking, results: Path, about: Description) -> Tracker:
    mode = decide_mode(tracking.mode)
    if mode == "off":
        return Tracker()
    results.mkdir(parents=True, exist_ok=True)
    try:
        return WandbRun(start_run(mode, tracking, results, about))
    except wandb.errors.Error as error:
        reason = str(error).partition("\n")[0]
        if tracking.mode == "online":
            raise ConfigError(
                f"tracking=online failed: {reason}; log in with `wandb login`, "
                "or set tracking=offline"
            ) from error
        go_offline(f"{server()}: {reason}")
        return WandbRun(start_run("offline", tracking, results, about))


def start_run(mode: Any, tracking: Tracking, results: Path, about: Description) -> wandb.Run:
    return wandb.init(
        mode=mode,
        project=tracking.project,
        entity=tracking.entity,
        dir=str(results),
        reinit="create_new",
        name=about.name,
        group=about.group,
        job_type=about.job_type,
        tags=about.tags,
        config=about.config,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
            x_save_requirements=False,
            disable_code=True,
            disable_git=True,  # the URL of a remote can contain a token
        ),
    )


def mark_offline(folder: Path) -> None:
    """Rename the folder of an online run, so that `wandb sync` uploads what is missing."""
    with suppress(OSError):  # on Windows, where the files are still open
        folder.rename(folder.with_name(f"offline-{folder.name}"))


def decide_mode(wanted: str) -> str:
    """Return the mode for wandb.init; `auto` is online after `wandb login`, else offline."""
    if wanted == "online":
        check_server()
    if wanted != "auto":
        return wanted
    asked = os.environ.get("WANDB_MODE")
    if asked:
        modes = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}
        if asked not in modes:
            raise ConfigError(f"WANDB_MODE={asked} is unknown: expected one of {', '.join(modes)}")
        return modes[asked]
    if not logged_in():
        return "offline"
    if answers(server()):
        os.environ["WANDB_MODE"] = "online"  # for the other runs of this command, as in go_offline
    else:
        go_offline(f"{server()} does not answer")
    return os.environ["WANDB_MODE"]


def go_offline(reason: str) -> None:
    """Keep the other runs of this command on disk, also those in worker processes."""
    os.environ["WANDB_MODE"] = "offline"
    print(
        f"W&B is not available ({reason}): runs are tracked offline; "
        "upload them later with make wandb-sync",
        file=sys.stderr,
        flush=True,
    )


def server() -> str:
    """Return the address of the server, from the environment or the settings of W&B."""
    return str(wandb.setup(wandb.Settings(silent=True)).settings.base_url)


def check_server() -> None:
    if not answers(server()):
        raise ConfigError(
            f"W&B does not answer at {server()}: check the network and the proxy, "
            "or set tracking=offline"
        )


@lru_cache
def answers(address: str) -> bool:
    """Return whether the server answers soon; looking up its name has no timeout of its own."""
    found = list[bool]()
    thread = Thread(target=lambda: found.append(responds(address)), daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return found == [True]


def responds(address: str) -> bool:
    """Return whether any server responds to a query; wandb.init reports what is wrong with it."""
    headers = {"Content-Type": "application/json"}
    query = Request(f"{address}/graphql", b'{"query": "{ viewer { id } }"}', headers)
    try:
        urlopen(query, timeout=ANSWER_SECONDS).close()
    except HTTPError as error:
        return error.code < 500
    except URLError as error:
        return isinstance(error.reason, ssl.SSLCertVerificationError)  # W&B has other certificates
    except OSError:
        return False
    return True


def logged_in() -> bool:
    """Return whether W&B has an API key, in the environment or in a netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = server().split("//")[-1].split("/")[0]
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
    check_server()
    return tracking.entity or str(wandb.Api().default_entity)
