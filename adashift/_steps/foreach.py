"""The step of many parameters by few operations, for devices without a kernel.

The state of all parameters lies in flat buffers, and each parameter has views of them: an operation
serves all parameters at once. Whether a running sum must be summed again is known to the device
alone, and the host must not wait for it, so all slots are summed in every step.
"""

from math import inf
from typing import Any

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState, real_gradient
from adashift._steps.single import decoupled_decay, rounded
from adashift._window import (
    CORRECTION,
    WEIGHT,
    forget_error,
    is_dense,
    is_plain,
    total_weight,
)


def supports(p: Tensor, group: ParamGroup) -> bool:
    """Whether this parameter can be stepped together with others."""
    wanted = group["foreach"] or (group["foreach"] is None and not p.is_cpu)
    known = group["phi"] in ("max", "mean", "none") and not (p.is_complex() or group["capturable"])
    return bool(wanted and known and is_plain(p) and is_dense(p))


class FlatTable:
    """Parameters of one device, dtype and step count, with their state in flat buffers."""

    def __init__(self, params: list[Tensor], states: list[ParamState], group: ParamGroup) -> None:
        self.params, self.states = params, states
        self.elementwise = group["phi"] == "none"
        self.sizes = [p.numel() for p in params]
        self.counts = torch.tensor(self.sizes, device=params[0].device)
        for state in states:
            forget_error(state)
            state["step"] = state["step"].cpu()
        names = [name for name, x in states[0].items() if torch.is_tensor(x) and name != "step"]
        self.flat = {name: self.gather(name) for name in names}
        buffer = self.flat["number"].new_zeros(2, sum(self.sizes))
        (self.g, self.step_buffer) = buffer
        self.gradients, self.steps = map(list, zip(*self.views(buffer), strict=True))
        self.weights: dict[float, Tensor] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Of each parameter its part of a (count, elements) buffer, in the layout of its memory."""
        lead, start, found = flat.stride(0), flat.storage_offset(), []
        for p, size in zip(self.params, self.sizes, strict=True):
            found.append(flat.as_strided((len(flat), *p.shape), (lead, *p.stride()), start))
            start += size
        return found

    def gather(self, name: str) -> Tensor:
        """Bring one part of all states into one buffer, and give the states views of it."""
        old = [state[name] for state in self.states]
        if name in ("sum", "slots") or (self.elementwise and name in ("v", "phi")):
            single = old[0].dim() == self.params[0].dim()
            flat = old[0].new_zeros(1 if single else len(old[0]), sum(self.sizes))
            new = [view[0] if single else view for view in self.views(flat)]
            torch._foreach_copy_(new, old)
            flat = flat[0] if single else flat
        else:
            flat = torch.stack(old, dim=-1)
            new = list(flat.unbind(-1))
        for state, x in zip(self.states, new, strict=True):
            state[name] = x
        return flat

    def step(self, group: ParamGroup) -> None:
        n, (beta1, beta2), alpha = group["n"], map(float, group["betas"]), group["lr"]
        torch._foreach_add_([state["step"] for state in self.states], 1)
        t = int(self.states[0]["step"])
        self.read_gradients(group)
        new_phi = self.phi_of_square(group["phi"])
        s, weight = self.window_sum(t, beta1, group["m"] or n)
        phi, number = self.flat["phi"][t % n], self.flat["number"]
        if t > n:
            correction = number[CORRECTION].mul_(beta2).add_(1 - beta2)
            v = self.flat["v"].mul_(beta2).add_(phi, alpha=1 - beta2)  # sees g_{t-n}, never g_t
            if self.elementwise:
                correction, weight = self.spread(correction), self.spread(weight)
            rate = alpha / (v / correction).sqrt_().add_(group["eps"]).mul_(weight)
            self.move(s, rate, v == 0, group)
        phi.copy_(new_phi)

    def read_gradients(self, group: ParamGroup) -> None:
        torch._foreach_copy_(self.gradients, list(map(real_gradient, self.params)))
        if group["maximize"]:
            self.g.neg_()
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            torch._foreach_add_(self.gradients, self.params, alpha=group["weight_decay"])

    def phi_of_square(self, phi: str) -> Tensor:
        if phi == "none":
            return self.g.square()
        if phi == "max":
            return torch.stack(torch._foreach_norm(self.gradients, inf)).square_()
        norms = torch.stack(torch._foreach_norm(self.gradients, 2, dtype=torch.float64))
        return norms.square_().div_(self.counts).to(self.g.dtype)

    def window_sum(self, t: int, beta1: float, m: float) -> tuple[Tensor, Any]:
        """Take g_t into the window; return m_t times its weight, and the weight."""
        if m == 1:
            return self.g, 1.0
        if m == inf:
            weight = self.flat["number"][WEIGHT].mul_(beta1).add_(1)
            total = self.flat["sum"]
            return total.copy_(self.g) if beta1 == 0 else total.mul_(beta1).add_(self.g), weight
        slots = self.flat["slots"]
        slots[t % int(m)].copy_(self.g)
        if beta1 == 0:
            return slots[t % int(m)].to(self.g.dtype), 1.0
        if beta1 not in self.weights:
            ages = [[(j - k) % int(m) for k in range(int(m))] for j in range(int(m))]
            weights = torch.tensor(beta1, dtype=torch.float64) ** torch.tensor(ages)
            self.weights = {beta1: weights.to(self.g)}
        weights = self.weights[beta1][t % int(m)]
        return torch.mv(slots.t().to(self.g.dtype), weights), total_weight(beta1, int(m))

    def spread(self, x: Any) -> Any:
        """A number for each parameter → one for each element."""
        if not torch.is_tensor(x):
            return x
        return torch.repeat_interleave(x, self.counts, output_size=len(self.g))

    def spread_blocks(self, x: Tensor) -> Tensor:
        return x if self.elementwise else self.spread(x)

    def move(self, s: Tensor, rate: Tensor, still: Tensor, group: ParamGroup) -> None:
        """θ −= rate · s, with one rounding, but for blocks that stand still."""
        still = self.spread_blocks(still)
        torch.mul(s, self.spread_blocks(rate), out=self.step_buffer)
        if decay := decoupled_decay(group):
            torch._foreach_copy_(self.gradients, self.params)
            self.step_buffer.add_(self.g * (group["lr"] * decay))
        self.step_buffer.masked_fill_(still, 0.0)  # ε alone is no scale of gradients
        if self.params[0].dtype == self.g.dtype:
            torch._foreach_sub_(self.params, self.steps)
            return
        torch._foreach_copy_(self.gradients, self.params)
        self.g.sub_(self.step_buffer).copy_(rounded(self.g, self.params[0].dtype, group))
        torch._foreach_copy_(self.params, self.gradients)
