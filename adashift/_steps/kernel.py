"""AdaShift's step on a GPU, in Triton: two launches for all parameters of a group and dtype.

`step_tiles` goes over memory once, with one program for each TILE of elements. It reads addresses
and clocks from a table, moves θ, and writes the largest |g| and Σ g² of its tile. `finish_step`
reduces these in a fixed order and brings v, φ, the numbers of the window and t to the end of the
step. Every parameter has its own t.
gpu.py makes the table; kernel.c is the same step on a CPU; the window is explained in _window.py.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from adashift._spatial import PHI as PHI_NAMES
from adashift._window import NUMBERS

COLUMNS = tl.constexpr(13)  # of the table, which has a row for each parameter
P, SUM, SLOTS, V, PHIS, NUMBER, STEP, SIZE, ROWS, KEY, FIRST_TILE, FIRST_PARTIAL, FIRST_BLOCK = map(
    tl.constexpr, range(COLUMNS.value)
)
MAX, MEAN, ROW, NONE = map(tl.constexpr, range(len(PHI_NAMES)))
NEWEST, WINDOW, ENDLESS = map(tl.constexpr, range(3))  # m = 1, m > 1, m = inf
CORRECTION, WEIGHT, BETA1, PEAKS = map(tl.constexpr, NUMBERS)
ERROR = WEIGHT
# Triton would compile again for other values: their alignment changes with the list of parameters.
PLAIN = ["table", "gradients", "tiles", "blocks", "tops", "squares", "plan", "lr_at", "n", "m"]


@triton.jit
def address(row, column, TYPE):
    return tl.load(row + column).to(tl.pointer_type(TYPE))


@triton.jit
def magnitude(x):
    """|x| as an integer: NaN is above inf, so a maximum keeps it."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def from_magnitude(x):
    if x.dtype == tl.int64:
        return x.to(tl.float64, bitcast=True)
    else:
        return x.to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    return from_magnitude(tl.maximum(magnitude(a), magnitude(b)))


@triton.jit
def larger_of_row(row_a, a, row_b, b):
    return row_b, tl.where(row_a == row_b, tl.maximum(a, b), b)


@triton.jit
def mixed(x):
    """A bijection whose bits look independent."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def round_by_chance(x, noise):
    """x as a bfloat16 above or below it, with the probability that is right on average."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, rounded)


@triton.jit
def other_peaks(number, t, m, PLACES: tl.constexpr):
    """The largest |g| of the last m − 1 steps, and that of m steps ago, which leaves the window."""
    k = tl.arange(0, PLACES)
    peaks = tl.load(number + PEAKS + k, mask=(k < m) & (k != t % m), other=0.0)
    return from_magnitude(tl.max(magnitude(peaks))), tl.load(number + PEAKS + t % m)


@triton.jit
def error_after(error, peak, leaving, beta1, total, last, UNIT: tl.constexpr):
    return beta1 * error + 3 * UNIT * (total + 2 * last) * larger(peak, leaving)


@triton.jit
def next_v(v, phi, beta2, new):
    return beta2 * v + new * phi


@triton.jit(do_not_specialize=PLAIN)
def step_tiles(
    table, gradients, tiles, tops, squares, plan, lr_at, lr: tl.float64, beta1: tl.float64,
    beta2: tl.float64, eps: tl.float64, decay: tl.float64, coupled: tl.float64, sign: tl.float64,
    total: tl.float64, last: tl.float64, n, m, STOCHASTIC: tl.constexpr,
    PHI: tl.constexpr, KIND: tl.constexpr, PLACES: tl.constexpr, UNIT: tl.constexpr,
    REAL: tl.constexpr, PARAM: tl.constexpr, SLOT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(tiles + program)
    row = table + tensor * COLUMNS
    tile = program - tl.load(row + FIRST_TILE)
    size, partial = tl.load(row + SIZE), tl.load(row + FIRST_PARTIAL) + tile
    number, t = address(row, NUMBER, REAL), tl.load(address(row, STEP, tl.int64)) + 1
    start, lane = tile * TILE, tl.arange(0, TILE)
    count = tl.minimum(size - start, TILE).to(tl.int32)
    inside = lane < size - start
    beta1, last, total = tl.full([], beta1, REAL), tl.full([], last, REAL), tl.full([], total, REAL)
    new, beta2 = tl.full([], 1 - beta2, REAL), tl.full([], beta2, REAL)
    sign, coupled = tl.full([], sign, REAL), tl.full([], coupled, REAL)
    if lr_at is not None:
        lr = tl.load(lr_at)
    decay = tl.full([], 1 - lr * decay, REAL)
    lr, eps = tl.full([], lr, REAL), tl.full([], eps, REAL)

    # -- the gradient as the rule sees it
    p_at = address(row, P, PARAM) + start + lane
    g_at = tl.load(gradients + tensor).to(tl.pointer_type(PARAM)) + start + lane
    p = tl.load(p_at, mask=inside, other=0.0).to(REAL)
    g = sign * tl.load(g_at, mask=inside, other=0.0).to(REAL)
    g = tl.where(coupled == 0, g, g + coupled * p)

    # -- the sum of the window: see _window.py
    again, s = False, g
    if KIND == WINDOW:
        sum_at, slots = address(row, SUM, REAL) + start + lane, address(row, SLOTS, SLOT)
        slot_at = slots + t % m * size + start + lane
        peak, leaving = other_peaks(number, t, m, PLACES)
        before = tl.load(number + ERROR)
        error = error_after(before, peak, leaving, beta1, total, last, UNIT)
        known = before >= 0 and error < float("inf")
        same = beta1 != 0 and beta1 == tl.load(number + BETA1)
        again = not (known and (same and error <= 25 * UNIT * total * total * peak))
        kept = g.to(SLOT)
        if again:
            s = tl.zeros([TILE], REAL)
            for k in range(tl.where(beta1 == 0, m, 1), m):  # the oldest first
                old_at = slots + (t + k) % m * size + start + lane
                s = beta1 * s + tl.load(old_at, mask=inside, other=0.0).to(REAL)
            s = beta1 * s + kept.to(REAL)
        else:
            old = tl.load(slot_at, mask=inside, other=0.0).to(REAL)
            s = beta1 * tl.load(sum_at, mask=inside, other=0.0) + kept.to(REAL) - last * old
        tl.store(slot_at, kept, mask=inside)
        tl.store(sum_at, s, mask=inside)
    if KIND == ENDLESS:
        sum_at = address(row, SUM, REAL) + start + lane
        s = tl.where(beta1 == 0, g, beta1 * tl.load(sum_at, mask=inside, other=0.0) + g)
        tl.store(sum_at, s, mask=inside)
        total = beta1 * tl.load(number + WEIGHT) + 1
    if tile == 0:
        tl.store(plan + 2 * tensor, t)
        tl.store(plan + 2 * tensor + 1, again)

    # -- v_t = β2 v_{t−1} + (1 − β2) φ(g_{t−n}²): it never sees g_t
    v_at, phi_at, rows = address(row, V, REAL), address(row, PHIS, REAL), tl.load(row + ROWS)
    moving = tl.where(t > n, count, 0)  # elements: none in the first n steps
    correction = tl.where(t > n, beta2 * tl.load(number + CORRECTION) + new, 1.0)
    if PHI == NONE:
        v_at += start + lane
        phi_at += t % n * size + start + lane
        v, old = tl.load(v_at, mask=inside, other=0.0), tl.load(phi_at, mask=inside, other=0.0)
        v = next_v(v, old, beta2, new)
        tl.store(v_at, v, mask=lane < moving)
        tl.store(phi_at, g * g, mask=inside)
    elif PHI == ROW:  # runs of `length` elements; more than TILE of them need no exact length
        length = size // rows
        first = start // length
        width = tl.minimum(length, TILE).to(tl.int32)
        begun = width - tl.minimum(length - start % length, TILE).to(tl.int32)
        index = (lane + begun) // width
        v = tl.load(v_at + first + index, mask=inside, other=0.0)
        old = tl.load(phi_at + t % n * rows + first + index, mask=inside, other=0.0)
        v = next_v(v, old, beta2, new)
    else:
        v = next_v(tl.load(v_at), tl.load(phi_at + t % n), beta2, new)

    # -- what the second launch reduces
    found = tl.where(inside, magnitude(g), 0)
    if PHI != ROW:
        tl.store(tops + partial, from_magnitude(tl.max(found)))
    if PHI == MEAN:
        wide = g.to(tl.float64)  # the sum of squares may overflow
        tl.store(squares + partial, tl.sum(wide * wide))

    # -- θ; ε alone is no scale of gradients, so nothing moves where v is 0
    moved = decay * p - lr / (tl.sqrt(v / correction) + eps) / total * s
    if STOCHASTIC and tl.bfloat16 == PARAM:
        seed = mixed(t.to(tl.uint32) ^ mixed(tl.load(row + KEY).to(tl.uint32)))
        moved = round_by_chance(moved, mixed(seed ^ (start.to(tl.uint32) + lane)))
    tl.store(p_at, moved.to(PARAM), mask=lane < tl.where(v == 0, 0, moving))

    # -- the same for rows, whose scan needs many registers: p and s are no longer in use
    if PHI == ROW:  # (row, tile) grows from run to run, so that row + tile is a place of its own
        _, found = tl.associative_scan((index, found), 0, larger_of_row)
        ends = ((lane + 1 + begun) // width != index) | (lane == count - 1)
        tl.store(tops + partial + first + index, from_magnitude(found), mask=inside & ends)


@triton.jit(do_not_specialize=PLAIN)
def finish_step(
    table, blocks, tops, squares, plan, beta1: tl.float64, beta2: tl.float64,
    total: tl.float64, last: tl.float64, n, m,
    PHI: tl.constexpr, KIND: tl.constexpr, PLACES: tl.constexpr, UNIT: tl.constexpr,
    REAL: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(blocks + program)
    row, lane = table + tensor * COLUMNS, tl.arange(0, LANES)
    block = program - tl.load(row + FIRST_BLOCK)
    size, rows = tl.load(row + SIZE), tl.load(row + ROWS)
    t, again = tl.load(plan + 2 * tensor), tl.load(plan + 2 * tensor + 1)
    v_at, phi_at = address(row, V, REAL), address(row, PHIS, REAL)
    beta1, last, total = tl.full([], beta1, REAL), tl.full([], last, REAL), tl.full([], total, REAL)
    new, beta2 = tl.full([], 1 - beta2, REAL), tl.full([], beta2, REAL)
    partials = (size + TILE - 1) // TILE
    tops += tl.load(row + FIRST_PARTIAL)
    if PHI == ROW:
        partials += rows - 1
        index, length = block * LANES + lane, size // rows
        inside, old_at = index < rows, phi_at + t % n * rows + index
        v = next_v(tl.load(v_at + index, mask=inside), tl.load(old_at, mask=inside), beta2, new)
        tl.store(v_at + index, v, mask=index < tl.where(t > n, rows, 0))
        first, end = index * length // TILE, ((index + 1) * length - 1) // TILE
        found = tl.zeros([LANES], REAL)
        for k in range(length // TILE + 2):
            here = inside & (first + k <= end)
            found = larger(found, tl.load(tops + index + first + k, mask=here, other=0.0))
        tl.store(old_at, found * found, mask=inside)
    if block == 0:
        number = address(row, NUMBER, REAL)
        greatest, square = magnitude(tl.zeros([LANES], REAL)), tl.zeros([LANES], tl.float64)
        for k in range(0, partials, LANES):
            part = tl.load(tops + k + lane, mask=k + lane < partials, other=0.0)
            greatest = tl.maximum(greatest, magnitude(part))
            if PHI == MEAN:
                square_at = squares + tl.load(row + FIRST_PARTIAL) + k + lane
                square += tl.load(square_at, mask=k + lane < partials, other=0.0)
        top = from_magnitude(tl.max(greatest))
        if PHI < ROW:  # one number for the whole tensor
            new_v = next_v(tl.load(v_at), tl.load(phi_at + t % n), beta2, new)
            tl.store(v_at, new_v, mask=t > n)
            phi = top * top
            if PHI == MEAN:
                phi = (tl.sum(square) / size).to(REAL)
            tl.store(phi_at + t % n, phi)
        tl.store(number + CORRECTION, beta2 * tl.load(number + CORRECTION) + new, mask=t > n)
        if KIND == ENDLESS:
            tl.store(number + WEIGHT, beta1 * tl.load(number + WEIGHT) + 1)
        if KIND == WINDOW:
            peak, leaving = other_peaks(number, t, m, PLACES)
            peak, before = larger(top, peak), tl.load(number + ERROR)
            error = error_after(before, peak, leaving, beta1, total, last, UNIT)
            error = tl.where(again != 0, 2 * UNIT * total * total * peak, error)
            error *= 1 + 8 * UNIT  # for what has been rounded above
            tl.store(number + ERROR, tl.where((before < 0) & (before > -m), before - 1, error))
            tl.store(number + BETA1, beta1)
            tl.store(number + PEAKS + t % m, top)
        tl.store(address(row, STEP, tl.int64), t)


@triton.jit
def write_number(x: tl.float64, out):
    tl.store(out, tl.full([], x, tl.float64))
