"""Images in a folder or zip archive, a folder for each class: decoded once, then one array file."""

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

from experiments.data.files import PARTIAL, DataError, first_writable, folders, keep, only_process
from experiments.data.images import ImageSet, decode, on_device, require_memory, words_of
from experiments.progress import progress

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LITTER = ("__MACOSX", "Thumbs.db", "desktop.ini")  # of file managers; they hide the rest with a dot
MAX_BYTES = 64_000_000  # of a file; an archive can promise more than a machine has
MAX_RATIO = 200  # of the files of an archive to itself; pictures are packed already
AT_ONCE = 256  # images that are decoded before they are written
DECODED = "decoded"  # the folder of the cache

Samples = list[tuple[str, int]]  # file and label
Shrink = Callable[[Image.Image, int], ArrayLike]  # an RGB picture to size × size × 3


@dataclass(frozen=True)
class Tree:
    """What is below a folder or in a zip archive, named as seen from `root`."""

    path: Path
    files: Mapping[str, tuple[int, int]]  # name → size, and what changes when the content does
    folders: frozenset[str]
    content: Callable[[str], bytes]
    root: str = ""

    def place(self, name: str) -> str:
        """A name for messages."""
        return f"{self.path}/{self.root}{name}"

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise DataError(f"{self.place(name)} is missing: put it there")
        size = self.files[name][0]
        if size > MAX_BYTES:
            raise DataError(
                f"{self.place(name)} has {size:,} bytes; files up to {MAX_BYTES:,} are read: "
                "replace or remove it"
            )
        try:
            return self.content(self.root + name)
        except Exception as error:  # an archive can be broken, locked or packed in many ways
            raise DataError(
                f"{self.place(name)} cannot be read ({words_of(error)}): replace it"
            ) from error

    def classes(self, part: str) -> dict[str, list[str]]:
        """Name of each folder that is directly in `part`, and all files below it, sorted."""
        inside = {f.removeprefix(part): f for f in self.folders if f.startswith(part)}
        found: dict[str, list[str]] = {name: [] for name in sorted(inside) if "/" not in name}
        for file in sorted(self.files):
            name, slash, _ = file.removeprefix(part).partition("/")
            if file.startswith(part) and slash:
                found[name].append(file)
        return found


@contextmanager
def open_tree(path: Path) -> Iterator[Tree]:
    """The files of a folder or archive. If all are in one folder, they are seen from there."""
    if path.is_dir():
        yield entered(Tree(path, *walk(path), lambda name: (path / name).read_bytes()))
        return
    with open_archive(path) as archive:
        refuse_tricks(path, archive.infolist())
        members = {normpath(m.filename).lstrip("/"): m for m in archive.infolist()}
        seen = {name: member for name, member in members.items() if not litters(name)}
        files = {name: (m.file_size, m.CRC) for name, m in seen.items() if not m.is_dir()}
        lowest = {name.rpartition("/")[0] for name in files} | (seen.keys() - files.keys())
        inside = frozenset(str(p) for low in lowest for p in PurePosixPath(low, "_").parents[:-1])
        yield entered(Tree(path, files, inside, lambda name: archive.read(members[name])))


def open_archive(path: Path) -> zipfile.ZipFile:
    if not path.exists():
        raise DataError(f"{path} does not exist: name a folder or a zip archive")
    try:
        return zipfile.ZipFile(path)
    except Exception as error:  # what a broken archive raises is nowhere written down
        raise DataError(
            f"{path} is no whole zip archive ({words_of(error)}): replace it"
        ) from error


def refuse_tricks(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Nothing is unpacked to a disk; still, an archive that tries is not one of pictures."""
    for member in members:
        if ".." in member.filename.split("/") or member.filename.startswith("/"):
            raise DataError(f"{path} has {member.filename!r}, which climbs out of it: replace it")
    size, promised = path.stat().st_size, sum(member.file_size for member in members)
    if promised > max(MAX_BYTES, MAX_RATIO * size):
        raise DataError(
            f"{path} has {size:,} bytes and promises {promised:,}, more than {MAX_RATIO} times as "
            "many: replace it"
        )


def walk(path: Path) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
    """Files with size and time of change, and folders, below a folder."""
    files, below = dict[str, tuple[int, int]](), set[str]()
    for top, inside, names in os.walk(path, onerror=give_up, followlinks=True):
        inside[:] = [name for name in inside if not litters(name)]
        here = Path(top).relative_to(path)
        below.update((here / name).as_posix() for name in inside)
        for name in names:
            if not litters(name):
                about = os.stat(os.path.join(top, name))
                files[(here / name).as_posix()] = about.st_size, about.st_mtime_ns
    return files, frozenset(below)


def give_up(error: OSError) -> None:
    raise error


def litters(name: str) -> bool:
    return any(part.startswith(".") or part in LITTER for part in name.split("/"))


def entered(tree: Tree) -> Tree:
    """The tree as seen from its one folder, if that is all it has and has folders itself."""
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
    """Which files there are, to train on and to test, and what they show."""

    train: Samples
    test: Samples
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
    """The first images of the first classes, each class in its turn."""
    if classes is not None and classes > listing.classes:
        raise ValueError(f"classes is {classes}; {tree.path} has {listing.classes}")
    train, test = in_turns(listing.train), in_turns(listing.test)
    names, labels = [name for name, _ in train + test], np.array([k for _, k in train + test])
    wanted = labels < (classes or listing.classes)
    rows = np.flatnonzero(wanted[: len(train)])[:limit]
    test_rows = len(train) + np.flatnonzero(wanted[len(train) :])[:test_limit]
    if not len(test_rows):
        raise DataError(
            f"{tree.path} has no images to test: add some (without test or val, they are the "
            "tenth, the twentieth … of a class)"
        )
    require_memory(str(tree.path), (len(rows) + len(test_rows)) * 3 * size**2, device)
    pixels = decoded(tree, names, size, shrink)
    return ImageSet(
        train=on_device(pixels[rows], labels[rows], device),
        test=on_device(pixels[test_rows], labels[test_rows], device),
        classes=classes or listing.classes,
    )


def in_turns(samples: Samples) -> Samples:
    """The first of every class, the second of every class …: any beginning is evenly spread."""
    groups = defaultdict[int, Samples](list)
    for name, label in sorted(samples):
        groups[label].append((name, label))
    turns = zip_longest(*(groups[label] for label in sorted(groups)))
    return [sample for turn in turns for sample in turn if sample]


def decoded(tree: Tree, names: Sequence[str], size: int, shrink: Shrink) -> NDArray[np.uint8]:
    """The pixels of these files, count × 3 × size × size, in a file that is made when missing."""
    file = f"{tree.path.stem}-{size}-{fingerprint(tree, names, shrink)}.npy"
    path = in_cache(file)
    if path is None:
        cache = first_writable(folders())
        with only_process(cache, tree.path.name):
            path = in_cache(file)  # another process may have been faster
            if path is None:
                path = decode_all(tree, names, size, shrink, cache, file)
    return mapped(path, (len(names), 3, size, size))


def fingerprint(tree: Tree, names: Sequence[str], shrink: Shrink) -> str:
    """What changes if any of the files does, or how it is made smaller."""
    digest = hashlib.sha256(shrink.__name__.encode())
    for name in names:
        digest.update(f"{name}\0{tree.files[name]}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def in_cache(file: str) -> Path | None:
    paths = [folder / DECODED / file for folder in folders()]
    return next((path for path in paths if path.is_file()), None)


def mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array of a file, read only where it is used."""
    try:
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        if pixels.shape == shape and pixels.dtype == np.uint8:
            return pixels
    except (AttributeError, EOFError, OSError, ValueError, zipfile.BadZipFile):
        pass  # it may look like anything that numpy knows
    raise DataError(
        f"{path} is altered or cut short: delete it, and the same command decodes the images again"
    )


def decode_all(
    tree: Tree, names: Sequence[str], size: int, shrink: Shrink, cache: Path, file: str
) -> Path:
    """Write the array file, and keep it when it is whole."""
    require_disk(cache, len(names) * 3 * size**2, tree.path)
    print(
        f"{tree.path}: {len(names):,} images are decoded, once, to {cache / DECODED}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=cache) as scratch:
        draft = Path(scratch) / file
        with draft.open("wb") as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's doubts; what it cannot read, it refuses
            write_pixels(out, tree, names, size, shrink)
        return keep(draft, cache / DECODED)


def require_disk(cache: Path, needed: int, path: Path) -> None:
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise DataError(
            f"{cache} has {free / 1e6:,.0f} MB left and the decoded images of {path} need "
            f"{needed / 1e6:,.0f} MB: make room, or name another folder first in ADASHIFT_DATA"
        )


def write_pixels(
    out: IO[bytes], tree: Tree, names: Sequence[str], size: int, shrink: Shrink
) -> None:
    """In the format of numpy, piece by piece, so that memory does not limit it."""

    def pixels(name: str) -> NDArray[np.uint8]:
        picture = decode(tree.read(name), tree.place(name))
        try:
            return np.asarray(shrink(picture, size), np.uint8).transpose(2, 0, 1)
        except ValueError as error:
            raise DataError(f"{tree.place(name)} {error}") from error

    shape = (len(names), 3, size, size)
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    bar = progress(total=len(names), unit=" images")
    with bar, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for start in range(0, len(names), AT_ONCE):
            part = list(pool.map(pixels, names[start : start + AT_ONCE]))
            out.write(np.stack(part).tobytes())
            bar.update(len(part))


# A folder for each class


@lru_cache(maxsize=1)  # the many runs of a figure share it; nobody writes to it
def load_folder(
    device: torch.device,
    path: str,
    size: PositiveInt = 32,
    classes: PositiveInt | None = None,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> ImageSet:
    """Images of your own: train/<class>/… and test/<class>/… or val/<class>/… in a folder or zip.

    Without that split (<class>/… alone) every tenth image of a class is for testing. Classes are
    numbered by their names; `classes` takes the first so many, `limit` and `test_limit` so many
    images, evenly from all classes. An image is cut to a square at its centre, then resized.
    """
    with open_tree(Path(path).expanduser().absolute()) as tree:
        listing = list_classes(tree)
        return image_set(tree, listing, size, fitted, device, classes, limit, test_limit)


def fitted(picture: Image.Image, size: int) -> ArrayLike:
    """The square at the centre, resized; what is cut off must not shine in at the edges."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((size, size), Image.Resampling.BICUBIC))


def list_classes(tree: Tree) -> Listing:
    parts = [part for part in ("train", "test", "val") if part in tree.folders]
    if not parts or parts == ["train"]:
        return every_tenth(images_of(tree, "train/" if parts else ""))
    if parts[0] != "train":
        raise DataError(f"{tree.place(parts[0])} is there and train is not: add it")
    train, test = (images_of(tree, f"{part}/") for part in parts[:2])
    for name in sorted(test.keys() - train.keys()):
        raise DataError(f"{tree.place(f'{parts[1]}/{name}')} is no class of train: remove it")
    numbers = {name: number for number, name in enumerate(train)}
    return Listing(labelled(train, numbers), labelled(test, numbers), len(train))


def every_tenth(found: Mapping[str, Sequence[str]]) -> Listing:
    """Of each class, the tenth image, the twentieth … are to test."""
    numbers = {name: number for number, name in enumerate(found)}
    test = {name: files[9::10] for name, files in found.items()}
    train = {name: sorted({*files} - {*test[name]}) for name, files in found.items()}
    return Listing(labelled(train, numbers), labelled(test, numbers), len(found))


def labelled(found: Mapping[str, Sequence[str]], numbers: Mapping[str, int]) -> Samples:
    return [(file, numbers[name]) for name, files in found.items() for file in files]


def images_of(tree: Tree, part: str) -> dict[str, list[str]]:
    """The images of each class; a folder without any, or with something else, is refused."""
    found = tree.classes(part)
    if not found:
        raise DataError(
            f"{tree.place(part)} has no images in folders, one for each class: add them"
        )
    for name, files in found.items():
        if not files:
            raise DataError(f"{tree.place(part + name)} has no images: add some or remove it")
        for file in files:
            if not file.lower().endswith(SUFFIXES):
                raise DataError(
                    f"{tree.place(file)} is no image (they end in {' '.join(SUFFIXES)}): remove it"
                )
    return found
