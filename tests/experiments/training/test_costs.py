"""Operations, bytes and activations counted on the meta device."""

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.config.compose import compose
from experiments.records.costs import Costs, Rates, Work, cost_key
from experiments.training import costs
from experiments.training.execute import prepare

MLP = ["experiment=mnist_mlp", "optimizer=adam"]
BATCH, WIDTHS = 64, [784, 256, 256, 10]


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "none"))


def test_a_perceptron_equals_a_count_by_hand():
    cost = costs.count_cost(compose([*MLP, "scale=paper"]))
    layers = list(pairwise(WIDTHS))
    forward = sum(2 * BATCH * wide * narrow for wide, narrow in layers)
    weights, inputs = forward, forward - 2 * BATCH * 784 * 256  # no gradient of the images
    assert cost.step.flops == forward + weights + inputs == 77_529_088
    assert cost.parameters == sum(wide * narrow + narrow for wide, narrow in layers)
    assert (cost.steps, cost.samples, cost.unit) == (57_300, BATCH, "images")
    assert cost.evaluations == 573
    # One layer for all: 256 × 256 × 10 and 784 × 256 × 10, the biases, then 15,000 images.
    one = 2 * (256 * 256 * 10 + 256 * 10 + 784 * 256 * 10 + 256 * 10)
    assert cost.evaluation.flops == one + 2 * 15_000 * 784 * 10


def test_activations_are_the_inputs_of_the_layers_and_the_loss():
    cost = costs.count_cost(compose(MLP))
    inputs = BATCH * (784 + 256 + 256)
    assert inputs * 4 <= cost.activations <= (inputs + 4 * BATCH * 10) * 4


@pytest.mark.parametrize("experiment", ["resnet_cifar10", "densenet_tiny_imagenet", "wgan_critic"])
def test_smoke_scale_equals_a_step_with_numbers(experiment):
    config = compose([f"experiment={experiment}", "scale=smoke"])
    task, _ = prepare(config, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        next(iter(task.steps())).loss().backward()
    assert costs.count_cost(config).step.flops == counter.get_total_flops() > 0


def test_the_paper_s_networks_are_counted_without_data():
    small = costs.count_cost(compose(["experiment=resnet_cifar10", "scale=laptop"]))
    assert small.steps == 5000 // 64 * 5
    large = costs.count_cost(compose(["experiment=resnet_cifar10", "scale=paper"]))
    assert large.steps == 50_000 // 128 * 50
    assert large.step.flops > 8 * small.step.flops


def test_translation_counts_words():
    cost = costs.count_cost(compose(["experiment=nmt", "scale=laptop"]))
    assert cost.unit == "tokens" and cost.samples == 32 * (12 + 13 + 2)
    assert cost.step.flops > 0 and cost.evaluation.flops == 0  # beam search


def test_a_problem_without_data_is_not_counted():
    assert costs.count_cost(compose(["experiment=counterexample_stochastic"])) is None


@pytest.mark.parametrize(("optimizer", "words"), [("sgd", 0), ("adam", 2), ("amsgrad", 3)])
def test_the_state_of_an_optimizer(optimizer, words):
    node = compose(["experiment=mnist_mlp", f"optimizer={optimizer}", "optimizer.lr=0.1"]).optimizer
    assert costs.state_bytes(node) == pytest.approx(4 * words, abs=0.01)


def test_rates_are_positive_and_give_a_time():
    rates = costs.measure_rates(torch.device("cpu"), threads=1)
    assert min(rates.flops, rates.bandwidth, rates.calls) > 1000
    assert Rates(10, 100, 1000).seconds(Work(20, 100, 500)) == 3.5


def test_costs_are_kept_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("ADASHIFT_CACHE", str(tmp_path))
    known, config = Costs(), compose(MLP)
    assert known.of(config) is None
    known.costs[cost_key(config)] = costs.count_cost(config)
    known.rates["here"] = Rates(1.0, 2.0, 3.0)
    known.save()
    again = Costs()
    assert again.of(config) == known.of(config) and again.rates == known.rates
    assert cost_key(compose([*MLP, "seed=1", "optimizer.lr=1"])) == cost_key(config)
    assert cost_key(compose([*MLP, "task.batch=32"])) != cost_key(config)
    known.path.write_text('{"costs": 3}')
    assert Costs().costs == {}
