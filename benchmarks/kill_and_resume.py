"""Kills trainings (SIGKILL) at random times, resumes them, and compares their records.

python -m benchmarks.kill_and_resume [--quick] [--results FOLDER]
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

from benchmarks.common import Benchmark, bullet_list, environment
from experiments.config.compose import compose
from experiments.products.markdown import markdown_table
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.device import pick_device
from experiments.training.execute import checkpoint_of, execute

KILLS, QUICK_KILLS = 50, 4
MAX_KILLS_PER_RUN = 5
PROBLEMS = {
    "mnist_mlp": ["steps=150"],
    "resnet_cifar10": [],
    "wgan_gp": [],
    "nmt": ["steps=40"],
}
# When a kill happened, from the start of a run to its end, inferred from the files it left.
MOMENTS = ("start", "before the first checkpoint", "training", "inside a write", "end")
NOT_COMPARED = (".lock", "run.json")  # they depend on time and machine


def run_of(experiment: str, results: Path, overrides: Sequence[str] = ()) -> Run:
    names = [f"experiment={experiment}", "optimizer=adashift", "scale=smoke", "tracking=off"]
    one = "threads=1"  # a process with threads must not fork
    return Run(compose([*names, *PROBLEMS[experiment], *overrides, one, f"results={results}"]))


def fork_training(run: Run, log: Path) -> int:
    """Train the run in a forked process: importing torch again would take seconds."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
        code = int(execute(run) != Status.FINISHED)
    finally:
        os._exit(code)


def wait_for_exit(child: int, log: Path) -> bool:
    """Return whether the process finished; raise an OSError if it failed."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise OSError(f"a run failed: {log.read_text(errors='replace')[-2000:]}")
    return status == 0


def train_undisturbed(run: Run, log: Path) -> float:
    """Train the run to its end; return the seconds."""
    start = time.monotonic()
    wait_for_exit(fork_training(run, log), log)
    return time.monotonic() - start


def kill_after(delay: float, run: Run, log: Path) -> bool:
    """Train the run and kill it after some seconds; return whether it was still running."""
    child = fork_training(run, log)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)  # no error if the child has ended: it was not waited for
    return not wait_for_exit(child, log)


def moment_of_kill(run: Run) -> str:
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
    files = [path for path in sorted(run.folder.iterdir()) if path.name not in NOT_COMPARED]
    return {path.name: path.read_bytes() for path in files}


def kill_repeatedly(whole: Run, run: Run, delays: Iterator[float], log: Path) -> pd.DataFrame:
    """Kill a run after each delay, then resume it to its end; return one row per kill."""
    rows = []
    for delay in delays:
        if not kill_after(delay, run, log):
            break
        state = checkpoint_of(run, pick_device("cpu")).load()
        step = state["done"] if state else 0
        rows.append({"seconds": delay, "moment": moment_of_kill(run), "step": step})
    train_undisturbed(run, log)
    same = run.status == whole.status and record_of(run) == record_of(whole)
    return pd.DataFrame(rows, columns=["seconds", "moment", "step"]).assign(same=same)


def kill_all(folder: Path, log: Path, quick: bool, rng: random.Random) -> pd.DataFrame:
    """Kill runs of the problems in turn; return one row per kill."""
    wholes = {name: run_of(name, folder / "undisturbed") for name in PROBLEMS}
    for run in wholes.values():
        execute(run)  # in this process, so that the forks share its imports and data
    lengths = {
        name: train_undisturbed(checkpointed(name, folder, "timed"), log) for name in PROBLEMS
    }
    left, most = (QUICK_KILLS, 1) if quick else (KILLS, MAX_KILLS_PER_RUN)
    tables = []
    for number, name in zip(count(1), cycle(PROBLEMS)):
        delays = (rng.uniform(0, lengths[name]) for _ in range(min(left, rng.randint(1, most))))
        run = checkpointed(name, folder, str(number))
        table = kill_repeatedly(wholes[name], run, delays, log)
        tables.append(table.assign(experiment=name, run=number))
        left -= len(table)
        if not left:
            break
    return pd.concat(tables, ignore_index=True)


def checkpointed(experiment: str, folder: Path, name: str) -> Run:
    """Return a run that writes a checkpoint after every step."""
    return run_of(experiment, folder / name, ["checkpoint_every=0"])


def kill_and_resume(quick: bool) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        table = kill_all(Path(scratch), log, quick, random.Random(0))
        lines = log.read_text(errors="replace").splitlines()
    # A resumed run prints the path of a checkpoint only if it skips it.
    return table.assign(skipped=sum(".pt" in line for line in lines))


def kills_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per problem, and one for all."""
    rows = []
    for name, part in [*table.groupby("experiment", sort=False), ("all", table)]:
        runs = part.drop_duplicates("run")
        counts = {f"kills: {m}": int((part["moment"] == m).sum()) for m in MOMENTS}
        ends = {"records that differ": int((~runs["same"]).sum())}
        rows.append({"experiment": name, "runs": len(runs), "kills": len(part)} | counts | ends)
    return pd.DataFrame(rows)


KILLS_EXPLANATION = f"""\
A run is killed (SIGKILL) after a random part of its undisturbed time, up to {MAX_KILLS_PER_RUN}
times, and then resumed to its end by the same command. It writes a checkpoint after every step. A
record differs if a byte of metrics.csv or of any file beside it does, except run.json, which has
times, or if a file is left over. The moment of a kill is inferred from the files that it left: none
or an empty folder (start), a record without a checkpoint, a checkpoint (training), a draft of a
file (inside a write), or a finished record (end)."""


def kills_sections(table: pd.DataFrame) -> list[str]:
    facts = environment() | {"damaged checkpoints that were skipped": table["skipped"].max()}
    return [bullet_list(facts), markdown_table(kills_summary(table)), KILLS_EXPLANATION]


def check_kills(table: pd.DataFrame, stem: Path, quick: bool) -> None:
    if not table["same"].all():
        raise OSError(f"records differ, see {stem}.csv")


KILLS_BENCHMARK = Benchmark(
    "kill-and-resume",
    "Killed and resumed",
    kill_and_resume,
    kills_summary,
    kills_sections,
    check_kills,
)

if __name__ == "__main__":
    KILLS_BENCHMARK.main()
