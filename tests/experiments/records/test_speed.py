"""The probe of this machine's speed is measured once and kept."""

import json
import time

import pytest

from experiments.records import provenance, speed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ADASHIFT_CACHE", str(tmp_path))
    speed.probe.cache_clear()
    yield tmp_path
    speed.probe.cache_clear()


def test_the_probe_is_measured_once(folder):
    first = speed.probe()
    (path,) = folder.iterdir()
    assert 0 < first < 5 and json.loads(path.read_text())["seconds"] == first
    path.write_text(json.dumps({"seconds": 0.5, "time": time.time()}))
    speed.probe.cache_clear()
    assert speed.probe() == 0.5 and provenance.machine()["probe"] == 0.5


@pytest.mark.parametrize("text", ["", "[]", '{"seconds": "x", "time": 9e99}', '{"time": 0}'])
def test_an_old_or_invalid_file_is_measured_again(folder, monkeypatch, text):
    monkeypatch.setattr(speed, "measured", lambda: 0.25)
    speed.probe()
    (path,) = folder.iterdir()
    path.write_text(text)
    speed.probe.cache_clear()
    assert speed.probe() == 0.25


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ADASHIFT_CACHE", str(tmp_path / "file"))
    speed.probe.cache_clear()
    assert speed.probe() > 0
