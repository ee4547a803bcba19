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
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._steps import address_of, row_of, rows_of, rule_of
from adashift._window import recover_error

SOURCE = Path(__file__).with_name("kernel.c")
FLOAT = ("-DREAL=float", "-DBITS=uint32_t", "-DUNIT=0x1p-24")
MACROS = {
    torch.float32: FLOAT,
    torch.float64: ("-DREAL=double", "-DBITS=uint64_t", "-DUNIT=0x1p-53"),
    torch.bfloat16: (*FLOAT, "-DBF16_PARAM"),
}
COMPILER_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")
TUNING = ("-march=native -mprefer-vector-width=512", "-march=native", "-mcpu=native", "")
RULE_FORMAT = Struct("9d5qQ")  # Rule of kernel.c
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
        for tuning in TUNING:
            try:
                run_compiler([*start, *tuning.split(), str(SOURCE), "-lm"])
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
        raise KernelUnavailable("kernel.c cannot be compiled on Windows")
    flags = [*macros, *COMPILER_FLAGS, *TUNING]
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
    """Address of the function that runs another one in torch's own threads; 0: use one thread.

    They may still spin after torch's last operation and would slow down threads of ours.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel  # of GNU, LLVM and Intel
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


class CpuTable:
    """Parameters of one group and dtype, as rows of addresses that the kernel reads.

    A table is kept as long as its parameters and their state stay where they are; from step to step
    only the addresses of gradients change.
    """

    @staticmethod
    def takes(p: Tensor, group: ParamGroup) -> bool:
        known = p.dtype in MACROS and p.is_cpu
        return known and kernel_for(p.dtype, group["state_dtype"]) is not None

    def __init__(self, params: list[Tensor], states: list[ParamState], group: ParamGroup) -> None:
        self.params, self.kernel = params, kernel_for(params[0].dtype, group["state_dtype"])
        for state in states:
            recover_error(state)
        jobs = enumerate(zip(params, states, strict=True))
        rows = [[*row_of(p, state, rows_of(p, group), key), 0] for key, (p, state) in jobs]
        self.rows = torch.tensor(rows)
        self.held = [list(state.values()) for state in states]  # the rows have addresses of these

    def step(self, group: ParamGroup) -> None:
        gradients = [address_of(p.grad) for p in self.params]
        self.rows[:, -1] = torch.tensor(gradients)
        if self.kernel(pack_rule(group), self.rows.data_ptr(), len(gradients)):
            raise MemoryError(f"out of memory for the plan of {len(gradients)} parameters")
        torch.autograd.graph.increment_version(self.params)


def pack_rule(group: ParamGroup) -> bytes:
    """Rule of kernel.c"""
    rule = rule_of(group, float(group["lr"]))
    rule["decay"] = 1 - rule["lr"] * rule["decay"]
    pool = torch_threads() if os.getpid() == IMPORTING_PROCESS else 0  # a fork has lost its threads
    threads, stochastic = torch.get_num_threads(), group["stochastic_rounding"]
    return RULE_FORMAT.pack(*rule.values(), threads, stochastic, pool)
