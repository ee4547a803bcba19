"""Locks, and files that are replaced in one step."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
FOLDERS = "results=… or published=…"  # the settings of the folders to which files are written


class WriteError(OSError):
    """A file that cannot be written. One line: which file, what is wrong, how to fix it."""


@contextmanager
def locked(
    folder: Path, announce: Callable[[str], None] | None = None, setting: str = FOLDERS
) -> Iterator[bool]:
    """Hold the lock of a folder; yield whether it is held. With `announce`, wait until it is.

    `setting` names what sets another folder. The operating system releases the lock of a process
    that ends, also of a killed one.
    """
    lock = FileLock(folder / LOCK, fallback_to_soft=False)  # a soft lock outlives a killed process
    with reporting_write_errors(folder, setting):
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            lock.acquire(blocking=False)
    if announce is not None and not lock.is_locked:
        announce(f"waiting for another process that has locked {folder}")
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder.

    filelock opens the file for writing, which fails in a read-only folder; a shared lock does not.
    """
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new content, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with reporting_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # before the rename, so that the name never has half a file
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def write_if_changed(path: Path, content: bytes) -> bool:
    """Write a file unless it already has this content; return whether it was written."""
    if path.exists() and path.read_bytes() == content:
        return False
    write_bytes(path, content)
    return True


def remove_drafts(folder: Path) -> None:
    """Remove what write_bytes left in killed processes; call it with the lock held."""
    for draft in folder.glob(".*.*.[0-9]*"):
        draft.unlink()


@contextmanager
def reporting_write_errors(path: Path, setting: str = FOLDERS) -> Iterator[None]:
    """Turn a full or read-only disk into one line: which file, what is wrong, how to fix it."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written ({error.strerror or error}): fix that or set another folder "
            f"with {setting}, then rerun the same command to resume"
        ) from error
