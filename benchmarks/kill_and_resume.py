"""Trainings are killed (SIGKILL) at random moments and continued; their records must not differ.

python -m benchmarks.kill_and_resume       50 kills: results/benchmarks/torture.md and torture.csv
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from benchmarks.common import command, listed, machine, markdown, write
from experiments.config.compose import compose
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.device import pick_device
from experiments.training.execute import checkpoint_of, execute

KILLS, QUICK = 50, 4
MOST = 5  # kills of one run; then it is left in peace
PROBLEMS = {
    "mnist_mlp": ["steps=150"],
    "resnet_cifar10": [],
    "wgan_gp": [],
    "nmt": ["steps=40"],
}
# Where a kill came, told by what it left, from the beginning of a run to its end.
MOMENTS = ("start", "before the first checkpoint", "training", "inside a write", "end")
UNALIKE = (".lock", "run.json")  # when and where it was made


def run_of(experiment: str, results: Path, words: Sequence[str] = ()) -> Run:
    names = [f"experiment={experiment}", "optimizer=adashift", "scale=smoke", "tracking=off"]
    one = "threads=1"  # a process with threads must not fork
    return Run(compose([*names, *PROBLEMS[experiment], *words, one, f"results={results}"]))


def begin(run: Run, log: Path) -> int:
    """A process that trains the run; a fork, because torch takes seconds to be imported."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
        code = int(execute(run) != Status.FINISHED)
    finally:
        os._exit(code)


def end(child: int, log: Path) -> bool:
    """Whether a process came to its end; one that failed ends all this."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise OSError(f"a run failed: {log.read_text(errors='replace')[-2000:]}")
    return status == 0


def undisturbed(run: Run, log: Path) -> float:
    """Train it in peace; how many seconds that took."""
    start = time.monotonic()
    end(begin(run, log), log)
    return time.monotonic() - start


def killed(run: Run, log: Path, after: float) -> bool:
    """Train it, and kill it after so many seconds; whether it had not ended by then."""
    child = begin(run, log)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)  # no error for one that has ended and was not waited for
    return not end(child, log)


def moment(run: Run) -> str:
    if run.done:
        return "end"
    checkpoint = checkpoint_of(run, pick_device("cpu"))
    kept = checkpoint.path.exists()
    if any(run.folder.glob(".*.*.[0-9]*")) or (checkpoint.before.exists() and not kept):
        return "inside a write"
    if kept:
        return "training"
    return "before the first checkpoint" if run.status == Status.KILLED else "start"


def record_of(run: Run) -> dict[str, bytes]:
    files = [path for path in sorted(run.folder.iterdir()) if path.name not in UNALIKE]
    return {path.name: path.read_bytes() for path in files}


def torment(whole: Run, run: Run, delays: Iterator[float], log: Path) -> pd.DataFrame:
    """Kill a run again and again, then leave it in peace; a row per kill."""
    rows = []
    for after in delays:
        if not killed(run, log, after):
            break
        state = checkpoint_of(run, pick_device("cpu")).load()
        step = state["done"] if state else 0
        rows.append({"seconds": after, "moment": moment(run), "step": step})
    undisturbed(run, log)
    same = run.status == whole.status and record_of(run) == record_of(whole)
    return pd.DataFrame(rows, columns=["seconds", "moment", "step"]).assign(same=same)


def kill_all(folder: Path, log: Path, quick: bool, draw: random.Random) -> pd.DataFrame:
    """So many kills, the problems in turn."""
    tqdm.monitor_interval = 0  # a thread
    wholes = {name: run_of(name, folder / "undisturbed") for name in PROBLEMS}
    for run in wholes.values():
        execute(run)  # here: what it imports and reads, the forks need not
    lengths = {name: undisturbed(kept(name, folder, "timed"), log) for name in PROBLEMS}
    left, most = (QUICK, 1) if quick else (KILLS, MOST)
    tables = []
    for number, name in zip(count(1), cycle(PROBLEMS)):
        delays = (draw.uniform(0, lengths[name]) for _ in range(min(left, draw.randint(1, most))))
        table = torment(wholes[name], kept(name, folder, str(number)), delays, log)
        tables.append(table.assign(experiment=name, run=number))
        left -= len(table)
        if not left:
            break
    return pd.concat(tables, ignore_index=True)


def kept(experiment: str, folder: Path, name: str) -> Run:
    """A run that writes a checkpoint after every step."""
    return run_of(experiment, folder / name, ["checkpoint_every=0"])


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row per problem, and one for all."""
    rows = []
    for name, part in [*table.groupby("experiment", sort=False), ("all", table)]:
        runs = part.drop_duplicates("run")
        counts = {f"kills: {m}": int((part["moment"] == m).sum()) for m in MOMENTS}
        ends = {"records that differ": int((~runs["same"]).sum())}
        rows.append({"experiment": name, "runs": len(runs), "kills": len(part)} | counts | ends)
    return pd.DataFrame(rows)


EXPLANATION = """\
A run is killed by SIGKILL after a random part of the time that it takes undisturbed, up to five
times, and then continued to its end by the same command. It writes a checkpoint after every step.
A record differs if a byte of metrics.csv or of any file beside it does (run.json has times and is
left out), or if anything is left over. Moments are told by what the kill left: nothing or an empty
folder (start), a record without a checkpoint, a checkpoint (training), a file that was being
written, or a record that was finished while the process was not."""


def document(table: pd.DataFrame, skipped: int, quick: bool) -> str:
    facts = machine() | {"truncated checkpoints that were skipped": skipped}
    parts = ["# Killed and continued"]
    parts += ["**A few kills, for the tests.**"] if quick else []
    parts += [listed(facts), markdown(summary(table)), EXPLANATION]
    return "\n\n".join(parts) + "\n"


def torture(results: Path, quick: bool) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        table = kill_all(Path(scratch), log, quick, random.Random(0))
        skipped = log.read_text(errors="replace").count("skipping checkpoint")
    write(table, document(table, skipped, quick), results / "benchmarks" / "torture")
    if not table["same"].all():
        raise OSError(f"records differ, see {results}/benchmarks/torture.csv")
    return table


def main(words: Sequence[str] | None = None) -> None:
    command(torture, summary, "Kill trainings, continue them, compare.", "torture", words)


if __name__ == "__main__":
    main()
