"""The training benchmark on small chunks: that it measures what it says, not how fast it is."""

import pandas as pd
import pytest
import torch

from experiments import bench_training
from experiments.bench_training import BARE, EVALUATED, LOADER, LOOP, LoaderScript, Ours, Script
from experiments.config import compose

PAIRS = [(task, opt) for task in bench_training.TASKS for opt in bench_training.OPTIMIZERS]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    bench_training.main(["--quick", "--results", str(folder)])
    return folder / "tables"


def test_every_contender_of_every_pair_is_timed(results):
    table = pd.read_csv(results / "bench-training.csv")
    wanted = [(*pair, name) for pair in PAIRS for name in (LOOP, EVALUATED, BARE, LOADER)]
    assert list(zip(table["task"], table["optimizer"], table["contender"], strict=True)) == wanted
    assert (table["steps_per_second"] > 0).all()
    assert (table.loc[table["contender"] == BARE, f"to_{BARE}"] == 1).all()
    assert (table.loc[table["contender"] == LOADER, f"to_{LOADER}"] == 1).all()


def test_the_page_says_what_was_measured(results):
    page = (results / "bench-training.md").read_text(encoding="utf-8")
    assert f"threads: {torch.get_num_threads()}" in page and "these numbers mean nothing" in page
    assert "at least 0.8 of bare and 5 × DataLoader" in page


@pytest.mark.parametrize("task", bench_training.TASKS)
def test_the_scripts_train_the_same_network_on_batches_of_the_same_form(task):
    config = compose([f"experiment={task}", "optimizer=sgd", "scale=smoke"])
    bare = Script(config, steps=2)
    loader = LoaderScript(config, 2, bench_training.plain_data(quick=True))
    for script in (bare, loader):
        images, labels = next(script.batches)
        assert images.shape == (config.task["batch"], 784) and labels.dtype == torch.int64
        before = [p.detach().clone() for p in script.net.parameters()]
        script.step()
        assert any((p != q).any() for p, q in zip(script.net.parameters(), before, strict=True))


def test_the_loop_is_timed_without_evaluations_and_with_all_of_them(tmp_path):
    class Log:
        def __init__(self):
            self.rows = []

        def log(self, step, metrics):
            self.rows.append((step, set(metrics)))

    config = compose(["experiment=mnist_lr", "optimizer=sgd", "scale=smoke"])
    for evaluated in (False, True):
        log = Log()
        Ours(config, log, 40, evaluated).step()
        assert [step for step, _ in log.rows] == [*range(2, 41, 2)]
        assert all("classifier/loss" in names for _, names in log.rows)
        assert all(("test_accuracy" in names) == evaluated for _, names in log.rows)
