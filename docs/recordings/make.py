"""Records terminal sessions as text: what users see while a command runs, and when it has ended.

python docs/recordings/make.py             all of them; about 5 minutes
python docs/recordings/make.py run sweep   some of them

Each command runs in a terminal of fixed size with its own results folder, and needs the MNIST data.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ROWS, COLUMNS = 40, 110
SHORT = 3  # seconds: half the time of a command that needs no progress bar

SESSIONS = {
    "run": "python run.py experiment=mnist_lr optimizer=adashift tracking=off",
    "figure": "python -m experiments figure 1 tracking=off",
    "sweep": "python run.py -m sweep=lr_1e-4_to_1e-2 experiment=mnist_lr optimizer=adam "
    "tracking=off",
    "show": "python -m experiments show experiment=mnist_lr optimizer=adam "
    "optimizer.lr=0.0001,0.001,0.01 --metric validation_accuracy",
}
NEEDS = {"show": "sweep"}  # the runs of another session

# a control sequence, a control character, or text
TOKEN = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|\x1b(?:\[[\d;?]*)?|[\x00-\x1f]|[^\x00-\x1f\x1b]+")


def main(names: list[str]) -> None:
    if unknown := {*names} - {*SESSIONS}:
        sys.exit(f"error: unknown sessions {', '.join(unknown)}: choose from {', '.join(SESSIONS)}")
    wanted = {other for name in names or SESSIONS for other in (name, NEEDS.get(name, name))}
    with TemporaryDirectory() as results:
        for name in (name for name in SESSIONS if name in wanted):
            text = record(SESSIONS[name], results)
            (HERE / f"{name}.txt").write_text(text)
            print(text)


def record(command: str, results: str) -> str:
    """Return what a command shows in the middle of its time, if it takes long, and at the end."""
    words = [sys.executable, *shlex.split(command)[1:], f"results={results}"]
    chunks = list(output_of(words))
    middle = chunks[-1][0] / 2
    text = f"$ {command}\n{screen(chunks, results)}\n"
    if middle < SHORT:
        return text
    before = [(seconds, part) for seconds, part in chunks if seconds <= middle]
    return (
        f"$ {command}\n{screen(before, results)}\n\n(after {middle:.0f} s; at the end:)\n\n{text}"
    )


def screen(chunks: Sequence[tuple[float, str]], results: str) -> str:
    """Return what the terminal shows, with the paths that a user sees in a checkout."""
    text = "".join(part for _, part in chunks)
    return render(text.replace(results, "results").replace(f"{ROOT}/", ""))


def output_of(words: list[str]) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal; yield what it prints, with the time in seconds."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    env = {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES")}
    start = time.monotonic()
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=env, start_new_session=True
    )
    os.close(theirs)
    while text := read_some(ours):
        yield time.monotonic() - start, text
    os.close(ours)
    if process.wait():
        sys.exit(f"error: {shlex.join(words)} failed")


def read_some(terminal: int) -> str:
    """Return what is available; empty when the command has ended."""
    try:
        return os.read(terminal, 2**16).decode(errors="replace")
    except OSError:  # Linux's end of a terminal
        return ""


def render(text: str) -> str:
    """Return what a terminal shows after a text with control characters; lines are not wrapped."""
    lines, row, column = [""], 0, 0
    for token in TOKEN.finditer(text):
        part, count, control = token[0], token[1], token[2]
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif control == "A":  # up
            row = max(0, row - int(count or 1))
        elif control in ("K", "J"):  # erase the rest of the line, or of the screen
            lines[row] = lines[row][:column]
            lines = lines if control == "K" else lines[: row + 1]
        elif part.isprintable():
            lines[row] = f"{lines[row]:{column}}"[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return "\n".join(line.rstrip() for line in lines).strip("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
