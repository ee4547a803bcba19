"""Tiny-ImageNet as tensors on the device."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import Image
from pydantic import PositiveInt

from experiments.data.files import DataError, Download, FileSet, fetch, folders
from experiments.data.folder import Listing, Samples, Tree, image_set, open_tree
from experiments.data.images import ImageSet

NAMES = ("tiny-imagenet-200", "tiny-imagenet-200.zip", "tiny-imagenet-200-subset.zip")
SIZE = 64
TRAIN = 100_000
ANNOTATIONS = "val/val_annotations.txt"

FILES = FileSet(
    name="Tiny-ImageNet",
    folder="",
    checksums={"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"},
    sources=lambda: [Download("http://cs231n.stanford.edu/")],
    cure="a network that reaches cs231n.stanford.edu",
)


@lru_cache(maxsize=1)  # the many runs of a figure share it; nobody writes to it
def load_tiny_imagenet(
    device: torch.device,
    size: Literal[32, 64] = 32,
    classes: PositiveInt | None = None,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> ImageSet:
    """Tiny-ImageNet itself; the official validation images are those to test.

    `classes` takes the first so many by name, `limit` and `test_limit` so many images, evenly
    from all classes.
    """
    with open_tree(find()) as tree:
        listing = list_official(tree)
        if len(listing.train) < TRAIN:
            print(
                f"Tiny-ImageNet: {tree.path} has {len(listing.train):,} of its {TRAIN:,} images",
                file=sys.stderr,
            )
        return image_set(tree, listing, size, halved, device, classes, limit, test_limit)


def find() -> Path:
    """The whole set in any folder, else a subset, else what the official source has."""
    paths = [folder / name for name in NAMES for folder in folders()]
    found = next((path for path in paths if path.exists()), None)
    return found or fetch(FILES)["tiny-imagenet-200.zip"]


def halved(picture: Image.Image, size: int) -> ArrayLike:
    """The mean of every 2 × 2 pixels, as in the released code, or the picture as it is."""
    if picture.size != (SIZE, SIZE):
        width, height = picture.size
        raise ValueError(f"has {width} × {height} pixels; it must have {SIZE} × {SIZE}: replace it")
    return np.asarray(picture.reduce(SIZE // size))


def list_official(tree: Tree) -> Listing:
    """From wnids.txt, train/<class>/images/… and val/val_annotations.txt with val/images/…"""
    names = sorted(set(text_of(tree, "wnids.txt").split()))  # their order there is nobody's
    numbers = {name: number for number, name in enumerate(names)}
    return Listing(training(tree, numbers), validation(tree, numbers), len(numbers))


def text_of(tree: Tree, name: str) -> str:
    return tree.read(name).decode(errors="replace")


def training(tree: Tree, numbers: dict[str, int]) -> Samples:
    folders = tree.classes("train/")
    for name in folders.keys() - numbers.keys():
        raise DataError(f"{tree.place(f'train/{name}')} is no class of wnids.txt: remove it")
    samples: Samples = []
    for name, number in numbers.items():
        images = f"train/{name}/images/"  # beside it is a list of boxes, which is not used
        files = [file for file in folders.get(name, []) if file.startswith(images)]
        if not files:
            raise DataError(f"{tree.place(images)} has no images: add them")
        samples += [(file, number) for file in files]
    return samples


def validation(tree: Tree, numbers: dict[str, int]) -> Samples:
    """A line of the annotations names an image, its class and a box."""
    unnamed = set(tree.classes("val/").get("images", []))
    samples: Samples = []
    for number, line in enumerate(text_of(tree, ANNOTATIONS).splitlines(), 1):
        image, name, *_ = [*line.split(), "", ""]
        place, file = f"{tree.place(ANNOTATIONS)}, line {number}", f"val/images/{image}"
        if name not in numbers:
            raise DataError(f"{place}: {name!r} is no class of wnids.txt: correct the line")
        if file not in unnamed:
            raise DataError(f"{place}: {file} is missing or named twice: correct the line")
        unnamed.remove(file)
        samples.append((file, numbers[name]))
    for file in sorted(unnamed):
        raise DataError(f"{tree.place(file)} is not in {ANNOTATIONS}: add a line or remove it")
    return samples
