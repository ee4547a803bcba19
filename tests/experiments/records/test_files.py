"""Locks and atomic writes: what other threads and processes see, and what a killed one leaves."""

import errno
import subprocess
import sys
import threading

import pytest

from experiments.config.paths import ROOT
from experiments.records.files import LOCK, WriteError, is_locked, locked, write_bytes

HOLD = """
import sys, time
from pathlib import Path
from experiments.records.files import locked
with locked(Path(sys.argv[1])) as held:
    print(held, flush=True)
    time.sleep(60)
"""


def start_holder(folder):
    """Start a process that holds the lock of the folder, and wait until it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n"
    return process


def test_killing_a_process_releases_its_lock(tmp_path):
    holder = start_holder(tmp_path)
    with locked(tmp_path) as held:
        assert not held and is_locked(tmp_path)
    holder.kill()
    holder.wait()
    assert not is_locked(tmp_path)
    with locked(tmp_path) as held:
        assert held


@pytest.mark.parametrize("where", ["process", "thread"])
def test_waiting_for_a_lock_announces_once(tmp_path, where):
    lines = []

    def release(line):
        lines.append(line)
        threading.Timer(0.3, end).start()  # longer than filelock polls

    if where == "process":
        end = start_holder(tmp_path).kill
    else:
        ready, done = threading.Event(), threading.Event()
        end = done.set

        def hold():
            with locked(tmp_path):
                ready.set()
                done.wait()

        threading.Thread(target=hold).start()
        ready.wait()
    with locked(tmp_path, announce=release) as held:
        assert held
    assert lines == [f"waiting for another process that has locked {tmp_path}"]


def test_asking_for_a_lock_does_not_write(tmp_path, monkeypatch):
    """Files of a read-only folder can be opened for reading only."""
    assert not is_locked(tmp_path) and list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        (tmp_path / LOCK).chmod(0o444)
        before = (tmp_path / LOCK).stat().st_mtime_ns
        opened = record_opens(monkeypatch)
        assert is_locked(tmp_path)
    assert opened == ["r"] and (tmp_path / LOCK).stat().st_mtime_ns == before


def record_opens(monkeypatch):
    from pathlib import Path

    modes, plain = [], Path.open
    monkeypatch.setattr(Path, "open", lambda p, mode="r": (modes.append(mode), plain(p, mode))[1])
    return modes


def test_a_file_system_without_locks_is_an_error(tmp_path, monkeypatch):
    """A soft lock, filelock's fallback, would stay behind after a kill."""

    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    with pytest.raises(WriteError, match="Function not implemented"), locked(tmp_path):
        pass


def test_a_failed_write_keeps_the_old_content_and_leaves_no_draft(tmp_path, monkeypatch):
    write_bytes(tmp_path / "a", b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(WriteError, match=r"a cannot be written \(No space left on device\)"):
        write_bytes(tmp_path / "a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]
