"""Images as tensors on the device: how they are decoded, standardised, augmented or computed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import PositiveInt
from torch import Tensor

from experiments.data.files import DataError

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # none of them starts a program
MAX_PIXELS = 50_000_000  # of a picture; more is an error or an attack
AT_ONCE = 2_000  # images that are counted together


@dataclass(frozen=True)
class Images:
    pixels: Tensor  # count × 3 × height × width, uint8
    labels: Tensor  # count, int64


@dataclass(frozen=True)
class ImageSet:
    train: Images
    test: Images
    classes: int


class Standardise:
    """uint8 → float32: (x/255 − mean) / std in each channel."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean, self.std = mean, std
        self.scale, self.shift = (1 / (255 * std)).view(3, 1, 1), (-mean / std).view(3, 1, 1)

    @classmethod
    def of(cls, images: Images) -> Standardise:
        """To mean 0 and standard deviation 1 over these images."""
        mean, std = statistics(images)
        if not std.all():
            raise ValueError(
                f"std of red, green, blue is {std.tolist()}; a colour that is the same everywhere "
                "cannot be standardised: standardise=false leaves it as it is"
            )
        return cls(mean, std)

    @classmethod
    def none(cls, device: torch.device) -> Standardise:
        """To [0, 1] and no further."""
        return cls(torch.zeros(3, device=device), torch.ones(3, device=device))

    @property
    def zero(self) -> Tensor:
        """The uint8 values that become 0, or nearly so."""
        return (self.mean * 255).round().to(torch.uint8)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().mul_(self.scale).add_(self.shift)


def statistics(images: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, of pixels divided by 255.

    From how often each of the 256 values occurs, so that it is exact and no float copy is made.
    """
    counts = torch.zeros(3, 256, dtype=torch.int64, device=images.pixels.device)
    for part in images.pixels.split(AT_ONCE):
        for channel, count in zip(part.unbind(1), counts, strict=True):
            count += torch.bincount(channel.flatten(), minlength=256)
    share = counts.cpu().double() / counts[0].sum().item()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share * (values - mean[:, None]) ** 2).sum(1).sqrt()
    return mean.float().to(counts.device), std.float().to(counts.device)


class Augment:
    """Random flips and crops of training images; every image has its own draw.

    `fill` is what stands around an image before it is cropped, one value or one for each channel.
    Draws are made on the CPU, so that a seed gives the same on every device.
    """

    def __init__(
        self,
        images: Images,
        padding: int,
        flip: bool,
        fill: Tensor | Sequence[int] | int,
        source: torch.Generator,
    ) -> None:
        if padding < 0:
            raise ValueError(f"padding is {padding}; it must be 0 or more")
        self.pixels, self.padding, self.flip, self.source = images.pixels, padding, flip, source
        self.fill = frame_colour(fill).to(images.pixels.device)

    def __call__(self, rows: Tensor) -> Tensor:
        """The batch that these rows of the training images make this time."""
        batch = self.pixels.index_select(0, rows)
        if self.flip:
            batch = self.mirror(batch)
        return self.crop(batch) if self.padding else batch

    def mirror(self, batch: Tensor) -> Tensor:
        """Left and right of about half of the images change places."""
        drawn = torch.randint(2, (len(batch),), generator=self.source).nonzero().flatten()
        chosen = drawn.to(batch.device)
        return batch.index_copy_(0, chosen, batch.index_select(0, chosen).flip(3))

    def crop(self, batch: Tensor) -> Tensor:
        """A window of each image in its frame, copied line by line: a line is a run of bytes."""
        count, channels, height, width = batch.shape
        tall, wide = height + 2 * self.padding, width + 2 * self.padding
        framed = self.fill.expand(count, channels, tall, wide).contiguous()
        framed[..., self.padding : -self.padding, self.padding : -self.padding] = batch
        draws = torch.randint(2 * self.padding + 1, (2, count, 1, 1), generator=self.source)
        top, left = draws.to(batch.device)
        lines = torch.arange(count * channels * tall, device=batch.device)
        inside = lines.view(count, channels, tall)[..., :height] + top
        runs = framed.flatten().unfold(0, width, 1)  # a view: one run for every byte it starts at
        return runs.index_select(0, (inside * wide + left).flatten()).view_as(batch)


def frame_colour(fill: Tensor | Sequence[int] | int) -> Tensor:
    """Three uint8 values, shaped to be spread over images."""
    values = torch.as_tensor(fill).flatten()
    if len(values) not in (1, 3) or values.is_floating_point() or (values.long() >> 8).any():
        raise ValueError(f"fill is {values.tolist()}; give one or three whole numbers in 0..255")
    return values.to(torch.uint8).expand(3).reshape(3, 1, 1)


def decode(content: bytes, place: object) -> Image.Image:
    """The RGB picture of a file; `place` names it if it is none."""
    try:
        picture = Image.open(io.BytesIO(content), formats=FORMATS)
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError(f"{picture.width} × {picture.height} pixels; {MAX_PIXELS:,} are read")
        if picture.mode[0] in "IF":  # Pillow cuts 16 bits off at 255
            raise ValueError(f"its pixels have more than 8 bits: mode {picture.mode}")
        return picture.convert("RGB")
    except Exception as error:  # decoders raise what they like
        raise DataError(
            f"{place} is no image that can be used ({words_of(error)}): replace or remove it"
        ) from error


def words_of(error: Exception) -> str:
    """One line about an error; the address of a buffer tells nobody anything."""
    text = " ".join(str(error).split())
    return "unknown format" if "cannot identify" in text else text or type(error).__name__


def require_memory(name: str, needed: int, device: torch.device) -> None:
    """Refuse what cannot fit, before it is tried: the system may kill a process that tries."""
    for place in dict.fromkeys((torch.device("cpu"), device)):  # it passes through the host
        free = free_memory(place)
        if free is not None and needed > free:
            raise DataError(
                f"{name} needs {needed / 1e6:,.0f} MB of memory and {free / 1e6:,.0f} MB are free "
                f"on {place}: take fewer images with limit=… and test_limit=…"
            )


def free_memory(device: torch.device) -> int | None:
    """Bytes, or None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    about = dict(line.split(":") for line in lines)
    return int(about["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in about else None


def generate_images(
    device: torch.device,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
    size: PositiveInt = 32,
    classes: PositiveInt = 10,
) -> ImageSet:
    """Noisy stripes in two colours, which a class has of its own: learned in a few dozen steps.

    For runs that must not need a download. Like a data set, it does not depend on a run's seed.
    The stripes lie across, so that neither a flip nor a crop hides the class.
    """
    rng = np.random.default_rng(0)
    colours = rng.uniform(30, 225, (classes, 2, 3, 1, 1)).astype(np.float32)
    stripes = rng.uniform(1, 5, classes)
    height = np.arange(size) / size

    def draw(count: int) -> Images:
        labels = np.arange(count) % classes
        phase = stripes[labels, None] * height + rng.random((count, 1))
        mix = (0.5 + 0.5 * np.sin(2 * np.pi * phase)).astype(np.float32)[:, None, :, None]
        first, second = colours[labels, 0], colours[labels, 1]
        noise = 20 * rng.standard_normal((count, 3, size, size), dtype=np.float32)
        images = np.clip(mix * first + (1 - mix) * second + noise, 0, 255).astype(np.uint8)
        return on_device(images, labels, device)

    return ImageSet(draw(limit or 512), draw(test_limit or 128), classes)


def on_device(
    pixels: NDArray[np.uint8], labels: NDArray[np.integer], device: torch.device
) -> Images:
    return Images(
        torch.from_numpy(pixels).to(device), torch.tensor(labels, dtype=torch.int64).to(device)
    )
