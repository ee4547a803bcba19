"""TensorBoard: its files have the curves of the record, the settings, the tags and the images."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status

from experiments.config.compose import compose
from experiments.records.record import Record
from experiments.records.tracking import publish_figure
from experiments.training.execute import execute
from tests.experiments.killing import Killed, die_after, run_of


def tracked(results, *words):
    return run_of(results, "mnist_lr", "tracking=tensorboard", "checkpoint_every=0", *words)


def folder_of(run):
    config, setting = run.config, run.folder.parent.name
    return config.results / "tensorboard" / config.experiment / setting / "seed0"


def events_of(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def curves(events):
    """Metric → list of (step, value)."""
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def recorded_curves(run):
    """The same from metrics.csv, as TensorBoard rounds it."""
    table = run.metrics().set_index("step")
    return {
        name: [(step, float(np.float32(value))) for step, value in column.dropna().items()]
        for name, column in table.items()
    }


def hyperparameters(events):
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    return metadata.parse_session_start_info_plugin_data(content)


def status_of(events):
    content = events.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
    return metadata.parse_session_end_info_plugin_data(content).status


def test_a_run_has_its_curves_settings_and_tags(tmp_path):
    data = "data._target_=experiments.data.mnist.generate_digits"
    run = tracked(tmp_path, "scale=laptop", "steps=20", "log_every=2", data)
    execute(run, tags=lambda run: ["figure-02", "table-04"])
    events = events_of(folder_of(run))
    assert curves(events) == recorded_curves(run)
    assert len(curves(events)["test_loss"]) == 10
    start = hyperparameters(events)
    assert start.group_name == f"mnist_lr {run.folder.parent.name}"
    assert start.hparams["optimizer.lr"].number_value == run.config.optimizer["lr"]
    assert start.hparams["optimizer._partial_"].bool_value is True
    assert start.hparams["tags"].string_value == "figure-02 table-04"
    assert not {"seed", "results", "deterministic"} & start.hparams.keys()
    assert status_of(events) == Status.STATUS_SUCCESS


def test_a_resumed_run_continues_its_curves_without_repeating_points(tmp_path, monkeypatch):
    run = tracked(tmp_path, "steps=30", "log_every=2")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die_after(patched, 18)  # at step 19, after the row of step 18
        execute(run)
    live = events_of(folder_of(run))  # as in a browser that stays open
    assert len(curves(live)["test_loss"]) == 9 and status_of(live) == Status.STATUS_FAILURE
    assert execute(run) == "finished"
    assert curves(live.Reload()) == curves(events_of(folder_of(run))) == recorded_curves(run)
    assert status_of(events_of(folder_of(run))) == Status.STATUS_SUCCESS


def test_smoke_runs_have_no_tags_and_a_failure_is_marked(tmp_path):
    run = tracked(tmp_path)
    with pytest.raises(ZeroDivisionError), Record(run.folder, run.config, "", ["figure-02"]):
        _ = 1 / 0
    events = events_of(folder_of(run))
    assert hyperparameters(events).hparams["tags"].string_value == ""
    assert status_of(events) == Status.STATUS_FAILURE


def test_a_figure_is_an_image(tmp_path):
    path = tmp_path / "figure-01.png"
    config = compose(["tracking=tensorboard", f"results={tmp_path}"])
    for width in (6, 8):  # the second replaces the first
        Image.new("RGB", (width, 4)).save(path)
        publish_figure(config, "figure-01", path)
    (image,) = events_of(tmp_path / "tensorboard/figures/figure-01").Images("figure-01")
    assert (image.width, image.height) == (8, 4)
    assert image.encoded_image_string == path.read_bytes()


def test_it_needs_no_torch():
    code = (
        "import sys, experiments.records.tracking.tensorboard\n"
        "assert not {'torch', 'wandb', 'tensorflow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
