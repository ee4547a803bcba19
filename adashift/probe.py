"""A probe that measures, in any training, whether v_t is correlated with the gradient it divides.

It reports the paper's diagnosis of Adam (section 3): the correlation of g_t² and v_t, and the net
update factor k of large gradients relative to small ones.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import inf, nan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from adashift._base import ParamGroup, ParamState, check_count, real_view
from adashift._moments import copy_into, pearson, welford
from adashift._readers import OptimizerReader, StepFormula, coupled_weight_decay, reader_of
from adashift.optimizer import AdaShift

Vectors = dict[str, Tensor]
Counts = dict[str, float]

# Memory of an element's mean square, as long as that of v at β2 = 0.999: a longer one would lag
# behind training, a shorter one would follow v.
MEAN_SQUARE_STEPS = 1000
# Gradients that only initialize the mean square. Adam's first step sizes are about 1 / |g_1|, so
# heavy-tailed that a few elements would dominate the mean.
WARM_UP_STEPS = 100


NO_COUNTS: Counts = {
    "seen": 0,  # gradients
    "samples": 0,  # of g² and v
    "held": 0.0,  # total weight in the first moment
    "weight": 0.0,  # the same, summed over the sampled steps
    "fresh": 0,  # whether the last step was sampled
    "met": 0,  # gradients that followed a sampled step
}


@dataclass
class ProbedBlock:
    """One parameter tensor: the columns of its elements in the probe's vectors, and its counts."""

    name: str
    shape: torch.Size
    columns: slice
    index: Tensor | None  # None: every element
    counts: Counts = field(default_factory=lambda: dict(NO_COUNTS))
    has_gradient: bool = False

    def pick(self, x: Tensor) -> Tensor:
        """Return the block's elements of x, which may be a scalar or broadcast to the block."""
        x = real_view(x)
        if x.numel() == 1:
            return x.reshape(1)
        if x.shape != self.shape:
            x = x.expand(self.shape)
        if self.index is None:
            return x.reshape(-1)
        if x.is_contiguous():
            return x.view(-1).index_select(0, self.index)
        return x.take(self.index)


class DecorrelationProbe:
    """Observe an optimizer and report, for each block (one parameter tensor):

    correlation: of g_t² and v_t over time, averaged over elements. v_t is the raw second moment,
        without bias correction, as in the paper. For independent gradients it is √(1 − β2²) for
        Adam (0.436 at β2 = 0.9, 0.045 at 0.999) and 0 for AdaShift, or slightly less in a short
        run. The initial rise of v, over a few times 1 / (1 − β2) steps, hides the correlation:
        call `reset` after it.
    k_ratio: the mean net update factor of large gradients over that of small ones; 1 is unbiased,
        below 1 large gradients count for less. k(g_t) = Σ_{i≥t} c_{i,t} D_i, where D_i is the step
        size of step i as the optimizer takes it (its lr, bias correction and eps) and c_{i,t}
        the weight of g_t in the direction of step i; both sums, of k and of the weights, run over
        the steps so far.
    k_effect: k_ratio divided by the same ratio of the step sizes just before each gradient. A
        gradient cannot affect those, so the division removes other causes (a trend in the step
        size, chance in a short run) and leaves the effect of the gradient itself.

    A gradient is large if g² exceeds the element's mean square over about 1,000 gradients before
    it. k is divided by the element's mean k before averaging over a block, so that elements with
    small v do not dominate.

    No gradient is stored for the sum over later steps: Σ_t [g_t large] k(g_t) =
    Σ_i D_i Σ_{t≤i} c_{i,t} [g_t large], and the inner sum is the optimizer's first moment of the
    indicator [g_t large].

    The overhead is about 30 small operations per step and 8 per block, for any block size: on one
    CPU core 20 % of a step of a 784-256-256-10 net with batch 64, 10 % with every=10, and little
    for a larger net. `python -m adashift.probe` measures it.

    Training with the probe is bit-identical to training without it. Supported are torch's Adam,
    AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta (with AMSGrad's maximum if enabled),
    AdaShift, SpatialOnly, AdamNC, and other optimizers with Adam's state. Steps that are not
    divided by √v (AdaShift's first n, RAdam's first five) are skipped, and the first 100 gradients
    of a block only initialize its mean square: k is NaN until then.

    Args:
        optimizer: the optimizer to observe, including parameter groups that are added later.
        every: read v every so many steps. Gradients are read at every step, because k needs them.
        elements: maximum number of elements per block, sampled once. Memory is 18 doubles for each
            (and m more for AdaShift's window, none for m=inf).
        names: names of the blocks, in the optimizer's order, or pairs such as
            model.named_parameters(). Default: the optimizer's own names if it was created with
            named parameters, else "0", "1", …
        seed: seed for sampling the elements; torch's global generator is not used.
        dtype: dtype of the sums; use float32 on a device without float64.

    Example:
        >>> theta = torch.nn.Parameter(torch.zeros(100))
        >>> optimizer = torch.optim.Adam([("theta", theta)], lr=0.001, betas=(0.0, 0.9))
        >>> random = torch.Generator().manual_seed(0)
        >>> with DecorrelationProbe(optimizer) as probe:
        ...     for _ in range(2000):
        ...         theta.grad = torch.randn(100, generator=random)
        ...         optimizer.step()
        >>> {name: round(value, 2) for name, value in probe.results().items()}
        {'theta/correlation': 0.43, 'theta/k_ratio': 0.89, 'theta/k_effect': 0.89}
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 1,
        elements: int = 256,
        names: Iterable[str] | Iterable[tuple[str, Tensor]] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        reader_of(optimizer)
        self.optimizer, self.dtype = optimizer, dtype
        self.every = check_count("every", every, inf, "1 reads v at every step")
        self.elements = check_count("elements", elements, inf, "usually 256")
        self._names: list[Any] = list(names or [])
        self._random = torch.Generator().manual_seed(seed)
        self._blocks: list[ProbedBlock] = []
        self._vectors: dict[str, Tensor] = {}
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._grow()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def results(self) -> dict[str, float]:
        """Return {"block/quantity": value}, NaN while unknown, e.g. for wandb.log."""
        results = {}
        for block in self._blocks:
            x = self._of(block.columns)
            r = pearson(*x["moments"][2:])
            results[f"{block.name}/correlation"] = r.nanmean().item()
            results[f"{block.name}/k_ratio"] = k_ratio = ratio(x, block.counts, "D", "weight")
            met = ratio(x, block.counts, "before", "met")
            results[f"{block.name}/k_effect"] = k_ratio / met if met else nan
        return results

    def reset(self) -> None:
        """Clear all sums and counts; the sampled elements stay the same."""
        for block in self._blocks:
            block.counts.update(NO_COUNTS)
        for x in self._vectors.values():
            x.zero_()

    def remove(self) -> None:
        """Remove the hooks; results remain available."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "DecorrelationProbe":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and tensors only, for torch.load(weights_only=True)."""
        return {
            "counts": [dict(block.counts) for block in self._blocks],
            "index": [block.index for block in self._blocks],
            "vectors": {name: x.clone() for name, x in self._vectors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, x in self._vectors.items():
            copy_into(x, state["vectors"][name], name)
        for block, counts, index in zip(self._blocks, state["counts"], state["index"], strict=True):
            block.counts.update(counts)
            block.index = index if index is None else index.to(x.device, copy=True)

    # Layout: the elements of all blocks are columns of shared vectors, so that the number of
    # operations per step hardly depends on the number of blocks

    def _grow(self) -> None:
        """Allocate columns for new parameters."""
        end = self._blocks[-1].columns.stop if self._blocks else 0
        for number, (p, group) in enumerate(parameters(self.optimizer)):
            if number >= len(self._blocks):
                shape = real_view(p).shape
                columns = slice(end, end := end + min(shape.numel(), self.elements))
                block = ProbedBlock(self._name(number, p, group), shape, columns, self._draw(p))
                self._blocks.append(block)
        device = next(parameters(self.optimizer))[0].device
        for name, rows in ROWS.items():
            new = torch.zeros(*rows, end, dtype=self.dtype, device=device)
            self._vectors[name] = with_old_columns(new, self._vectors.get(name))
        self._views.clear()
        self._grow_window(torch.zeros(longest_window(self.optimizer), end).to(new))

    def _grow_window(self, new: Tensor) -> None:
        """Move gradient i of each block to row i % len(new)."""
        old = self._vectors.get("window", new[:0])
        self._vectors["window"] = new
        for block in self._blocks:
            seen = int(block.counts["seen"])
            for i in range(max(0, seen - len(old)), seen):
                new[i % len(new), block.columns] = old[i % len(old), block.columns]

    def _draw(self, p: Tensor) -> Tensor | None:
        size = real_view(p).numel()
        if size <= self.elements:
            return None
        # With replacement: without, torch would permute all elements.
        drawn = torch.randint(size, (self.elements,), generator=self._random)
        return drawn.sort().values.to(p.device)

    def _name(self, number: int, p: Tensor, group: ParamGroup) -> str:
        for given in self._names:
            if not isinstance(given, str) and given[1] is p:
                return given[0]
        if number < len(self._names) and isinstance(self._names[number], str):
            return self._names[number]
        if "param_names" in group:
            return group["param_names"][[q is p for q in group["params"]].index(True)]
        return str(number)

    def _of(self, columns: slice) -> dict[str, Tensor]:
        """Return cached views of the vectors; creating them would be a quarter of the overhead."""
        key = columns.start, columns.stop
        if key not in self._views:
            self._views[key] = {name: x[..., columns] for name, x in self._vectors.items()}
        return self._views[key]

    # Hooks

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Read the gradients now, or after the closure if there is one."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._read_gradients()
            return None

        def closure_and_read() -> Any:
            loss = closure()
            self._read_gradients()
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": closure_and_read}
        return (args[0], closure_and_read, *args[2:]), kwargs

    @torch.no_grad()
    def _read_gradients(self) -> None:
        if sum(len(group["params"]) for group in self.optimizer.param_groups) > len(self._blocks):
            self._grow()
        scale = getattr(self.optimizer, "grad_scale", None)  # set by GradScaler if fused
        coupled = coupled_weight_decay(self.optimizer)
        for block, (p, group) in zip(self._blocks, parameters(self.optimizer), strict=True):
            block.has_gradient = p.grad is not None and p.numel() > 0
            if p.grad is not None and p.numel() > 0:
                g = self._of(block.columns)["g"].copy_(block.pick(dense(p.grad)))
                if scale is not None:
                    g.div_(scale.to(g))
                if coupled(group):
                    g.mul_(-1 if group.get("maximize") else 1)
                    g.add_(block.pick(p.detach()).to(g), alpha=group["weight_decay"])

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and skipped.item():
            return
        reader = reader_of(optimizer)
        seen = [
            (block, self._read_step(reader, block, optimizer.state[p], group))
            for block, (p, group) in zip(self._blocks, parameters(optimizer), strict=True)
        ]
        # Adjacent blocks with equal counts and step, usually all, are processed as one vector.
        for (step, *_), run in groupby(seen, key=lambda x: (x[1], *x[0].counts.values())):
            if step is not None:
                blocks = [block for block, _ in run]
                columns = slice(blocks[0].columns.start, blocks[-1].columns.stop)
                counts = dict(blocks[0].counts)
                self._accumulate(self._of(columns), reader, step, counts)
                for block in blocks:
                    block.counts.update(counts)

    def _read_step(
        self, reader: OptimizerReader, block: ProbedBlock, state: ParamState, group: ParamGroup
    ) -> StepFormula | None:
        """Return the formula of the step, None if there was none; copy v if it is due."""
        if not block.has_gradient:
            return None
        step = reader.step(state, group)
        if block.counts["seen"] % self.every:
            return step._replace(size=0.0)
        if step.size > 0:
            x = self._of(block.columns)
            x["v"].copy_(reader.v(state, group, block.pick))
            if reader.divisor is not None:
                x["divisor"].copy_(reader.divisor(state, group, block.pick, x["g"].square()))
        return step

    def _accumulate(
        self, x: Vectors, reader: OptimizerReader, step: StepFormula, counts: Counts
    ) -> None:
        s = x["g"].square()
        if counts["seen"] >= WARM_UP_STEPS:
            x["large"].copy_(s > x["mean_square"])
            if counts["fresh"]:
                counts["met"] += 1
                x["before_all"].add_(x["D"])
                x["before_large"].addcmul_(x["D"], x["large"])
                x["before_share"].add_(x["large"])
            update_memory(x, step, counts)
        counts["seen"] += 1
        x["mean_square"].lerp_(s, max(1 / counts["seen"], 1 / MEAN_SQUARE_STEPS))
        counts["fresh"] = int(step.size > 0)
        if step.size > 0:
            counts["samples"] += 1
            welford(x["moments"], s, x["v"], int(counts["samples"]))
            add_step_size(x, x["v"] if reader.divisor is None else x["divisor"], step, counts)


# The probe's vectors and their leading dimensions
ROWS: dict[str, tuple[int, ...]] = {
    "g": (),
    "v": (),
    "divisor": (),
    "moments": (5,),  # of g² and v
    "mean_square": (),
    "large": (),  # 1 where the current gradient is large, else 0
    "memory": (),  # first moment of "large"
    "D": (),  # step size
    "D_all": (),  # Σ k over all gradients
    "D_large": (),  # Σ k over large gradients
    "D_share": (),  # weight of large gradients
    "before_all": (),  # as above, with the step size before each gradient
    "before_large": (),
    "before_share": (),
}


def update_memory(x: Vectors, step: StepFormula, counts: Counts) -> None:
    """Add [g_t large] to a first moment like the optimizer's, without its gain."""
    if not step.window:
        x["memory"].mul_(step.decay).add_(x["large"], alpha=step.entry)
        counts["held"] = step.decay * counts["held"] + step.entry
        return
    rows, t = len(x["window"]), int(counts["seen"])
    x["window"][t % rows] = x["large"]
    weights = [0.0] * rows
    for j in range(min(step.window, t - WARM_UP_STEPS + 1)):  # warm-up gradients have no label
        weights[(t - j) % rows] = step.decay**j
    torch.mv(x["window"].T, x["g"].new_tensor(weights), out=x["memory"])
    counts["held"] = sum(weights)


def add_step_size(x: Vectors, divisor: Tensor, step: StepFormula, counts: Counts) -> None:
    """Add D_i · Σ_t c_{i,t} [g_t large] to Σ_t [g_t large] k(g_t), and likewise the other sums."""
    D = torch.add(divisor.sqrt(), step.eps, out=x["D"]).reciprocal_().mul_(step.size)
    D.masked_fill_(divisor == 0, 0.0)  # no gradient has reached v yet
    if counts["held"] == 0:
        return
    weight = step.gain * counts["held"] + step.now
    share = step.gain * x["memory"]
    if step.now:
        share.add_(x["large"], alpha=step.now)
    counts["weight"] += weight
    x["D_all"].add_(D, alpha=weight)
    x["D_large"].addcmul_(D, share)
    x["D_share"].add_(share)


def ratio(x: Vectors, counts: Counts, kind: str, total: str) -> float:
    """Return the ratio of mean step sizes, large over small, relative to each element's mean."""
    typical = x["D_all"] / counts["weight"]
    known = (typical > 0) & typical.isfinite()
    all_, large = (x[f"{kind}_{name}"][known] / typical[known] for name in ("all", "large"))
    share = x[f"{kind}_share"][known]
    of_large, of_small = (
        large.sum() / share.sum(),
        (all_ - large).sum() / (counts[total] - share).sum(),
    )
    return (of_large / of_small).item()


def parameters(optimizer: Optimizer) -> Iterator[tuple[Tensor, ParamGroup]]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield p, group


def longest_window(optimizer: Optimizer) -> int:
    if not isinstance(optimizer, AdaShift):
        return 0
    windows = [group["m"] or group["n"] for group in optimizer.param_groups]
    return max((m for m in windows if m != inf), default=0)


def with_old_columns(new: Tensor, old: Tensor | None) -> Tensor:
    """Return new with its first columns copied from old."""
    if old is not None:
        new[..., : old.shape[-1]] = old
    return new


def dense(g: Tensor) -> Tensor:
    if g.layout != torch.strided:
        raise RuntimeError(
            f"a gradient has layout {g.layout}; the probe needs dense gradients: build the "
            "embedding with sparse=False"
        )
    return g.resolve_conj() if g.is_conj() else g


def measure_overhead(rounds: int = 20, steps: int = 20) -> None:
    """Print the probe's overhead for a 784-256-256-10 net with batch 64, the median over rounds."""
    import statistics
    import time

    def train(make: Callable[..., Optimizer], every: int | None) -> Callable[[], float]:
        layers = [torch.nn.Linear(784, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 10)]
        net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        optimizer = make(net.parameters())
        if every is not None:
            DecorrelationProbe(optimizer, every=every)
        x, y = torch.randn(64, 784), torch.randint(10, (64,))

        def some_steps() -> float:
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
            return (time.perf_counter() - start) / steps

        return some_steps

    for make in (Adam, AdaShift):
        for every in (1, 10):
            bare, watched = train(make, None), train(make, every)
            for _ in range(WARM_UP_STEPS // steps + 1):
                bare(), watched()
            times = [(bare(), watched()) for _ in range(rounds)]
            without = statistics.median(a for a, _ in times)
            added = statistics.median(b - a for a, b in times)
            print(
                f"{make.__name__}, every={every}: {1e3 * without:.2f} ms per step, the probe adds "
                f"{1e3 * added:.2f} ms ({added / without:.0%})"
            )


if __name__ == "__main__":
    measure_overhead()
