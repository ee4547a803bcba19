"""Checkpoint: all that a training needs to go on, to the bit, after its process was killed.

A file has a line that says what it is of, and a checksum; what does not fit is passed over. It is
read by torch.load(weights_only=True), so that a file from elsewhere can do no harm. The one before
the newest is kept as well, for a disk that spoils a file after it was written.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from experiments.config.errors import ConfigError, last_line
from experiments.records.files import write_bytes

NAME, BEFORE = "checkpoint.pt", "checkpoint.before.pt"
FORMAT = "AdaShift checkpoint 1"  # another number for a state of another form


class Stateful(Protocol):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoint:
    """The last good state of one run; `of` says which run that is."""

    def __init__(self, folder: Path, of: str, every: float) -> None:
        self.path, self.before, self.of, self.every = folder / NAME, folder / BEFORE, of, every
        self.saved = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self.saved >= self.every

    def save(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        label = {"format": FORMAT, "of": self.of, "sha256": checksum(content)}
        if self.path.exists():
            self.path.replace(self.before)
        write_bytes(self.path, json.dumps(label).encode() + b"\n" + content)
        self.saved = time.monotonic()

    def restore(self, training: Stateful) -> None:
        """Bring a training to the last good state, if there is one."""
        state = self.load()
        if state is None:
            return
        try:
            training.load_state_dict(state)
        except Exception as error:  # half of it may be loaded by now, so it cannot be passed over
            raise ConfigError(
                f"{self.path} is of other code and does not fit "
                f"({type(error).__name__}: {last_line(error)}): force=true starts the run again"
            ) from error

    def load(self) -> dict[str, Any] | None:
        """The newest state that can be used; each that cannot is passed over with a line."""
        for path in (self.path, self.before):
            if not path.exists():
                continue
            try:
                return self.read(path)
            except ValueError as error:
                print(f"{path} is passed over: {error}", file=sys.stderr)
        return None

    def read(self, path: Path) -> dict[str, Any]:
        line, _, content = path.read_bytes().partition(b"\n")
        try:
            label = json.loads(line)
            form, of, expected = label["format"], label["of"], label["sha256"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError("it is no checkpoint of this project") from error
        if form != FORMAT:
            raise ValueError(f"it is of another version, {form}")
        if of != self.of:
            raise ValueError(f"it is of another run, {of}")
        if checksum(content) != expected:
            raise ValueError("it is cut short or damaged")
        try:
            state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError("it holds more than numbers and tensors, and could do harm") from error
        return state

    def remove(self) -> None:
        for path in (self.before, self.path):  # in this order: what a kill leaves is found again
            path.unlink(missing_ok=True)


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
