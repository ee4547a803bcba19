"""Status: how far a run is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How far a run is, in the order in which counts of runs list them.

    `run.json` holds the value.
    """

    FINISHED = "finished"
    DIVERGED = "diverged"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    FAILED = "failed"
    MISSING = "missing"

    @classmethod
    def in_info(cls, info: Mapping[str, Any]) -> Status:
        """Return the status that a run.json holds; MISSING if it holds no valid one."""
        try:
            return cls(info["status"])
        except (KeyError, ValueError):
            return cls.MISSING

    @property
    def is_final(self) -> bool:
        """Whether the run is complete, so that it is not trained again."""
        return self in (Status.FINISHED, Status.DIVERGED)

    @property
    def is_failure(self) -> bool:
        return self in (Status.FAILED, Status.KILLED)
