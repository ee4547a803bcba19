"""`make plan`: the cost of figures before anything is trained."""

import pytest

from experiments import __main__ as cli
from experiments.config.compose import compose
from experiments.products import plan
from experiments.records import costs, estimate
from experiments.records.costs import Cost, Rates, Work
from experiments.records.run import Run


@pytest.fixture
def ask(small_figure, tmp_path, monkeypatch, capsys):
    """Return the lines of a plan of a small figure; nothing is published."""
    monkeypatch.setenv("ADASHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "none"))
    costs.known_costs.cache_clear()
    estimate.timings.cache_clear()
    places = [f"results={tmp_path / 'results'}", f"published={tmp_path / 'published'}"]

    def ask(*words):
        cli.main(["plan", *words, *places])
        return capsys.readouterr().out.splitlines()

    ask.places = places
    yield ask
    costs.known_costs.cache_clear()


def test_a_plan_counts_before_anything_is_trained(ask, tmp_path):
    header, line, *rest = ask("scale=paper")
    assert header.split()[:5] == ["runs", "steps", "samples", "FLOP", "memory"]
    assert header.split()[5:] == ["this", "machine", "RTX", "4090", "A100", "H100"]
    assert line.startswith("figure 01     4  230 k  15 M images")
    (cost,) = costs.known_costs().costs.values()
    work = 4 * (57_300 * cost.step.flops + 573 * cost.evaluation.flops)
    assert f"  {work:.1e}  ".replace("e+", "e") in line
    assert "estimated from counted operations" in rest[1]
    assert not (tmp_path / "results").exists()


def test_status_and_plan_agree(ask, capsys):
    _, line, *_ = ask("figure-1")
    cli.main(["status", *ask.places])
    here = capsys.readouterr().out.splitlines()[0]
    assert here.startswith("figure 01: 4 missing of 4 runs; about ")
    time = here.split("about ")[1].removesuffix(" left")
    assert f"  {time}  " in line


COST = Cost(
    steps=100, samples=64, unit="images", step=Work(3e12, 6e9, 1e5), evaluation=Work(0, 0, 0),
    evaluations=1, parameters=10**6, activations=10**9,
)  # fmt: skip


def test_the_time_on_a_gpu_is_the_sum_of_operations_bytes_and_calls(monkeypatch):
    shares = {"share_of_peak": 0.5, "share_of_bandwidth": 1.0, "calls_per_second": 1e5}
    monkeypatch.setattr(plan, "settings", lambda: shares)
    gpu = plan.Gpu("a GPU", float32=3, tf32=6, bfloat16=12, memory=1, bandwidth=6)
    assert gpu.seconds(COST, "float32") == pytest.approx(100 * (2 + 1 + 1))
    assert gpu.seconds(COST, "tf32") == pytest.approx(100 * (1 + 1 + 1))
    assert gpu.seconds(COST, "bfloat16") == pytest.approx(100 * (0.5 + 1 + 1))
    run = Run(compose(["experiment=mnist_mlp", "optimizer=adam"]))
    assert plan.memory_of(run, COST) == pytest.approx(10**6 * 16 + 10**9, rel=1e-3)
    assert plan.gpu_cell(gpu, [run], {run.folder: COST}, memory=2e9) == "too small"
    assert plan.gpu_cell(gpu, [run], {run.folder: COST}, memory=1e9) == "6.7 min"


@pytest.mark.parametrize(
    ("experiment", "words", "expected"),
    [
        ("resnet_cifar10", [], "float32"),
        ("resnet_cifar10", ["speed=fast"], "bfloat16"),
        ("resnet_cifar10", ["trainer.autocast=true"], "bfloat16"),
        ("wgan_critic", ["speed=fast"], "tf32"),
        ("mnist_mlp", [], "float32"),
        ("mnist_mlp", ["speed=fast"], "tf32"),
    ],
)
def test_the_precision_on_a_gpu_depends_on_the_speed(experiment, words, expected):
    run = Run(compose([f"experiment={experiment}", "optimizer=adam", *words]))
    assert plan.precision(run) == expected


def test_a_counted_time_is_corrected_by_a_known_one(ask, monkeypatch):
    """The model gives 100 s at laptop scale, where a run took 200 s, and 1000 s at paper scale."""
    pair = ["experiment=resnet_cifar10", "optimizer=adam", *ask.places]
    laptop, paper = (Run(compose([*pair, f"scale={scale}"])) for scale in ("laptop", "paper"))
    known = costs.known_costs()
    for run, times in ((laptop, 1), (paper, 10)):
        known.costs[costs.cost_key(run.config)] = Cost(**{**vars(COST), "steps": 100 * times})
    known.rates[costs.device_key(paper.config)] = Rates(1e30, 6e9, 1e30)
    assert estimate.estimate([paper], 1).seconds == pytest.approx(1000)
    config = laptop.config.model_dump(mode="json", exclude={"results", "published"})
    info = {"status": "finished", "seconds": 200, "machine": {}, "config": config}
    timing = estimate.timing_of(info, laptop.setting, own=False)
    monkeypatch.setattr(estimate, "timings", lambda *_: [timing])
    assert estimate.estimate([paper], 1).seconds == pytest.approx(2000)


def test_every_gpu_has_all_rates():
    assert [gpu.name for gpu in plan.gpus()] == ["RTX 4090", "A100", "H100"]
    assert all(gpu.float32 <= gpu.tf32 <= gpu.bfloat16 for gpu in plan.gpus())
