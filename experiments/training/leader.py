"""The processes of one run under torchrun: the leader writes and prints, the others follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from experiments.training.collectives import is_first, world_size
from experiments.training.loop import Log


class ProcessGroup:
    """The processes of a run; a single process is a leader without followers."""

    trains = False

    def start(self) -> None:
        """Tell the followers to train."""
        self.trains = self.broadcast(True)

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of the leader in every process."""
        values = [value]
        if world_size() > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


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
    if is_first() and not group.trains:
        group.broadcast(False)  # the followers wait for this message
    dist.destroy_process_group()


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
