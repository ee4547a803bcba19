"""What docs/surprises.md says of single steps."""

import torch

from experiments.config import build, compose
from experiments.execute import make_optimizers


def first_steps(optimizer, count, *words):
    """(size of the largest update of the first layer, how often its pixel is lit) of each step."""
    config = compose(["experiment=mnist_mlp", "scale=paper", f"optimizer={optimizer}", *words])
    task = build(config.task, "task", seed=0, device=torch.device("cpu"))
    (rule,) = make_optimizers(config, task).values()
    lit = (task.data.train.images > 0).float().mean(0)
    weight = task.net.weights[0]
    for _, step in zip(range(count), task.steps(), strict=False):
        before = weight.detach().clone()
        step.take(rule)
        size, place = (weight.detach() - before).abs().flatten().max(0)
        yield size.item(), lit[place // weight.shape[1]].item()


def test_the_huge_steps_of_non_adashift_belong_to_pixels_that_are_seldom_lit():
    huge = [(size, lit) for size, lit in first_steps("non_adashift", 60) if size > 1]
    assert len(huge) > 20 and max(size for size, _ in huge) > 100  # at a learning rate of 0.0005
    assert all(lit < 0.05 for _, lit in huge)


def test_neither_adam_nor_a_larger_eps_nor_max_has_them():
    bound = 0.001 / (1 - 0.999) ** 0.5  # of Adam: v has at least (1 − β2) g²
    assert all(size < bound for size, _ in first_steps("adam", 60))
    assert all(size < 1 for size, _ in first_steps("non_adashift", 60, "optimizer.eps=0.01"))
    assert all(size < 1 for size, _ in first_steps("adashift", 60))
