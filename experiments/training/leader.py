"""The processes of one run: the first leads, writes and speaks, the others follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.config.schema import Config
from experiments.records.record import Record
from experiments.training.checkpoint import Checkpoint
from experiments.training.collectives import is_first, world_size


class Team:
    """The processes of a run. The first says once whether there is something to train."""

    told = False

    def begin(self, state: dict[str, Any] | None) -> None:
        """All others train too, from this state or, if it is None, from the start."""
        self.tell({"state": state})

    def tell(self, message: dict[str, Any] | None) -> None:
        if world_size() > 1 and not self.told:
            dist.broadcast_object_list([message], src=0)
        self.told = True

    def hear(self) -> dict[str, Any] | None:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0)
        return message[0]


@contextmanager
def team(device: torch.device) -> Iterator[Team]:
    """Join the processes that torchrun has started, if it has."""
    members = Team()
    if not dist.is_torchelastic_launched():
        yield members
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield members
    # Not after an error, when the others may wait for something else: torchrun ends them.
    if is_first():
        members.tell(None)  # there was nothing to train, unless it has said otherwise
    dist.destroy_process_group()


class Leading(Checkpoint):
    """The checkpoint of the first process: what it finds, all go on from."""

    def __init__(self, checkpoint: Checkpoint, members: Team) -> None:
        vars(self).update(vars(checkpoint))
        self.members = members

    def load(self) -> dict[str, Any] | None:
        state = super().load()
        self.members.begin(state)
        return state


class Following(Checkpoint):
    """What another process has loaded; nothing is written here."""

    due = False

    def __init__(self, state: dict[str, Any] | None) -> None:
        self.state = state

    def load(self) -> dict[str, Any] | None:
        return self.state

    def save(self, state: dict[str, Any]) -> None:
        pass


class Unwritten(Record):
    """The record of a process whose first one writes."""

    def __init__(self, config: Config) -> None:
        super().__init__(Path(), config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
