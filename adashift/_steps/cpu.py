"""AdaShift's step on a CPU in one pass over memory: kernel.c, compiled on first use and kept.

The C compiler is the one that CC names, else cc, gcc or clang. The library is kept in
ADASHIFT_CACHE, else in the user's cache folder, under a name that changes with the source, the
compiler and the processor; without a writable folder it is compiled again in each process.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from math import inf
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState, state_dtype_of
from adashift._spatial import PHI
from adashift._window import compact, is_dense, is_plain, recover_error, total_weight

SOURCE = Path(__file__).with_name("kernel.c")
FLOAT = ("-DREAL=float", "-DBITS=uint32_t", "-DUNIT=0x1p-24")
MACROS = {
    torch.float32: FLOAT,
    torch.float64: ("-DREAL=double", "-DBITS=uint64_t", "-DUNIT=0x1p-53"),
    torch.bfloat16: (*FLOAT, "-DBF16_PARAM"),
}
COMPILER_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
TUNING_FLAGS = (
    ("-march=native", "-mprefer-vector-width=512"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
RULE_FORMAT = Struct("9d5qQ")  # Rule of kernel.c
GRADIENT = 1  # the place of a gradient's address in a Job of kernel.c
IMPORTING_PROCESS = os.getpid()


class KernelUnavailable(Exception):
    """There is no compiler, or it fails; the message says which and why."""


def compiler() -> list[str]:
    """The compiler as the start of a command line."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise KernelUnavailable(f"{shlex.join(named) or 'cc, gcc or clang'} was not found")


def cpu_description() -> str:
    """What decides which instructions can be used; a home folder may serve many machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return platform.machine() + platform.processor() + "".join(sorted(set(flags)))


def cache_folder() -> Path:
    """Where libraries are kept: a folder that only this user can write to."""
    root = os.environ.get("ADASHIFT_CACHE")
    if root is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(home, "adashift")
    try:
        Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return Path(root)
    except OSError:
        own = tempfile.mkdtemp(prefix="adashift-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return Path(own)


def run_compiler(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise KernelUnavailable(f"{command[0]} failed: {reason}")
    return done.stdout


def compile_to(target: Path, macros: Sequence[str]) -> None:
    """Compile with the best flags that the compiler knows; two processes may do so at once."""
    handle, draft = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    start = [*compiler(), *COMPILER_FLAGS, *macros, "-o", draft]
    try:
        for tuning in TUNING_FLAGS:
            try:
                run_compiler([*start, *tuning, str(SOURCE), "-lm"])
                os.replace(draft, target)
                return
            except KernelUnavailable as error:
                reason = error
        raise reason
    finally:
        Path(draft).unlink(missing_ok=True)


@cache
def kernel_for(dtype: torch.dtype, slot_dtype: torch.dtype | None = None) -> Any:
    """The function of kernel.c for these dtypes; None, with a warning, if it is not available."""
    half = slot_dtype == torch.bfloat16
    try:
        return load_kernel((*MACROS[dtype], *["-DBF16_SLOT"] * half))
    except (KernelUnavailable, OSError) as error:
        warnings.warn(
            f"fused=True needs a C compiler, but {error}; using the default instead: "
            "install a C compiler, set CC, or drop fused=True",
            stacklevel=6,
        )
        return None


def load_kernel(macros: Sequence[str]) -> Any:
    if sys.platform == "win32":
        raise KernelUnavailable("kernel.c needs pthreads, which are not available on Windows")
    flags = [*macros, *COMPILER_FLAGS, str(TUNING_FLAGS)]
    made_by = [run_compiler([*compiler(), "--version"]), cpu_description(), *flags]
    key = hashlib.sha256(SOURCE.read_bytes() + "\n".join(made_by).encode()).hexdigest()[:16]
    path = cache_folder() / f"kernel-{key}.so"
    if not path.exists():
        compile_to(path, macros)
    step = ctypes.CDLL(str(path)).adashift_step
    step.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    return step


@cache
def torch_threads() -> int:
    """Address of the function that runs another one in torch's own threads, or 0.

    They may still spin after torch's last operation and would slow down threads of ours.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel  # missing where torch uses another OpenMP
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


# -- which parameters it takes -----------------------------------------------------------------


def supports(p: Tensor, group: ParamGroup) -> bool:
    """Whether there is a kernel for this parameter."""
    known = p.dtype in MACROS and p.is_cpu and is_plain(p) and isinstance(group["phi"], str)
    return known and is_dense(p) and kernel_for(p.dtype, group["state_dtype"]) is not None


def supports_step(p: Tensor, state: ParamState, group: ParamGroup) -> bool:
    """Whether gradient and state lie in memory as the kernel expects them."""
    g, row = p.grad, p.stride(0) if p.dim() else 1
    assert g is not None
    rows_apart = group["phi"] == "row" and p.dim() > 1 and row * p.shape[0] != p.numel()
    slot_dtype = group["state_dtype"] or state_dtype_of(p)
    kept = [state[name] for name in ("sum", "slots") if name in state]
    kept += [state[name] for name in ("v", "phi") if group["phi"] == "none"]
    return (
        (g.dtype, g.stride()) == (p.dtype, p.stride())
        and not g.is_neg()  # a sign that is not in memory
        and not rows_apart
        and state["number"].dtype == state_dtype_of(p)  # a checkpoint keeps its own
        and ("slots" not in state or state["slots"].dtype == slot_dtype)
        and all(x.stride()[x.dim() - p.dim() :] == p.stride() for x in kept)
    )


class JobTable:
    """The parameters of one group and dtype that the kernel takes, as rows of addresses.

    A table is kept as long as its parameters and their state stay where they are; from step to step
    only the addresses of gradients change.
    """

    def __init__(self, params: list[Tensor], states: list[ParamState], group: ParamGroup) -> None:
        self.params, self.kernel = params, kernel_for(params[0].dtype, group["state_dtype"])
        self.rows = torch.tensor(
            [job(p, s, key) for key, (p, s) in enumerate(zip(params, states, strict=True))]
        )
        self.held = [list(state.values()) for state in states]  # the rows have addresses of these

    def step(self, group: ParamGroup) -> None:
        gradients = [p.grad.data_ptr() for p in self.params]  # type: ignore[union-attr]
        self.rows[:, GRADIENT] = torch.tensor(gradients)
        if self.kernel(pack_rule(group), self.rows.data_ptr(), len(gradients)):
            raise MemoryError(f"out of memory for the plan of {len(gradients)} parameters")
        torch.autograd.graph.increment_version(self.params)


def job(p: Tensor, state: ParamState, key: int) -> list[int]:
    """A Job of kernel.c; the address of the gradient follows in every step."""
    state |= {name: compact(state[name]) for name in ("slots", "phi", "number") if name in state}
    recover_error(state)
    names = ("sum", "slots", "v", "phi", "number", "step")
    addresses = [state[name].data_ptr() if name in state else 0 for name in names]
    return [p.data_ptr(), 0, *addresses, p.numel(), p.shape[0] if p.dim() else 1, key]


def pack_rule(group: ParamGroup) -> bytes:
    (beta1, beta2), m = map(float, group["betas"]), group["m"] or group["n"]
    m = 0 if m == inf else m
    lr, decay = float(group["lr"]), group["weight_decay"]
    decays = (1 - lr * decay, 0.0) if group["decoupled_weight_decay"] else (1.0, decay)
    sign = -1.0 if group["maximize"] else 1.0
    numbers = (lr, beta1, beta2, group["eps"], *decays, sign, total_weight(beta1, m), beta1**m)
    counts = (list(PHI).index(group["phi"]), group["n"], m, torch.get_num_threads())
    pool = torch_threads() if os.getpid() == IMPORTING_PROCESS else 0  # a fork has lost its threads
    return RULE_FORMAT.pack(*numbers, *counts, group["stochastic_rounding"], pool)
