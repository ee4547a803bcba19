"""The step of many parameters by few operations, for devices without a kernel.

The state of all parameters lies in flat buffers, and each parameter has views of them: an operation
serves all parameters at once. Whether a running sum must be summed again is known to the device
alone, and the host must not wait for it, so all slots are summed in every step.
"""

from math import inf

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState, real_gradient
from adashift._state import TENSORS, is_dense, is_plain, restored
from adashift._steps import rows_of, single
from adashift._window import forget_error, total_weight


class FlatTable:
    """Parameters of one device, dtype and step count, with their state in flat buffers."""

    @staticmethod
    def takes(p: Tensor, group: ParamGroup) -> bool:
        wanted = group["foreach"] or (group["foreach"] is None and not p.is_cpu)
        known = isinstance(group["phi"], str) and not (p.is_complex() or group["capturable"])
        if not (wanted and known and is_plain(p) and is_dense(p)):
            return False
        return rows_of(p, group) == 1 or p.stride(0) * p.shape[0] == p.numel()  # rows in one piece

    def __init__(self, params: list[Tensor], states: list[ParamState], group: ParamGroup) -> None:
        self.params, self.states, device = params, states, params[0].device
        self.elementwise = group["phi"] == "none"
        self.sizes, self.rows = [p.numel() for p in params], [rows_of(p, group) for p in params]
        rows, sizes = torch.tensor(self.rows), torch.tensor(self.sizes)
        self.lengths = (sizes // rows).repeat_interleave(rows).to(device)  # elements of a block
        several = {"row": rows, "none": sizes}.get(group["phi"])
        self.blocks = None if several is None else several.to(device)  # of each parameter
        for state in states:
            forget_error(state)
            state["step"] = state["step"].cpu()
        self.flat = {name: states[0][name] for name in ("n", "m")}
        self.flat |= {name: self.gather(name) for name in TENSORS[:-1] if name in states[0]}
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
            alone = old[0].dim() == self.params[0].dim()
            flat = old[0].new_zeros(1 if alone else len(old[0]), sum(self.sizes))
            new = [view[0] if alone else view for view in self.views(flat)]
            torch._foreach_copy_(new, old)
            flat = flat[0] if alone else flat
        else:
            lead = () if name == "v" else old[0].shape[:1]
            flat = torch.cat([x.reshape(*lead, -1) for x in old], dim=-1)
            parts = flat.split([1] * len(old) if name == "number" else self.rows, dim=-1)
            new = [part.view(x.shape) for part, x in zip(parts, old, strict=True)]
        for state, x in zip(self.states, new, strict=True):
            state[name] = x
        return flat

    def release(self, gathered: set[Tensor]) -> None:
        """Copy the states that are not gathered again: a view would keep a whole buffer alive."""
        for p, state in zip(self.params, self.states, strict=True):
            for name in TENSORS[:-1] if p not in gathered else ():
                if name in state:
                    state[name] = restored(p, name, state[name])

    def step(self, group: ParamGroup) -> None:
        beta1, beta2 = map(float, group["betas"])
        torch._foreach_add_([state["step"] for state in self.states], 1)
        t, n = int(self.states[0]["step"]), self.flat["n"]
        self.read_gradients(group)
        new_phi = self.phi_of_square(group["phi"])
        s, weight = self.window_sum(t, beta1)
        if t > n:
            v, correction = single.shifted_v(self.flat, t, beta2)
            root = (v / self.to_blocks(correction)).sqrt_().add_(group["eps"])
            rate = single.learning_rate(group) / root.mul_(self.to_blocks(weight))
            self.move(s, rate, v == 0, group)
        self.flat["phi"][t % n].copy_(new_phi)

    def read_gradients(self, group: ParamGroup) -> None:
        torch._foreach_copy_(self.gradients, list(map(real_gradient, self.params)))
        if group["maximize"]:
            self.g.neg_()
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            torch._foreach_add_(self.gradients, self.params, alpha=group["weight_decay"])

    def phi_of_square(self, phi: str) -> Tensor:
        if phi == "none":
            return self.g.square()
        if phi == "row":
            return torch.segment_reduce(self.g.square(), "max", lengths=self.lengths, unsafe=True)
        if phi == "max":
            return torch.stack(torch._foreach_norm(self.gradients, inf)).square_()
        norms = torch.stack(torch._foreach_norm(self.gradients, 2, dtype=torch.float64))
        return norms.square_().div_(self.lengths).to(self.g.dtype)

    def window_sum(self, t: int, beta1: float) -> single.Moment:
        """Take g_t into the window; return m_t times its weight, and the weight."""
        m = self.flat["m"]
        if m < 2:
            return (self.g, 1.0) if m == 1 else single.endless_sum(self.g, self.flat, beta1)
        slots = self.flat["slots"]
        slots[t % m].copy_(self.g)
        if beta1 == 0 or slots.dtype != self.g.dtype:  # mv would need a wide copy of all slots
            return single.sum_slots(slots, t, beta1, self.flat["sum"]), total_weight(beta1, m)
        if beta1 not in self.weights:
            ages = [[(j - k) % m for k in range(m)] for j in range(m)]
            weights = torch.tensor(beta1, dtype=torch.float64) ** torch.tensor(ages)
            self.weights = {beta1: weights.to(self.g, non_blocking=True)}
        weights = self.weights[beta1][t % m]
        return torch.mv(slots.t(), weights), total_weight(beta1, m)

    def to_blocks(self, x: float | Tensor) -> float | Tensor:
        """A number for each parameter → one for each v."""
        if not torch.is_tensor(x) or self.blocks is None:
            return x
        return torch.repeat_interleave(x, self.blocks, output_size=self.flat["v"].numel())

    def to_elements(self, x: Tensor) -> Tensor:
        if self.elementwise:
            return x
        return torch.repeat_interleave(x, self.lengths, output_size=len(self.g))

    def move(self, s: Tensor, rate: Tensor, still: Tensor, group: ParamGroup) -> None:
        """θ −= rate · s, with one rounding, but for blocks that stand still."""
        still = self.to_elements(still)
        torch.mul(s, self.to_elements(rate), out=self.step_buffer)
        if decay := single.decoupled_decay(group):
            torch._foreach_copy_(self.gradients, self.params)
            self.step_buffer.add_(self.g * (single.learning_rate(group) * decay))
        self.step_buffer.masked_fill_(still, 0.0)  # ε alone is no scale of gradients
        if self.params[0].dtype == self.g.dtype:
            torch._foreach_sub_(self.params, self.steps)
            return
        torch._foreach_copy_(self.gradients, self.params)
        self.g.sub_(self.step_buffer).copy_(single.rounded(self.g, self.params[0].dtype, group))
        torch._foreach_copy_(self.params, self.gradients)
