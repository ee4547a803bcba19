"""TensorBoard: event files in results/tensorboard, one folder per run.

Written with the package of TensorBoard: torch.utils.tensorboard would import torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from experiments.config.schema import leaves
from experiments.records.tracking import Description, Tracker

FLUSH_SECONDS = 5  # a curve in the browser is at most this old


class TensorBoardRun(Tracker):
    """A run of TensorBoard; a group of its hyperparameters is a setting with its seeds."""

    def __init__(self, root: Path, about: Description) -> None:
        *place, setting = about.group.split()
        folder = root.joinpath(*place, setting, about.name.removeprefix(f"{setting}-"))
        # A resumed run logs all its rows again. An open browser would wait for a removed file.
        for old in folder.glob("events.out.tfevents.*"):
            old.write_bytes(b"")
        self.writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        self.step = 0
        self.add(session_log=SessionLog(status=SessionLog.START))  # an open browser forgets the old
        if about.config:
            self.write(hyperparameters(about))

    def add(self, **content: Any) -> None:
        self.writer.add_event(Event(wall_time=time.time(), step=self.step, **content))

    def write(self, *values: Any) -> None:
        self.add(summary=Summary(value=values))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.write(*(Summary.Value(tag=k, simple_value=float(v)) for k, v in metrics.items()))

    def log_image(self, name: str, path: Path) -> None:
        with Image.open(path) as picture:
            width, height = picture.size
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes()
        )
        self.write(Summary.Value(tag=name, image=image))

    def finish(self, failed: bool = False) -> None:
        status = Status.STATUS_FAILURE if failed else Status.STATUS_SUCCESS
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        data = HParamsPluginData(session_end_info=end)
        self.write(plugin_value(metadata.SESSION_END_INFO_TAG, data))
        self.writer.close()


def hyperparameters(about: Description) -> Summary.Value:
    start = SessionStartInfo(group_name=about.group, start_time_secs=time.time())
    for key, value in settings_of(about):
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = str(value)
    return plugin_value(
        metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)
    )


def settings_of(about: Description) -> Iterator[tuple[str, Any]]:
    """Yield what the runs of a group share: the settings that are set, and the tags."""
    settings = leaves(about.config) | {"tags": " ".join(about.tags), "seed": None}
    yield from ((key, value) for key, value in settings.items() if value is not None)


def plugin_value(tag: str, data: HParamsPluginData) -> Summary.Value:
    about = metadata.create_summary_metadata(data)
    return Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
