"""The networks: shapes and counts of the published ones, behaviour of smaller ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.config.build import build
from experiments.config.errors import ConfigError
from experiments.models.densenet import DenseBlock, DenseNet
from experiments.models.resnet import PreActBlock, PreActResNet

RESNET = {"width": 32, "blocks": [2, 2, 2, 2], "classes": 10}
CIFAR = {
    "growth": 24, "blocks": [6, 12, 48, 32], "classes": 10, "bottleneck": True,
    "transition": "growth", "stem_kernel": 7, "stem_stride": 2, "dropout": 0.2,
    "init": "glorot", "norm_momentum": 0.1, "norm_eps": 1e-3,
}  # fmt: skip
TINY = {
    "growth": 12, "blocks": [8, 8, 8], "classes": 200, "bottleneck": False,
    "transition": "same", "stem_kernel": 3, "stem_stride": 1, "dropout": 0.2,
    "init": "he", "norm_momentum": 0.001, "norm_eps": 1e-3,
}  # fmt: skip
BC_100 = CIFAR | {
    "growth": 12, "blocks": [16, 16, 16], "transition": "half", "stem_kernel": 3, "stem_stride": 1,
}  # fmt: skip

PUBLISHED = {
    "ResNet": lambda: PreActResNet(**RESNET),
    "CIFAR": lambda: DenseNet(**CIFAR),
    "Tiny": lambda: DenseNet(**TINY),
    "BC-100": lambda: DenseNet(**BC_100),
}
SMALL = {
    "ResNet": lambda: PreActResNet(4, [1, 2, 1], 5),
    "CIFAR": lambda: DenseNet(**CIFAR | {"growth": 4, "blocks": [1, 2, 2, 1]}),
    "Tiny": lambda: DenseNet(**TINY | {"growth": 4, "blocks": [2, 1, 2]}),
    "BC-100": lambda: DenseNet(**BC_100 | {"growth": 4, "blocks": [2, 1, 2]}),
}

every_net = pytest.mark.parametrize("name", SMALL)
dense_nets = pytest.mark.parametrize("name", ["CIFAR", "Tiny", "BC-100"])


def small(name, seed=0):
    torch.manual_seed(seed)
    return SMALL[name]()


def images(count=8, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def kinds(modules):
    return [type(m).__name__ for m in modules]


def layers(net, *types):
    return [m for m in net.modules() if isinstance(m, types)]


def shapes_after(modules, net, x):
    """Return the shape of one image after each of the modules."""
    found = []
    for m in modules:
        m.register_forward_hook(lambda _module, _x, y: found.append(tuple(y.shape[1:])))
    net.eval()
    with torch.no_grad():
        net(x)
    return found


@pytest.mark.parametrize(
    ("name", "count"),
    [("ResNet", 2_799_114), ("CIFAR", 6_365_962), ("Tiny", 553_280), ("BC-100", 769_162)],
)
def test_parameter_counts_of_the_published_networks(name, count):
    assert sum(p.numel() for p in PUBLISHED[name]().parameters()) == count


@pytest.mark.parametrize(
    ("name", "weights"), [("ResNet", 18), ("CIFAR", 201), ("Tiny", 28), ("BC-100", 100)]
)
def test_depth_of_the_published_networks(name, weights):
    """The released "100-layer" network has 201; shortcuts are not counted."""
    net = PUBLISHED[name]()
    shortcuts = sum(isinstance(m.shortcut, nn.Conv2d) for m in layers(net, PreActBlock))
    assert len(layers(net, nn.Conv2d, nn.Linear)) - shortcuts == weights


def test_shapes_of_the_resnet():
    net = PUBLISHED["ResNet"]()
    assert shapes_after([net.stem, *net.stages, net.linear], net, images(1)) == [
        (32, 32, 32), (32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4), (10,),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        (
            "CIFAR",
            [
                (48, 16, 16), (192, 16, 16), (24, 8, 8), (312, 8, 8), (24, 4, 4),
                (1176, 4, 4), (24, 2, 2), (792, 2, 2), (10,),
            ],
        ),
        (
            "Tiny",
            [
                (24, 32, 32), (120, 32, 32), (120, 16, 16), (216, 16, 16), (216, 8, 8),
                (312, 8, 8), (200,),
            ],
        ),
        (
            "BC-100",
            [
                (24, 32, 32), (216, 32, 32), (108, 16, 16), (300, 16, 16), (150, 8, 8),
                (342, 8, 8), (10,),
            ],
        ),
    ],
)  # fmt: skip
def test_shapes_of_the_densenets(name, shapes):
    net = PUBLISHED[name]()
    assert shapes_after([net.stem, *net.blocks, net.linear], net, images(1)) == shapes


@pytest.mark.parametrize("stride", [1, 2])
def test_the_shortcut_of_a_block_gets_the_raw_input(stride):
    block, x = PreActBlock(4, 4 * stride, stride), torch.randn(2, 4, 8, 8)
    before = x.clone()
    assert kinds(block.residual) == ["BatchNorm2d", "ReLU", "Conv2d"] * 2
    nn.init.zeros_(block.residual[-1].weight)
    nn.init.zeros_(block.residual[-1].bias)
    short = x if stride == 1 else F.conv2d(x, block.shortcut.weight, block.shortcut.bias, stride=2)
    torch.testing.assert_close(block(x), short)
    assert torch.equal(x, before)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_a_dense_block_concatenates_its_input_and_new_channels(bottleneck):
    net = DenseNet(**TINY | {"growth": 4, "blocks": [3], "bottleneck": bottleneck})
    (block,) = net.blocks
    x = torch.randn(2, 8, 6, 6)
    before = x.clone()
    y = block(x)
    assert y.shape == (2, 8 + 3 * 4, 6, 6)
    assert torch.equal(y[:, :8], before) and torch.equal(x, before)


def test_order_of_layers_in_a_densenet():
    part = ["BatchNorm2d", "ReLU", "Conv2d", "Dropout"]
    net = SMALL["CIFAR"]()
    narrow, wide = layers(net, DenseBlock)[0][0]
    assert kinds(narrow) == kinds(wide) == part
    assert (narrow[2].kernel_size, narrow[2].out_channels) == ((1, 1), 4 * 4)
    assert (wide[2].kernel_size, wide[2].out_channels) == ((3, 3), 4)
    reduce, pool = net.blocks[1]
    assert kinds(reduce) == part and kinds([pool]) == ["AvgPool2d"]
    assert kinds(layers(SMALL["Tiny"](), DenseBlock)[0][0]) == part
    assert kinds(net.head) == ["BatchNorm2d", "ReLU"]


def assert_he(weight):
    std = (1.3 * 2 / weight[0].numel()) ** 0.5
    cut = 0.8796 * std  # of a normal variable truncated at two standard deviations
    assert weight.std() == pytest.approx(cut, rel=3 / weight.numel() ** 0.5)
    assert abs(weight.mean()) < 5 * cut / weight.numel() ** 0.5
    assert weight.abs().max() <= 2 * std * 1.0001


def assert_glorot(weight):
    area = weight[0, 0].numel()
    bound = (6 / (area * (weight.shape[0] + weight.shape[1]))) ** 0.5
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=3 / weight.numel() ** 0.5)
    assert abs(weight.mean()) < 5 * bound / 3**0.5 / weight.numel() ** 0.5
    assert bound * (1 - 20 / weight.numel()) <= weight.abs().max() <= bound * 1.0001


@pytest.mark.parametrize(
    ("name", "convolution", "linear"),
    [
        ("ResNet", assert_he, assert_he),
        ("CIFAR", assert_glorot, assert_glorot),
        ("Tiny", assert_he, assert_glorot),
    ],
)
def test_initial_weights_are_those_of_the_released_code(name, convolution, linear):
    torch.manual_seed(0)
    net = PUBLISHED[name]()
    for layer in layers(net, nn.Conv2d):
        convolution(layer.weight.detach())
    linear(net.linear.weight.detach())


def test_he_has_variance_two_over_fan_in():
    weight = PUBLISHED["ResNet"]().stages[3][1].residual[5].weight.detach()
    assert weight.var() * weight[0].numel() == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_biases_start_at_zero_and_only_resnet_convolutions_have_them(name):
    net = PUBLISHED[name]()
    biases = [layer.bias for layer in layers(net, nn.Conv2d)]
    assert all((bias is not None) == (name == "ResNet") for bias in biases)
    for bias in [net.linear.bias, *biases]:
        assert bias is None or (bias == 0).all()


@pytest.mark.parametrize(
    ("name", "momentum", "eps"),
    [("ResNet", 0.1, 1e-5), ("CIFAR", 0.1, 1e-3), ("Tiny", 0.001, 1e-3)],
)
def test_batch_norm_is_that_of_the_released_code(name, momentum, eps):
    for norm in layers(PUBLISHED[name](), nn.BatchNorm2d):
        assert (norm.momentum, norm.eps) == (momentum, eps)
        assert (norm.weight == 1).all() and (norm.bias == 0).all()


@every_net
def test_the_seed_determines_the_weights(name):
    first, again, other = (small(name, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@dense_nets
def test_dropout_drops_a_fifth_in_training(name):
    drops = layers(small(name), nn.Dropout)
    assert len(drops) == len(layers(small(name), nn.Conv2d)) - 1  # all except the stem
    left = (drops[0](torch.ones(100_000)) > 0).float().mean()
    assert left == pytest.approx(0.8, abs=0.01)


@dense_nets
def test_dropout_is_active_only_in_training(name):
    net, x = small(name), images()
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


def test_without_dropout_training_is_deterministic():
    net, x = DenseNet(**TINY | {"growth": 4, "blocks": [2, 1], "dropout": 0}), images()
    assert torch.equal(net(x), net(x))


@every_net
def test_gradients_reach_every_parameter(name):
    net = small(name)
    F.cross_entropy(net(images()), torch.arange(8) % 5).backward()
    before_a_norm = {layer.bias for layer in layers(net, nn.Conv2d)}
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert parameter in before_a_norm or parameter.grad.abs().max() > 1e-6


def test_convolution_biases_of_the_resnet_have_no_effect_in_training():
    """Batch norm subtracts them, so their gradient is 0."""
    net, x = small("ResNet").double(), images().double()
    before = net(x)
    for layer in layers(net, nn.Conv2d):
        nn.init.normal_(layer.bias)
    torch.testing.assert_close(net(x), before, rtol=1e-9, atol=1e-9)


@every_net
@pytest.mark.parametrize("size", [32, 64])
def test_both_image_sizes_work(name, size):
    net = small(name)
    assert net(images(2, size)).shape == (2, net.linear.out_features)


@every_net
def test_channels_last_gives_the_same_output(name):
    net, x = small(name).eval(), images()
    expected = net(x)
    net, x = (part.to(memory_format=torch.channels_last) for part in (net, x))
    inner = []
    net.head.register_forward_hook(lambda _module, _x, y: inner.append(y))
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)
    assert inner[0].is_contiguous(memory_format=torch.channels_last)  # up to the head


@every_net
@torch.no_grad()  # oneDNN's gradient of a strided bf16 convolution can crash with AMX
def test_bf16_is_close_to_float32(name):
    net, x = small(name).eval(), images()
    expected = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = net(x)
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["ResNet", "CIFAR"])
def test_each_network_compiles_to_one_graph(name):
    """aot_eager builds inductor's graphs without half a minute of compilation."""
    outputs, gradients = [], []
    for wrap in (lambda net: net, lambda n: torch.compile(n, backend="aot_eager", fullgraph=True)):
        net = small(name)
        for drop in layers(net, nn.Dropout):
            drop.p = 0.0  # compiled dropout draws different numbers
        outputs.append(wrap(net)(images()))
        outputs[-1].square().mean().backward()
        gradients.append(net.stem.weight.grad)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "settings", "wrong"),
    [
        ("resnet.PreActResNet", RESNET, {"width": 0}),
        ("resnet.PreActResNet", RESNET, {"blocks": [2, -1]}),
        ("densenet.DenseNet", TINY, {"transition": "third"}),
        ("densenet.DenseNet", TINY, {"dropout": 1}),
        ("densenet.DenseNet", TINY, {"init": "normal"}),
    ],
)
def test_invalid_settings_are_reported_by_name(target, settings, wrong):
    node = {"_target_": f"experiments.models.{target}", **settings, "blocks": [1, 1]}
    assert isinstance(build(node, "task.net"), nn.Module)
    (key,) = wrong
    with pytest.raises(ConfigError, match=rf"task\.net\.{key}=.* is invalid"):
        build(node | wrong, "task.net")
