"""The README commands in order, at smoke scale: all pass, and Git sees no change."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONG = ("make verify", "make all")  # minutes and hours
OTHERS = [
    "make figure-8 SCALE=smoke",
    "make table-5 SCALE=smoke",
    "make claims SCALE=smoke",
    "make report SCALE=smoke",
    "make status FIGURE=1",
]


def readme_commands():
    """The commands of the README in order, at smoke scale; `make test` runs a few tests only."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text())
    for line in "".join(text for language, text in blocks if not language).splitlines():
        command = line.split("  #")[0].strip()
        if command == "make test":
            yield "make test TESTS=tests/test_docs.py ARGS='-n0 -k \"links or published\"'"
        elif command.startswith("python"):
            yield f"{command} scale=smoke"
        elif command not in LONG:
            yield command if "RECORDS=published" in command else f"{command} SCALE=smoke"


@pytest.fixture
def clone(tmp_path):
    """A clone of the project with all current changes, and a fake virtual environment."""
    folder, bin_folder = tmp_path / "clone", tmp_path / "venv/bin"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (bin_folder / "python").chmod(0o755)
    (tmp_path / "venv/.installed").touch()  # newer than requirements.lock and pyproject.toml
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@pytest.mark.slow
def test_readme_commands_leave_no_untracked_files(clone, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment |= {"VENV": str(tmp_path / "venv"), "PYTEST_ADDOPTS": ""}
    environment["PATH"] = f"{tmp_path / 'venv/bin'}{os.pathsep}{environment['PATH']}"
    for command in [*readme_commands(), *OTHERS]:
        out = subprocess.run(
            command, shell=True, cwd=clone, env=environment, capture_output=True, text=True
        )
        assert out.returncode == 0, f"{command}\n{out.stdout}\n{out.stderr}"
        assert "Warning" not in out.stderr, f"{command}\n{out.stderr}"
    state = ["git", "status", "--porcelain"]
    left = subprocess.run(state, cwd=clone, capture_output=True, text=True).stdout
    assert left == ""
