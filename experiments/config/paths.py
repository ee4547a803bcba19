"""Paths of the project and its configuration."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CONF = ROOT / "conf"


def shown_path(path: Path) -> str:
    """Return the path as typed on the command line."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def choices_of(group: str) -> list[str]:
    """The names that `group=` accepts."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
