"""Checkpoint: what a killed training needs to resume, so that its record stays byte-identical.

The first line of a file names its format and run and has a checksum; a file that does not match is
skipped. torch.load(weights_only=True) reads it, so that a malicious file cannot execute code. The
previous checkpoint is kept too, in case the disk damages the newest one.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch.serialization import default_restore_location
from torch.types import Storage

from experiments.records.files import write_bytes

NAME, BEFORE = "checkpoint.pt", "checkpoint.before.pt"
CHECKPOINT_FORMAT = "AdaShift checkpoint 2"  # increase the number when the state changes


class Checkpoint:
    """The last good state of one run, which `of` names."""

    def __init__(self, folder: Path, of: str, device: torch.device, every: float) -> None:
        self.path, self.before = folder / NAME, folder / BEFORE
        self.of, self.device, self.every = of, device, every
        self.saved = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self.saved >= self.every

    def save(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        label = {"format": CHECKPOINT_FORMAT, "of": self.of, "sha256": checksum(content)}
        if self.path.exists():
            self.path.replace(self.before)
        write_bytes(self.path, json.dumps(label).encode() + b"\n" + content)
        self.saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the newest valid state; print a line for each file that is skipped."""
        for path in (self.path, self.before):
            if not path.exists():
                continue
            try:
                return self.read(path)
            except ValueError as error:
                print(f"skipping checkpoint {path}: {error}", file=sys.stderr)
        return None

    def read(self, path: Path) -> dict[str, Any]:
        line, _, content = path.read_bytes().partition(b"\n")
        try:
            label = json.loads(line)
            form, of, expected = label["format"], label["of"], label["sha256"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError("it is not a checkpoint of this project") from error
        if form != CHECKPOINT_FORMAT:
            raise ValueError(f"it was written by another version, {form}")
        if of != self.of:
            raise ValueError(f"it belongs to another run, {of}")
        if checksum(content) != expected:
            raise ValueError("it is truncated or damaged")
        try:
            state: dict[str, Any] = torch.load(
                io.BytesIO(content), map_location=self.place, weights_only=True
            )
        except pickle.UnpicklingError as error:
            raise ValueError("it contains objects that could execute code") from error
        return state

    def place(self, storage: Storage, location: str) -> Storage:
        """Move what was on a GPU to the GPU of this run, which may have another number."""
        here = location if location == "cpu" else str(self.device)
        return cast(Storage, default_restore_location(storage, here))

    def remove(self) -> None:
        for path in (self.before, self.path):  # the newest last: after a kill, load() finds it
            path.unlink(missing_ok=True)


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
