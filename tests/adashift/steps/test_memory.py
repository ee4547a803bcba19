"""What may change between two steps: memory, dtypes, devices and options."""

import copy
import itertools
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adashift import AdamNC, AdaShift, SpatialOnly
from adashift._state import new_state
from adashift._window import total_weight
from adashift.reference import AdaShiftReference

WAYS = [{}, {"foreach": True}, {"fused": True}, {"capturable": True}]
every_way = pytest.mark.parametrize("way", WAYS, ids=["single", "foreach", "fused", "capturable"])


def trained(way, shape=(6, 5), steps=7, dtype=torch.float32, **options):
    """A parameter and its optimizer after some steps."""
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = AdaShift([p], n=3, **options, **way)
    for t in range(steps):
        p.grad = torch.full_like(p, t + 1.0)
        optimizer.step()
    return p, optimizer


@every_way
@pytest.mark.parametrize("phi", ["max", "none"])
def test_parameter_of_another_shape_is_an_error(phi, way):
    p, optimizer = trained(way, phi=phi)
    p.data = torch.ones(60_000, 50)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"state '\w+' has shape .*6, 5\), but .* \(60000, 50\)"):
        optimizer.step()
    assert torch.equal(p, torch.ones_like(p))


@every_way
def test_checkpoint_of_another_shape_is_an_error(way):
    _, saved = trained(way, (3, 2))
    p, optimizer = trained(way, (300, 200), steps=1)
    optimizer.load_state_dict(saved.state_dict())
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"has shape \(3, 2\), but .* shape \(300, 200\)"):
        optimizer.step()


@every_way
def test_checkpoint_with_other_rows_is_an_error(way):
    """With m = 1 the state of φ = row is v alone, which a kernel would read beyond its end."""
    _, saved = trained(way, (3, 2), phi="row", m=1)
    p, optimizer = trained(way, (30_000, 2), steps=1, phi="row", m=1)
    optimizer.load_state_dict(saved.state_dict())
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"state 'v' has shape \(3, 1\), .* needs \(30000, 1\)"):
        optimizer.step()


@every_way
def test_gradient_of_another_shape_is_an_error(way):
    """A gradient that a new p.data left behind, or whose own data is another one."""
    p, optimizer = trained(way, (6,), m=1)
    p.data = torch.ones(3_000_000)
    with pytest.raises(RuntimeError, match=r"shape \(6,\) on cpu, its parameter \(3000000,\)"):
        optimizer.step()
    assert (p == 1).all()
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad.data = torch.ones(6)
    with pytest.raises(RuntimeError, match="call zero_grad"):
        optimizer.step()


@every_way
def test_replaced_state_is_noticed(way):
    """One tensor of it, as offloading to another memory may leave it."""
    ends = []
    for replaced in (False, True):
        p, optimizer = trained(way)
        if replaced:
            optimizer.state[p]["sum"] = optimizer.state[p]["sum"].clone()
            optimizer.state[p]["slots"] = optimizer.state[p]["slots"].clone()
        for t in range(5):
            p.grad = torch.full_like(p, t - 3.0)
            optimizer.step()
        ends.append((p.detach(), optimizer.state[p]["slots"].clone()))
    assert all(map(torch.equal, *ends))


@every_way
def test_empty_checkpoint_frees_the_old_state(way):
    p, optimizer = trained(way)
    old = weakref.ref(optimizer.state[p]["slots"])
    optimizer.load_state_dict(AdaShift([p], n=3, **way).state_dict())
    assert not optimizer.state and old() is None


@every_way
def test_state_on_another_device_is_an_error(way):
    p, optimizer = trained(way)
    optimizer.state[p]["number"] = optimizer.state[p]["number"].to("meta")
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="'number' is on meta, its parameter on cpu"):
        optimizer.step()


@every_way
def test_state_of_another_optimizer_is_an_error(way):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    adam = torch.optim.Adam([p])
    adam.step()
    optimizer = AdaShift([p], n=2, **way)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(
        {"state": adam.state_dict()["state"], "param_groups": saved["param_groups"]}
    )
    with pytest.raises(RuntimeError, match="that of another optimizer"):
        optimizer.step()


@every_way
def test_a_step_that_fails_changes_nothing(way):
    good, bad = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = AdaShift([{"params": [good]}, {"params": [bad]}], n=2, **way)
    for _ in range(3):
        good.grad, bad.grad = torch.ones(4), torch.ones(4)
        optimizer.step()
    before, state = good.detach().clone(), copy.deepcopy(optimizer.state[good])
    bad.data = torch.ones(9)
    bad.grad = torch.ones(9)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(good, before)
    for name, x in state.items():
        assert not torch.is_tensor(x) or torch.equal(x, optimizer.state[good][name])


@every_way
def test_parameters_and_gradients_may_move_in_memory(way):
    """Gradients are new tensors in every step, and p.data may be another one."""
    p = torch.nn.Parameter(torch.zeros(50_000).double())
    optimizer, oracle = AdaShift([p], n=3, **way), AdaShiftReference(p, n=3)
    for t in range(12):
        g = torch.randn(50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        p.grad = g
        if t % 4 == 3:
            p.data = p.data.clone()
        optimizer.step()
        torch.testing.assert_close(p.detach(), oracle.step(g), rtol=1e-12, atol=1e-12)


@every_way
def test_version_counter_shows_that_the_parameter_has_changed(way):
    p, optimizer = trained(way)
    loss = (p * p).sum()  # keeps p for its backward pass
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_way
def test_conjugate_parameter_moves_as_its_resolved_twin(way):
    start = torch.randn(40, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    ends = []
    for conjugate in (False, True):
        own = start.clone().conj()
        p = torch.nn.Parameter(own if conjugate else own.resolve_conj())
        assert p.is_conj() == conjugate
        optimizer = AdaShift([p], n=2, lr=0.1, **way)
        for t in range(8):
            p.grad = torch.randn(
                40, dtype=torch.complex64, generator=torch.Generator().manual_seed(t)
            )
            optimizer.step()
        ends.append(p.detach().resolve_conj())
    assert (ends[0] - start.conj()).abs().min() > 0
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@every_way
def test_gradients_of_lower_precision_keep_the_state_in_single(way):
    p = torch.nn.Parameter(torch.ones(30))
    p.grad_dtype = torch.bfloat16
    optimizer = AdaShift([p], n=2, **way)
    for t in range(6):
        p.grad = torch.full((30,), 1.0 + t, dtype=torch.bfloat16)
        optimizer.step()
    tensors = [x for x in optimizer.state[p].values() if torch.is_tensor(x)]
    assert {x.dtype for x in tensors} == {torch.float32, torch.int64} and (p < 1).all()


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_half_precision_rounds_once(dtype, decay, way):
    """A step of half a unit in the last place is the rounded exact step."""
    p = torch.nn.Parameter(torch.linspace(1, 2, 500).to(dtype))
    optimizer = AdaShift([p], n=1, lr=0.01, weight_decay=decay, **way)
    generator = torch.Generator().manual_seed(0)
    for t in range(40):
        g = torch.randn(500, generator=generator)
        wide = torch.nn.Parameter(p.detach().float())
        twin = AdaShift([wide], n=1, lr=0.01, weight_decay=decay)
        twin.state[wide].update(copy.deepcopy(dict(optimizer.state[p])))
        p.grad, wide.grad = g.to(dtype), g.to(dtype).float()
        optimizer.step()
        twin.step()
        if t > 1:
            ulp = torch.finfo(dtype).eps * 2
            assert ((p.detach().float() - wide.detach()).abs() <= 0.51 * ulp).all()


@every_way
@pytest.mark.parametrize("size", [(), (6, 5)])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_learning_rate_may_be_a_tensor(shape, size, way):
    lr = torch.full(shape, 0.01)
    a, tensor = trained(way, size, lr=lr, weight_decay=0.1)
    b, number = trained(way, size, lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(a, b)
    lr.fill_(0.5)
    for p, optimizer in ((a, tensor), (b, number)):
        optimizer.param_groups[0]["lr"] = 0.5 if p is b else lr
        p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(a, b)


@every_way
def test_betas_may_be_tensors_that_change_in_place(way):
    betas = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.99, dtype=torch.float64)
    p = torch.nn.Parameter(torch.zeros(9).double())
    optimizer, oracle = AdaShift([p], n=4, betas=betas, **way), AdaShiftReference(p, n=4)
    for t in range(30):
        betas[0].fill_([0.9, 0.5, 0.0, 1.0][t // 3 % 4])
        oracle.beta1, oracle.beta2 = betas[0].item(), betas[1].item()
        p.grad = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        expected = oracle.step(p.grad)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-11)


def test_beta1_schedule_keeps_caches_small():
    p, optimizer = trained({"foreach": True})
    for t in range(300):
        optimizer.param_groups[0]["betas"] = (t / 300, 0.999)
        p.grad = torch.ones_like(p)
        optimizer.step()
    info = total_weight.cache_info()
    assert info.currsize <= info.maxsize <= 64
    ((table,),) = (plan.tables for plan in optimizer._plans.values())
    assert len(table.weights) == 1


@every_way
def test_clock_beyond_float32(way):
    """t = 2^24 + 1 is no float32; the step continues as from another multiple of n and m."""
    ends = []
    for start in (8, 2**24, 2**40):
        p = torch.nn.Parameter(torch.zeros(40))
        optimizer = AdaShift([p], n=4, **way)
        generator = torch.Generator().manual_seed(0)
        for t in range(17):
            if t == 8:
                optimizer.state[p]["step"].fill_(start)
            p.grad = torch.randn(40, generator=generator)
            optimizer.step()
        assert optimizer.state[p]["step"] == start + 9
        ends.append(p.detach())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


@every_way
@pytest.mark.parametrize(("name", "value"), [("n", 4), ("m", 2), ("m", math.inf), ("phi", "row")])
def test_changed_options_are_errors(name, value, way):
    p, optimizer = trained(way)
    before = p.detach().clone()
    optimizer.param_groups[0][name] = value
    with pytest.raises(RuntimeError, match=f"{name} changed from .* to {value}|m changed from 3"):
        optimizer.step()
    assert torch.equal(p, before)


@every_way
def test_mean_does_not_overflow(way):
    p = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = AdaShift([p], n=1, phi="mean", **way)
    for _ in range(3):
        p.grad = torch.full_like(p, 1e19)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.02), rtol=1e-4, atol=0)


@every_way
@pytest.mark.parametrize("phi", ["max", "mean", "row", "none"])
@pytest.mark.parametrize("m", [1, 2, math.inf])
@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.filterwarnings("ignore:m=inf")
def test_inf_gradients_end_alike(when, m, phi, way):
    """Where v is 0 nothing moves; v = inf moves nothing, unless m_t is inf, which gives NaN."""
    p = torch.nn.Parameter(torch.ones(4, 2).double())
    optimizer = AdaShift([p], n=2, m=m, phi=phi, **way)
    oracle = AdaShiftReference(p, n=2, m=m, phi=phi)
    for t in range(9):
        p.grad = torch.full((4, 2), 1.0 if t >= when else 0.0, dtype=torch.float64)
        if t == when:
            p.grad[1, 1] = math.inf
        expected = oracle.step(p.grad)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("phi", ["max", "mean", "row", "none"])
def test_implementation_may_change_without_a_checkpoint(phi):
    """foreach leaves the state of all parameters interleaved in flat buffers."""
    params = [torch.nn.Parameter(torch.zeros(k, 7).double()) for k in (1, 5, 300)]
    optimizer = AdaShift(params, n=4, phi=phi)
    oracles = [AdaShiftReference(p, n=4, phi=phi) for p in params]
    for t in range(48):
        optimizer.param_groups[0].update(foreach=t // 6 % 2 == 1, fused=t // 6 % 4 == 2)
        for k, (p, oracle) in enumerate(zip(params, oracles, strict=True)):
            generator = torch.Generator().manual_seed(100 * k + t)
            p.grad = torch.randn(p.shape, dtype=torch.float64, generator=generator)
            oracle.step(p.grad)
        optimizer.step()
        for p, oracle in zip(params, oracles, strict=True):
            torch.testing.assert_close(p.detach(), oracle.theta, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("later", [{}, {"foreach": False}, {"foreach": False, "fused": True}])
@pytest.mark.parametrize("phi", ["max", "row", "none"])
def test_parameters_that_are_frozen_one_by_one_keep_no_memory_of_others(phi, later):
    """foreach has the state of all in flat buffers; in the end, others step the rest."""
    params = [torch.nn.Parameter(torch.zeros(10, 100).double()) for _ in range(20)]
    optimizer = AdaShift(params, n=3, phi=phi, foreach=True)
    oracles = [AdaShiftReference(p, n=3, phi=phi) for p in params]
    for t in range(20):
        if t == 15:
            optimizer.param_groups[0].update(later)
        for k, (p, oracle) in enumerate(zip(params, oracles, strict=True)):
            generator = torch.Generator().manual_seed(100 * k + t)
            g = torch.randn(p.shape, dtype=torch.float64, generator=generator)
            p.grad = g if k >= t else None
            if k >= t:
                oracle.step(g)
        optimizer.step()
    for p, oracle in zip(params, oracles, strict=True):
        torch.testing.assert_close(p.detach(), oracle.theta, rtol=1e-11, atol=1e-12)
    tensors = [x for p in params for x in optimizer.state[p].values() if torch.is_tensor(x)]
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    assert sum(kept.values()) <= 1.1 * sum(x.nbytes for x in tensors)


@pytest.mark.parametrize("mark", ["_is_flat_param", "_fsdp_flattened"])
def test_parameters_that_fsdp1_has_flattened_are_refused(mark):
    p = torch.nn.Parameter(torch.ones(8))
    setattr(p, mark, True)
    p.grad = torch.ones(8)
    with pytest.raises(RuntimeError, match="use fully_shard"):
        AdaShift([p]).step()
    AdaShift([p], phi="none").step()


@pytest.mark.parametrize("way", WAYS[:3], ids=["single", "foreach", "fused"])
def test_stochastic_rounding_is_right_on_average(way):
    """Steps of a tenth of the spacing of bfloat16 are lost to nearest, and kept by chance."""
    ends = {}
    for stochastic in (False, True):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.full((20_000,), 1.5, dtype=torch.bfloat16))
        optimizer = AdaShift([p], n=1, lr=2**-7 / 10, stochastic_rounding=stochastic, **way)
        for _ in range(51):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[stochastic] = p.detach().float()
    assert (ends[False] == 1.5).all()
    expected, spread = 1.5 - 50 * 2**-7 / 10, (50 * 0.09) ** 0.5 * 2**-7
    assert abs(ends[True].mean() - expected) < 5 * spread / 20_000**0.5
    assert 0.8 * spread < ends[True].std() < 1.2 * spread


@every_way
def test_stochastic_rounding_with_the_state_of_a_float64_parameter(way):
    p, optimizer = trained(way, dtype=torch.float64, stochastic_rounding=True)
    before = p.detach().clone()
    p.data = p.data.bfloat16()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["sum"].dtype == torch.float64
    assert (p < before).all() and (p > before - 0.05).all()


def test_fused_stochastic_rounding_is_equal_in_replicas_with_other_seeds():
    ends = []
    for seed in range(2):
        torch.manual_seed(seed)
        options = dict(lr=1e-3, dtype=torch.bfloat16, stochastic_rounding=True)
        p, _ = trained({"fused": True}, (500,), **options)
        ends.append(p.detach())
    assert torch.equal(*ends) and ends[0].unique().numel() > 1


@every_way
def test_slots_in_bfloat16_follow_rounded_gradients(way):
    p = torch.nn.Parameter(torch.zeros(700).double())
    q = torch.nn.Parameter(torch.zeros(700))
    optimizer = AdaShift([q], n=4, lr=0.1, state_dtype=torch.bfloat16, **way)
    oracle = AdaShiftReference(p, n=4, lr=0.1)
    for t in range(25):
        g = torch.randn(700, generator=torch.Generator().manual_seed(t)).bfloat16()
        q.grad = g.float()
        expected = oracle.step(g.double())
        optimizer.step()
        torch.testing.assert_close(q.detach().double(), expected, rtol=1e-4, atol=1e-5)
    assert optimizer.state[q]["slots"].dtype == torch.bfloat16


@every_way
def test_slots_keep_their_dtype_beside_others(way):
    """One parameter continues a float32 checkpoint, the other starts with bfloat16 slots."""
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = AdaShift([q, p], n=3, **way)
    p.grad = torch.full_like(p, 1 / 3)
    optimizer.step()
    optimizer.param_groups[0]["state_dtype"] = torch.bfloat16
    optimizer.state[q].update(new_state(q, optimizer.param_groups[0]))
    optimizer.state[q]["step"].add_(1)
    q.grad = torch.ones_like(q)
    optimizer.step()
    assert optimizer.state[q]["slots"].dtype == torch.bfloat16
    assert optimizer.state[p]["slots"].dtype == torch.float32
    assert (optimizer.state[p]["slots"][1:] == p.grad).all()


class CopySizes(TorchDispatchMode):
    """Notes how many elements are converted to another dtype at once."""

    def __init__(self):
        super().__init__()
        self.found = [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.found.append(out.numel())
        return out


@every_way
def test_slots_in_bfloat16_are_never_copied_as_a_whole(way):
    p, optimizer = trained(way, state_dtype=torch.bfloat16)
    with CopySizes() as sizes:
        optimizer.step()
    assert max(sizes.found) <= p.numel()


def test_endless_window_warns_where_v_and_m_share_much():
    p = torch.nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="use n=44 or more") as warned:
        AdaShift([p], n=10, m=math.inf)
    assert [w.filename for w in warned] == [__file__]
    with pytest.warns(UserWarning, match=r"use betas\[0\] < 1$"):
        AdaShift([p], n=10, m=math.inf, betas=(1.0, 0.9))
    AdaShift([p], n=44, m=math.inf)
    AdaShift([p], n=1, m=math.inf, betas=(0.0, 0.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fused="yes"), "fused is 'yes'; it must be True, False or None$"),
        (dict(foreach=1), "foreach is 1; it must be True, False or None$"),
        (dict(capturable=None), "capturable is None; it must be True or False$"),
        (dict(maximize=1), "maximize is 1; it must be True or False$"),
        (dict(phi=["max"]), r"phi is \['max'\]; use one of max, mean, row, none or a function"),
        (dict(state_dtype=torch.float16), "state_dtype is torch.float16; it must be None or"),
    ],
)
def test_bad_switches_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        AdaShift([torch.nn.Parameter(torch.zeros(1))], **options)


def test_integer_parameters_are_errors():
    optimizer, whole = AdaShift([torch.zeros(3)]), torch.zeros(3, dtype=torch.int64)
    for add in (lambda: AdaShift([whole]), lambda: optimizer.add_param_group({"params": [whole]})):
        with pytest.raises(ValueError, match=r"torch.int64; it must be floating-point .*\.float"):
            add()
    assert len(optimizer.param_groups) == 1


RULES = [AdaShift, AdamNC, SpatialOnly]
PAIRS = itertools.product(RULES, [torch.optim.Adam, torch.optim.SGD, *RULES])


@pytest.mark.parametrize(("rule", "other"), [(a, b) for a, b in PAIRS if a is not b])
def test_checkpoint_of_another_optimizer_is_an_error(rule, other):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, saved = rule([p], lr=0.2), other([p], lr=0.1).state_dict()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"has .*, so it is not of {rule.__name__}: load"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
