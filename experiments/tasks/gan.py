"""WGAN-GP: critic and generator, or a critic with a fixed generator (Section 5.5)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn import Parameter

from experiments.data.batches import Batches, Drawn, Epochs, generator, moved
from experiments.data.images import ImageSet
from experiments.models.compiled import compiled
from experiments.models.gan import Networks, Pair
from experiments.task import Step, Task
from experiments.tasks.images import initialised

CENTRE, RANGE = 127.5, 128  # released code: images are (x − 127.5) / 128
GRID = 8  # rows and columns of sample images


class WassersteinGP:
    """The paper's objective: mean D(G(z)) − mean D(x) + weight × mean (slope − 1)².

    Slopes ‖∇D‖ are computed at points between real and generated images (Gulrajani et al. 2017).
    """

    def __init__(self, weight: NonNegativeFloat) -> None:
        self.weight = weight

    def loss(self, real: Tensor, fake: Tensor) -> Tensor:
        """Return the critic's loss from its scores."""
        return fake.mean() - real.mean()

    def points(self, fresh: Tensor) -> Tensor:
        """Return the points at which slopes are computed, from points drawn for this step."""
        return fresh

    def penalty(self, slopes: Tensor) -> Tensor:
        return self.weight * (slopes - 1).square().mean()

    def remember(self, points: Tensor, slopes: Tensor) -> None:
        """Called after the last critic step of a round; this objective remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class MaxGP(WassersteinGP):
    """The released code's objective: log-sigmoid and linear, weight × max slope².

    Half of the points are stored: those with the largest slopes at the end of the last round.
    """

    stored: Tensor | None = None

    def loss(self, real: Tensor, fake: Tensor) -> Tensor:
        return (F.softplus(-real) - real).mean() + (F.softplus(fake) + fake).mean()

    def points(self, fresh: Tensor) -> Tensor:
        first, second = fresh.tensor_split(2)
        if self.stored is None:
            self.stored = second
        return torch.cat([first, self.stored])

    def penalty(self, slopes: Tensor) -> Tensor:
        return self.weight * slopes.square().max()

    def remember(self, points: Tensor, slopes: Tensor) -> None:
        steepest = slopes.detach().topk(len(slopes) // 2).indices
        self.stored = points.index_select(0, steepest)

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = state["stored"]


@dataclass(frozen=True)
class GanTrainer:
    """Batch size, order of steps, and settings for speed that do not change the maths."""

    batch: PositiveInt
    critic_steps: PositiveInt  # per round
    channels_last: bool = False  # memory layout of images and kernels
    compile: bool = False  # torch.compile, of the critic


class GAN(Task):
    """Rounds of `critic_steps` critic steps and one generator step."""

    trains_generator: ClassVar[bool] = True

    def __init__(
        self,
        data: Callable[[torch.device], ImageSet],
        model: Networks,
        trainer: GanTrainer,
        objective: WassersteinGP,
        seed: int,
        device: torch.device,
    ) -> None:
        self.data, self.device = data(device), device
        self.trainer, self.objective = trainer, objective
        self.layout = torch.channels_last if trainer.channels_last else torch.contiguous_format
        pixels, self.dimension = self.data.train.pixels, model.noise
        pair = initialised(partial(model.pair, pixels.shape[-1]), seed)
        pair.to(device).to(memory_format=self.layout)
        assert isinstance(pair, Pair)
        self.critic, self.generator = pair.critic, pair.generator
        if trainer.compile:
            self.critic.forward = compiled(self.critic.forward)  # type: ignore[method-assign]
            self.critic.gradient = compiled(self.critic.gradient)  # type: ignore[method-assign]
        self.batches = Batches(len(pixels), trainer.batch, generator(seed, "order"), device)
        source = generator(seed, "noise")
        self.test_noise = self.draw(len(self.data.test.pixels), source).to(device)
        self.sample_noise = self.draw(GRID**2, source).to(device)
        self.noise = Epochs[Drawn](source, self.draw_epoch)
        self.turn = 0  # steps taken in this round

    def players(self) -> dict[str, list[Parameter]]:
        return {
            "critic": list(self.critic.parameters()),
            "generator": list(self.generator.parameters()),
        }

    def steps(self) -> Iterator[Step]:
        rows, noise = iter(self.batches), iter(self.noise)
        while True:
            while self.turn < self.trainer.critic_steps:
                self.turn += 1
                yield Step("critic", partial(self.critic_loss, next(rows), *next(noise)))
            self.turn = 0
            if self.trains_generator:
                yield Step("generator", partial(self.generator_loss, *next(noise)))

    def critic_loss(self, rows: Tensor, noise: Tensor, part: Tensor) -> Tensor:
        """Return the loss; `part` is the place of each penalty point, from 0 (real) to 1."""
        real = self.images(self.data.train.pixels.index_select(0, rows))
        fake = self.generated(noise)
        scores = self.critic(torch.cat([real, fake]))
        points = self.objective.points(torch.lerp(real, fake, part))
        slopes = self.slopes(points)
        if self.turn == self.trainer.critic_steps:
            self.objective.remember(points, slopes)
        return self.objective.loss(*scores.chunk(2)) + self.objective.penalty(slopes)

    def generator_loss(self, noise: Tensor) -> Tensor:
        """Return −mean D(G(z)), for every objective of the critic."""
        self.critic.requires_grad_(False)  # saves computing gradients that are not used
        score = self.critic(self.generator(noise)).mean()
        self.critic.requires_grad_(True)
        return -score

    def images(self, pixels: Tensor) -> Tensor:
        values = pixels.to(memory_format=self.layout).float()
        return values.sub_(CENTRE).div_(RANGE)

    def draw_epoch(self, source: torch.Generator) -> Sequence[Drawn]:
        """Return what the losses of each step need besides rows, for the rounds of an epoch."""
        count, drawn = self.trainer.batch, list[Drawn]()
        for _ in range(max(1, self.batches.per_epoch // self.trainer.critic_steps)):
            for _ in range(self.trainer.critic_steps):
                noise = self.draw(count, source)
                drawn.append((noise, torch.rand(count, 1, 1, 1, generator=source)))
            if self.trains_generator:
                drawn.append((self.draw(count, source),))
        return moved(drawn, self.device)

    def draw(self, count: int, source: torch.Generator) -> Tensor:
        """Draw noise on the unit sphere."""
        return F.normalize(torch.randn(count, self.dimension, generator=source))

    @torch.no_grad()
    def generated(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def slopes(self, points: Tensor) -> Tensor:
        return torch.linalg.vector_norm(self.critic.gradient(points), dim=(1, 2, 3))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the critic's distance of test and generated images, and its slope halfway."""
        real, fake = self.images(self.data.test.pixels), self.generated(self.test_noise)
        distance = self.critic(real).mean() - self.critic(fake).mean()
        slope = self.slopes((real + fake) / 2).mean()
        return {"test_distance": float(distance), "test_slope": float(slope)}

    def files(self) -> dict[str, bytes]:
        picture = io.BytesIO()
        Image.fromarray(self.samples().permute(1, 2, 0).cpu().numpy()).save(picture, "PNG")
        return {"samples.png": picture.getvalue()}

    def samples(self) -> Tensor:
        """Return generated images as one picture: 3 × height × width, uint8."""
        images = self.generated(self.sample_noise).mul(RANGE).add(CENTRE).round().clamp(0, 255)
        rows = images.to(torch.uint8).unflatten(0, (GRID, GRID))
        return rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches.state_dict(),
            "noise": self.noise.state_dict(),
            "objective": self.objective.state_dict(),
            "turn": self.turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])
        self.noise.load_state_dict(state["noise"])
        self.objective.load_state_dict(state["objective"])
        self.turn = state["turn"]


class FixedGenerator(GAN):
    """Only the critic, with a fixed generator that is the same for every seed.

    The generator comes from a WGAN-GP training with `generator_seed`, after `generator_steps`
    steps of its own; with 0 it is untrained.
    """

    trains_generator = False

    def __init__(
        self,
        data: Callable[[torch.device], ImageSet],
        model: Networks,
        trainer: GanTrainer,
        objective: WassersteinGP,
        generator_seed: NonNegativeInt,
        generator_steps: NonNegativeInt,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(data, model, trainer, objective, seed, device)
        before = GAN(data, model, trainer, WassersteinGP(weight=10), generator_seed, device)
        pretrain(before, generator_steps)
        self.generator = before.generator.requires_grad_(False)

    def players(self) -> dict[str, list[Parameter]]:
        return {"critic": list(self.critic.parameters())}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"generator": self.generator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.generator.load_state_dict(state["generator"])


def pretrain(task: GAN, rounds: int) -> None:
    """Train both networks without a record, by Adam as in Gulrajani et al. 2017, Algorithm 1."""
    adam = partial(torch.optim.Adam, lr=1e-4, betas=(0.0, 0.9))
    optimizers = {name: adam(parameters) for name, parameters in task.players().items()}
    for step in islice(task.steps(), rounds * (task.trainer.critic_steps + 1)):
        step.take(optimizers[step.player])
