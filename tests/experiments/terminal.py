"""A terminal for tests: runs a command in a pseudo terminal and keeps every screen it showed."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

WIDTH, HEIGHT = 80, 24
TOKEN = re.compile(r"\x1b\[(\d*)([A-Z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """The lines of a terminal, which understands only what experiments/progress.py writes."""

    def __init__(self):
        self.lines, self.row, self.column = [""], 0, 0

    def feed(self, text):
        position = 0
        for token in TOKEN.finditer(text):
            assert token.start() == position, f"unknown: {text[position : position + 9]!r}"
            position = token.end()
            count, command, control, plain = token.groups()
            if command:
                {"J": self.clear, "A": self.up}[command](int(count or 1))
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.down()
            else:
                self.print(plain)

    def clear(self, _):
        self.lines[self.row :] = [self.lines[self.row][: self.column]]

    def up(self, count):
        assert count <= self.row
        self.row -= count

    def down(self):
        self.row += 1
        self.lines += [""] * (self.row + 1 - len(self.lines))

    def print(self, text):
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)

    def __str__(self):
        return "\n".join(line.rstrip() for line in self.lines)


def in_terminal(command, **options):
    """Return the exit status of a command and every screen that it showed."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, **options)
    os.close(its)
    screen, screens = Screen(), []
    for text in chunks(mine):
        screen.feed(text)
        screens.append(str(screen))
    return process.wait(), screens


def chunks(terminal):
    """Yield what is written, at once; a sequence of the terminal is never divided."""
    rest = ""
    while True:
        try:
            rest += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the last process has closed it
            yield rest
            return
        whole = re.match(r"(?s)(.*?)(\x1b\[?\d*)?\Z", rest)
        yield whole[1]
        rest = whole[2] or ""
