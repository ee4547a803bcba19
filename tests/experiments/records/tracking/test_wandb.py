"""W&B: what is written to disk, what is sent to a server, what happens if it does not answer."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wandb
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record as Message

from experiments.config import gpus
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.products.specs import figures_using
from experiments.records.record import Record
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.records.tracking import publish_figure
from experiments.records.tracking import wandb as tracker
from experiments.records.tracking.wandb import answers, decide_mode, logged_in
from experiments.training.execute import execute
from experiments.training.pool import execute_all
from experiments.training.scheduler import train_all
from tests.experiments.wandb_server import KEY, WandbServer

PAIR = ["experiment=counterexample_stochastic", "optimizer=adam"]
SHORT = [*PAIR, "scale=paper", "steps=400", "log_every=40", "task.warm_up=10"]


@pytest.fixture(autouse=True)
def clean_wandb(monkeypatch):
    """W&B reads the environment once per process; a decision of one test is not for the next."""
    monkeypatch.setenv("WANDB_MODE", "")  # so that it is restored
    monkeypatch.delenv("WANDB_MODE")
    wandb.teardown()
    answers.cache_clear()
    yield
    wandb.teardown()


def log_in(monkeypatch, address: str) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", address)
    monkeypatch.setenv("WANDB_API_KEY", KEY)


@pytest.fixture
def server(monkeypatch):
    with WandbServer() as server:
        log_in(monkeypatch, server.address)
        yield server


@pytest.fixture
def closed(monkeypatch):
    """The address of a server that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        log_in(monkeypatch, address)
        yield address


def request(tmp_path: Path, *words: str) -> Run:
    return Run(compose([*(words or [*PAIR, "scale=smoke"]), f"results={tmp_path}"]))


# -- on disk -----------------------------------------------------------------------------------


def read_wandb(path: Path) -> list:
    """Return the records of a .wandb file, by W&B's message class (it has no reader for Python).

    The file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB with pieces of records,
    each piece led by checksum, length and kind (1 whole, 2 first, 3 middle, 4 last).
    """
    data, position, parts, found = path.read_bytes(), 7, b"", []
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if room < 7 or kind == 0:
            position += room
            continue
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            found.append(Message.FromString(parts))
            parts = b""
    return found


def finished_wandb(results: Path) -> list:
    """Wait for the exit record: W&B's process may still write after finish() returns."""
    for _ in range(100):
        messages = read_wandb(offline_file(results))
        if any(message.HasField("exit") for message in messages):
            return messages
        time.sleep(0.1)
    raise AssertionError("no exit within 10 seconds")


def plain(items) -> dict:
    return {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}


def offline_file(results: Path) -> Path:
    (path,) = results.glob("wandb/offline-run-*/run-*.wandb")
    return path


def test_offline_files_have_the_config_and_the_complete_history(tmp_path):
    run = request(tmp_path, *SHORT, "tracking=offline")
    execute(run, tags=lambda run: ["figure-01"])
    messages = finished_wandb(tmp_path)
    (about,) = (m.run for m in messages if m.HasField("run"))
    assert about.project == "adashift"
    assert about.run_group == f"counterexample_stochastic adam-{run.config.digest()}"
    assert about.job_type == "adam"
    assert list(about.tags) == ["figure-01"]
    config = plain(about.config.update)
    assert config["task"]["problem"] == {
        "_target_": "experiments.tasks.counterexample.Stochastic", "C": 101, "delta": 0.02,
    }  # fmt: skip
    assert config["optimizer"]["betas"] == [0, 0.999] and config["seed"] == 0
    history = [plain(m.history.item) for m in messages if m.HasField("history")]
    ours = run.metrics()
    assert len(history) == len(ours) == 10
    for column in ours.columns:
        assert [row[column] for row in history] == ours[column].tolist()
    axes = {m.metric.name: m.metric.step_metric for m in messages if m.HasField("metric")}
    assert {axes[name] for name in ours.columns if name != "step"} == {"step"}


def test_a_figure_is_an_image(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "figure.png")
    config = compose([*SHORT, "tracking=offline", f"results={tmp_path}"])
    publish_figure(config, "figure-01", tmp_path / "figure.png")
    messages = finished_wandb(tmp_path)
    rows = [plain(m.history.item) for m in messages if m.HasField("history")]
    assert rows[0]["figure-01/_type"] == "image-file" and rows[0]["figure-01/width"] == 8
    (about,) = (m.run for m in messages if m.HasField("run"))
    assert list(about.tags) == ["figure-01"]


def test_smoke_runs_and_their_figures_have_no_tags(tmp_path):
    """The tags select what a dashboard shows of a figure: smoke runs are not results."""
    run = request(tmp_path, *PAIR, "scale=smoke", "tracking=offline")
    assert figures_using(run) == ["figure-01"]
    execute(run, tags=figures_using)
    (about,) = (m.run for m in finished_wandb(tmp_path) if m.HasField("run"))
    assert about.job_type == "adam" and not about.tags
    Image.new("RGB", (8, 8)).save(tmp_path / "figure-01-smoke.png")
    config = compose([*PAIR, "scale=smoke", "tracking=offline", f"results={tmp_path / 'figure'}"])
    publish_figure(config, "figure-01", tmp_path / "figure-01-smoke.png")
    (about,) = (m.run for m in finished_wandb(tmp_path / "figure") if m.HasField("run"))
    assert about.display_name == "figure-01-smoke" and not about.tags


def test_nothing_is_written_without_tracking(tmp_path):
    execute(request(tmp_path, *PAIR, "scale=smoke", "tracking=off"))
    execute(request(tmp_path, *PAIR, "scale=smoke", "seed=1", "tracking=auto"))
    assert not (tmp_path / "wandb").exists()


# -- online ------------------------------------------------------------------------------------


def test_an_online_run_is_sent_completely(tmp_path, server):
    run = request(tmp_path, *SHORT)
    assert execute(run, tags=lambda run: ["figure-01"]) == "finished"
    sent, ours = server.only_run(), run.metrics()
    assert sent.about["project"] == "adashift" and sent.about["jobType"] == "adam"
    assert sent.about["tags"] == ["figure-01"]
    assert sent.about["groupName"] == f"counterexample_stochastic adam-{run.config.digest()}"
    assert sent.about["displayName"] == f"adam-{run.config.digest()}-seed0"
    assert sent.config["optimizer"]["betas"] == [0, 0.999] and sent.config["seed"] == 0
    assert sent.config["task"]["problem"]["C"] == 101 and sent.config["commit"]
    assert not {"results", "published", "tracking"} & sent.config.keys()
    assert len(sent.history) == len(ours) == 10
    for column in ours.columns:
        assert [row[column] for row in sent.history] == ours[column].tolist()
        assert sent.summary[column] == ours[column].iloc[-1]
    assert sent.exit_code == 0


def test_tags_and_images_are_sent(tmp_path, server):
    Image.new("RGB", (8, 8)).save(tmp_path / "figure-04.png")
    config = compose([*SHORT, f"results={tmp_path}"])
    publish_figure(config, "figure-04", tmp_path / "figure-04.png")
    assert server.only_run().about["tags"] == ["figure-04"]
    image = (tmp_path / "figure-04.png").read_bytes()
    assert [body for name, body in server.uploads.items() if name.endswith(".png")] == [image]


def test_a_run_that_fails_is_sent_as_failed(tmp_path, server):
    run = request(tmp_path, *SHORT)
    with pytest.raises(ZeroDivisionError), Record(run.folder, run.config) as record:
        record.log(1, {"theta": 1.0})
        _ = 1 / 0
    assert server.only_run().exit_code == 1 and server.only_run().summary["theta"] == 1


# -- a server that does not answer -------------------------------------------------------------


NOTICE = (
    "W&B is not available ({}): runs are tracked offline; upload them later with make wandb-sync"
)


def test_auto_asks_the_server_once_per_command(tmp_path, closed, capsys):
    begun = time.monotonic()
    for seed in (0, 1):
        assert execute(request(tmp_path, *SHORT, f"seed={seed}")) == "finished"
    assert time.monotonic() - begun < 30
    assert capsys.readouterr().err.splitlines() == [NOTICE.format(f"{closed} does not answer")]
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert not list(tmp_path.glob("wandb/run-*"))


def test_the_wait_for_a_silent_server_is_short(server, monkeypatch):
    server.silent.set()
    monkeypatch.setattr(tracker, "ANSWER_SECONDS", 0.2)
    begun = time.monotonic()
    assert decide_mode("auto") == "offline" and time.monotonic() - begun < 5


@pytest.mark.slow
def test_workers_do_not_ask_the_server_again(tmp_path, closed, capfd, monkeypatch):
    monkeypatch.setattr(gpus, "cores", lambda: 2)
    words = ["experiment=mnist_lr", "scale=paper", "steps=10", "log_every=5"]
    words += ["data._target_=experiments.data.mnist.generate_digits"]
    execute_all([request(tmp_path, *words, f"seed={seed}") for seed in range(3)], "three runs")
    assert capfd.readouterr().err.count("does not answer") == 1
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 3


def test_online_fails_once_before_anything_is_trained(tmp_path, closed):
    with pytest.raises(ConfigError, match=f"does not answer at {closed}: check the network"):
        execute(request(tmp_path, *SHORT, "tracking=online"))
    runs = [request(tmp_path, *SHORT, "tracking=online", f"seed={seed}") for seed in (0, 1)]
    with pytest.raises(ConfigError, match="or set tracking=offline"):
        train_all(runs, lambda runs: iter([]), "two runs")
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {".lock"}


def test_nothing_is_written_if_wandb_cannot_log_in(tmp_path, server, monkeypatch):
    def no_key(**settings):
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", no_key)
    with pytest.raises(ConfigError, match="wandb login"):
        execute(request(tmp_path, *SHORT, "tracking=online"))
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {".lock"}


def test_auto_keeps_a_run_that_the_server_rejects(tmp_path, server, capsys):
    server.status = 404
    assert execute(request(tmp_path, *SHORT)) == "finished"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"W&B is not available ({server.address}: ")
    assert offline_file(tmp_path)


def test_finish_gives_up_if_the_network_goes_down(tmp_path, server, capsys, monkeypatch):
    monkeypatch.setattr(tracker, "FINISH_SECONDS", 1)
    run = request(tmp_path, *SHORT)
    begun = time.monotonic()
    with Record(run.folder, run.config) as record:
        for step in range(1, 6):
            record.log(step, {"theta": float(step)})
        server.silent.set()
        record.status = Status.FINISHED
    assert time.monotonic() - begun < 20 and run.done
    reason = f"the upload of adam-{run.config.digest()}-seed0 took more than 1 s"
    assert capsys.readouterr().err.splitlines() == [NOTICE.format(reason)]
    assert decide_mode("auto") == "offline"
    with WandbServer() as later:
        command = [sys.executable, "-m", "wandb", "sync", "--yes"]
        environment = os.environ | later.environment | {"WANDB_DIR": str(tmp_path)}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        (name,) = server.runs
        assert [row["theta"] for row in later.runs[name].history] == [1, 2, 3, 4, 5]
        assert later.only_run().exit_code == 0


# -- modes -------------------------------------------------------------------------------------


def test_auto_is_online_after_a_login(server):
    assert decide_mode("auto") == decide_mode("online") == "online"


def test_auto_is_offline_without_a_login(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not logged_in() and decide_mode("auto") == "offline"


def test_a_key_in_the_netrc_file_counts_as_logged_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    host = tracker.server().split("//")[-1]
    (tmp_path / ".netrc").write_text(f"machine elsewhere\n  login user\n  password {KEY}\n")
    assert not logged_in()
    (tmp_path / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    assert logged_in()


def test_the_environment_variables_of_wandb_are_respected(monkeypatch):
    for asked, mode in [("disabled", "off"), ("dryrun", "offline"), ("online", "online")]:
        monkeypatch.setenv("WANDB_MODE", asked)
        assert decide_mode("auto") == mode
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match="WANDB_MODE=nonsense"):
        decide_mode("auto")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert decide_mode("auto") == "offline"
