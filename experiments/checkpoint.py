"""Checkpoint: all that a training needs to go on, to the bit, after its process was killed.

A file has a line that says what it is of, and a checksum; what does not fit is passed over. It is
read by torch.load(weights_only=True), so that a file from elsewhere can do no harm.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from experiments.record import write_bytes

NAME = "checkpoint.pt"
FORMAT = "AdaShift checkpoint 1"  # another number for a state of another form


class Checkpoint:
    """The last good state of one run; `of` says which run that is."""

    def __init__(self, folder: Path, of: str, every: float) -> None:
        self.path, self.of, self.every = folder / NAME, of, every
        self.saved = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self.saved >= self.every

    def save(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        label = {"format": FORMAT, "of": self.of, "sha256": checksum(content)}
        write_bytes(self.path, json.dumps(label).encode() + b"\n" + content)
        self.saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state, or None with a line that says why there is none to be used."""
        if not self.path.exists():
            return None
        try:
            return self.read()
        except ValueError as error:
            print(f"{self.path} is passed over, {error}: the run starts again", file=sys.stderr)
            return None

    def read(self) -> dict[str, Any]:
        line, _, content = self.path.read_bytes().partition(b"\n")
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
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        return state

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
