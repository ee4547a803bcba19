"""Progress: how far a loop is, as live lines on a terminal or as plain lines in a log file.

The functions that write numbers, durations and columns are used by other packages too.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import parent_process
from typing import Self, TypeVar

FIRST_REPORT, INTERVAL = 0.2, 1.0  # seconds: until the first report, between two reports
LINE_INTERVAL = 5.0  # seconds between two lines in a log file
BAR_WIDTH = 20
CLEAR = "\r\x1b[J"  # from the cursor to the end of the screen

LISTED = 3  # items of a list whose lines are alike

Values = Mapping[str, float]
Item = TypeVar("Item")
Justify = Callable[[str, int], str]


@dataclass(frozen=True)
class Snapshot:
    """How far a loop is at one moment."""

    done: int
    total: int | None  # None: unknown
    first: int  # what was done before this process began or resumed
    seconds: float  # since then
    unit: str = "step"
    values: Values = field(default_factory=dict)  # the newest ones

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 0.0

    @property
    def new_fraction(self) -> float:
        """The part that was done in this process."""
        return (self.done - self.first) / self.total if self.total else 0.0

    @property
    def rate(self) -> float:
        return (self.done - self.first) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """NaN if unknown."""
        return (self.total - self.done) / self.rate if self.total and self.rate else math.nan

    @property
    def speed(self) -> str:
        return f"{number(self.rate, 3)} {self.unit}s/s" if self.rate else ""

    def line(self) -> str:
        """Return one line of a log file."""
        total = "" if self.total is None else f"/{self.total}"
        count = f"{self.unit} {self.done}{total}"
        return spaced(count, named(self.values), self.speed, left(self.seconds_left))

    def live_lines(self) -> list[str]:
        """Return two lines for a terminal, so that neither is longer than 80 characters."""
        total = "" if self.total is None else f"/{self.total:,}"
        bar = "" if self.total is None else f"[{bar_of(self.fraction)}] {self.fraction:4.0%}"
        count = f"{self.done:,}{total} {self.unit}s"
        return [spaced(bar, count, self.speed, left(self.seconds_left)), named(self.values)]


def bar_of(fraction: float) -> str:
    return ("#" * int(BAR_WIDTH * fraction)).ljust(BAR_WIDTH, "-")


def named(values: Values) -> str:
    return spaced(*(f"{name} {number(value)}" for name, value in values.items()))


def left(seconds: float) -> str:
    return f"left {duration(seconds)}" if seconds > 0 else ""  # NaN: unknown


def spaced(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def count_of(count: int, noun: str) -> str:
    """
    >>> count_of(1, "run"), count_of(2000, "run")
    ('1 run', '2,000 runs')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def first_lines(items: Sequence[Item], line: Callable[[Item], str]) -> list[str]:
    """Return lines on the first items, and how many others there are."""
    more = [f"    … and {len(items) - LISTED} more"] if len(items) > LISTED else []
    return [f"    {line(item)}" for item in items[:LISTED]] + more


def aligned(rows: Iterable[Sequence[str]], others: Justify = str.rjust) -> list[str]:
    """Return the rows as columns of equal width; `others` aligns all but the first column."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([*map(str.ljust, row[:1], widths), *map(others, row[1:], widths[1:])]).rstrip()
        for row in table
    ]


def number(value: float, digits: int = 4) -> str:
    """
    >>> number(0.91234), number(12345.6, 3), number(1.5e-7)
    ('0.9123', '12,346', '1.5e-07')
    """
    return f"{value:,.0f}" if 10**digits <= abs(value) < 1e9 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """
    >>> duration(0.25), duration(14.2), duration(250), duration(7500)
    ('0.2 s', '14 s', '4 min 10 s', '2 h 5 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress:
    """Counts what a loop has done, and shows it unless `shown` is false.

    >>> with Progress("image").begin(total=len(names)) as progress:
    ...     progress.advance(100)
    ...     progress.log({})
    """

    def __init__(self, unit: str = "step", shown: bool = True) -> None:
        self.unit, self.output = unit, output(shown)

    def begin(self, total: int | None, done: int = 0, newest: Callable[[], Values] = dict) -> Self:
        """Start the clock; `newest` returns values that are newer than the logged ones."""
        self.total, self.first, self.done, self.newest = total, done, done, newest
        self.values: dict[str, float] = {}
        self.begun = time.monotonic()
        self.due = self.begun + FIRST_REPORT
        self.output.report(self.snapshot())
        return self

    def advance(self, size: int = 1) -> None:
        self.done += size
        if (now := time.monotonic()) >= self.due:
            self.due = now + INTERVAL
            self.values |= self.newest()
            self.report(self.snapshot())

    def report(self, snapshot: Snapshot) -> None:
        self.output.report(snapshot)

    def log(self, values: Values) -> None:
        """Note the values that the loop has recorded."""
        self.values |= values
        self.output.log(self.snapshot())

    def snapshot(self) -> Snapshot:
        seconds, values = time.monotonic() - self.begun, dict(self.values)
        return Snapshot(self.done, self.total, self.first, seconds, self.unit, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.output.close()


class Output:
    """Shows nothing."""

    def report(self, snapshot: Snapshot) -> None:
        """Show how far the loop is; called about once per second."""

    def log(self, snapshot: Snapshot) -> None:
        """Show what was recorded."""

    def close(self) -> None:
        """Leave a state in which others can print."""


class Terminal(Output):
    """Live lines, replaced by the next ones.

    The cursor waits above them, on an empty line: what others print remains readable.
    """

    def report(self, snapshot: Snapshot) -> None:
        self.draw(snapshot.live_lines())

    def draw(self, lines: Sequence[str]) -> None:
        width, height = terminal_size()
        visible = [line[: width - 1] for line in lines[: max(1, height - 2)]]
        write("".join([CLEAR, *("\n" + line for line in visible), f"\x1b[{len(visible)}A\r"]))

    def close(self) -> None:
        write(CLEAR)


class LogFile(Output):
    """A plain line for each record, except for records that follow each other quickly."""

    due = 0.0
    pending: Snapshot | None = None

    def log(self, snapshot: Snapshot) -> None:
        self.pending = snapshot
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + LINE_INTERVAL
            self.close()

    def close(self) -> None:
        if self.pending is not None:
            print_line(self.pending.line())
        self.pending = None


def output(shown: bool = True) -> Output:
    """Return where this process shows its progress, if it does."""
    # A worker has a parent that shows all runs; the first process of torchrun shows its run.
    if not shown or parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return Output()
    return Terminal() if on_terminal() else LogFile()


def on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def terminal_size() -> tuple[int, int]:
    try:
        width, height = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return 80, 24
    return width or 80, height or 24  # a pseudo terminal may have no size


def message(text: str) -> None:
    """Print a line on stderr, above the live lines."""
    write(f"{CLEAR if on_terminal() else ''}{text}\n")


def print_line(text: str) -> None:
    """Print a line on stdout, where the results are, above the live lines."""
    if on_terminal():
        write(CLEAR)
    try:
        print(text, flush=True)
    except OSError:  # a closed pipe must not stop a training
        drop_output()


def drop_output() -> None:
    """Discard what is printed from now on, and what could not be printed."""
    with suppress(OSError):  # an output without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write(text: str) -> None:
    # A closed terminal, or a signal during a write, must not stop a training.
    with suppress(OSError, RuntimeError):
        sys.stderr.write(text)
        sys.stderr.flush()
