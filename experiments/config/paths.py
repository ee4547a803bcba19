"""Paths of the project and its configuration."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CONF = ROOT / "conf"


def shown_path(path: Path) -> str:
    """Return the path as typed on the command line."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def choices_of(group: str) -> list[str]:
    """The names that `group=` accepts."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def described(group: str) -> str:
    """A section of the help: what `group=` accepts, each on a line with its description."""
    names = choices_of(group)
    width = max(map(len, names))
    return f"{group}=\n" + "".join(f"  {n:{width}}  {description(group, n)}\n" for n in names)


def description(group: str, name: str) -> str:
    """The first sentence of the comment at the top of a file, after the command that runs it."""
    lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not line.startswith(("# @package", "# python ")):
            comment.append(line.removeprefix("#").strip())
    return re.split(r"(?<=[.?]) (?=[A-Z])", " ".join(comment))[0].rstrip(".")
