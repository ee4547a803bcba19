"""The time of runs, from finished ones that the test makes up."""

import json

import pandas as pd
import pytest

from experiments.config import gpus
from experiments.config.compose import compose
from experiments.records import archive, costs, estimate, index, provenance, record
from experiments.records.archive import Published
from experiments.records.run import Run

HERE = {"processor": "ours", "cores": 2, "probe": 0.1}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(provenance, "processor", lambda: HERE["processor"])
    monkeypatch.setattr(costs, "processor", lambda: HERE["processor"])
    monkeypatch.setattr(estimate, "probe", lambda: HERE["probe"])
    monkeypatch.setattr("os.cpu_count", lambda: HERE["cores"])
    estimate.timings.cache_clear()
    estimate.listed_rows.cache_clear()


@pytest.fixture
def run(tmp_path):
    """Return a run of the given overrides; nothing is published in its folders."""
    places = [f"results={tmp_path / 'results'}", f"published={tmp_path / 'published'}"]
    return lambda *words: Run(compose(["experiment=mnist_mlp", *words, *places]))


def info_of(run, seconds, machine=HERE, status="finished", step=57300, device="cpu"):
    config = run.config.model_dump(mode="json", exclude={"results", "published"})
    about = {"machine": machine, "device": device, "config": config}
    return {"status": status, "step": step, "seconds": seconds} | about


def finish(run, seconds, **about):
    run.folder.mkdir(parents=True)
    (run.folder / record.INFO).write_text(json.dumps(info_of(run, seconds, **about)))
    (run.folder / record.METRICS).write_text("step,metric,value\n")
    estimate.timings.cache_clear()


def publish(run, seconds, **about):
    empty = pd.DataFrame({"step": [1], "test_loss": [1.0]})
    twin = Published(info_of(run, seconds, **about), empty)
    archive.save(run.config.published, run.config.experiment, {run.entry: twin})
    estimate.timings.cache_clear()


def seconds(*runs, at_once=1):
    return estimate.estimate(runs, at_once).seconds


def test_without_finished_runs_the_time_is_unknown(run):
    found = estimate.estimate([run("seed=0"), run("seed=1")])
    assert (found.seconds, found.unknown) == (0, 2)
    assert found.words(" left") == "2 of unknown length"


def test_published_times_are_converted_by_the_probe(run):
    publish(run("seed=0"), 100, machine={"processor": "theirs", "cores": 64, "probe": 0.05})
    assert seconds(run("seed=1")) == 200  # this machine takes twice as long for the probe
    assert estimate.estimate([run("seed=1")], 1).source == "published runs"


def test_without_a_probe_published_times_are_taken_as_they_are(run):
    publish(run("seed=0"), 100, machine={"processor": "theirs", "cores": 64})
    assert seconds(run("seed=1")) == 100


def test_own_runs_of_this_machine_are_preferred_and_not_converted(run):
    publish(run("seed=0"), 100)
    finish(run("seed=0"), 60, machine=HERE | {"probe": 0.4})
    assert seconds(run("seed=1")) == 60
    assert estimate.estimate([run("seed=1")], 1).source == "your runs"


def test_the_same_setting_is_preferred_then_the_same_optimizer(run):
    finish(run("optimizer=adam"), 10)
    finish(run("optimizer=adashift", "optimizer.lr=0.5"), 20)
    assert seconds(run("optimizer=adashift", "seed=1")) == 20
    finish(run("optimizer=adashift"), 30)
    assert seconds(run("optimizer=adashift", "seed=1")) == 30
    assert seconds(run("optimizer=amsgrad")) == 20  # the median of all


def test_seeds_that_were_trained_on_a_busy_machine_hardly_count(run):
    for seed, time in enumerate((10, 11, 35, 60)):
        finish(run(f"seed={seed}"), time)
    assert seconds(run("seed=9")) == 11


def test_a_shorter_run_takes_a_part_of_the_time(run):
    finish(run(), 100)
    assert seconds(run("steps=5730", "seed=1")) == pytest.approx(10)


RESNET = ["experiment=resnet_cifar10", "scale=laptop"]


@pytest.mark.parametrize(
    "words", [["trainer.epochs=50"], ["data.limit=100"], ["model.width=4"], ["speed=fast"]]
)
def test_the_time_of_another_task_says_nothing_if_epochs_decide_the_steps(run, words):
    finish(run(*RESNET), 100)
    assert estimate.estimate([run(*RESNET, *words)]).unknown == 1
    finish(run(*RESNET, *words), 30)
    assert seconds(run(*RESNET, *words, "optimizer.lr=0.5")) == 30
    assert seconds(run(*RESNET, "optimizer.lr=0.5")) == 100


def test_the_time_of_another_task_is_converted_by_the_steps(run):
    finish(run("task.hidden=[8]"), 100)
    assert seconds(run("steps=5730")) == pytest.approx(10)
    finish(run("steps=573"), 4)
    assert seconds(run("steps=5730")) == pytest.approx(40)  # the same task is preferred


def test_a_run_is_timed_by_runs_of_its_device(run, monkeypatch):
    finish(run("seed=0"), 100)
    finish(run("seed=1"), 10, device="NVIDIA A100")
    assert seconds(run("seed=2")) == 100
    listed = "GPU 0: NVIDIA A100 (UUID: GPU-1)"
    monkeypatch.setattr(gpus, "nvidia_smi", lambda flag, *_: [listed] * (flag == "-L"))
    assert seconds(run("seed=2")) == 10
    assert seconds(run("seed=2", "device=cpu")) == 100
    assert costs.device_key(run().config) == "NVIDIA A100"
    assert costs.device_key(run("device=cpu", "threads=3").config) == "ours, 3 threads"


def test_other_scales_and_unfinished_runs_say_nothing(run):
    finish(run("scale=smoke"), 1)
    finish(run("seed=1"), 5, status="diverged")
    assert estimate.estimate([run()]).unknown == 1


def test_runs_in_parallel_take_as_long_as_the_longest(run):
    finish(run("optimizer=adam"), 100)
    finish(run("optimizer=adashift"), 10)
    runs = [run("optimizer=adam", "seed=1"), run("optimizer=adashift", "seed=1")]
    assert seconds(*runs) == 110
    assert seconds(*runs, at_once=2) == 100 + estimate.START


def test_only_the_rest_of_an_interrupted_run_is_counted(run):
    finish(run("seed=0"), 100)
    finish(run("seed=1"), 25, status="interrupted", step=57300 // 4)
    assert seconds(run("seed=1")) == pytest.approx(75)


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])  # killed: running
@pytest.mark.parametrize("words", [[], ["steps=null"]])  # null: decided by epochs
def test_the_progress_of_an_unfinished_run_says_how_much_is_left(run, status, words):
    finish(run("seed=0", *words), 100)
    finish(run("seed=1", *words), 25, status=status, step=0)
    state = {"done": 30, "total": 120, "first": 0, "seconds": 25.0}
    (run("seed=1", *words).folder / record.PROGRESS).write_text(json.dumps(state))
    assert seconds(run("seed=1", *words)) == pytest.approx(75)
    assert seconds(run("seed=1", *words, "force=true")) == 100
    (run("seed=1", *words).folder / record.PROGRESS).write_text('{"done": ')
    assert seconds(run("seed=1", *words)) == 100


def test_runs_published_without_records_count(run):
    row = dict.fromkeys(index.INDEX_COLUMNS, "") | {
        "run": f"mnist_mlp/{run().entry}", "experiment": "mnist_mlp", "optimizer": "adashift",
        "scale": "paper", "status": "finished", "seconds": "42.0", "records": index.WITHOUT,
        "command": "python run.py experiment=mnist_mlp optimizer=adashift scale=paper seed=0",
    }  # fmt: skip
    index.write_index(run().config.published / "runs.csv", {row["run"]: row})
    assert seconds(run("seed=1")) == 42
    assert estimate.estimate([run("task.hidden=[8]")]).unknown == 1


def test_a_damaged_records_file_is_no_error(run):
    publish(run(), 100)
    path = archive.path_of(run().config.published, "mnist_mlp")
    path.write_bytes(path.read_bytes()[:100])
    assert estimate.estimate([run()]).unknown == 1


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "0.5 s"), (59, "59 s"), (90, "1.5 min"), (90000, "1 d")]
)
def test_a_duration_has_one_unit(seconds, words):
    assert estimate.rough_duration(seconds) == words


def test_the_published_runs_give_a_time_for_experiments_with_and_without_records():
    for name in ("resnet_cifar10", "mnist_mlp", "counterexample_stochastic"):
        assert estimate.similar(Run(compose([f"experiment={name}", "results=nowhere"])))
