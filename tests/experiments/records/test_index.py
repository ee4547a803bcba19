"""runs.csv: how rows are added, updated and removed."""

import threading
import time

import pytest

from experiments.config.compose import compose
from experiments.products.make import keep_index
from experiments.records import index
from experiments.records.record import read_metrics
from experiments.records.run import Run
from experiments.training.execute import execute

PAIR = ["experiment=counterexample_stochastic", "scale=smoke", "tracking=off"]
PRODUCTS = ("figure-01", "table-01")


@pytest.fixture
def run(tmp_path):
    return Run(compose([*PAIR, "optimizer=adam", f"results={tmp_path}"]))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "runs.csv"


def test_a_row_agrees_with_the_record(run, file):
    execute(run)
    index.update_index(file, "figure-01", [run], PRODUCTS)
    (row,) = index.read_index(file).values()
    assert tuple(row) == index.INDEX_COLUMNS
    assert row["run"] == f"counterexample_stochastic/adam-{run.config.digest()}/seed=0"
    assert (row["status"], row["seed"], row["serves"]) == ("finished", "0", "figure-01")
    assert "lr=0.001 betas=[0,0.999]" in row["settings"] and "_target_" not in row["settings"]
    assert float(row["seconds"]) == pytest.approx(run.info["seconds"], abs=0.06)
    end = run.metrics()["theta"].iloc[-1]
    assert f"theta={end:.5g}" in row["metrics"] and run.info["commit"].startswith(
        row["commit"][:12]
    )
    assert (
        "torch 2" in row["versions"] and row["records"] == "yes" and row["command"] == run.command()
    )


def test_the_row_of_a_run_from_another_machine_is_kept(run, file, tmp_path):
    execute(run)
    index.update_index(file, "figure-01", [run], PRODUCTS)
    here = index.read_index(file)
    away = Run(run.config.model_copy(update={"results": tmp_path / "other"}))
    assert not away.done
    index.update_index(file, "figure-01", [away], PRODUCTS)
    assert index.read_index(file) == here
    index.update_index(file, "table-01", [away], PRODUCTS)
    assert index.read_index(file)[index.name_of(run)]["serves"] == "figure-01 table-01"


def test_a_run_that_is_not_finished_has_no_row(run, file):
    index.update_index(file, "figure-01", [run], PRODUCTS)
    assert not file.exists()
    execute(run)
    index.update_index(file, "figure-01", [run, run.with_seed(1)], PRODUCTS)
    assert [row["status"] for row in index.read_index(file).values()] == ["finished"]


def test_a_run_that_no_product_uses_is_removed(run, file):
    other = run.with_seed(1)
    execute(run), execute(other)
    index.update_index(file, "figure-01", [run, other], PRODUCTS)
    index.update_index(file, "table-01", [other], PRODUCTS)
    index.update_index(file, "figure-01", [run], PRODUCTS)
    serves = {row["seed"]: row["serves"] for row in index.read_index(file).values()}
    assert serves == {"0": "figure-01", "1": "table-01"}
    index.update_index(file, "figure-01", [run], ["figure-01"])
    assert [row["seed"] for row in index.read_index(file).values()] == ["0"]


def test_an_update_without_changes_does_not_write(run, file):
    execute(run)
    index.update_index(file, "figure-01", [run], PRODUCTS)
    before = file.stat().st_mtime_ns
    index.update_index(file, "figure-01", [run], PRODUCTS)
    assert file.stat().st_mtime_ns == before


def test_two_products_made_at_the_same_time_keep_their_rows(tmp_path, monkeypatch):
    """No other command may write between the reading and the writing of one command."""
    words = [*PAIR, f"results={tmp_path}"]
    runs = {name: [Run(compose([*words, f"optimizer={name}"]))] for name in ("adam", "sgd")}
    for (one,) in runs.values():
        execute(one)
    read = index.read_index
    monkeypatch.setattr(index, "read_index", lambda path: (read(path), time.sleep(0.3))[0])
    jobs = [
        threading.Thread(target=keep_index, args=(f"figure-{number}", {"a": part}))
        for number, part in zip(("01", "02"), runs.values(), strict=True)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(read(tmp_path / "runs-smoke.csv")) == 2


def test_a_run_that_diverged_before_its_first_record_has_no_metrics(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,metric,value\n")
    assert index.last_metrics(read_metrics(tmp_path)) == ""
