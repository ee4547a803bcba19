"""Images as tensors on the device: decoding, standardizing, augmenting, generating."""

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

from experiments.data.batches import Drawn, moved
from experiments.data.files import DataError

FORMATS = (
    "BMP",
    "GIF",
    "JPEG",
    "PNG",
    "PPM",
    "TIFF",
    "WEBP",
)  # decoded without other programs
MAX_PIXELS = 50_000_000  # per picture, against decompression bombs
COUNT_BATCH = 2_000  # images per chunk when pixel values are counted


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
        """Standardize to mean 0 and standard deviation 1 over these images."""
        mean, std = statistics(images)
        if not std.all():
            raise ValueError(
                f"std of red, green, blue is {std.tolist()}; a constant channel cannot be "
                "standardized: set standardise=false"
            )
        return cls(mean, std)

    @classmethod
    def none(cls, device: torch.device) -> Standardise:
        """Scale to [0, 1] only."""
        return cls(torch.zeros(3, device=device), torch.ones(3, device=device))

    @property
    def zero(self) -> Tensor:
        """Return the uint8 values that are mapped closest to 0."""
        return (self.mean * 255).round().to(torch.uint8)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().mul_(self.scale).add_(self.shift)


def statistics(images: Images) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, of pixels divided by 255.

    Computed from the counts of the 256 values, which is exact and needs no float copy.
    """
    counts = torch.zeros(3, 256, dtype=torch.int64, device=images.pixels.device)
    for part in images.pixels.split(COUNT_BATCH):
        for channel, count in zip(part.unbind(1), counts, strict=True):
            count += torch.bincount(channel.flatten(), minlength=256)
    share = counts.cpu().double() / counts[0].sum().item()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share * (values - mean[:, None]) ** 2).sum(1).sqrt()
    return mean.float().to(counts.device), std.float().to(counts.device)


class Augment:
    """Random flips and crops of training images, drawn independently for every image.

    `fill` is the padding value, one for all channels or one per channel.
    """

    def __init__(
        self, images: Images, padding: int, flip: bool, fill: Tensor | Sequence[int] | int
    ) -> None:
        if padding < 0:
            raise ValueError(f"padding is {padding}; expected 0 or more")
        self.pixels, self.padding, self.flip = images.pixels, padding, flip
        self.fill = frame_colour(fill).to(images.pixels.device)

    def draw_epoch(self, batches: int, size: int, source: torch.Generator) -> Sequence[Drawn]:
        """Return what each of these batches needs besides its rows, on the device."""
        drawn = [self.draw(size, source) for _ in range(batches)]
        return moved(drawn, self.pixels.device)

    def draw(self, count: int, source: torch.Generator) -> Drawn:
        """Draw which images of a batch are flipped, and the corner of each crop."""
        flipped = corners = torch.empty(0, dtype=torch.int64)
        if self.flip:
            flipped = torch.randint(2, (count,), generator=source).nonzero().flatten()
        if self.padding:
            corners = torch.randint(2 * self.padding + 1, (2, count, 1, 1), generator=source)
        return flipped, corners

    def __call__(self, rows: Tensor, flipped: Tensor, corners: Tensor) -> Tensor:
        """Return an augmented batch of these rows of the training images."""
        batch = self.pixels.index_select(0, rows)
        if self.flip:
            mirrored = batch.index_select(0, flipped).flip(3)
            batch = batch.index_copy_(0, flipped, mirrored)
        return self.crop(batch, *corners) if self.padding else batch

    def crop(self, batch: Tensor, top: Tensor, left: Tensor) -> Tensor:
        """Crop each padded image at its corner, line by line: a line is a run of bytes."""
        count, channels, height, width = batch.shape
        tall, wide = height + 2 * self.padding, width + 2 * self.padding
        framed = self.fill.expand(count, channels, tall, wide).contiguous()
        framed[..., self.padding : -self.padding, self.padding : -self.padding] = batch
        lines = torch.arange(count * channels * tall, device=batch.device)
        inside = lines.view(count, channels, tall)[..., :height] + top
        runs = framed.flatten().unfold(0, width, 1)  # a view: the run that starts at each byte
        return runs.index_select(0, (inside * wide + left).flatten()).view_as(batch)


def frame_colour(fill: Tensor | Sequence[int] | int) -> Tensor:
    """Return three uint8 values in a shape that broadcasts over images."""
    values = torch.as_tensor(fill).flatten().cpu()
    if len(values) not in (1, 3) or values.is_floating_point() or (values.long() >> 8).any():
        raise ValueError(f"fill is {values.tolist()}; expected one or three integers from 0 to 255")
    return values.to(torch.uint8).expand(3).reshape(3, 1, 1)


def decode(content: bytes, place: object) -> Image.Image:
    """Decode a file into an RGB picture; `place` names the file in errors."""
    try:
        picture = Image.open(io.BytesIO(content), formats=FORMATS)
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError(
                f"{picture.width} × {picture.height} pixels; expected at most {MAX_PIXELS:,}"
            )
        if picture.mode[0] in "IF":  # Pillow would clip 16-bit values at 255
            raise ValueError(f"pixels have more than 8 bits: mode {picture.mode}")
        return picture.convert("RGB")
    except Exception as error:  # decoders raise any exception
        raise DataError(
            f"{place} is not a usable image ({error_text(error)}): replace or remove it"
        ) from error


def error_text(error: Exception) -> str:
    """Return the error in one line, without the address of a buffer."""
    text = " ".join(str(error).split())
    return "unknown format" if "cannot identify" in text else text or type(error).__name__


def require_memory(name: str, needed: int, device: torch.device) -> None:
    """Raise if the data does not fit, before the system kills the process."""
    for place in dict.fromkeys((torch.device("cpu"), device)):  # data passes through the host
        free = free_memory(place)
        if free is not None and needed > free:
            raise DataError(
                f"out of memory: {name} needs {needed / 1e6:,.0f} MB, and {place} has "
                f"{free / 1e6:,.0f} MB free: set data.limit=… and data.test_limit=…"
            )


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes, or None if the system does not report them."""
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
    """Return noisy stripes in two colours per class, learned in a few dozen steps.

    For runs without a download. Like a data set, it does not depend on the run's seed. The stripes
    are horizontal, so that neither a flip nor a crop hides the class.
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


def empty_images(count: int, side: int, device: torch.device) -> Images:
    """Return images without values: the meta device needs shapes only, and no files."""
    pixels = torch.empty(count, 3, side, side, dtype=torch.uint8, device=device)
    return Images(pixels, torch.empty(count, dtype=torch.int64, device=device))


def on_device(
    pixels: NDArray[np.uint8], labels: NDArray[np.integer], device: torch.device
) -> Images:
    return Images(
        torch.from_numpy(pixels).to(device), torch.tensor(labels, dtype=torch.int64).to(device)
    )
