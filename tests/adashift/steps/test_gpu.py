"""The step on a GPU, shown without one.

Numbers: Triton's interpreter against the reference (interpreted_kernels.py, in its own process).
Code: every variant of the kernels is compiled for GPUs of NVIDIA and AMD. Launches, host syncs and
mixed devices: fake tensors on cuda:0. `make gpu-check` measures on a real GPU.
"""

import contextlib
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adashift import AdaShift, _steps
from adashift._steps import foreach, gpu, single

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

HERE = Path(__file__).parent
PHIS = ["max", "mean", "row", "none"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CUDA = torch.device("cuda:0")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
pytestmark = pytest.mark.filterwarnings("ignore:m=inf", "ignore:Accessing the data pointer")


def test_numbers_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", str(HERE / "interpreted_kernels.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout


# -- a GPU that only counts --------------------------------------------------------------------


FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # of a launch, by the number of lists


def launches_of(func, args):
    """How many kernels an operation launches; torch splits lists of tensors."""
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and torch.is_tensor(x[0])]
    if not func.__name__.startswith("_foreach"):
        return 1
    blocks = sum(-(-x.numel() // 65536) for x in lists[0])
    launches = max(-(-len(lists[0]) // FOREACH_TENSORS[len(lists)]), -(-blocks // 320))
    return launches + ("norm" in func.__name__)


class FakeGpu(TorchDispatchMode):
    """Operations on cuda:0 have shapes, but no values; those on the CPU are real."""

    def __init__(self):
        super().__init__()
        self.launches, self.waits, self.variants, self.device = [], [], {}, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(map(is_on_gpu, leaves)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits.append(func.__name__)
        out = func(*args, **kwargs)
        if any(x.is_cpu for x in tree_leaves(out) if torch.is_tensor(x)):
            self.waits.append(func.__name__)  # a copy to the host
        if func.namespace == "aten" and not (is_view(func) or "empty" in func.__name__):
            self.launches += [func.__name__] * launches_of(func, args)
        return out

    @contextlib.contextmanager
    def device_of(self, x):
        self.device = x.device
        yield
        self.device = None

    def launch(self, kernel, *, grid, warmup, num_warps, enable_fp_fusion, **arguments):
        assert not enable_fp_fusion and grid[0] > 0
        assert self.device == CUDA, "a launch goes to the current device"
        devices = {x.device for x in arguments.values() if torch.is_tensor(x)}
        assert devices == {CUDA}
        self.launches.append(kernel.__name__)
        types = {name: signature(x, name) for name, x in arguments.items()}
        constants = {name: x for name, x in arguments.items() if types[name] == "constexpr"}
        self.variants[kernel.__name__, *map(str, constants.values())] = (kernel, types, constants)


def is_on_gpu(x):
    return isinstance(x, FakeTensor) or (isinstance(x, torch.device) and x.type == "cuda")


def is_view(func):
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


def signature(x, name):
    if x is None or name.isupper():
        return "constexpr"
    if torch.is_tensor(x):
        return "*" + {"float32": "fp32", "float64": "fp64", "int64": "i64"}[str(x.dtype)[6:]]
    return "fp64" if isinstance(x, float) else "i32"


def fake_address(x, fresh=itertools.count(16, 16)):  # noqa: B008
    """A number of its own for each tensor; fake ones have no memory."""
    return x.__dict__.setdefault("address", next(fresh)) if x is not None else 0


@pytest.fixture
def fake_gpu(monkeypatch):
    mode = FakeGpu()
    for module in (_steps, gpu):
        monkeypatch.setattr(module, "address_of", fake_address)
    for module in (_steps, foreach, single):
        monkeypatch.setattr(module, "is_plain", lambda x: True)
    monkeypatch.setattr(gpu, "available", lambda device: True)
    monkeypatch.setattr(gpu, "is_capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "device_of", mode.device_of)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    run = triton.runtime.jit.JITFunction
    monkeypatch.setattr(run, "run", lambda self, **kwargs: mode.launch(self, **kwargs))
    with FakeTensorMode(allow_non_fake_inputs=True), mode:
        yield mode


def on_gpu(shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype, device=CUDA).requires_grad_() for shape in shapes]


def step(fake_gpu, optimizer, params, missing=()):
    """A step with new gradients; returns the number of launches."""
    for i, p in enumerate(params):
        p.grad = None if i in missing else torch.empty_like(p, requires_grad=False)
    fake_gpu.launches.clear()
    optimizer.step()
    return len(fake_gpu.launches)


WAYS = [
    {},
    {"fused": True},
    {"capturable": True},
    {"fused": False},
    {"fused": False, "foreach": False},
    {"fused": False, "capturable": True},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way) or "default")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phi", PHIS)
def test_no_wait_and_one_device(phi, dtype, way, fake_gpu):
    for m in (1, 2, 3, math.inf):
        params = on_gpu([(), (1,), (33,), (7, 5), (4, 3, 3, 3)], dtype)
        optimizer = AdaShift(params, n=3, m=m, phi=phi, weight_decay=0.1, **way)
        if m == 2:  # a learning rate on the device; a new optimizer would read it
            optimizer.param_groups[0]["lr"] = torch.zeros(1, device=CUDA)
        for t in range(6):
            step(fake_gpu, optimizer, params, missing=[t % 3])
            assert not fake_gpu.waits


def shapes_of(net):
    models = pytest.importorskip("torchvision").models
    with unset_fake_temporarily(), torch.device("meta"):
        return [p.shape for p in getattr(models, net)().parameters()]


@pytest.mark.parametrize("net", ["resnet18", "densenet121"])
@pytest.mark.parametrize(
    ("way", "least", "most"),
    [
        ({}, 3, 3),
        ({"foreach": False}, 3, 3),
        ({"capturable": True}, 3, 3),
        ({"fused": False}, 4, 60),
        ({"fused": False, "phi": "row"}, 4, 60),
    ],
)
def test_launches(net, way, least, most, fake_gpu):
    """Two kernels, and a copy of the gradients' addresses if they are new."""
    params = on_gpu(shapes_of(net))
    optimizer = AdaShift(params, weight_decay=0.1, **way)
    step(fake_gpu, optimizer, params)
    for _ in range(12):
        assert least <= step(fake_gpu, optimizer, params) <= most, fake_gpu.launches
    if "fused" not in way:
        fake_gpu.launches.clear()
        optimizer.step()  # with the same gradients
        assert fake_gpu.launches == ["step_tiles", "finish_step"]
    assert not fake_gpu.waits


@pytest.mark.parametrize("way", [{}, {"capturable": True}])
def test_launches_when_gradients_are_missing_and_lr_is_a_tensor(way, fake_gpu):
    params = on_gpu(shapes_of("resnet18"))
    optimizer = AdaShift(params, phi="mean", **way)
    optimizer.param_groups[0]["lr"] = torch.zeros((), device=CUDA)  # a new optimizer would read it
    step(fake_gpu, optimizer, params)
    for t in range(4):
        assert step(fake_gpu, optimizer, params, missing=[t, t + 1]) == 3, fake_gpu.launches
    assert not fake_gpu.waits


def test_each_device_dtype_and_misfit_goes_its_own_way(fake_gpu):
    """A tensor with gaps, a complex one or a gradient of another layout stops no other tensor."""
    params = [*on_gpu([(9, 9), (5,)]), *on_gpu([(8,)], torch.bfloat16)]
    gaps = torch.zeros(6, 6, device=CUDA)[:, ::2].requires_grad_()
    params += [gaps, *on_gpu([(3,)], torch.complex64), *on_gpu([(4, 6)])]
    optimizer = AdaShift(params, n=2)
    for p in params:
        p.grad = torch.empty_like(p)
    params[-1].grad = torch.empty(6, 4, device=CUDA).t()
    optimizer.step()
    (plan,) = optimizer._plans.values()
    taken = [table.params for table in plan.tables if isinstance(table, gpu.GpuTable)]
    assert [list(map(id, ps)) for ps in taken] == [list(map(id, params[:2])), [id(params[2])]]


def test_a_clock_on_the_host_moves_to_the_device_without_waiting(fake_gpu):
    """A checkpoint and the other ways leave it on the CPU."""
    params = on_gpu([(40,), (3, 5)])
    optimizer = AdaShift(params, n=2)
    for missing in ([], [0], [1]):
        step(fake_gpu, optimizer, params, missing)
    optimizer.state[params[0]]["step"] = torch.tensor(7)
    step(fake_gpu, optimizer, params)
    assert optimizer.state[params[0]]["step"].device == CUDA and not fake_gpu.waits


def test_a_graph_gets_addresses_of_its_own(fake_gpu, monkeypatch):
    """What a capture copies has not arrived when the next step runs outside of the graph."""
    params = on_gpu([(40,)])
    optimizer = AdaShift(params, n=2, capturable=True)
    step(fake_gpu, optimizer, params)
    (table,) = next(iter(optimizer._plans.values())).tables
    before, held = table.part["gradients"], []
    monkeypatch.setattr(gpu, "captured", held)
    monkeypatch.setattr(gpu, "is_capturing", lambda device: True)
    monkeypatch.setattr(gpu, "address_of", lambda x: 16)
    step(fake_gpu, optimizer, params)
    assert table.part["gradients"] is before and table.addresses != [16]
    copied = next(x for x in held if isinstance(x, FakeTensor) and x is not table.memory)
    assert any(x is table.memory for x in held) and copied is not before
    assert any(not isinstance(x, FakeTensor) and x.tolist() == [16] for x in held)


class Sm80:
    """A driver that knows what to compile for, and no more."""

    def get_current_target(self):
        return TARGETS["sm_80"]

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def test_another_list_of_parameters_compiles_nothing_again(monkeypatch):
    """Triton itself binds the arguments: floats as float64, addresses whatever their alignment."""
    compiled, run = {}, triton.runtime.jit.JITFunction.run

    def compile_only(kernel, *, warmup, **arguments):
        source = run(kernel, warmup=True, **arguments).src
        compiled.setdefault(kernel.__name__, []).append((source.hash(), source.signature))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(gpu, "DEVICES", ("cpu",))
    monkeypatch.setattr(gpu, "available", lambda device: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Sm80())
    for count, n in ((1, 2), (2, 3), (3, 16), (5, 17)):
        params = [torch.zeros(1100).requires_grad_() for _ in range(count)]
        for p in params:
            p.grad = torch.ones(1100)
        AdaShift(params, n=n, m=2, lr=1.0, betas=(0.0, 0.0)).step()
    for found in compiled.values():
        assert len(found) == 4 and len({key for key, _ in found}) == 1
        assert "fp64" in found[0][1].values() and "fp32" not in found[0][1].values()


# -- compiled ahead of time --------------------------------------------------------------------


MOST_REGISTERS = 128  # two programs of eight warps fit in a multiprocessor


WINDOWS = [dict(m=1), dict(m=10), dict(m=10, state_dtype=torch.bfloat16), dict(m=math.inf)]


def launched_variants(fake_gpu, dtypes, windows):
    """Every variant of the kernels that the optimizer launches for these settings."""
    for phi, dtype, window in itertools.product(PHIS, dtypes, windows):
        for stochastic in {False, dtype == torch.bfloat16}:
            params = on_gpu([(40, 3)], dtype)
            optimizer = AdaShift(params, phi=phi, stochastic_rounding=stochastic, **window)
            if stochastic:  # one more setting, for another variant
                optimizer.param_groups[0]["lr"] = torch.zeros((), device=CUDA)
            step(fake_gpu, optimizer, params)
    return list(fake_gpu.variants.values())


def registers_and_spills(kernel, types, constants, target):
    types = {name: types[name] for name in kernel.arg_names}
    options = dict(num_warps=gpu.WARPS, enable_fp_fusion=False)
    source = ASTSource(kernel, types, constants)
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        found = dict(re.findall(r"\.vgpr_(count|spill_count):\s*(\d+)", compiled.asm["amdgcn"]))
        return int(found["count"]), int(found["spill_count"])
    return resources_of(compiled.asm["cubin"])


def resources_of(cubin):
    """Registers, and bytes of local memory, which hold what has been spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


def check_variants(variants, target):
    for kernel, types, constants in variants:
        registers, spilled = registers_and_spills(kernel, types, constants, target)
        assert registers <= MOST_REGISTERS, (kernel.__name__, constants)
        assert spilled == 0, (kernel.__name__, constants)


def test_float32_compiles_without_spills(fake_gpu):
    variants = launched_variants(fake_gpu, [torch.float32], [dict(m=10), dict(m=math.inf)])
    assert len(variants) == 16
    with unset_fake_temporarily():
        check_variants(variants, TARGETS["sm_80"])


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles_without_spills(target, fake_gpu):
    variants = launched_variants(fake_gpu, DTYPES, WINDOWS)
    assert len(variants) == 80 + 24  # of the two kernels
    with unset_fake_temporarily():
        check_variants(variants, TARGETS[target])
