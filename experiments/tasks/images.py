"""Classification of images by a convolutional network (Sections 5.3 and 5.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import Parameter

from experiments.data.batches import Batches, Drawn, Epochs, generator
from experiments.data.images import Augment, ImageSet, Standardise
from experiments.models.compiled import compiled
from experiments.task import Step, Task
from experiments.training import collectives

TEST_BATCH = 500  # images; larger batches are not faster
Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class ImageTrainer:
    """Length, batch size, and settings for speed that do not change the maths."""

    epochs: PositiveInt
    batch: PositiveInt
    channels_last: bool = False  # memory layout of images and kernels
    autocast: bool = False  # matrix products and convolutions in bfloat16
    compile: bool = False  # torch.compile


class ImageClassifier(Task):
    """Softmax cross-entropy, with random flips and crops of the training images."""

    divisible = True

    def __init__(
        self,
        data: Callable[[torch.device], ImageSet],
        model: Callable[..., nn.Module],
        trainer: ImageTrainer,
        standardise: bool,
        padding: NonNegativeInt,
        flip: bool,
        seed: int,
        device: torch.device,
    ) -> None:
        self.data, self.trainer, self.device = data(device), trainer, device
        self.layout = torch.channels_last if trainer.channels_last else torch.contiguous_format
        self.net = initialised(partial(model, classes=self.data.classes), seed)
        self.net.to(device).to(memory_format=self.layout)
        if trainer.batch % collectives.world_size():
            raise ValueError(
                f"trainer.batch is {trainer.batch}; expected a multiple of "
                f"{collectives.world_size()}, the number of processes"
            )
        net = collectives.shared(self.net, device)
        graphs = device.type == "cuda" and collectives.world_size() == 1
        self.forward = compiled(net, graphs=graphs) if trainer.compile else net
        train = self.data.train
        self.standardise = Standardise.of(train) if standardise else Standardise.none(device)
        self.augment = Augment(train, padding, flip, self.standardise.zero)
        count = len(train.labels)
        self.batches = Batches(count, trainer.batch, generator(seed, "order"), device)
        self.epoch_steps = self.batches.per_epoch
        draw_epoch = partial(self.augment.draw_epoch, self.epoch_steps, trainer.batch)
        self.noise = Epochs[Drawn](generator(seed, "noise"), draw_epoch)
        self.total_steps = self.epoch_steps * trainer.epochs

    def players(self) -> dict[str, list[Parameter]]:
        return {"classifier": list(self.net.parameters())}

    def steps(self) -> Iterator[Step]:
        for rows, drawn in zip(self.batches, self.noise, strict=True):
            yield Step("classifier", partial(self.loss, rows, drawn))

    def loss(self, rows: Tensor, drawn: Drawn) -> Tensor:
        labels = collectives.part(self.data.train.labels.index_select(0, rows))
        images = collectives.part(self.augment(rows, *drawn))
        return collectives.mean_over_processes(F.cross_entropy(self.output(images), labels))

    def output(self, pixels: Tensor) -> Tensor:
        images = self.standardise(pixels).contiguous(memory_format=self.layout)
        lower = torch.autocast(self.device.type, torch.bfloat16) if self.trainer.autocast else None
        with lower or nullcontext():
            answer: Tensor = self.forward(images)
        return answer.float()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return loss and accuracy on the test images."""
        test = self.data.test
        self.net.eval()
        parts = zip(test.pixels.split(TEST_BATCH), test.labels.split(TEST_BATCH), strict=True)
        sums = torch.stack(
            [loss_and_correct(self.output(pixels), labels) for pixels, labels in parts]
        )
        self.net.train()
        loss, accuracy = (sums.sum(0) / len(test.labels)).tolist()
        return {"test_loss": loss, "test_accuracy": accuracy}

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches.state_dict(),
            "noise": self.noise.state_dict(),
            "buffers": {name: b.clone() for name, b in self.net.named_buffers()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])
        self.noise.load_state_dict(state["noise"])
        for name, buffer in self.net.named_buffers():
            buffer.copy_(state["buffers"][name])


def initialised(make: Callable[[], Net], seed: int) -> Net:
    """Return a network initialized by a seed; torch's global generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "initialisation").initial_seed())
        return make()


def loss_and_correct(output: Tensor, labels: Tensor) -> Tensor:
    """Return the sums of losses and correct answers, on the device."""
    correct = output.argmax(1) == labels
    return torch.stack([F.cross_entropy(output, labels, reduction="sum"), correct.float().sum()])
