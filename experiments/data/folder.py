"""Images in a folder or zip archive, one folder per class, decoded once into one array file."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import IO

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from pydantic import PositiveInt

from experiments.data.files import (
    PARTIAL,
    DataError,
    data_folders,
    first_writable,
    move_into_place,
    only_process,
)
from experiments.data.images import ImageSet, decode, error_text, on_device, require_memory
from experiments.progress import Progress

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LITTER = ("__MACOSX", "Thumbs.db", "desktop.ini")  # files of file managers, besides dot files
MAX_IMAGE_BYTES = 64_000_000  # per file; an archive can declare more than the machine has
MAX_RATIO = 200  # unpacked to packed size of an archive; pictures hardly compress
DECODE_BATCH = 256  # images decoded per write
DECODED = "decoded"  # the folder of the cache

LabelledFiles = list[tuple[str, int]]  # file and label
Shrink = Callable[[Image.Image, int], ArrayLike]  # an RGB picture to size × size × 3


@dataclass(frozen=True)
class Tree:
    """The content of a folder or zip archive; names are relative to `root`."""

    path: Path
    files: Mapping[str, tuple[int, int]]  # name → size, and modification time or CRC
    folders: frozenset[str]
    content: Callable[[str], bytes]
    root: str = ""

    def place(self, name: str) -> str:
        """Return the full name, for messages."""
        return f"{self.path}/{self.root}{name}"

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise DataError(f"{self.place(name)} is missing: add it")
        size = self.files[name][0]
        if size > MAX_IMAGE_BYTES:
            raise DataError(
                f"{self.place(name)} has {size:,} bytes; expected at most {MAX_IMAGE_BYTES:,}: "
                "replace or remove it"
            )
        try:
            return self.content(self.root + name)
        except Exception as error:  # a broken or encrypted archive raises any exception
            raise DataError(
                f"{self.place(name)} cannot be read ({error_text(error)}): replace it"
            ) from error

    def classes(self, part: str) -> dict[str, list[str]]:
        """Return name → sorted files of each folder that is directly in `part`."""
        inside = {f.removeprefix(part): f for f in self.folders if f.startswith(part)}
        found: dict[str, list[str]] = {name: [] for name in sorted(inside) if "/" not in name}
        for file in sorted(self.files):
            name, slash, _ = file.removeprefix(part).partition("/")
            if file.startswith(part) and slash:
                found[name].append(file)
        return found


@contextmanager
def open_tree(path: Path) -> Iterator[Tree]:
    """Open a folder or archive. If everything is in one folder, that one is the root."""
    if path.is_dir():
        yield entered(Tree(path, *scan_folder(path), lambda name: (path / name).read_bytes()))
        return
    with open_archive(path) as archive:
        check_members(path, archive.infolist())
        members = {normpath(m.filename).lstrip("/"): m for m in archive.infolist()}
        seen = {name: member for name, member in members.items() if not is_litter(name)}
        files = {name: (m.file_size, m.CRC) for name, m in seen.items() if not m.is_dir()}
        lowest = {name.rpartition("/")[0] for name in files} | (seen.keys() - files.keys())
        inside = frozenset(str(p) for low in lowest for p in PurePosixPath(low, "_").parents[:-1])
        yield entered(Tree(path, files, inside, lambda name: archive.read(members[name])))


def open_archive(path: Path) -> zipfile.ZipFile:
    if not path.exists():
        raise DataError(f"{path} does not exist: set data.path to a folder or a zip archive")
    try:
        return zipfile.ZipFile(path)
    except Exception as error:  # zipfile documents not all of its exceptions
        raise DataError(
            f"{path} is not a valid zip archive ({error_text(error)}): replace it"
        ) from error


def check_members(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise for an archive that looks malicious, although nothing is unpacked to disk."""
    for member in members:
        if ".." in member.filename.split("/") or member.filename.startswith("/"):
            raise DataError(f"{path}: path escapes the archive: {member.filename!r}: replace it")
    size, declared = path.stat().st_size, sum(member.file_size for member in members)
    if declared > max(MAX_IMAGE_BYTES, MAX_RATIO * size):
        raise DataError(
            f"{path} has {size:,} bytes and unpacks to {declared:,}, more than {MAX_RATIO} times "
            "as many: replace it"
        )


def scan_folder(path: Path) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
    """Return all files, with size and modification time, and all folders inside a folder."""
    files, below = dict[str, tuple[int, int]](), set[str]()
    for top, inside, names in os.walk(path, onerror=raise_error, followlinks=True):
        inside[:] = [name for name in inside if not is_litter(name)]
        here = Path(top).relative_to(path)
        below.update((here / name).as_posix() for name in inside)
        for name in names:
            if not is_litter(name):
                about = os.stat(os.path.join(top, name))
                files[(here / name).as_posix()] = about.st_size, about.st_mtime_ns
    return files, frozenset(below)


def raise_error(error: OSError) -> None:
    raise error


def is_litter(name: str) -> bool:
    return any(part.startswith(".") or part in LITTER for part in name.split("/"))


def entered(tree: Tree) -> Tree:
    """Return the tree with its only folder as root, if that folder contains folders."""
    top, *others = {name.split("/")[0] for name in tree.files.keys() | tree.folders} or {""}
    if others or not any(folder.startswith(f"{top}/") for folder in tree.folders):
        return tree
    start = len(top) + 1
    return replace(
        tree,
        files={name[start:]: about for name, about in tree.files.items()},
        folders=frozenset(name[start:] for name in tree.folders if name != top),
        root=f"{top}/",
    )


# From files to tensors


@dataclass(frozen=True)
class Listing:
    """Files with labels, for training and for testing, and the number of classes."""

    train: LabelledFiles
    test: LabelledFiles
    classes: int


def image_set(
    tree: Tree,
    listing: Listing,
    size: int,
    shrink: Shrink,
    device: torch.device,
    classes: int | None,
    limit: int | None,
    test_limit: int | None,
) -> ImageSet:
    """Return the first images of the first classes, evenly from all classes."""
    if classes is not None and classes > listing.classes:
        raise ValueError(f"classes is {classes}; {tree.path} has only {listing.classes}")
    train, test = in_turns(listing.train), in_turns(listing.test)
    names, labels = [name for name, _ in train + test], np.array([k for _, k in train + test])
    wanted = labels < (classes or listing.classes)
    rows = np.flatnonzero(wanted[: len(train)])[:limit]
    test_rows = len(train) + np.flatnonzero(wanted[len(train) :])[:test_limit]
    if not len(test_rows):
        raise DataError(
            f"{tree.path} has no test images: add a folder test or val, or at least ten images "
            "per class, of which every tenth is for testing"
        )
    require_memory(str(tree.path), (len(rows) + len(test_rows)) * 3 * size**2, device)
    pixels = decoded(tree, names, size, shrink)
    return ImageSet(
        train=on_device(pixels[rows], labels[rows], device),
        test=on_device(pixels[test_rows], labels[test_rows], device),
        classes=classes or listing.classes,
    )


def in_turns(samples: LabelledFiles) -> LabelledFiles:
    """Return the first of every class, the second of every class …: any prefix is balanced."""
    groups = defaultdict[int, LabelledFiles](list)
    for name, label in sorted(samples):
        groups[label].append((name, label))
    turns = zip_longest(*(groups[label] for label in sorted(groups)))
    return [sample for turn in turns for sample in turn if sample]


def decoded(tree: Tree, names: Sequence[str], size: int, shrink: Shrink) -> NDArray[np.uint8]:
    """Return the pixels, count × 3 × size × size, from a cache file; create it if missing."""
    file = f"{tree.path.stem}-{size}-{fingerprint(tree, names, shrink)}.npy"
    path = in_cache(file)
    if path is None:
        cache = first_writable(data_folders())
        with only_process(cache, tree.path.name):
            path = in_cache(file)  # another process may have decoded it
            if path is None:
                path = decode_all(tree, names, size, shrink, cache, file)
    return mapped(path, (len(names), 3, size, size))


def fingerprint(tree: Tree, names: Sequence[str], shrink: Shrink) -> str:
    """Return a hash of the files and of the resize function."""
    digest = hashlib.sha256(shrink.__name__.encode())
    for name in names:
        digest.update(f"{name}\0{tree.files[name]}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def in_cache(file: str) -> Path | None:
    paths = [folder / DECODED / file for folder in data_folders()]
    return next((path for path in paths if path.is_file()), None)


def mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the array of a file, mapped into memory."""
    try:
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        if pixels.shape == shape and pixels.dtype == np.uint8:
            return pixels
    except (AttributeError, EOFError, OSError, ValueError, zipfile.BadZipFile):
        pass  # numpy raises these for invalid files
    raise DataError(
        f"{path} is corrupt: delete it and rerun the same command to decode the images again"
    )


def decode_all(
    tree: Tree, names: Sequence[str], size: int, shrink: Shrink, cache: Path, file: str
) -> Path:
    """Write the array file, and move it into the cache when it is complete."""
    require_disk(cache, len(names) * 3 * size**2, tree.path)
    print(
        f"{tree.path}: decoding {len(names):,} images (once) to {cache / DECODED}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=cache) as scratch:
        draft = Path(scratch) / file
        with draft.open("wb") as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow raises for files that it cannot read
            write_pixels(out, tree, names, size, shrink)
        return move_into_place(draft, cache / DECODED)


def require_disk(cache: Path, needed: int, path: Path) -> None:
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise DataError(
            f"{cache} has {free / 1e6:,.0f} MB free, and the decoded images of {path} need "
            f"{needed / 1e6:,.0f} MB: free disk space, or put another folder first in ADASHIFT_DATA"
        )


def write_pixels(
    out: IO[bytes], tree: Tree, names: Sequence[str], size: int, shrink: Shrink
) -> None:
    """Write numpy's format in chunks, so that the images need not fit into memory."""

    def pixels(name: str) -> NDArray[np.uint8]:
        picture = decode(tree.read(name), tree.place(name))
        try:
            return np.asarray(shrink(picture, size), np.uint8).transpose(2, 0, 1)
        except ValueError as error:
            raise DataError(f"{tree.place(name)} {error}") from error

    shape = (len(names), 3, size, size)
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    progress = Progress("image").begin(len(names))
    with progress, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for start in range(0, len(names), DECODE_BATCH):
            part = list(pool.map(pixels, names[start : start + DECODE_BATCH]))
            out.write(np.stack(part).tobytes())
            progress.advance(len(part))
            progress.log({})


# One folder per class


@lru_cache(maxsize=1)  # shared by the runs of a figure, which only read it
def load_folder(
    device: torch.device,
    path: str,
    size: PositiveInt = 32,
    classes: PositiveInt | None = None,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> ImageSet:
    """Return your own images: train/<class>/… and test/<class>/… or val/<class>/…, folder or zip.

    Without that split (only <class>/…) every tenth image of a class is for testing. Classes are
    numbered in the order of their names. `classes` is the number of classes, `limit` and
    `test_limit` are numbers of images, taken evenly from all classes. Images are cropped to the
    central square, then resized.
    """
    with open_tree(Path(path).expanduser().absolute()) as tree:
        listing = list_classes(tree)
        return image_set(tree, listing, size, fitted, device, classes, limit, test_limit)


def fitted(picture: Image.Image, size: int) -> ArrayLike:
    """Crop to the central square first, so that the rest does not affect the edges, and resize."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((size, size), Image.Resampling.BICUBIC))


def list_classes(tree: Tree) -> Listing:
    parts = [part for part in ("train", "test", "val") if part in tree.folders]
    if not parts or parts == ["train"]:
        return every_tenth(images_of(tree, "train/" if parts else ""))
    if parts[0] != "train":
        raise DataError(f"{tree.place(parts[0])} exists, but train does not: add train")
    train, test = (images_of(tree, f"{part}/") for part in parts[:2])
    for name in sorted(test.keys() - train.keys()):
        raise DataError(f"{tree.place(f'{parts[1]}/{name}')} is not a class of train: remove it")
    numbers = {name: number for number, name in enumerate(train)}
    return Listing(labelled(train, numbers), labelled(test, numbers), len(train))


def every_tenth(found: Mapping[str, Sequence[str]]) -> Listing:
    """Use the tenth, twentieth … image of each class for testing."""
    numbers = {name: number for number, name in enumerate(found)}
    test = {name: files[9::10] for name, files in found.items()}
    train = {name: sorted({*files} - {*test[name]}) for name, files in found.items()}
    return Listing(labelled(train, numbers), labelled(test, numbers), len(found))


def labelled(found: Mapping[str, Sequence[str]], numbers: Mapping[str, int]) -> LabelledFiles:
    return [(file, numbers[name]) for name, files in found.items() for file in files]


def images_of(tree: Tree, part: str) -> dict[str, list[str]]:
    """Return the images of each class; raise for an empty folder or another kind of file."""
    found = tree.classes(part)
    if not found:
        raise DataError(f"{tree.place(part)} has no folders of images, one per class: add them")
    for name, files in found.items():
        if not files:
            raise DataError(f"{tree.place(part + name)} has no images: add some or remove it")
        for file in files:
            if not file.lower().endswith(SUFFIXES):
                raise DataError(
                    f"{tree.place(file)} is not an image ({' '.join(SUFFIXES)}): remove it"
                )
    return found
