"""The update on a CPU in one pass over memory: kernel.c, compiled on first use and cached.

The C compiler is $CC, else cc, gcc or clang. The shared library is cached in $ADASHIFT_CACHE, else
in the user's cache folder, under a name that depends on the source, the compiler and the CPU. If
the folder is not writable, each process compiles its own copy.
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
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._spatial import PHI
from adashift._window import WindowPlan, total_weight

SOURCE = Path(__file__).with_name("kernel.c")
TYPES = {torch.float32: ("float", "uint32_t"), torch.float64: ("double", "uint64_t")}
COMPILER_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
TUNING_FLAGS = (
    ("-march=native", "-mprefer-vector-width=512"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
MAX_CLOSING = 256  # MOST in kernel.c, the largest number of slots it converts

RULE_FORMAT, JOB_FORMAT = Struct("8d2qQ"), Struct("9Q2q2d")  # Rule and Job of kernel.c
IMPORTING_PROCESS = os.getpid()


class KernelUnavailable(Exception):
    """The kernel could not be compiled or loaded."""


def compiler() -> list[str]:
    """Return the compiler as the start of a command line."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise KernelUnavailable(f"{shlex.join(named) or 'cc, gcc or clang'} was not found")


def cpu_description() -> str:
    """Return what determines the instruction set; machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return platform.machine() + platform.processor() + "".join(sorted(set(flags)))


def cache_folder() -> Path:
    """Return the cache folder, to which only this user can write."""
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


def compile_to(target: Path, real: str, bits: str) -> None:
    """Compile with the first flags that the compiler accepts; safe if two processes do so."""
    handle, draft = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    start = [*compiler(), *COMPILER_FLAGS, f"-DREAL={real}", f"-DBITS={bits}", "-o", draft]
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
def kernel_for(dtype: torch.dtype) -> Any:
    """Return the function of kernel.c for a dtype, or warn and return None."""
    try:
        return load_kernel(*TYPES[dtype])
    except (KernelUnavailable, OSError) as error:
        warnings.warn(
            f"fused=True needs a C compiler, but {error}; using the default instead: "
            "install a C compiler, set CC, or drop fused=True",
            stacklevel=5,
        )
        return None


def load_kernel(real: str, bits: str) -> Any:
    if sys.platform == "win32":
        raise KernelUnavailable("kernel.c needs pthreads, not available on Windows")
    made_by = [
        run_compiler([*compiler(), "--version"]),
        cpu_description(),
        real,
        str(COMPILER_FLAGS),
        str(TUNING_FLAGS),
    ]
    key = hashlib.sha256(SOURCE.read_bytes() + "\n".join(made_by).encode()).hexdigest()[:16]
    path = cache_folder() / f"kernel-{real}-{key}.so"
    if not path.exists():
        compile_to(path, real, bits)
    step = ctypes.CDLL(str(path)).adashift_step
    step.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
    return step


@cache
def torch_threads() -> int:
    """Return the address of GOMP_parallel, which runs a function in torch's threads, or 0.

    torch's threads may still spin after its last operation and would slow down other threads.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel  # missing if torch uses another OpenMP
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def supports(p: Tensor, phi: Any) -> bool:
    """Return whether the kernel supports this parameter's type and φ."""
    own = type(p).__torch_dispatch__ is not Tensor.__torch_dispatch__  # DTensor …
    plain = p.dtype in TYPES and p.is_cpu and type(phi) is str and not own
    return plain and kernel_for(p.dtype) is not None


def supports_layout(p: Tensor, g: Tensor, plan: WindowPlan, v: Tensor, phi: Tensor) -> bool:
    """Return whether the tensors are dense with equal strides and dtypes, as the kernel needs."""
    layout = p.stride()
    return (
        g.stride() == layout
        and not g.is_neg()  # lazy negation: the sign is not in memory
        and g.dtype == v.dtype == phi.dtype == p.dtype  # a checkpoint may have another
        and (plan.slot is None or (plan.slot.stride(), plan.slot.dtype) == (layout, p.dtype))
        and len(plan.front) < 2
        and len(plan.closing) <= MAX_CLOSING
        and (p.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(p))
        and (v.dim() == 0 or v.stride() == phi.stride() == layout)
    )


class Jobs:
    """The updates of a group's parameters, run by one kernel call for each dtype."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.packed = dict[torch.dtype, list[bytes]]()
        self.held = list[Any]()  # keeps memory alive that the kernel points to
        self.clocks = dict[int, tuple[str, float]]()  # by t, which most parameters share

    def add(self, p: Tensor, g: Tensor, plan: WindowPlan, state: ParamState, t: int) -> None:
        if t not in self.clocks:
            n, beta2 = self.group["n"], self.group["betas"][1]
            self.clocks[t] = f"phi{t % n}", 1 - beta2 ** (t - n) if t > n else 0.0
        phi, correction = self.clocks[t]
        earlier, keep, slot, front, closing = plan
        buffer, weight = front[0] if front else (None, 0.0)
        job = JOB_FORMAT.pack(
            p.data_ptr(),
            g.data_ptr(),
            0 if earlier is None else earlier.data_ptr(),
            0 if keep is None else keep.data_ptr(),
            0 if slot is None else slot.data_ptr(),
            0 if buffer is None else buffer.data_ptr(),
            self.table(closing) if closing else 0,
            state["v"].data_ptr(),
            state[phi].data_ptr(),
            p.numel(),
            len(closing),
            weight,
            correction,
        )
        self.packed.setdefault(p.dtype, []).append(job)
        self.held.append(g)  # a copy if p.grad is a lazy conjugate

    def table(self, closing: list[Tensor]) -> int:
        pointers = [slot.data_ptr() for slot in closing]
        self.held.append((ctypes.c_void_p * len(pointers))(*pointers))
        return ctypes.addressof(self.held[-1])

    def run(self) -> None:
        for dtype, jobs in self.packed.items():
            if kernel_for(dtype)(self.rule(), b"".join(jobs), len(jobs)):
                raise MemoryError(f"out of memory while updating {len(jobs)} parameters")

    def rule(self) -> bytes:
        group = self.group
        (beta1, beta2), m = group["betas"], group["m"] or group["n"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        decays = (1 - lr * decay, 0.0) if group["decoupled_weight_decay"] else (1.0, decay)
        sign = -1.0 if group["maximize"] else 1.0
        phi = list(PHI).index(group["phi"])
        numbers = (lr, beta1, beta2, group["eps"], total_weight(beta1, m), *decays, sign)
        pool = (
            torch_threads() if os.getpid() == IMPORTING_PROCESS else 0
        )  # a fork has lost its threads
        return RULE_FORMAT.pack(*numbers, phi, torch.get_num_threads(), pool)
