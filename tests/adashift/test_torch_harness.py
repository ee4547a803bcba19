"""torch's generic optimizer tests, applied to AdaShift.

The inputs are torch's OptimizerInfo; the tests follow torch's own. n is at most 3, because these
tests take few steps and the first n steps update nothing.
"""

import copy
import inspect
import io

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from adashift import AdaShift
from adashift.reference import AdaShiftReference

pytest.importorskip("expecttest")
common = pytest.importorskip("torch.testing._internal.common_optimizers")

VARIANTS = [
    dict(),
    dict(lr=0.02),
    dict(phi="mean", betas=(0.0, 0.9)),
    dict(phi="none", betas=(1.0, 0.99)),
    dict(m=1, eps=1e-4),
    dict(weight_decay=0.1),
    dict(weight_decay=0.1, decoupled_weight_decay=False),
    dict(maximize=True),
    dict(foreach=True),
    dict(fused=True),
    dict(capturable=True),
]


def inputs(device=None, dtype=None):
    return [
        common.OptimizerInput(params=None, kwargs={"n": n, **options}, desc=f"n={n} {options}")
        for n in (1, 2, 3)
        for options in VARIANTS
    ]


INFO = common.OptimizerInfo(
    AdaShift,
    optim_inputs_func=inputs,
    supported_impls=("foreach", "fused"),
    not_og_supported_flags=(
        "maximize",
        "weight_decay",
        "decoupled_weight_decay",
        "foreach",
        "fused",
        "capturable",
    ),
    has_capturable_arg=True,
    supports_sparse=False,
    supports_complex=True,
)
INPUTS = INFO.optim_inputs_func(device="cpu")
every_input = pytest.mark.parametrize("options", [i.kwargs for i in INPUTS], ids=str)
every_n = pytest.mark.parametrize("n", [1, 2, 3])


def problem(contiguous=True, dtype=torch.float64):
    """Return two parameters and a loss with minimum 0."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        return torch.randn(*shape, 2, generator=generator, dtype=dtype)[..., 0]

    weight, bias, x = values(10, 5), values(10), values(5)
    if contiguous:
        weight, bias = weight.contiguous(), bias.contiguous()
    params = [torch.nn.Parameter(weight), torch.nn.Parameter(bias)]
    assert all(p.is_contiguous() is contiguous for p in params)

    def loss():
        return (params[0].mv(x) + params[1]).pow(2).sum()

    return params, loss


def train(opt, loss, steps):
    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return [opt.step(closure).item() for _ in range(steps)]


def same(one, other):
    """Assert that nested dicts, lists, tensors and plain values are equal, including types."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


# --- direction


@every_input
@pytest.mark.parametrize("contiguous", [True, False])
def test_loss_changes_in_the_right_direction(options, contiguous):
    params, loss = problem(contiguous)
    values = train(AdaShift(params, **options), loss, 20)
    n = options["n"]
    assert values[: n + 1] == [values[0]] * (n + 1)
    sign = 1 if options.get("maximize") else -1
    assert sign * values[-1] > sign * values[0]
    twins, twin_loss = problem(not contiguous)
    train(AdaShift(twins, **options), twin_loss, 20)
    torch.testing.assert_close(params, twins)


@every_n
@pytest.mark.parametrize("schedulers", INFO.scheduler_inputs, ids=len)
def test_loss_decreases_with_schedulers(n, schedulers):
    params, loss = problem()
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    opt = AdaShift(groups, n=n)
    made = [build(opt) for build in schedulers]
    values = []
    for _ in range(25):
        values += train(opt, loss, 1)
        for scheduler in made:
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(values[-1]) if plateau else scheduler.step()
    assert values[-1] < 0.9 * values[0]
    if made:
        assert opt.param_groups[0]["lr"] < 0.01


@every_input
def test_tensor_lr_matches_float_lr(options):
    options = {"lr": 0.01, **options}
    results = []
    for lr in (options["lr"], torch.tensor(options["lr"], dtype=torch.float64)):
        params, loss = problem()
        opt = AdaShift(params, **options | {"lr": lr})
        schedule = lr_scheduler.ExponentialLR(opt, 0.9)
        for _ in range(8):
            train(opt, loss, 1)
            schedule.step()
        assert type(opt.param_groups[0]["lr"]) is type(lr)
        results.append(params)
    torch.testing.assert_close(*results)


@every_n
def test_param_groups_have_their_own_lr_and_decay(n):
    params, loss = problem()
    start = copy.deepcopy(params)
    opt = AdaShift([{"params": params[:1]}, {"params": params[1:], "lr": 0.0}], lr=0.01, n=n)
    train(opt, loss, n + 2)
    assert not torch.equal(params[0], start[0]) and torch.equal(params[1], start[1])
    twins, _ = problem()
    groups = [{"params": twins[:1]}, {"params": twins[1:], "weight_decay": 0.5}]
    decaying = AdaShift(groups, lr=0.01, n=n)
    for p, twin in zip(params, twins, strict=True):
        p.data.copy_(twin.data)
    plain = AdaShift(params, lr=0.01, n=n)
    for _ in range(n + 1):  # one update, with gradients of 1
        for p in params + twins:
            p.grad = torch.ones_like(p)
        plain.step()
        decaying.step()
    same(twins[0], params[0])
    torch.testing.assert_close(twins[1], params[1] - 0.01 * 0.5 * start[1])


# --- steps that change nothing


@every_input
def test_step_without_gradients_is_a_no_op(options):
    params, loss = problem()
    opt = AdaShift(params, **options)
    opt.step()
    assert not opt.state
    same(params, problem()[0])
    train(opt, loss, 5)
    before = copy.deepcopy((params, opt.state_dict()))
    opt.zero_grad()
    opt.step()
    same((params, opt.state_dict()), before)
    train(opt, loss, 1)
    assert not torch.equal(params[0], before[0][0])


@every_input
def test_zero_gradients_change_nothing_even_after_step_n(options):
    if options.get("decoupled_weight_decay") is False:
        options = options | {"weight_decay": 0.0}  # λθ is part of the gradient
    params, _ = problem()
    opt = AdaShift(params, **options)
    for _ in range(options["n"] + 5):
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        same(params, problem()[0])
    assert opt.state[params[0]]["step"] == options["n"] + 5


# --- repr, state, copies


@every_input
def test_is_printable_with_every_option(options):
    text = repr(AdaShift(problem()[0], **options))
    assert text.startswith("AdaShift (\nParameter Group 0\n")
    assert all(f"    {key}: {value}\n" in text for key, value in options.items())


@every_input
def test_state_dict_is_deterministic_and_not_modified_by_loading(options):
    params, loss = problem()
    opt = AdaShift(params, **options)
    train(opt, loss, 5)
    saved = opt.state_dict()
    before = copy.deepcopy(saved)
    twins, twin_loss = problem()
    for twin, p in zip(twins, params, strict=True):
        twin.data.copy_(p.data)
    other = AdaShift(twins)
    other.load_state_dict(saved)
    same(saved, before)
    assert train(other, twin_loss, 5) == train(opt, loss, 5)
    same(other.state_dict(), opt.state_dict())
    assert before["state"][0]["step"] == 5 and other.state[twins[0]]["step"] == 10


@every_input
def test_state_dict_survives_a_file_read_with_weights_only(options):
    params, loss = problem()
    opt = AdaShift(params, **options)
    train(opt, loss, 5)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = AdaShift(params)
    other.load_state_dict(torch.load(file, weights_only=True))
    same(other.state_dict(), opt.state_dict())


@every_input
def test_state_dict_without_newer_options_loads(options):
    if set(options) & set(INFO.not_og_supported_flags):
        options = {"n": options["n"]}
    params, loss = problem()
    opt = AdaShift(params, **options)
    train(opt, loss, 3)
    old = copy.deepcopy(opt.state_dict())
    for flag in INFO.not_og_supported_flags:
        del old["param_groups"][0][flag]
    twins, twin_loss = problem()
    for twin, p in zip(twins, params, strict=True):
        twin.data.copy_(p.data)
    other = AdaShift(twins, **options)
    other.load_state_dict(old)
    assert train(other, twin_loss, 5) == train(opt, loss, 5)


@every_input
def test_deepcopy_keeps_all_public_attributes(options):
    params, loss = problem()
    opt = AdaShift(params, **options)
    train(opt, loss, 5)
    twin = copy.deepcopy(opt)
    public = {key for key in vars(opt) if not key.startswith("_")}
    assert public >= {"defaults", "state", "param_groups"}
    assert {key for key in vars(twin) if not key.startswith("_")} == public
    assert opt.defaults.items() <= twin.defaults.items()
    same(twin.state_dict(), opt.state_dict())


@every_input
def test_state_is_not_empty(options):
    params, loss = problem()
    opt = AdaShift(params, **options)
    train(opt, loss, 1)
    assert set(opt.state) == set(params) and all(opt.state.values())


# --- hooks


def test_state_dict_hooks_are_called_in_order():
    opt, calls = AdaShift(problem()[0], n=1), []
    opt.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    opt.register_state_dict_pre_hook(lambda o: calls.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda o, s: {**s, "post": calls.append("post")})
    assert "post" in opt.state_dict()
    assert calls == ["first", "pre", "post"]


def test_load_state_dict_hooks_are_called_in_order_and_once():
    opt, calls = AdaShift(problem()[0], n=1), []
    opt.register_load_state_dict_pre_hook(lambda o, s: calls.append("pre"))
    opt.register_load_state_dict_pre_hook(lambda o, s: calls.append("first"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: calls.append("post"))
    opt.load_state_dict(opt.state_dict())
    assert calls == ["first", "pre", "post"]


def test_load_state_dict_uses_the_result_of_a_pre_hook():
    params, loss = problem()
    opt = AdaShift(params, n=2)
    train(opt, loss, 4)
    changed = copy.deepcopy(opt.state_dict())
    changed["param_groups"][0]["lr"] = 0.5
    changed["state"][0]["v"].fill_(7.0)
    handle = opt.register_load_state_dict_pre_hook(lambda o, s: changed)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.5 and opt.state[params[0]]["v"] == 7
    handle.remove()
    opt.load_state_dict(copy.deepcopy(changed))
    assert opt.state[params[0]]["v"] == 7


def test_load_state_dict_keeps_changes_by_a_post_hook():
    params, loss = problem()
    opt = AdaShift(params, n=2)
    train(opt, loss, 4)

    def change(optimizer):
        optimizer.state[params[0]]["v"] = torch.tensor(7.0)

    opt.register_load_state_dict_post_hook(change)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.state[params[0]]["v"] == 7


def test_local_and_global_step_hooks_are_called_in_order():
    params, loss = problem()
    opt, calls = AdaShift(params, n=1), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
        opt.register_step_pre_hook(lambda *_: calls.append("pre")),
        opt.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        loss().backward()
        opt.step()
    finally:
        for handle in handles:
            handle.remove()
    opt.step()
    assert calls == ["global pre", "pre", "post", "global post"]


def test_step_pre_hook_may_modify_the_gradient():
    params, loss = problem()
    opt = AdaShift(params, n=1)
    opt.register_step_pre_hook(lambda o, *_: torch.nn.utils.clip_grad_value_(params, 0.0))
    loss().backward()
    assert params[0].grad.any()
    for _ in range(4):
        opt.step()
    same(params, problem()[0])


# --- complex and named parameters


@every_input
def test_complex_parameters_match_pairs_of_real_ones(options):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, generator=generator, dtype=torch.complex128)
    whole = torch.nn.Parameter(values.clone())
    pairs = torch.nn.Parameter(torch.view_as_real(values).clone())
    target = torch.randn(3, 4, generator=generator, dtype=torch.complex128)

    def loss(z):
        return ((z * z - target).abs() ** 2).sum()

    one, other = AdaShift([whole], **options), AdaShift([pairs], **options)
    for _ in range(8):
        a = train(one, lambda: loss(whole), 1)
        b = train(other, lambda: loss(torch.view_as_complex(pairs)), 1)
        assert a == pytest.approx(b)
        torch.testing.assert_close(torch.view_as_real(whole.detach()), pairs.detach())
    assert not torch.equal(whole, values)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


@every_n
def test_named_parameters_train_equally_and_keep_their_names(n):
    named, unnamed, x = net(), net(), torch.ones(5, 4)
    one, other = AdaShift(named.named_parameters(), n=n), AdaShift(unnamed.parameters(), n=n)
    for model, opt in ((named, one), (unnamed, other)):
        train(opt, lambda model=model: model(x).pow(2).sum(), 5)
    same(list(named.parameters()), list(unnamed.parameters()))
    names = [name for name, _ in net().named_parameters()]
    saved = one.state_dict()
    assert saved["param_groups"][0]["param_names"] == names
    other.load_state_dict(saved)  # named into unnamed, and vice versa
    one.load_state_dict(AdaShift(unnamed.parameters(), n=n).state_dict())
    assert one.param_groups[0]["param_names"] == names and not one.state


# --- schedulers and gradient accumulation

ARGUMENTS = {
    "LambdaLR": (lambda t: 0.9**t,),
    "MultiplicativeLR": (lambda t: 0.9,),
    "StepLR": (3,),
    "MultiStepLR": ([3, 6],),
    "ExponentialLR": (0.9,),
    "CosineAnnealingLR": (8,),
    "CyclicLR": (0.01, 0.1, 3),
    "CosineAnnealingWarmRestarts": (4,),
    "OneCycleLR": (0.1, 20),
}
SCHEDULERS = set(lr_scheduler.__all__) - {"LRScheduler", "SequentialLR", "ChainedScheduler"}


def scheduler(name, opt):
    return getattr(lr_scheduler, name)(opt, *ARGUMENTS.get(name, ()))


@every_n
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_works_with_every_scheduler(name, n):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt, oracle = AdaShift([p], lr=0.1, n=n), AdaShiftReference(p, lr=0.1, n=n)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    ours, theirs = scheduler(name, opt), scheduler(name, plain)
    needs_loss = "metrics" in inspect.signature(ours.step).parameters
    rates = set()
    for t in range(14):
        group = opt.param_groups[0]
        assert group["lr"] == plain.param_groups[0]["lr"]
        oracle.alpha, oracle.beta1 = group["lr"], group["betas"][0]
        rates.add(oracle.alpha)
        p.grad = torch.tensor([1.0 + t % 3, -2.0], dtype=torch.float64)
        opt.step()
        plain.step()
        expected = oracle.step(p.grad)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-13)
        for schedule in (ours, theirs):
            schedule.step(1.0) if needs_loss else schedule.step()
    assert len(rates) > 1 and p.any()


@every_input
def test_gradient_accumulation_equals_one_big_batch(options):
    results = []
    for parts in (1, 4):
        model = net().double()
        opt = AdaShift(model.parameters(), **options)
        for t in range(6):
            generator = torch.Generator().manual_seed(t)
            batch = torch.randn(8, 4, generator=generator, dtype=torch.float64)
            opt.zero_grad()
            for part in batch.chunk(parts):
                (model(part).pow(2).mean() / parts).backward()
            opt.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    assert not torch.equal(results[0][0], net()[0].weight.double())
