"""Every experiment trains and evaluates on a GPU, and no step waits for it.

The device is empty (tests/experiments/empty_device.py), so that this needs no GPU.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from experiments.config.compose import compose
from experiments.config.paths import CONF, choices_of
from experiments.data import cifar10, mnist, tiny_imagenet, translation
from experiments.data.batches import Epochs
from experiments.data.images import Images, ImageSet
from experiments.data.mnist import Mnist, Samples
from experiments.data.text import Pairs, Sentences, Vocabulary
from experiments.task import Measurement
from experiments.tasks.counterexample import Trajectory
from experiments.tasks.images import ImageClassifier
from experiments.training.execute import prepare
from experiments.training.loop import Training
from tests.experiments.empty_device import META, EmptyDevice, Violation

STEPS = 3  # more than AdaShift keeps gradients
OPTIMIZER_COPIES = 2  # when it makes its state


def optimizers_of(experiment):
    return sorted(path.stem for path in (CONF / "tuned" / experiment).glob("*.yaml"))


def is_training(experiment):
    target = compose([f"experiment={experiment}", f"optimizer={optimizers_of(experiment)[0]}"])
    names = (".beta_grid.", ".lemmas.")
    return not any(name in target.task["_target_"] for name in names)


EXPERIMENTS = choices_of("experiment")
TRAININGS = [name for name in EXPERIMENTS if is_training(name)]


# Training data of the published sizes


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


def images(train, test, classes):
    def part(count):
        pixels = empty(count, 3, 32, 32, dtype=torch.uint8)
        return Images(pixels, empty(count, dtype=torch.int64))

    return lambda device, **_: ImageSet(part(train), part(test), classes)


def digits(device):
    def part(count):
        return Samples(empty(count, 784), empty(count, dtype=torch.int64))

    return Mnist(part(55_000), part(5_000), part(10_000))


def sentences(train, dev, test, words):
    def side(count):
        lengths = torch.arange(count) % 15 + 3
        return Sentences(empty(count, 17, dtype=torch.int64), lengths)

    def part(count):
        return Pairs(side(count), side(count), ["a reference"] * count)

    def load(device, **_):
        lists = [Vocabulary(tuple(map(str, range(count)))) for count in words]
        return translation.Corpus(part(train), part(dev), part(test), *lists)

    return load


@pytest.fixture
def published_sizes(monkeypatch):
    monkeypatch.setattr(cifar10, "load_cifar10", images(50_000, 600, 10))
    monkeypatch.setattr(tiny_imagenet, "load_tiny_imagenet", images(100_000, 600, 200))
    monkeypatch.setattr(mnist, "load_mnist", digits)
    iwslt = sentences(133_317, 70, 70, (7_709, 17_191))
    monkeypatch.setattr(translation, "load_iwslt15", iwslt)
    monkeypatch.setattr(translation, "load_by_heart", sentences(200, 70, 70, (900, 900)))


# Training


def settings_of(experiment, optimizer, scale):
    """Return a config with an optimizer that starts at once and needs no kernel of a GPU."""
    words = [f"experiment={experiment}", f"optimizer={optimizer}", f"scale={scale}"]
    chosen = compose(words).optimizer
    if "n" in chosen:
        words.append("optimizer.n=1")
    if chosen.get("fused") and chosen["_target_"].startswith("torch."):
        words.append("optimizer.fused=false")
    return compose([*words, "tracking=off"])


class Trial:
    """A training on an empty device, and the copies to it."""

    def __init__(self, config):
        self.device, self.epochs, self.optimizer_copies = EmptyDevice(), 0, 0
        with self.device, self.device.reading():
            self.task, loop = prepare(config, META)
            if isinstance(self.task, Measurement):
                return
            optimizers = loop.args[1]
            record = SimpleNamespace(log=lambda *_: None, state_dict=dict, load_state_dict=len)
            self.training = Training(self.task, optimizers, record)
            self.training.progress.begin(STEPS, 0)
        for optimizer in optimizers.values():
            self.watch(optimizer)
        for part in vars(self.task).values():
            if isinstance(part, Epochs):
                part.draw = self.counted(part.draw)

    def counted(self, draw):
        def draw_epoch(source):
            self.epochs += 1
            return draw(source)

        return draw_epoch

    def watch(self, optimizer):
        def note(sign, *_):
            self.optimizer_copies += sign * self.device.copies

        optimizer.register_step_pre_hook(partial(note, -1))
        optimizer.register_step_post_hook(partial(note, 1))

    def take_steps(self, count=STEPS):
        """Take at least `count` steps of each player; an epoch begins with the first."""
        self.device.copies = self.optimizer_copies = self.epochs = 0
        for part in vars(self.task).values():
            if isinstance(part, Epochs):
                part.position = part.per_epoch
        taken = dict.fromkeys(self.task.players(), 0)
        with self.device:
            for step in self.task.steps():
                self.training.take(step)
                taken[step.player] += 1
                if min(taken.values()) >= count:
                    break
        copies = self.device.copies - self.optimizer_copies
        assert copies == self.epochs, f"{copies} copies to the device in {self.epochs} new epochs"
        assert self.optimizer_copies <= OPTIMIZER_COPIES * len(taken)

    def evaluate(self):
        with self.device, self.device.reading():
            self.training.log(self.task.evaluate())
            self.training.log(metrics := self.task.evaluate_at_end())
            self.task.files()
        return metrics

    def resume(self):
        with self.device, self.device.reading():
            self.training.load_state_dict(self.training.state_dict())


@pytest.mark.parametrize("scale", ["smoke", "paper"])
@pytest.mark.parametrize("experiment", TRAININGS)
def test_no_step_waits_for_the_device(experiment, scale, published_sizes):
    choices = optimizers_of(experiment)
    optimizer = "adashift" if "adashift" in choices else choices[0]
    trial = Trial(settings_of(experiment, optimizer, scale))
    trial.take_steps()
    used = trial.device.operations
    assert trial.evaluate()
    trial.resume()
    trial.take_steps(1)
    # One number is not worth a GPU.
    assert (used == 0) == isinstance(trial.task, Trajectory)


@pytest.mark.parametrize("experiment", sorted(set(EXPERIMENTS) - set(TRAININGS)))
def test_measurements_do_not_use_the_device(experiment):
    trial = Trial(settings_of(experiment, optimizers_of(experiment)[0], "smoke"))
    assert isinstance(trial.task, Measurement) and trial.device.operations == 0


# Levenberg–Marquardt decides by the loss whether to keep a step, so it has to wait for it.
@pytest.mark.parametrize(
    "optimizer", sorted({*choices_of("optimizer")} - {"custom", "levenberg_marquardt"})
)
def test_no_optimizer_waits_for_the_device(optimizer):
    words = ["experiment=mnist_mlp", f"optimizer={optimizer}", "scale=smoke", "optimizer.lr=0.1"]
    Trial(compose([*words, *["++optimizer.fused=false"] * is_fused(optimizer)])).take_steps()


def is_fused(optimizer):
    path = CONF / "tuned" / "mnist_mlp" / f"{optimizer}.yaml"
    return optimizer in ("adam", "amsgrad") and path.exists()


# The device notices


def faulty(fault: Callable[[torch.Tensor], object]):
    """Return a loss that does something wrong besides."""
    plain = ImageClassifier.loss

    def loss(self, *args):
        value = plain(self, *args)
        fault(value)
        return value

    return loss


ROW = torch.zeros(1, dtype=torch.int64)
WAITS = {
    "item": lambda x: x.item(),
    "float": lambda x: float(x.detach()),
    "bool": bool,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "copy_": lambda x: torch.zeros(()).copy_(x.detach()),
    "nonzero": lambda x: x.view(1).nonzero(),
    "mask": lambda x: x.view(1)[x.view(1) > 0],
    "unique": lambda x: x.view(1).unique(),
    "equal": lambda x: torch.equal(x, x),
    "backward": lambda x: x.register_hook(lambda g: g.item()),
}
MIXES = {
    "index": lambda x: x.view(1)[ROW],
    "index_select": lambda x: x.view(1).index_select(0, ROW),
    "add": lambda x: x + torch.ones(2),
    "generator": lambda x: torch.rand(2, generator=torch.Generator(), device=x.device),
}
COPIES = {
    "to": lambda x: x + torch.ones(2).to(x.device),
    "copy_": lambda x: torch.empty_like(x.detach().view(1)).copy_(torch.ones(1)),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
}


def trial_with(fault, monkeypatch):
    monkeypatch.setattr(ImageClassifier, "loss", faulty(fault))
    return Trial(settings_of("resnet_cifar10", "sgd", "smoke"))


@pytest.mark.parametrize("name", WAITS)
def test_a_step_that_waits_is_found(name, monkeypatch):
    with pytest.raises(Violation, match="waits for the device"):
        trial_with(WAITS[name], monkeypatch).take_steps()


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_of_devices_is_found(name, monkeypatch):
    with pytest.raises(Violation, match=r"mixes devices|generator of the CPU"):
        trial_with(MIXES[name], monkeypatch).take_steps()


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_in_a_step_is_found(name, monkeypatch):
    with pytest.raises(AssertionError, match="5 copies to the device in 2 new epochs"):
        trial_with(COPIES[name], monkeypatch).take_steps()


def test_numbers_of_the_host_are_not_copied(monkeypatch):
    """A kernel takes a single number as an argument."""
    trial_with(lambda x: 2 * x + torch.tensor(1.0), monkeypatch).take_steps()


def test_an_evaluation_may_read():
    device = EmptyDevice()
    with device, device.reading():
        x = torch.ones(2, 3, device=META)
        assert x.sum().item() == 2 and x.tolist() == 2 * [[2.0, 2.0, 2.0]]
        assert x.nonzero().shape == (6, 2)
