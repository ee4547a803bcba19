"""Records: metrics.csv is exact, run.json says how a run ended, W&B has a complete copy."""

import json
import struct
import time
from pathlib import Path

import pytest

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.products.specs import figures_using
from experiments.records import tracking
from experiments.records.record import Record, read_info, read_metrics
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.records.tracking import decide_mode, logged_in
from experiments.training.execute import execute

PAIR = ["experiment=counterexample_stochastic", "optimizer=adam", "scale=smoke"]


def request(tmp_path: Path, *overrides: str) -> Run:
    return Run(compose([*PAIR, f"results={tmp_path}", "tracking=off", *overrides]))


def test_metrics_are_read_bit_identical(tmp_path):
    values = [0.1 + 0.2, 1 / 3, -1e-300, 2.0**53 + 2]
    with Record(tmp_path, request(tmp_path).config) as record:
        for step, value in enumerate(values, 1):
            record.log(step, {"x": value, "y": -value} if step % 2 else {"x": value})
        record.status = Status.FINISHED
    table = read_metrics(tmp_path)
    assert table["x"].tolist() == values
    assert table["y"].dropna().tolist() == [-values[0], -values[2]]


def test_run_json_has_the_config_and_the_status(tmp_path):
    run = request(tmp_path, "seed=4")
    assert run.status == "missing"
    assert execute(run) == "finished"
    info = run.info
    assert info["status"] == "finished" and info["error"] is None
    assert info["config"]["seed"] == 4 and info["config"]["task"]["problem"]["C"] == 101
    assert info["versions"]["torch"] and info["seconds"] > 0 and info["machine"]["cores"]
    assert "results" not in info["config"]


def test_an_error_is_recorded_and_raised(tmp_path):
    with pytest.raises(ZeroDivisionError), Record(tmp_path, request(tmp_path).config):
        _ = 1 / 0
    assert read_info(tmp_path)["status"] == "failed"
    assert "ZeroDivisionError" in read_info(tmp_path)["error"]


def test_an_interrupted_run_is_not_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt), Record(tmp_path, request(tmp_path).config) as record:
        record.log(1, {"x": 1.0})
        raise KeyboardInterrupt
    assert read_info(tmp_path)["status"] == "interrupted"
    assert read_metrics(tmp_path)["x"].tolist() == [1.0]


def test_a_truncated_run_json_counts_as_missing(tmp_path):
    run = request(tmp_path)
    execute(run)
    text = (run.folder / "run.json").read_text()
    (run.folder / "run.json").write_text(text[: len(text) // 2])
    assert run.status == "missing" and not run.done


def test_a_finished_record_survives_an_interrupted_rerun(tmp_path):
    run = request(tmp_path)
    execute(run)
    before = {p.name: p.read_bytes() for p in run.folder.iterdir()}
    with pytest.raises(KeyboardInterrupt), Record(run.folder, run.config) as record:
        record.log(1, {"theta": 0.0})
        raise KeyboardInterrupt
    assert before == {p.name: p.read_bytes() for p in run.folder.iterdir()}


def test_nothing_is_written_if_wandb_cannot_log_in(tmp_path, monkeypatch):
    def no_key(**settings):
        raise wandb.errors.UsageError("no API key")

    import wandb

    monkeypatch.setattr(wandb, "init", no_key)
    with pytest.raises(ConfigError, match="wandb login"):
        execute(request(tmp_path, "tracking=online"))
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {".lock"}


def test_auto_tracking_falls_back_to_offline(tmp_path, monkeypatch, capsys):
    import wandb

    real = wandb.init

    def no_network(mode, **settings):
        if mode == "online":
            raise wandb.errors.CommError("no network")
        return real(mode=mode, **settings)

    monkeypatch.setattr(wandb, "init", no_network)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert execute(request(tmp_path, "tracking=auto")) == "finished"
    assert not (tmp_path / "wandb").exists(), "a smoke run is not tracked"
    short = ["scale=paper", "steps=400", "log_every=40", "task.warm_up=10"]
    assert execute(request(tmp_path, "tracking=auto", *short)) == "finished"
    assert "tracked offline" in capsys.readouterr().err
    assert offline_file(tmp_path)


def test_the_same_command_writes_byte_identical_metrics(tmp_path):
    first, second = (request(tmp_path / name) for name in ("a", "b"))
    for run in (first, second):
        execute(run)
    assert (first.folder / "metrics.csv").read_bytes() == (
        second.folder / "metrics.csv"
    ).read_bytes()
    other = request(tmp_path / "a", "seed=1")
    execute(other)
    assert (first.folder / "metrics.csv").read_bytes() != (
        other.folder / "metrics.csv"
    ).read_bytes()


def test_a_finished_run_is_not_trained_again_unless_forced(tmp_path):
    run = request(tmp_path)
    execute(run)
    started = run.info["started"], (run.folder / "run.json").stat().st_mtime_ns
    lines = []
    execute(run, announce=lines.append)
    assert started == (run.info["started"], (run.folder / "run.json").stat().st_mtime_ns)
    assert "already finished" in lines[0]
    execute(request(tmp_path, "force=true"))
    assert (run.folder / "run.json").stat().st_mtime_ns != started[1]


# -- W&B ---------------------------------------------------------------------------------------


def read_wandb(path: Path) -> list:
    """Return the records of a .wandb file, by W&B's message class (it has no reader for Python).

    The file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB with pieces of records,
    each piece led by checksum, length and kind (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto.wandb_internal_pb2 import Record as Message

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
    run = request(tmp_path, "tracking=offline")
    execute(run, tags=figures_using)
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
    assert len(history) == len(ours) == 200
    for column in ours.columns:
        assert [row[column] for row in history] == ours[column].tolist()
    axes = {m.metric.name: m.metric.step_metric for m in messages if m.HasField("metric")}
    assert {axes[name] for name in ours.columns if name != "step"} == {"step"}


def test_a_figure_is_uploaded_to_wandb_as_an_image(tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "figure.png")
    config = compose(["tracking=offline", f"results={tmp_path}"])
    tracking.publish_figure(config, "figure-01", tmp_path / "figure.png")
    rows = [plain(m.history.item) for m in finished_wandb(tmp_path) if m.HasField("history")]
    assert rows[0]["figure-01/_type"] == "image-file" and rows[0]["figure-01/width"] == 8


def test_tracking_off_writes_no_wandb_files(tmp_path):
    execute(request(tmp_path, "tracking=off"))
    assert not (tmp_path / "wandb").exists()


def test_auto_is_offline_without_a_login(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not logged_in() and decide_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert decide_mode("auto") == "online"
    assert decide_mode("off") == "off"


def test_a_key_in_the_netrc_file_counts_as_logged_in(monkeypatch, tmp_path):
    import wandb

    monkeypatch.setenv("HOME", str(tmp_path))
    host = wandb.Settings().base_url.split("//")[-1]
    (tmp_path / ".netrc").write_text(f"machine elsewhere\n  login user\n  password {'x' * 40}\n")
    assert not logged_in()
    (tmp_path / ".netrc").write_text(f"machine {host}\n  login user\n  password {'x' * 40}\n")
    assert logged_in()


def test_the_environment_variables_of_wandb_are_respected(monkeypatch):
    for asked, mode in [("disabled", "off"), ("dryrun", "offline"), ("online", "online")]:
        monkeypatch.setenv("WANDB_MODE", asked)
        assert decide_mode("auto") == mode
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match="WANDB_MODE=nonsense"):
        decide_mode("auto")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert decide_mode("auto") == "offline"
