"""What docs/surprises.md says of single steps."""

import pytest
import torch

from experiments.config.build import build
from experiments.config.compose import compose
from experiments.data import files, mnist
from experiments.products.comparison import values
from experiments.products.specs import load_spec
from experiments.training.execute import make_optimizers

pytestmark = pytest.mark.skipif(
    len(files.search_folders(mnist.MNIST_FILES)) < len(mnist.MNIST_FILES.checksums),
    reason="MNIST is not in a folder that ADASHIFT_DATA names",
)


def first_steps(optimizer, count, *words):
    """Of each step the largest update of the first layer: (size, how often its pixel is lit).

    With non_adashift its gradient and what that is divided by as well.
    """
    config = compose(["experiment=mnist_mlp", "scale=paper", f"optimizer={optimizer}", *words])
    task = build(config.task, "task", seed=0, device=torch.device("cpu"))
    (rule,) = make_optimizers(config, task).values()
    lit = (task.data.train.images > 0).float().mean(0)
    weight = task.net.weights[0]
    for t, step in zip(range(1, count + 1), task.steps(), strict=False):
        before = weight.detach().clone()
        step.take(rule)
        size, place = (weight.detach() - before).abs().flatten().max(0)
        more = divided(rule, weight, place, t) if optimizer == "non_adashift" else ()
        yield size.item(), lit[place // weight.shape[1]].item(), *more


def divided(rule, weight, place, t):
    """The gradient of one element, and the root of its v, which has seen t − n gradients."""
    (group,) = rule.param_groups
    v = rule.state[weight]["v"].flatten()[place] / max(
        1 - group["betas"][1] ** (t - group["n"]), 1e-9
    )
    return weight.grad.flatten()[place].abs().item(), v.sqrt().item()


def test_the_huge_steps_of_non_adashift_belong_to_pixels_that_are_seldom_lit():
    huge = [step for step in first_steps("non_adashift", 60) if step[0] > 1]
    sizes, lit, gradients, roots = zip(*huge, strict=True)
    assert len(huge) > 20 and max(sizes) > 100  # at a learning rate of 0.0005
    assert max(lit) < 0.05
    # The gradients are of the usual size, and √v is tiny; ε = 1e-8 has no part in it.
    assert min(gradients) > 0.001 and max(gradients) < 1
    assert min(roots) > 3e-8 and max(roots) < 1e-3


def test_neither_adam_nor_a_larger_eps_nor_max_has_them():
    bound = 0.001 / (1 - 0.999) ** 0.5  # of Adam: v has at least (1 − β2) g²
    assert all(size < bound for size, *_ in first_steps("adam", 60))
    assert all(size < 1 for size, *_ in first_steps("non_adashift", 60, "optimizer.eps=0.01"))
    assert all(size < 1 for size, *_ in first_steps("adashift", 60))


def test_non_adashift_also_explodes_in_some_seeds_of_logistic_regression():
    """The sentence of docs/surprises.md, from the published records."""
    runs = load_spec("figure", "02").expand(["records=published"])["non_adashift"]
    ends = sorted(values(runs, "classifier/loss", "tail_mean"))
    assert len(ends) == 10 and all(0.24 < end < 0.6 for end in ends[:7])
    assert all(end > 2 for end in ends[7:])
