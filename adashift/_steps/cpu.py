"""AdaShift's step on a CPU in one pass over memory: kernel.c, compiled on first use and kept.

The C compiler is the one that CC names, else cc, gcc or clang. The library is kept in
ADASHIFT_CACHE, else in the user's cache folder, under a name that changes with the source, the
compiler and the processor; without a folder to write to it is compiled anew in each process.
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
MAX_CLOSING = 256  # slots that kernel.c can sum up

RULE_FORMAT, JOB_FORMAT = Struct("8d2qQ"), Struct("9Q2q2d")  # Rule and Job of kernel.c
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


def compile_to(target: Path, real: str, bits: str) -> None:
    """Compile with the best flags that the compiler knows; two processes may do so at once."""
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
    """The function of kernel.c for a dtype, or None, with a warning, if it cannot be had."""
    try:
        return load_kernel(*TYPES[dtype])
    except (KernelUnavailable, OSError) as error:
        warnings.warn(
            f"fused=True needs a C compiler, but {error}; the default path is used instead: "
            "install one, or name it in the environment variable CC",
            stacklevel=5,
        )
        return None


def load_kernel(real: str, bits: str) -> Any:
    if sys.platform == "win32":
        raise KernelUnavailable("kernel.c needs pthreads, which Windows has not")
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
    """Address of what runs a function in torch's own threads, or 0.

    They may still spin after torch's last operation, and threads of ours would wait behind them.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel  # where torch uses another OpenMP, it is not there
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def supports(p: Tensor, phi: Any) -> bool:
    """Whether there is a kernel for this parameter and φ."""
    own = type(p).__torch_dispatch__ is not Tensor.__torch_dispatch__  # DTensor …
    plain = p.dtype in TYPES and p.is_cpu and type(phi) is str and not own
    return plain and kernel_for(p.dtype) is not None


def supports_layout(p: Tensor, g: Tensor, move: WindowPlan, v: Tensor, phi: Tensor) -> bool:
    """Whether the kernel can make this step: memory without gaps, laid out alike, one front."""
    layout = p.stride()
    return (
        g.stride() == layout
        and not g.is_neg()  # a sign that is not in memory
        and g.dtype == v.dtype == phi.dtype == p.dtype  # a checkpoint keeps its own
        and (move.slot is None or (move.slot.stride(), move.slot.dtype) == (layout, p.dtype))
        and len(move.front) < 2
        and len(move.closing) <= MAX_CLOSING
        and (p.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(p))
        and (v.dim() == 0 or v.stride() == phi.stride() == layout)
    )


class Jobs:
    """The steps of a group's parameters, which one call of the kernel for each dtype takes."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.packed = dict[torch.dtype, list[bytes]]()
        self.held = list[Any]()  # what the kernel has addresses of and nobody else may hold
        self.clocks = dict[int, tuple[str, float]]()  # most parameters have the same t

    def add(self, p: Tensor, g: Tensor, move: WindowPlan, state: ParamState, t: int) -> None:
        if t not in self.clocks:
            n, beta2 = self.group["n"], self.group["betas"][1]
            self.clocks[t] = f"phi{t % n}", 1 - beta2 ** (t - n) if t > n else 0.0
        phi, correction = self.clocks[t]
        earlier, keep, slot, front, closing = move
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
        self.held.append(g)  # a copy, where p.grad is the conjugate of what is in memory

    def table(self, closing: list[Tensor]) -> int:
        pointers = [slot.data_ptr() for slot in closing]
        self.held.append((ctypes.c_void_p * len(pointers))(*pointers))
        return ctypes.addressof(self.held[-1])

    def run(self) -> None:
        for dtype, jobs in self.packed.items():
            if kernel_for(dtype)(self.rule(), b"".join(jobs), len(jobs)):
                raise MemoryError(f"no memory for the plan of {len(jobs)} parameters")

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
