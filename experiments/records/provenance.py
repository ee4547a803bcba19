"""Provenance of a run: commit, machine and package versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from experiments.config.paths import ROOT
from experiments.records.speed import probe

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "pandas", "hydra-core", "wandb")


@cache
def commit() -> str | None:
    """Return the commit of the running code, with -dirty if the code has uncommitted changes."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changes = [*git, "status", "--porcelain", "--", ":!results"]
        dirty = subprocess.run(changes, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("-dirty" if dirty.strip() else "")


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": processor(),  # the kernels chosen for it affect the last digits
        "cores": os.cpu_count(),
        "probe": probe(),  # seconds of a fixed workload
        "processes": int(os.environ.get("WORLD_SIZE", 1)),  # started by torchrun
        "python": sys.version.split()[0],
    }


@cache
def processor() -> str:
    """Return the name of the processor, such as AMD EPYC 7B13."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


@cache
def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
