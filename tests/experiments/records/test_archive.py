"""Published records: values are bit-identical, and a damaged file is an error in one line."""

import hashlib
import json
import lzma

import numpy as np
import pandas as pd
import pytest

from experiments.records import archive
from experiments.records.archive import Published, RecordsError

BITS = np.random.default_rng(0).integers(0, 2**63, 2000).view(float)
VALUES = [
    0.1,
    1 / 3,
    -1e-300,
    5e-324,
    np.inf,
    -0.0,
    float(np.float32(0.7)),
    *BITS[np.isfinite(BITS)],
]


@pytest.fixture
def runs():
    steps = range(1, len(VALUES) + 1)
    first = pd.DataFrame({"step": steps, "loss": VALUES, "theta": VALUES[::-1]})
    second = pd.DataFrame({"step": [1, 2], "loss": [1.0, np.nan], "other": [np.nan, 3.0]})
    return {
        "adam-12345678/seed=0": Published({"status": "finished", "config": {"a": "β # 1"}}, first),
        "sgd-12345678/seed=1": Published({"status": "diverged"}, second),
    }


def test_values_are_read_bit_identical(tmp_path, runs):
    archive.save(tmp_path, "valley", runs)
    found = archive.load(tmp_path, "valley")
    assert list(found) == list(runs) and archive.experiments(tmp_path) == ["valley"]
    for name, run in runs.items():
        pd.testing.assert_frame_equal(found[name].metrics, run.metrics, check_exact=True)
        assert found[name].info == run.info | {"run": name} and found[name].status == run.status
    assert np.signbit(found["adam-12345678/seed=0"].metrics["loss"][5])


def test_pandas_reads_a_file_without_our_code(tmp_path, runs):
    archive.save(tmp_path, "valley", runs)
    table = pd.read_csv(tmp_path / "records/valley.csv.xz", comment="#")
    assert (
        list(table.columns) == ["run", "step", "loss", "other", "theta"]
        and len(table) == len(VALUES) + 2
    )


def test_saving_the_same_records_does_not_write(tmp_path, runs):
    archive.save(tmp_path, "valley", runs)
    path = archive.path_of(tmp_path, "valley")
    before = path.stat().st_mtime_ns, path.read_bytes()
    archive.save(tmp_path, "valley", dict(archive.load(tmp_path, "valley")))
    assert before == (path.stat().st_mtime_ns, path.read_bytes())


def test_an_experiment_without_a_file_has_no_published_runs(tmp_path):
    assert archive.load(tmp_path, "valley") == {} and archive.experiments(tmp_path) == []


def text(path):
    return lzma.decompress(path.read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.read_bytes()[:-40], "truncated or not an xz file"),
        (lambda path: path.read_bytes()[:10], "truncated or not an xz file"),
        (lambda path: b"", "truncated or not an xz file"),
        (lambda path: b"step,loss\n1,2\n", "truncated or not an xz file"),
        (lambda path: lzma.compress(b"step,loss\n1,2\n"), "is not a records file"),
        (lambda path: lzma.compress(text(path).replace(b"0.1", b"0.2", 1)), "checksum mismatch"),
        (lambda path: lzma.compress(text(path)[:-5]), "checksum mismatch"),
        (lambda path: lzma.compress(text(path).replace(b"sha256 ", b"sha256 0")), "checksum"),
    ],
)
def test_a_truncated_changed_or_foreign_file_is_one_line_with_its_path(
    tmp_path, runs, damage, message
):
    archive.save(tmp_path, "valley", runs)
    path = archive.path_of(tmp_path, "valley")
    path.write_bytes(damage(path))
    with pytest.raises(RecordsError, match=message) as error:
        archive.read_runs.__wrapped__(path, 0)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_with_a_valid_checksum_but_no_records_is_an_error(tmp_path):
    """Another format, or a later one."""
    rest = b'# {"run": "adam-1/seed=0"}\nrun,step\nother-1/seed=0,1\n'
    for body in (rest, b"# {\n", b"", json.dumps([1]).encode()):
        checksum = f"# sha256 {hashlib.sha256(body).hexdigest()}\n"
        path = tmp_path / "records/valley.csv.xz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lzma.compress(f"{archive.RECORDS_FORMAT}\n{checksum}".encode() + body))
        with pytest.raises(RecordsError, match=r"valley\.csv\.xz"):
            archive.read_runs.__wrapped__(path, 0)


def test_a_small_file_cannot_exhaust_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_RECORDS_BYTES", 1000)
    path = tmp_path / "bomb.csv.xz"
    path.write_bytes(lzma.compress(bytes(10_000)))
    with pytest.raises(RecordsError, match="more than 1,000 bytes"):
        archive.unpack(path)


@pytest.mark.filterwarnings("error")
def test_many_metrics_are_written_without_a_warning(tmp_path):
    """pandas warns if a frame has more than 100 blocks, here one for each metric."""
    wide = pd.DataFrame({"step": [1], **{f"metric {i}": [float(i)] for i in range(200)}})
    run = Published({"status": "finished"}, wide)
    runs = {f"adam-12345678/seed={seed}": run for seed in range(2)}
    archive.save(tmp_path, "valley", runs)
    archive.save(tmp_path, "valley", dict(archive.load(tmp_path, "valley")))
