"""What a run shows while it trains: live lines on a terminal, plain lines in a log file."""

import io
import math
import sys

import pytest

from experiments import progress as shown
from experiments.config.paths import ROOT
from experiments.progress import (
    LogFile,
    Output,
    Progress,
    Snapshot,
    aligned,
    count_of,
    duration,
    first_lines,
)
from tests.experiments.command_line import run_py
from tests.experiments.terminal import Screen, in_terminal

WORDS = ["experiment=mnist_lr", "optimizer=adam", "scale=smoke", "tracking=off"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(shown.time, "monotonic", lambda: Clock.now)
    return Clock


class Frames(Output):
    """Keeps what would be shown."""

    def __init__(self):
        self.reports, self.logs = [], []

    def report(self, snapshot):
        self.reports.append(snapshot)

    def log(self, snapshot):
        self.logs.append(snapshot)


def test_speed_and_time_left_count_from_where_the_run_resumed():
    resumed = Snapshot(done=600, total=1000, first=500, seconds=10.0)
    assert (resumed.rate, resumed.seconds_left) == (10.0, 40.0)
    assert (resumed.fraction, resumed.new_fraction) == (0.6, 0.1)
    assert math.isnan(Snapshot(done=3, total=None, first=0, seconds=1.0).seconds_left)
    assert math.isnan(Snapshot(done=0, total=10, first=0, seconds=1.0).seconds_left)


def test_a_line_names_every_value():
    state = Snapshot(400, 2000, 0, 4.0, values={"classifier/loss": 0.31, "accuracy": 0.91234})
    assert state.line() == (
        "step 400/2000  classifier/loss 0.31  accuracy 0.9123  100 steps/s  left 16 s"
    )
    assert Snapshot(7, None, 0, 2.0, "row").line() == "row 7  3.5 rows/s"
    assert Snapshot(5, 5, 0, 2.0).line() == "step 5/5  2.5 steps/s"  # nothing is left


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (3599.6, "1 h 0 min")],
)
def test_durations_are_rounded_before_they_are_divided(seconds, text):
    assert duration(seconds) == text


def test_reports_start_at_once_and_are_rare(clock):
    progress = Progress(shown=False)
    progress.output = Frames()
    losses = iter([0.5, 0.25])
    progress.begin(10_000, newest=lambda: {"loss": next(losses)})  # read only for a report
    for _ in range(2000):
        clock.now += 0.001
        progress.advance()
    times = [round(state.seconds, 1) for state in progress.output.reports]
    assert times == [0.0, 0.2, 1.2]
    values = [state.values for state in progress.output.reports]
    assert values == [{}, {"loss": 0.5}, {"loss": 0.25}]


def test_a_log_file_has_the_first_and_the_last_record_and_few_between(clock, capsys):
    progress = Progress(shown=False)
    progress.output = LogFile()
    with progress.begin(100):
        for step in range(1, 101):
            clock.now += 0.12
            progress.advance()
            progress.log({"theta": step})
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/100", "43/100", "85/100", "100/100"]


def test_a_closed_pipe_does_not_stop_a_training(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    shown.print_line("a")
    shown.write("b")


def test_workers_and_followers_of_torchrun_show_nothing(monkeypatch):
    assert type(shown.output()) is not Output
    monkeypatch.setenv("RANK", "1")
    assert type(shown.output()) is Output
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(shown, "parent_process", lambda: "a process")
    assert type(shown.output()) is Output


def test_what_others_print_stays_readable_above_the_live_lines(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(shown, "write", screen.feed)
    terminal = shown.Terminal()
    terminal.draw(["figure 4: 0/2 runs", "  adam seed=0"])
    screen.feed("downloading\n\r")
    assert str(screen).splitlines()[0] == "downloading"
    terminal.draw(["figure 4: 1/2 runs"])
    assert str(screen).splitlines() == ["downloading", "", "figure 4: 1/2 runs"]
    terminal.close()
    assert str(screen).splitlines() == ["downloading"]


def test_lines_fit_the_terminal(monkeypatch):
    written = []
    monkeypatch.setattr(shown, "write", written.append)
    monkeypatch.setattr(shown, "terminal_size", lambda: (20, 6))
    shown.Terminal().draw(["x" * 50] * 50)
    assert written[0].count("\n") == 4 and max(map(len, written[0].split("x\n"))) < 30
    assert "x" * 19 in written[0] and "x" * 20 not in written[0]


def test_counts_have_a_plural():
    assert [count_of(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_columns_have_equal_width():
    rows = [["", "a", "long"], ["first", "22", ""]]
    assert aligned(rows) == ["        a  long", "first  22"]
    assert aligned(rows, str.ljust) == ["       a   long", "first  22"]
    assert aligned([]) == []


def test_only_the_first_of_many_items_are_listed():
    assert first_lines("abc", str.upper) == ["    A", "    B", "    C"]
    assert first_lines("abcde", str.upper)[2:] == ["    C", "    … and 2 more"]


# Command lines


def test_a_run_without_a_terminal_prints_plain_lines(tmp_path, capfd):
    assert run_py(*WORDS, f"results={tmp_path}") is None
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert lines[1].startswith("step 2/40  classifier/loss ") and "steps/s  left " in lines[1]
    assert lines[2].startswith("step 40/40  classifier/loss ")
    assert " validation_accuracy " in lines[1] and not printed.err
    assert all(character.isprintable() for line in lines for character in line)
    assert not list(tmp_path.rglob(".progress"))


@pytest.mark.slow
def test_a_run_on_a_terminal_shows_live_lines_and_then_the_summary(tmp_path):
    words = [*WORDS, "steps=3000", f"results={tmp_path}"]
    status, screens = in_terminal([sys.executable, "run.py", *words], cwd=ROOT)
    live = [s for s in screens if "classifier/loss" in s and "steps/s  left" in s]
    assert status == 0 and live and "/3,000 steps" in live[0] and "validation_accuracy" in live[-1]
    assert "[--------------------]   0%" in "".join(screens)  # before the first step
    assert "left" not in screens[-1] and ": finished, 3,000 steps in " in screens[-1]
