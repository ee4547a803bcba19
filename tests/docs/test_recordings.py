"""docs/recordings: the emulated terminal, and the committed recordings."""

import importlib.util
import shlex
import sys

import pytest

from experiments.config.paths import ROOT

FOLDER = ROOT / "docs/recordings"
description = importlib.util.spec_from_file_location("recordings", FOLDER / "make.py")
recordings = importlib.util.module_from_spec(description)
description.loader.exec_module(recordings)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\r\nb\r\n", "a\nb"),
        ("10 %\r100 %\r\n", "100 %"),
        ("long line\rno\x1b[K\r\n", "no"),
        ("a\r\nlive\r\nlines\x1b[A\r\x1b[Jb", "a\nb"),
        ("long line\r         \rdone", "done"),
        ("outer\r\ninner\r\x1b[Anew", "newer\ninner"),
        ("one\r\n\r\n\x1b[2Atwo", "two"),
        ("\x1b[31mred\x1b[0m ┤⣿", "red ┤⣿"),
        ("a\r\n   b", "a\n   b"),
        ("cut off \x1b[", "cut off"),
    ],
)
def test_control_characters_are_resolved(text, shown):
    assert recordings.render(text) == shown


def test_a_command_runs_in_a_terminal_of_fixed_size_and_paths_are_relative(tmp_path):
    script = """
import os, sys, time
print(os.isatty(1), os.get_terminal_size().columns, sys.argv[1], os.getcwd() + "/conf")
time.sleep(0.2)
"""
    (tmp_path / "script.py").write_text(script)
    text = recordings.record(f"python {tmp_path}/script.py", "/some/folder")
    expected = f"True {recordings.COLUMNS} results=results conf"
    assert text.splitlines() == [f"$ python {tmp_path}/script.py", expected]


def test_a_long_command_is_also_shown_in_the_middle(tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "SHORT", 0)
    script = "import time; print('busy', end='\\r', flush=True); time.sleep(1); print('finished')"
    (tmp_path / "script.py").write_text(script)
    text = recordings.record(f"python {tmp_path}/script.py", str(tmp_path))
    first, last = text.split("at the end:)")
    assert "busy" in first and "finished" not in first
    assert last.split()[-1] == "finished" and "busy" not in last


def test_a_command_that_fails_is_reported(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .* failed"):
        recordings.record(shlex.join(["python", str(tmp_path / "none.py")]), str(tmp_path))


@pytest.mark.parametrize("name", recordings.SESSIONS)
def test_the_committed_recordings_are_of_these_commands(name):
    text = (FOLDER / f"{name}.txt").read_text()
    assert text.startswith(f"$ {recordings.SESSIONS[name]}\n")
    assert "\x1b" not in text and "\r" not in text
    assert str(ROOT) not in text and "/tmp/" not in text and sys.prefix not in text
