"""WGAN-GP: networks, derivatives of the penalty, both objectives, rounds, resuming."""

import io
from functools import cache, partial
from itertools import islice, pairwise

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from adashift import AdaShift
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import CONF
from experiments.models.gan import GAIN, Conv, Linear, Networks, Residual
from experiments.records.run import Run
from experiments.task import Step
from experiments.tasks.gan import MaxGP, WassersteinGP, pretrain
from experiments.training.execute import execute

CPU = torch.device("cpu")
OPTIMIZERS = {
    name: sorted(p.stem for p in (CONF / "tuned" / name).glob("*.yaml"))
    for name in ("wgan_critic", "wgan_gp")
}
MAX_GP = "task.objective={_target_:experiments.tasks.gan.MaxGP,weight:0.1}"
# Images of 8 pixels keep the tests fast.
TINY = [
    "data._target_=experiments.data.images.generate_images", "++data.size=8", "model.sizes=2",
    "model.noise=10", "trainer.batch=8",
]  # fmt: skip

both_objectives = pytest.mark.parametrize("objective", [[], [MAX_GP]], ids=["paper", "released"])
both_tasks = pytest.mark.parametrize("experiment", ["wgan_critic", "wgan_gp"])


@cache
def config_of(experiment, *overrides):
    words = [f"experiment={experiment}", "optimizer=adam", "scale=smoke", "tracking=off"]
    return compose([*words, *overrides])


def task_of(experiment, *overrides, seed=0):
    config = config_of(experiment, *TINY, *overrides)
    return build(config.task, "task", seed=seed, device=CPU)


def critic_of(width=3, layers=1, sizes=2, size=4):
    """Return a tiny critic in double precision, with biases that are not 0."""
    torch.manual_seed(0)
    critic = Networks(width, layers, sizes, noise=5).critic(size).double()
    for layer in critic.layers:
        torch.nn.init.normal_(layer.bias)
    return critic


def pictures(count=6, size=4, seed=1):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).double()


def slopes_of(critic, points):
    """Return the slopes by autograd."""
    points = points.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return gradient.flatten(1).norm(dim=1)


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def weights(task):
    return flat(p for player in task.players().values() for p in player)


def optimizers_of(task, make):
    return {name: make(parameters) for name, parameters in task.players().items()}


def learn(task, optimizers, count):
    steps = islice(task.steps(), count)
    return [(step.player, float(step.take(optimizers[step.player]))) for step in steps]


# The networks


def test_parameter_counts_of_the_published_networks():
    source = [
        "data._target_=experiments.data.images.generate_images", "data.limit=64",
        "data.test_limit=1",
    ]  # fmt: skip
    for experiment in ("wgan_critic", "wgan_gp"):
        config = config_of(experiment, "scale=paper", *source)
        task = build(config.task, "task", seed=0, device=CPU)
        counts = [len(flat(net.parameters())) for net in (task.critic, task.generator)]
        assert counts == [1_629_057, 1_833_731]
        assert not task.trainer.channels_last


def test_scales_of_the_weights():
    """The scales of the released code; a residual layer's includes the gain of its ReLU."""
    critic = Networks(128, 2, 4, 100).critic(32)
    scales = {type(layer).__name__: layer.scale for layer in critic.layers}
    assert scales["Conv"] == pytest.approx(19.2, abs=0.05)
    assert scales["Down"] == pytest.approx(2.95, abs=0.005)
    assert scales["Residual"] == pytest.approx(2.95 * 1.414, abs=0.007)
    assert scales["Score"] == pytest.approx(2.21, abs=0.005)


@pytest.mark.parametrize(
    ("layer", "x", "variance"),
    [
        (partial(Conv, 32, 64), torch.randn(4, 32, 16, 16), 1),
        (partial(Conv, 32, 64, GAIN), torch.randn(4, 32, 16, 16).relu(), 1),
        (partial(Residual, 64), torch.randn(4, 64, 16, 16), 2),  # includes its input
        (partial(Linear, 500, 300), torch.randn(200, 500), 1),
    ],
)
@torch.no_grad()
def test_initial_weights_preserve_the_variance(layer, x, variance):
    torch.manual_seed(0)
    layer = layer()
    bound = 0.01 * 3**0.5
    assert layer.weight.std() == pytest.approx(0.01, rel=0.02)  # uniform
    assert 0.999 * bound < layer.weight.abs().max() <= bound
    assert (layer.bias == 0).all()
    inner = layer(x)[..., 1:-1, 1:-1] if x.ndim == 4 else layer(x)  # without the zero padding
    assert inner.var() == pytest.approx(variance, rel=0.1)


def test_a_critic_starts_with_slopes_near_one():
    torch.manual_seed(0)
    critic = Networks(32, 2, 4, 100).critic(32)
    slopes = slopes_of(critic, 0.5 * torch.randn(8, 3, 32, 32))
    assert slopes.min() > 0.7 and slopes.max() < 1.6


def test_the_critic_matches_a_plain_forward_pass():
    critic = critic_of(layers=2)
    stem, first, second, down, third, fourth, score = critic.layers

    def conv(x, layer, gain=1.0):
        scale = gain / (layer.weight[0].numel() ** 0.5 * 0.01)
        return F.conv2d(x, layer.weight * scale, layer.bias, padding=1)

    x = pictures()
    h = conv(x, stem)
    for layer in (first, second):
        h = h + conv(1.414 * h.relu(), layer)
    h = conv(F.avg_pool2d(h, 2), down)
    for layer in (third, fourth):
        h = h + conv(1.414 * h.relu(), layer)
    last = score.weight / (score.in_features**0.5 * 0.01)
    torch.testing.assert_close(critic(x), h.flatten(1) @ last[0] + score.bias)


def test_a_size_that_cannot_be_halved_raises():
    with pytest.raises(ConfigError, match="sizes is 5; 8 pixels cannot be halved 4 times"):
        task_of("wgan_gp", "model.sizes=5")


# The penalty


@pytest.mark.parametrize("shape", [(3, 1, 2, 4), (4, 2, 3, 8), (2, 3, 1, 4)])
def test_the_gradient_of_the_critic_matches_autograd(shape):
    """And so do the derivatives of its norms with respect to the weights."""
    critic, points = critic_of(*shape), pictures(size=shape[-1])
    own = critic.gradient(points).flatten(1).norm(dim=1)
    theirs = slopes_of(critic, points)
    torch.testing.assert_close(own, theirs)
    weighted = torch.arange(1.0, 7).double()
    parameters = list(critic.parameters())
    first = torch.autograd.grad((own * weighted).sum(), parameters, allow_unused=True)
    second = torch.autograd.grad((theirs * weighted).sum(), parameters, allow_unused=True)
    for name, a, b in zip(dict(critic.named_parameters()), first, second, strict=True):
        if name.endswith("bias"):  # a bias does not affect the gradient
            assert a is None and (b is None or not b.any())
        else:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("objective", [WassersteinGP(10), MaxGP(0.1)])
def test_derivatives_of_the_penalty_match_finite_differences(objective):
    """The finite differences use autograd's slopes."""
    critic, points = critic_of(), pictures()
    objective.penalty(critic.gradient(points).flatten(1).norm(dim=1)).backward()
    source, h = torch.Generator().manual_seed(0), 1e-6
    for p in critic.parameters():
        direction, sides = torch.randn(p.shape, generator=source).double(), []
        for change in (h, -2 * h):
            p.data += change * direction
            sides.append(float(objective.penalty(slopes_of(critic, points)).detach()))
        p.data += h * direction
        found = 0.0 if p.grad is None else float((p.grad * direction).sum())
        assert found == pytest.approx((sides[0] - sides[1]) / (2 * h), rel=1e-6, abs=1e-7)


def test_the_penalty_of_a_zero_gradient_has_finite_derivatives():
    critic = critic_of()
    torch.nn.init.zeros_(critic.layers[-1].weight)
    task = task_of("wgan_gp")
    task.critic = critic
    task.objective.penalty(task.slopes(pictures())).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in critic.parameters())


# The objectives


def slow_loss(task, rows, stored):
    """Return the critic's loss, image by image, with the same random numbers as the task."""
    source = torch.Generator()
    source.set_state(task.noise.before)
    noise = torch.randn(len(rows), 10, generator=source)
    parts = torch.rand(len(rows), generator=source)
    loss, points = 0.0, []
    for row, z, part in zip(rows, noise, parts, strict=True):
        real = (task.data.train.pixels[row].float() - 127.5) / 128
        fake = task.generator(z[None] / z.norm())[0].detach()
        points.append((1 - part) * real + part * fake)
        on_real, on_fake = task.critic(real[None]).squeeze(), task.critic(fake[None]).squeeze()
        if stored is None:
            loss += (on_fake - on_real) / len(rows)
        else:
            loss += (-F.logsigmoid(on_real) - on_real) / len(rows)
            loss += (-F.logsigmoid(-on_fake) + on_fake) / len(rows)
    if stored is not None:
        points = [*points[: len(rows) // 2], *stored]
    slopes = [slopes_of(task.critic, point[None]).squeeze() for point in points]
    if stored is None:
        return loss + 10 * sum((slope - 1) ** 2 for slope in slopes) / len(rows)
    return loss + 0.1 * max(slope**2 for slope in slopes)


@both_tasks
@both_objectives
def test_objectives_match_the_slow_loss(experiment, objective):
    task, rows = task_of(experiment, *objective), torch.arange(3, 11)
    stored = pictures(4, 8).float() if objective else None
    if objective:
        task.objective.stored = stored
    expected = slow_loss(task, rows, stored)
    gradients = torch.autograd.grad(expected, list(task.critic.parameters()))
    loss = task.critic_loss(rows, *next(iter(task.noise)))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(loss, list(task.critic.parameters()))
    torch.testing.assert_close(flat(found), flat(gradients), rtol=1e-3, atol=1e-2)


def test_half_of_the_points_are_stored():
    objective = MaxGP(0.1)
    fresh, later = (torch.arange(8.0).view(8, 1, 1, 1) + start for start in (0, 100))
    assert objective.points(fresh).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    points = objective.points(later)
    assert points.flatten().tolist() == [100, 101, 102, 103, 4, 5, 6, 7]
    objective.remember(points, torch.tensor([3.0, 9, 1, 0, 8, 2, 7, 5]))
    assert objective.points(fresh).flatten().tolist() == [0, 1, 2, 3, 101, 4, 6, 7]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_small_batch_keeps_its_size(count):
    objective, fresh = MaxGP(0.1), torch.randn(count, 3, 4, 4)
    for _ in range(3):
        points = objective.points(fresh)
        assert len(points) == count
        objective.remember(points, torch.rand(count))


def test_points_are_stored_at_the_end_of_a_round():
    """The slopes are those before the last step; with lr=0 they do not change."""
    task = task_of("wgan_critic", MAX_GP)
    still = optimizers_of(task, partial(torch.optim.SGD, lr=0))
    kept = []
    for step in islice(task.steps(), 15):
        step.take(still["critic"])
        kept.append(task.objective.stored)
    changed = [a is not b for a, b in pairwise(kept)]
    assert changed == ([False] * 3 + [True] + [False]) * 2 + [False] * 3 + [True]
    slopes = [slopes_of(task.critic, kept[at]) for at in (4, 9, 14)]
    assert all((s.diff() <= 1e-6).all() for s in slopes)
    assert all((b >= a - 1e-6).all() for a, b in pairwise(slopes))  # only steeper points are stored


# Rounds


def test_five_critic_steps_per_generator_step():
    task = task_of("wgan_gp")
    players = [step.player for step in islice(task.steps(), 18)]
    assert players == (["critic"] * 5 + ["generator"]) * 3
    task = task_of("wgan_gp", "trainer.critic_steps=2")
    assert [step.player for step in islice(task.steps(), 4)] == [
        *["critic"] * 2,
        "generator",
        "critic",
    ]
    assert {step.player for step in islice(task_of("wgan_critic").steps(), 18)} == {"critic"}


def test_a_step_updates_only_its_player():
    task = task_of("wgan_gp")
    optimizers = optimizers_of(task, partial(torch.optim.Adam, lr=1e-3))
    for step in islice(task.steps(), 12):
        before = {name: flat(player) for name, player in task.players().items()}
        grads = [p.grad for p in task.critic.parameters()]
        step.take(optimizers[step.player])
        moved = {
            name for name, p in task.players().items() if not torch.equal(before[name], flat(p))
        }
        assert moved == {step.player}
        if step.player == "generator":  # no gradients are computed for the critic
            assert all(a is p.grad for a, p in zip(grads, task.critic.parameters(), strict=True))
            assert all(p.requires_grad for p in task.critic.parameters())


def test_the_generator_learns_to_raise_its_score():
    task = task_of("wgan_gp")
    optimizer = torch.optim.Adam(task.generator.parameters(), lr=1e-4)
    noise = task.sample_noise
    before = task.generator_loss(noise)
    for _ in range(10):
        Step("generator", partial(task.generator_loss, noise)).take(optimizer)
    assert task.generator_loss(noise) < before - 0.1


def test_a_fixed_generator_never_changes_and_does_not_depend_on_the_seed():
    first, other, wanted = (
        task_of("wgan_critic", seed=0),
        task_of("wgan_critic", seed=1),
        task_of("wgan_critic", "task.generator_seed=7"),
    )
    start = flat(first.generator.parameters())
    assert list(first.players()) == ["critic"]
    learn(first, optimizers_of(first, partial(AdaShift, lr=1e-3, n=1)), 12)
    assert torch.equal(start, flat(first.generator.parameters()))
    assert torch.equal(start, flat(other.generator.parameters()))
    assert not torch.equal(start, flat(wanted.generator.parameters()))
    assert not torch.equal(weights(first), weights(other))


def test_a_fixed_generator_can_be_pretrained():
    words = ["trainer.critic_steps=2", "task.generator_steps=3"]
    task, again, other = (task_of("wgan_critic", *words, seed=seed) for seed in (0, 0, 1))
    full = task_of("wgan_gp", "trainer.critic_steps=2", seed=1000)
    pretrain(full, 3)
    assert torch.equal(flat(task.generator.parameters()), flat(full.generator.parameters()))
    assert torch.equal(flat(task.generator.parameters()), flat(other.generator.parameters()))
    random = task_of("wgan_critic")
    assert torch.equal(weights(task), weights(random))  # the critic is untrained
    assert not torch.equal(flat(task.generator.parameters()), flat(random.generator.parameters()))
    assert torch.equal(task.noise.before, again.noise.before)


def test_images_are_centred_and_noise_is_on_the_sphere():
    task = task_of("wgan_gp")
    values = task.images(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    assert values.flatten().tolist() == [-127.5 / 128, 127.5 / 128]
    critic = [drawn for drawn in task.noise.epoch if len(drawn) == 2]
    noise, parts = (torch.cat(drawn) for drawn in zip(*critic, strict=True))
    torch.testing.assert_close(noise.norm(dim=1), torch.ones(len(noise)))
    assert parts.shape == (len(noise), 1, 1, 1)  # one random number per image
    assert 0 <= parts.min() < 0.1 and 0.9 < parts.max() < 1


def test_samples_are_one_picture():
    task = task_of("wgan_gp")
    picture = task.samples()
    assert picture.shape == (3, 64, 64) and picture.dtype == torch.uint8
    values = task.generated(task.sample_noise)[19] * 128 + 127.5
    tile = picture[:, 16:24, 24:32]  # row 3, column 4
    torch.testing.assert_close(tile.float(), values.clamp(0, 255), rtol=0, atol=0.51)
    assert torch.equal(picture, task.samples())


def test_samples_are_kept_in_the_record_and_in_wandb(tmp_path):
    words = ["optimizer=adashift", *TINY, "tracking=offline", f"results={tmp_path}"]
    run = Run(config_of("wgan_gp", *words))
    assert execute(run) == "finished"
    kept = run.folder / "samples.png"
    assert Image.open(kept).size == (64, 64)
    (copy,) = tmp_path.glob("wandb/offline-*/files/media/images/samples_*.png")
    assert copy.read_bytes() == kept.read_bytes()


def test_evaluation_changes_nothing():
    task = task_of("wgan_critic")
    before = task.noise.source.get_state()
    assert task.evaluate() == task.evaluate()
    assert torch.equal(before, task.noise.source.get_state())
    real, fake = task.images(task.data.test.pixels), task.generated(task.test_noise)
    distance = (task.critic(real) - task.critic(fake)).mean().item()
    slope = slopes_of(task.critic, (real + fake) / 2).mean().item()
    expected = {"test_distance": distance, "test_slope": slope}
    assert task.evaluate() == pytest.approx(expected, rel=1e-4)


@both_objectives
def test_channels_last_computes_the_same(objective):
    plain = task_of("wgan_gp", *objective)
    fast = task_of("wgan_gp", *objective, "trainer.channels_last=true")
    make = partial(torch.optim.SGD, lr=1e-7)
    losses, other = (learn(task, optimizers_of(task, make), 12) for task in (plain, fast))
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in other], rel=1e-3)
    torch.testing.assert_close(weights(plain), weights(fast), rtol=1e-3, atol=1e-5)


# Complete runs


def losses(tmp_path, experiment, *words):
    run = Run(config_of(experiment, *words, f"results={tmp_path}"))
    assert execute(run) == "finished"
    metrics = run.metrics()
    return metrics[[name for name in metrics if name.endswith("/loss")]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS["wgan_critic"])
def test_the_critic_learns_with_every_optimizer(optimizer, tmp_path):
    found = losses(tmp_path, "wgan_critic", f"optimizer={optimizer}")
    assert list(found) == ["critic/loss"]
    assert found["critic/loss"].iloc[-1] < found["critic/loss"].iloc[0] - 0.3


@pytest.mark.parametrize("optimizer", ["adam", "amsgrad", "adashift"])
def test_the_critic_learns_with_the_released_objective(optimizer, tmp_path):
    words = [f"optimizer={optimizer}", "steps=30", MAX_GP]
    found = losses(tmp_path, "wgan_critic", *words)["critic/loss"]
    assert found.iloc[-1] < found.iloc[0] - 0.3


@pytest.mark.parametrize("optimizer", OPTIMIZERS["wgan_gp"])
def test_both_players_record_their_losses(optimizer, tmp_path):
    found = losses(tmp_path, "wgan_gp", f"optimizer={optimizer}")
    assert set(found) == {"critic/loss", "generator/loss"}
    assert found.notna().all(axis=None)


@both_tasks
@both_objectives
def test_the_same_seed_gives_the_same_record(experiment, objective, tmp_path):
    records = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        words = ["optimizer=adashift", *TINY, *objective, f"results={tmp_path / name}"]
        run = Run(config_of(experiment, *words, f"seed={seed}"))
        assert execute(run) == "finished"
        records.append((run.folder / "metrics.csv").read_bytes())
    assert records[0] == records[1] != records[2]


@both_tasks
@both_objectives
@pytest.mark.parametrize("cut", [5, 8])  # before a generator step, and within a round
def test_resuming_is_bit_identical(experiment, objective, cut):
    whole, begun, rest = (task_of(experiment, *objective) for _ in range(3))
    make = partial(AdaShift, lr=1e-4, betas=(0, 0.999), n=1)
    expected = learn(whole, optimizers_of(whole, make), 14)
    first = optimizers_of(begun, make)
    learn(begun, first, cut)
    file, players = io.BytesIO(), begun.players()
    values = {name: [p.detach() for p in player] for name, player in players.items()}
    states = {name: optimizer.state_dict() for name, optimizer in first.items()}
    torch.save([values, states, begun.state_dict()], file)
    file.seek(0)
    values, states, kept = torch.load(file, weights_only=True)
    second = optimizers_of(rest, make)
    with torch.no_grad():
        for name, player in rest.players().items():
            second[name].load_state_dict(states[name])
            for p, value in zip(player, values[name], strict=True):
                p.copy_(value)
    rest.load_state_dict(kept)
    assert learn(rest, second, 14 - cut) == expected[cut:]
    assert torch.equal(weights(whole), weights(rest))
    assert whole.evaluate() == rest.evaluate()
