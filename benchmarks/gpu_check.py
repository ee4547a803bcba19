"""This machine's GPU: AdaShift compared with its reference, experiments with a CPU, times.

    python -m benchmarks.gpu_check [--quick] [--results FOLDER]

Writes results/gpu-check.md, a page to paste into an issue. The exit code is 1 if a check fails.
A smoke run of every experiment is trained on the CPU, on the GPU and on the GPU with speed=fast,
and one published run is trained again on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from adashift import AdaShift
from adashift.reference import AdaShiftReference
from benchmarks.common import bullet_list, environment, interleave
from benchmarks.optimizer import Shapes, numel, parameter_lists, state_bytes
from experiments.config.compose import compose
from experiments.config.paths import ROOT, choices_of
from experiments.products.markdown import markdown_table
from experiments.products.verify import repeated
from experiments.records import archive
from experiments.records.agreement import DIFFERENT, compare
from experiments.records.run import Run
from experiments.training.execute import execute
from experiments.training.pool import attempt

SHAPES = [(), (1,), (1000,), (70_003,), (33, 129), (16, 3, 3, 3), (3, 5000)]
WINDOWS: dict[str, dict[str, Any]] = {"m=1": dict(m=1), "m=3": dict(m=3), "m=inf": dict(m=math.inf)}
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 8 * torch.finfo(torch.bfloat16).eps,  # θ is rounded in each of eight steps
    torch.float16: 8 * torch.finfo(torch.float16).eps,
}
CONTENDERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "Adam fused": partial(torch.optim.Adam, fused=True),
    "Adam foreach": partial(torch.optim.Adam, foreach=True),
    "AdaShift m=1": partial(AdaShift, m=1),
    "AdaShift n=m=10": AdaShift,
    "AdaShift n=m=10, bf16 slots": partial(AdaShift, state_dtype=torch.bfloat16),
    "AdaShift n=44 m=inf": partial(AdaShift, n=44, m=math.inf),
    "AdaShift n=m=10 phi=row": partial(AdaShift, phi="row"),
    "AdaShift n=m=10 foreach": partial(AdaShift, foreach=True),
}


SHORT = ("optimizer.n=2", "optimizer.m=null")  # AdaShift's first n steps move nothing
TRAINING_TOLERANCE = {"exact": 1e-3, "fast": 0.05}  # rounding that grows in training; bfloat16
TINY = 1e-12  # curves that stay below are equal
PUBLISHED_EXPERIMENT = "ill_conditioned"  # needs no data; 4 s on a CPU


# -- correctness -------------------------------------------------------------------------------


def random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradients(params: list[Tensor], steps: int) -> Iterator[list[Tensor]]:
    """Of changing size, so that a wrong lag shows."""
    generator = torch.Generator().manual_seed(1)
    for t in range(steps):
        yield [(math.exp(t % 4) * random(p.shape, generator)).to(p) for p in params]


def make_params(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [random(shape, generator).to(device, dtype).requires_grad_() for shape in SHAPES]


def worst_error(params: list[Tensor], oracles: list[AdaShiftReference]) -> float:
    """The largest error, relative to the largest |θ| of its tensor, or to 1 if that is larger."""
    errors = [
        (p.detach().cpu().double() - oracle.theta).abs().max() / oracle.theta.abs().max().clamp(1)
        for p, oracle in zip(params, oracles, strict=True)
    ]
    return torch.stack(errors).max().item()


def eager_error(device: torch.device, dtype: torch.dtype, **options: Any) -> float:
    params = make_params(device, dtype)
    optimizer = AdaShift(params, n=3, **options)
    oracles = [AdaShiftReference(p.cpu(), n=3, **options) for p in params]
    for found in gradients(params, 11):
        for p, g, oracle in zip(params, found, oracles, strict=True):
            p.grad = g
            oracle.step(g.cpu())
        optimizer.step()
    return worst_error(params, oracles)


def graph_error(device: torch.device) -> float:
    """Of steps that a CUDA graph repeats, after one before it; its gradients are new tensors."""
    params = make_params(device, torch.float32)
    optimizer = AdaShift(params, n=3, capturable=True)
    oracles = [AdaShiftReference(p.cpu(), n=3) for p in params]
    found = list(gradients(params, 11))
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    for p, g in zip(params, found[0], strict=True):
        p.grad = g.clone()
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream(device).wait_stream(side)
    for p, g in zip(params, found[1], strict=True):
        p.grad = g.clone()
    with torch.cuda.graph(graph):
        optimizer.step()
    for t, step in enumerate(found):
        for p, g, oracle in zip(params, step, oracles, strict=True):
            p.grad.copy_(g)  # type: ignore[union-attr]
            oracle.step(g.cpu())
        graph.replay() if t > 0 else None
    torch.cuda.synchronize(device)
    return worst_error(params, oracles)


def check_rows(device: torch.device) -> pd.DataFrame:
    rows = []
    phis = ("max", "mean", "row", "none")
    for dtype, phi, (name, window) in itertools.product(TOLERANCE, phis, WINDOWS.items()):
        error = eager_error(device, dtype, phi=phi, **window)
        rows.append([f"{str(dtype)[6:]}, phi={phi}, {name}", error, TOLERANCE[dtype]])
    if device.type == "cuda":
        rows.append(["CUDA graph, float32", graph_error(device), TOLERANCE[torch.float32]])
    table = pd.DataFrame(rows, columns=["check", "error", "tolerance"])
    return table.assign(passed=table["error"] <= table["tolerance"])  # NaN has not passed


# -- training ----------------------------------------------------------------------------------


def smoke_run(experiment: str, *words: str) -> Run:
    tuned = "adashift" in choices_of(f"tuned/{experiment}")
    optimizer = ("optimizer=adashift", *SHORT) if tuned else ("optimizer=adam",)
    fixed = [f"experiment={experiment}", *optimizer, "scale=smoke", "tracking=off", *words]
    if "dropout" in compose(fixed).task.get("model", {}):
        fixed.append("model.dropout=0")  # each device draws its own numbers for it
    return Run(compose(fixed))


def gap_of(run: Run, reference: Run) -> float:
    """The largest difference of a curve relative to its largest value, of step losses if any.

    Adam and AdaShift divide rounding errors by rounding errors where a gradient is 0, such as that
    of a bias before batch norm. It changes no training loss, but the test loss of a short run.
    """
    mine, theirs = (r.metrics().set_index("step") for r in (run, reference))
    names = [name for name in theirs if name.endswith("/loss")] or list(theirs)
    differences = (mine[names] - theirs[names]).abs().max()
    return float((differences / theirs[names].abs().max().clip(lower=TINY)).max(skipna=False))


def comparison(run: Run, reference: Run, tolerance: float) -> dict[str, Any]:
    """Train a run and compare it; one that fails has no gap and has not passed."""
    outcome = attempt(run, lambda run: [])
    done = outcome.status == reference.status and len(run.metrics()) == len(reference.metrics())
    gap = gap_of(run, reference) if done else math.nan
    print(f"{run.config.experiment}, {run.config.speed}: {outcome}, gap {gap:.1e}", flush=True)
    return {
        "experiment": run.config.experiment,
        "speed": run.config.speed,
        "gap": gap,
        "tolerance": tolerance,
        "passed": gap <= tolerance,  # NaN has not
        "seconds": run.info.get("seconds"),
        "CPU seconds": reference.info["seconds"],
        "GiB": run.info.get("gpu_memory_used"),
        "outcome": str(outcome),
    }


def train_rows(device: str, experiments: Sequence[str]) -> pd.DataFrame:
    """Train each experiment on the CPU and, exact and fast, on the device."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="adashift-gpu-check-") as folder:
        for name in experiments:
            reference = smoke_run(name, "device=cpu", f"results={folder}/cpu")
            execute(reference)
            for speed, tolerance in TRAINING_TOLERANCE.items():
                words = (f"device={device}", f"speed={speed}", f"results={folder}/device")
                rows.append(comparison(smoke_run(name, *words), reference, tolerance))
    return pd.DataFrame(rows)


def published_agreement(device: str) -> str:
    """Train a published run of AdaShift that needs no data, and compare it."""
    runs = archive.load(ROOT / "results" / "published", PUBLISHED_EXPERIMENT)
    published = next(run for name, run in runs.items() if name.startswith("adashift-"))
    with tempfile.TemporaryDirectory(prefix="adashift-gpu-check-") as folder:
        run = repeated(published, [f"device={device}", f"results={folder}"])
        outcome = attempt(run, lambda run: [])
        return f"`{run.command()}`: {compare(run) if run.done else f'{DIFFERENT}: {outcome}'}"


# -- time, launches, memory --------------------------------------------------------------------


class Entrant:
    """An optimizer over its own parameters and gradients, past the steps without motion."""

    def __init__(self, make: Callable[[list[Tensor]], Any], shapes: Shapes) -> None:
        params = [torch.randn(shape, device="cuda").requires_grad_() for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        self.optimizer = make(params)
        for _ in range(50):
            self.step()

    def step(self) -> None:
        self.optimizer.step()
        torch.cuda.synchronize()

    def launches(self) -> int:
        """Kernels and copies of one step."""
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.step()
        return sum(e.count for e in found.key_averages() if e.device_type == DeviceType.CUDA)


def time_rows(name: str, shapes: Shapes, rounds: int) -> pd.DataFrame:
    """One contender at a time next to Adam fused, so that two states are in memory."""
    rows = []
    for contender in CONTENDERS:
        pair = {key: Entrant(CONTENDERS[key], shapes) for key in {"Adam fused", contender}}
        times = interleave(pair, rounds).median()
        rows.append(
            {
                "list": name,
                "contender": contender,
                "ms per step": 1e3 * times[contender],
                "÷ Adam fused": times[contender] / times["Adam fused"],
                "launches": pair[contender].launches(),
                "state bytes per parameter": state_bytes(pair[contender].optimizer) / numel(shapes),
            }
        )
    return pd.DataFrame(rows)


# -- the page ----------------------------------------------------------------------------------


def gpu_facts() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return environment() | {
        "GPU": f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {runtime}",
        "command": "make gpu-check",
    }


def training_part(trained: pd.DataFrame, agreement: str) -> list[str]:
    passed = f"Runs within their tolerance: {trained['passed'].sum()} of {len(trained)}."
    shown = trained.assign(gap=trained["gap"].map("{:.1e}".format)).round({"seconds": 1})
    return [
        "## Training",
        "A smoke run of each experiment compared with the same run on the CPU: the largest "
        "difference of training losses (of all metrics, if it has none) relative to the largest "
        "value. Seconds include compiling.",
        passed,
        markdown_table(shown.round({"CPU seconds": 1})),
        "A published run, trained again here:",
        agreement,
    ]


def page(
    checks: pd.DataFrame, times: pd.DataFrame, training: Sequence[str], facts: dict[str, Any]
) -> str:
    failed = checks[~checks["passed"]]
    verdict = f"Checks passed: {len(checks) - len(failed)} of {len(checks)}."
    worst = checks.assign(share=checks["error"] / checks["tolerance"]).nlargest(3, "share")
    shown = failed if len(failed) else worst[checks.columns]
    intro = "Failed:" if len(failed) else "The three that come closest to their tolerance:"
    times = times.round({"ms per step": 3, "÷ Adam fused": 2, "state bytes per parameter": 2})
    parts = ["# AdaShift on a GPU", bullet_list(facts), "## Correctness", verdict, intro]
    parts += [
        markdown_table(shown),
        *training,
        "## Time per step",
        "Median of steps of the two in turn, float32.",
    ]
    return "\n\n".join([*parts, markdown_table(times)]) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check AdaShift on this machine's GPU.")
    parser.add_argument("--quick", action="store_true", help="two experiments, small lists")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="FOLDER")
    arguments = parser.parse_args(words)
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU; run this on a machine with CUDA or ROCm and a driver")
    warnings.filterwarnings("ignore", "m=inf with betas")  # a short n, on purpose
    checks = check_rows(torch.device("cuda", 0))
    experiments = ["mnist_lr", "lemma_2"] if arguments.quick else choices_of("experiment")
    trained = train_rows("cuda:0", experiments)
    agreement = published_agreement("cuda:0")
    lists = parameter_lists(arguments.quick).items()
    times = pd.concat([time_rows(name, shapes, rounds) for name, (shapes, rounds) in lists])
    text = page(checks, times, training_part(trained, agreement), gpu_facts())
    print(text)
    path = arguments.results / "gpu-check.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"Written: {path}")
    good = checks["passed"].all() and trained["passed"].all() and DIFFERENT not in agreement
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
