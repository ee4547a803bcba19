"""The processes of one run under torchrun: the leader writes and prints, the others follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from experiments.training.checkpoint import Checkpoint
from experiments.training.collectives import is_first, world_size
from experiments.training.loop import Log, StateStore


@dataclass(frozen=True)
class StartMessage:
    """The leader's message to train, from a state or, if it is None, from the first step."""

    state: dict[str, Any] | None


class ProcessGroup:
    """The processes of a run. The leader sends one message; a process alone leads nobody."""

    sent = False

    def send(self, message: StartMessage | None) -> None:
        if world_size() > 1 and not self.sent:
            dist.broadcast_object_list([message], src=0)
        self.sent = True

    def receive(self) -> StartMessage | None:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0)
        return message[0]


@contextmanager
def process_group(device: torch.device) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started, if it did."""
    group = ProcessGroup()
    if not dist.is_torchelastic_launched():
        yield group
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield group
    # Skipped after an error, when followers may wait in another collective: torchrun ends them.
    if is_first():
        group.send(None)  # releases the followers if there was nothing to train
    dist.destroy_process_group()


@dataclass
class LeaderCheckpoint(StateStore):
    """The checkpoint of the leader: all processes start from the state that it loads."""

    checkpoint: Checkpoint
    group: ProcessGroup

    @property
    def due(self) -> bool:
        return self.checkpoint.due

    def load(self) -> dict[str, Any] | None:
        state = self.checkpoint.load()
        self.group.send(StartMessage(state))
        return state

    def save(self, state: dict[str, Any]) -> None:
        self.checkpoint.save(state)


@dataclass
class FollowerCheckpoint(StateStore):
    """The state that the leader has sent; a follower saves nothing."""

    state: dict[str, Any] | None
    due = False

    def load(self) -> dict[str, Any] | None:
        state, self.state = self.state, None  # it takes as much memory as the training
        return state

    def save(self, state: dict[str, Any]) -> None:
        pass


class FollowerLog(Log):
    """The log of a follower, which writes nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def keep(self, files: Mapping[str, bytes]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
