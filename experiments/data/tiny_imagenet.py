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

from experiments.data.files import DataError, Download, FileSet, data_folders, fetch
from experiments.data.folder import LabelledFiles, Listing, Tree, image_set, open_tree
from experiments.data.images import ImageSet, empty_images

TINY_IMAGENET_NAMES = ("tiny-imagenet-200", "tiny-imagenet-200.zip", "tiny-imagenet-200-subset.zip")
TINY_IMAGENET_SIDE = 64
TINY_IMAGENET_TRAIN = 100_000
TINY_IMAGENET_TEST = 10_000
TINY_IMAGENET_CLASSES = 200
ANNOTATIONS = "val/val_annotations.txt"

TINY_IMAGENET_FILES = FileSet(
    name="Tiny-ImageNet",
    folder="",
    checksums={"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"},
    sources=lambda: [Download("http://cs231n.stanford.edu/")],
    requirement="access to cs231n.stanford.edu",
)


@lru_cache(maxsize=1)  # shared by the runs of a figure, which only read it
def load_tiny_imagenet(
    device: torch.device,
    size: Literal[32, 64] = 32,
    classes: PositiveInt | None = None,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> ImageSet:
    """Return Tiny-ImageNet, with the official validation images for testing.

    `classes` is the number of classes, in the order of their names; `limit` and `test_limit` are
    numbers of images, taken evenly from all classes.
    """
    if device.type == "meta":
        train = empty_images(limit or TINY_IMAGENET_TRAIN, size, device)
        test = empty_images(test_limit or TINY_IMAGENET_TEST, size, device)
        return ImageSet(train, test, classes or TINY_IMAGENET_CLASSES)
    with open_tree(find_tiny_imagenet()) as tree:
        listing = list_official(tree)
        if len(listing.train) < TINY_IMAGENET_TRAIN:
            share = f"{len(listing.train):,} of {TINY_IMAGENET_TRAIN:,} images"
            print(f"Tiny-ImageNet: {tree.path} has only {share}", file=sys.stderr)
        return image_set(tree, listing, size, halved, device, classes, limit, test_limit)


def find_tiny_imagenet() -> Path:
    """Return the complete set from any data folder, else a subset, else download it."""
    paths = [folder / name for name in TINY_IMAGENET_NAMES for folder in data_folders()]
    found = next((path for path in paths if path.exists()), None)
    return found or fetch(TINY_IMAGENET_FILES)["tiny-imagenet-200.zip"]


def halved(picture: Image.Image, size: int) -> ArrayLike:
    """Return the mean of every 2 × 2 pixels, as in the released code, or the picture unchanged."""
    side, (width, height) = TINY_IMAGENET_SIDE, picture.size
    if (width, height) != (side, side):
        raise ValueError(f"has {width} × {height} pixels; expected {side} × {side}: replace it")
    return np.asarray(picture.reduce(side // size))


def list_official(tree: Tree) -> Listing:
    """List wnids.txt, train/<class>/images/… and val/val_annotations.txt with val/images/…"""
    names = sorted(set(read_text_of(tree, "wnids.txt").split()))  # wnids.txt is not sorted
    numbers = {name: number for number, name in enumerate(names)}
    return Listing(training(tree, numbers), validation(tree, numbers), len(numbers))


def read_text_of(tree: Tree, name: str) -> str:
    return tree.read(name).decode(errors="replace")


def training(tree: Tree, numbers: dict[str, int]) -> LabelledFiles:
    classes = tree.classes("train/")
    for name in classes.keys() - numbers.keys():
        raise DataError(f"{tree.place(f'train/{name}')} is not a class of wnids.txt: remove it")
    samples: LabelledFiles = []
    for name, number in numbers.items():
        images = f"train/{name}/images/"  # next to it is a list of boxes, which is not used
        files = [file for file in classes.get(name, []) if file.startswith(images)]
        if not files:
            raise DataError(f"{tree.place(images)} has no images: add them")
        samples += [(file, number) for file in files]
    return samples


def validation(tree: Tree, numbers: dict[str, int]) -> LabelledFiles:
    """List the images of the annotations: each line has an image, its class and a box."""
    unnamed = set(tree.classes("val/").get("images", []))
    samples: LabelledFiles = []
    for number, line in enumerate(read_text_of(tree, ANNOTATIONS).splitlines(), 1):
        image, name, *_ = [*line.split(), "", ""]
        place, file = f"{tree.place(ANNOTATIONS)}, line {number}", f"val/images/{image}"
        if name not in numbers:
            raise DataError(f"{place}: {name!r} is not a class of wnids.txt: correct the line")
        if file not in unnamed:
            raise DataError(f"{place}: {file} is missing or named twice: correct the line")
        unnamed.remove(file)
        samples.append((file, numbers[name]))
    for file in sorted(unnamed):
        raise DataError(f"{tree.place(file)} is not in {ANNOTATIONS}: add a line or remove it")
    return samples
