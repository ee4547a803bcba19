"""Element-wise correlations over time in one pass, without storing the gradients.

`RunningCorrelation` is Pearson's coefficient of any two streams. `CorrelationStudy` computes the
paper's Appendix C (Tables 1 to 4 and Adam's correlation) for ten lags at once.
"""

from collections.abc import Sequence
from math import inf, nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adashift._base import check_count, check_number
from adashift._moments import copy_into, pearson, welford

# A variance below this fraction of the mean square is rounding error: the element is constant.
MIN_RELATIVE_VARIANCE = 1e-12
# A chunk of steps × columns that fits in a core's cache.
CHUNK_STEPS, CHUNK_COLUMNS = 32, 4096


class RunningCorrelation:
    """Element-wise Pearson correlation of two streams of tensors, by Welford's algorithm.

    Example:
        >>> r = RunningCorrelation((2,))
        >>> for t in range(4):
        ...     r.update(torch.tensor([t, t]), torch.tensor([2 * t + 1, t % 2]))
        >>> r.value(), r.count
        (tensor([1.0000, 0.4472], dtype=torch.float64), 4)
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.count = 0
        self._moments = torch.zeros((5, *shape), dtype=dtype, device=device)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add one pair; x or y may be a scalar."""
        self.count += 1
        welford(self._moments, x.to(self._moments), y.to(self._moments), self.count)

    def value(self) -> Tensor:
        """Return the correlation of each element; NaN where x or y is constant."""
        return pearson(*self._moments[2:])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "moments": self._moments.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        copy_into(self._moments, state["moments"], "moments")


class CorrelationSummary(NamedTuple):
    """One entry of Tables 1 to 4: mean and standard deviation of a correlation over elements."""

    kind: str  # "temporal", "spatial", "non" (n = 0: Adam) or "max" (n = 0: spatial-only)
    n: int
    beta2: float | None  # of "non" and "max"
    mean: float
    std: float
    elements: int  # number of elements that vary; constant ones are skipped


class CorrelationStudy:
    """The correlations of Appendix C over T consecutive gradients g_0 … g_{T−1} of one tensor.

    For every lag n = 1 … lags, over the pairs of steps (t, t−n) with 0 ≤ t−n and t < T:

        temporal   g_t[i] and g_{t−n}[i], over all elements (Table 1)
        spatial    g_t[i] and g_{t−n}[j], over fixed random pairs i ≠ j (Table 2)
        non        g_t[i]² and v_t[i],  v_t = β2 v_{t−1} + (1−β2) g_{t−n}² (Table 3)
        max        g_t[i]² and v_t,     v_t = β2 v_{t−1} + (1−β2) max_j g_{t−n}[j]² (Table 4)

    "non" and "max" also include n = 0, where v_t contains the current gradient: Adam and
    spatial-only. The captions of Tables 3 and 4 say g_{t−n}² instead of g_t², which v_t contains:
    that is the case n = 0 except for the last n steps.

    v starts at 0 without bias correction. Its rise over 1/(1−β2) steps adds to the variance of v
    and hides the correlation: at β2 = 0.999 and over 8,590 independent gradients, Adam's 0.045
    becomes 0.005 and Table 3's −0.007 becomes −0.001, so the printed −0.011 requires a v that had
    settled. Pass earlier gradients to `warm_up`, which updates v and nothing else.

    v of lag n is Adam's v of n steps ago. With w_t = v_t / (1−β2) = β2 w_{t−1} + g_t², which has
    the same correlations as v, all lags follow from the longest, and the sums of w from the rest:

        Σ g_t² w_{t−n} = β2 Σ g_t² w_{t−n−1} + Σ g_t² g_{t−n}²
        (1−β2)  Σ w_t  = Σ g_t² − β2 w_{T−1}
        (1−β2²) Σ w_t² = Σ g_t⁴ + 2 β2 Σ g_t² w_{t−1} − β2² w_{T−1}²

    with one more term in each for w_{−1} after a warm-up. This needs two products per lag and
    element, and two more for each β2. Sums are in float64, because the variance of v is a small
    difference of large sums: the mean of v is about 30 times its standard deviation.

    Memory per element: 32 + 2 lags floats and 3 + 2 lags + (4 + lags) |β2| doubles, 620 bytes with
    the defaults, for any T.

    Args:
        shape: the shape of the gradients.
        lags: the largest n.
        beta2s: the values of β2.
        pairs: number of pairs i ≠ j.
        generator: generator that samples the pairs.
        dtype: dtype of the gradients in the buffer.

    Example:
        >>> random = torch.Generator().manual_seed(0)
        >>> study = CorrelationStudy((8, 8), lags=2, beta2s=[0.9], pairs=16, generator=random)
        >>> for _ in range(5000):
        ...     study.update(torch.randn(8, 8, generator=random))
        >>> adam = next(row for row in study.results() if (row.kind, row.n) == ("non", 0))
        >>> round(adam.mean, 2)   # √(1 − 0.9²) for independent gradients
        0.43
    """

    def __init__(
        self,
        shape: Sequence[int],
        lags: int = 10,
        beta2s: Sequence[float] = (0.9, 0.999),
        pairs: int = 256,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.size = torch.Size(shape), prod(shape)
        self.lags = L = check_count("lags", lags, inf, "the paper has 10")
        self.beta2s = [float(check_number("beta2", b, 0, 1, 0.999)) for b in beta2s]
        self.count = self._pending = 0
        self._i, self._j = (x.to(device) for x in random_pairs(self.size, pairs, generator))

        def zeros(*leading: int, size: int = self.size, as_type: Any = torch.float64) -> Tensor:
            return torch.zeros(*leading, size, dtype=as_type, device=device)

        # On the device once: a step must not wait for a copy.
        self._beta2 = torch.tensor(self.beta2s, dtype=torch.float64, device=device)
        B = len(self.beta2s)
        self._buffer = zeros(L + CHUNK_STEPS, as_type=dtype)  # the newest `lags`, then the pending
        self._head = zeros(L, as_type=dtype)  # the first `lags`, which lag n excludes in part
        self._sums = {
            "g": zeros(),
            "s": zeros(),  # s is g²
            "ss": zeros(),
            "gg_lag": zeros(L),  # last row: lag 1
            "ss_lag": zeros(L),
            "pair": zeros(L, size=pairs),
            "w": zeros(B),  # w of `lags` steps ago
            "sw": zeros(B),
            "w_before": zeros(B),  # w_{−1}
            "max_v": zeros(L + 1, size=B),  # the newest values of v for "max", the current one last
            "sum_max": zeros(L + 1, size=B),  # row n: over the steps that have a v of n steps ago
            "sum_max_max": zeros(L + 1, size=B),
            "sum_s_max": zeros(L + 1, B),
        }

    def warm_up(self, g: Tensor) -> None:
        """Update v with a gradient that precedes the first `update`."""
        if self.count > 0:
            raise RuntimeError(
                f"warm_up was called after {self.count} steps; it sets the initial v: "
                "call it before the first update"
            )
        self._check(g)
        s = g.detach().reshape(-1).double().square_()
        before, newest = self._sums["w_before"], self._sums["max_v"]
        torch.addcmul(s, self._beta2_column(), before, out=before)
        self._sums["w"].copy_(before)
        newest[-1] = self._beta2 * newest[-1] + (1 - self._beta2) * s.max()

    def update(self, g: Tensor) -> None:
        """Add the gradient of the next step; its values are copied."""
        self._check(g)
        self._buffer[self.lags + self._pending].copy_(g.detach().reshape(-1))
        if self.count < self.lags:
            self._head[self.count].copy_(self._buffer[self.lags + self._pending])
        self.count += 1
        self._pending += 1
        if self._pending == CHUNK_STEPS:
            self._accumulate()

    def _check(self, g: Tensor) -> None:
        if g.shape != self.shape:
            raise ValueError(
                f"the gradient has shape {tuple(g.shape)}; expected "
                f"{tuple(self.shape)}: create one CorrelationStudy for each tensor"
            )

    def results(self) -> list[CorrelationSummary]:
        """Return every correlation so far, ordered by kind, n and β2."""
        self._accumulate()
        lags = range(1, self.lags + 1)
        rows = [summarize("temporal", n, None, self._temporal(n)) for n in lags]
        rows += [summarize("spatial", n, None, self._spatial(n)) for n in lags]
        for kind, table in (("non", self._non()), ("max", self._max())):
            for n, values in enumerate(table):
                rows += [summarize(kind, n, b, r) for b, r in zip(self.beta2s, values, strict=True)]
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return ints and tensors only; a study that loads them continues bit-identically."""
        tensors = {name: x.clone() for name, x in self._tensors().items()}
        return {"count": self.count, "waiting": self._pending, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self._pending = state["count"], state["waiting"]
        for name, x in self._tensors().items():
            copy_into(x, state["tensors"][name], name)

    def _tensors(self) -> dict[str, Tensor]:
        own = {"buffer": self._buffer, "head": self._head, "i": self._i, "j": self._j}
        return own | self._sums

    # Accumulate sums

    def _accumulate(self) -> None:
        """Add the pending steps to the sums, a chunk of columns at a time to stay in cache."""
        L, steps = self.lags, self._pending
        if steps == 0:
            return
        g = self._buffer[: L + steps]
        max_v = self._accumulate_max(largest_square(g[L:]))
        for start in range(0, self.size, CHUNK_COLUMNS):
            columns = slice(start, start + CHUNK_COLUMNS)
            x = g[:, columns].double()
            self._accumulate_products(x, columns)
            s = x.square_()
            self._accumulate_w(s, columns)
            sums = self._sums["sum_s_max"][..., columns]
            sums += torch.tensordot(max_v, s[L:], dims=([0], [0]))
        self._accumulate_pairs(g)
        g[:L].copy_(g[steps:].clone() if steps < L else g[steps:])
        self._pending = 0

    def _accumulated(self) -> int:
        return self.count - self._pending

    def _accumulate_products(self, x: Tensor, columns: slice) -> None:
        L, sums = self.lags, self._sums
        gg, ss = sums["gg_lag"][:, columns].clone(), sums["ss_lag"][:, columns].clone()
        product = torch.empty_like(gg)
        for t in range(L, len(x)):
            torch.mul(x[t - L : t], x[t], out=product)
            gg.add_(product)
            ss.addcmul_(product, product)
        sums["gg_lag"][:, columns], sums["ss_lag"][:, columns] = gg, ss
        sums["g"][columns] += x[L:].sum(0)

    def _accumulate_w(self, s: Tensor, columns: slice) -> None:
        L, sums = self.lags, self._sums
        sums["s"][columns] += s[L:].sum(0)
        sums["ss"][columns] += s[L:].square().sum(0)
        w, sw = sums["w"][:, columns].clone(), sums["sw"][:, columns].clone()
        beta2 = self._beta2_column()
        begins = max(L, 2 * L - self._accumulated())  # first t for which t − lags ≥ 0
        for t in range(begins, len(s)):
            torch.addcmul(s[t - L], beta2, w, out=w)
            sw.addcmul_(s[t], w)
        sums["w"][:, columns], sums["sw"][:, columns] = w, sw

    def _accumulate_max(self, largest: Tensor) -> Tensor:
        """Advance v of "max" over the pending steps; return v_{t−n} for each t and n."""
        newest, sums = self._sums["max_v"], self._sums
        beta2 = self._beta2
        lagged = newest.new_empty(len(largest), *newest.shape)
        for t, x in enumerate(largest):
            newest[:-1] = newest[1:].clone()
            newest[-1] = beta2 * newest[-1] + (1 - beta2) * x
            lagged[t] = newest.flip(0)
            lagged[t, self._accumulated() + t + 1 :] = 0  # before the first update
        sums["sum_max"] += lagged.sum(0)
        sums["sum_max_max"] += lagged.square().sum(0)
        return lagged

    def _accumulate_pairs(self, g: Tensor) -> None:
        L = self.lags
        at_i, at_j = g[L:, self._i].double(), g[:, self._j].double()
        for n in range(1, L + 1):
            self._sums["pair"][L - n] += (at_i * at_j[L - n : len(g) - n]).sum(0)

    # From sums to correlations

    def _temporal(self, n: int) -> Tensor:
        late, early = self._late("g", n), self._early("g", n)
        late_square, early_square = self._late("s", n), self._early("s", n)
        product = self._sums["gg_lag"][self.lags - n]
        return self._from_sums(n, late, early, late_square, early_square, product)

    def _spatial(self, n: int) -> Tensor:
        late, late_square = self._late("g", n)[self._i], self._late("s", n)[self._i]
        early, early_square = self._early("g", n)[self._j], self._early("s", n)[self._j]
        product = self._sums["pair"][self.lags - n]
        return self._from_sums(n, late, early, late_square, early_square, product)

    def _non(self) -> list[list[Tensor]]:
        """For n = 0 … lags and each β2."""
        last, sw = self._all_lags()
        beta2, s, ss = self._beta2_column(), self._sums["s"], self._sums["ss"]
        before = self._sums["w_before"]
        w_change, ww_change = last[0] - before, last[0].square() - before.square()
        before_s = sw[1] + before * self._head[0].double().square()
        w = (s - beta2 * w_change) / (1 - beta2)
        ww = (ss + 2 * beta2 * before_s - beta2**2 * ww_change) / (1 - beta2**2)
        table = []
        for n in range(self.lags + 1):
            late, late_square = self._late("s", n), self._late("ss", n)
            table.append(list(self._from_sums(n, late, w, late_square, ww, sw[n])))
            w, ww = w - last[n], ww - last[n].square()
        return table

    def _all_lags(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return w_{T−1−n} and Σ g_t² w_{t−n} for n = 0 … lags; only n = lags is stored."""
        L, sums, beta2 = self.lags, self._sums, self._beta2_column()
        last, sw = [sums["w"]], [sums["sw"]]
        products = [*sums["ss_lag"][1:], sums["ss"]]
        for n in range(L - 1, -1, -1):
            g, first = self._buffer[L - 1 - n].double(), self._head[n].double()
            begun = self.count > n  # w_{T−1−n} includes a gradient
            last.append(beta2 * last[-1] + g.square() if begun else last[-1])
            own = products[L - 1 - n]
            sw.append(beta2 * (sw[-1] + first.square() * sums["w_before"]) + own)
        return last[::-1], sw[::-1]

    def _beta2_column(self) -> Tensor:
        return self._beta2[:, None]

    def _max(self) -> list[list[Tensor]]:
        sums, table = self._sums, []
        for n in range(self.lags + 1):
            late, late_square = self._late("s", n), self._late("ss", n)
            v, vv = sums["sum_max"][n, :, None], sums["sum_max_max"][n, :, None]
            table.append(list(self._from_sums(n, late, v, late_square, vv, sums["sum_s_max"][n])))
        return table

    def _late(self, name: str, n: int) -> Tensor:
        """Σ over t = n … T−1: all but the first n."""
        return self._sums[name] - power_sum(name, self._head[:n])

    def _early(self, name: str, n: int) -> Tensor:
        """Σ over t = 0 … T−1−n: all but the last n."""
        return self._sums[name] - power_sum(name, self._buffer[self.lags - n : self.lags])

    def _from_sums(
        self, n: int, x: Tensor, y: Tensor, xx: Tensor, yy: Tensor, xy: Tensor
    ) -> Tensor:
        pairs = self.count - n
        if pairs < 2:
            return torch.full_like(xy, nan)
        dxdx, dydy = xx - x * x / pairs, yy - y * y / pairs
        dxdx = torch.where(dxdx > MIN_RELATIVE_VARIANCE * xx, dxdx, 0.0)
        dydy = torch.where(dydy > MIN_RELATIVE_VARIANCE * yy, dydy, 0.0)
        return pearson(dxdx, dydy, xy - x * y / pairs)


def power_sum(name: str, g: Tensor) -> Tensor:
    """Σ g, Σ g² or Σ g⁴ over time, for the sums "g", "s" and "ss"."""
    return g.double().pow({"g": 1, "s": 2, "ss": 4}[name]).sum(0)


def largest_square(g: Tensor) -> Tensor:
    """Return the largest square of each row."""
    low, high = torch.aminmax(g, dim=1)
    return torch.maximum(-low, high).double().square_()


def summarize(kind: str, n: int, beta2: float | None, values: Tensor) -> CorrelationSummary:
    values = values[~values.isnan()]
    if values.numel() == 0:
        return CorrelationSummary(kind, n, beta2, nan, nan, 0)
    std, mean = torch.std_mean(values, correction=0)
    return CorrelationSummary(kind, n, beta2, mean.item(), std.item(), values.numel())


def random_pairs(size: int, pairs: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return indices i ≠ j of random elements."""
    if size < 2:
        raise ValueError(f"the gradients have {size} elements; a pair i ≠ j needs at least 2")
    i = torch.randint(size, (pairs,), generator=generator)
    return i, (i + torch.randint(1, size, (pairs,), generator=generator)) % size
