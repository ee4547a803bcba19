"""Locks, and files that are replaced in one step."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


LOCK = ".lock"


class WriteError(OSError):
    """A record that cannot be written. One line: which file, what is wrong, the cure."""


@contextmanager
def locked(folder: Path, announce: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Whether this process alone may write to the folder; with `announce`, wait until it may.

    The system takes the lock from a process that ends, however it ends.
    """
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if announce is None:
                yield False
                return
            announce(f"waiting for another process that is training it: {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock; asked without writing, for a folder may be read-only."""
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
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # before the name, which must never be that of a torn file
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def write_if_changed(path: Path, content: bytes) -> bool:
    """Write a file unless it has this content already; return whether it was written."""
    if path.exists() and path.read_bytes() == content:
        return False
    write_bytes(path, content)
    return True


def remove_drafts(folder: Path) -> None:
    """What write_bytes left in processes that were killed; only for whoever holds the lock."""
    for draft in folder.glob(".*.*.[0-9]*"):
        draft.unlink()


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A full or read-only disk is told in one line, with the file and the cure."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written ({error.strerror or error}): mend that or name another "
            "folder with results=…; what was there is kept, and the same command goes on"
        ) from error
