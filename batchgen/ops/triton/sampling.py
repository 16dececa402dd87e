"""Argmax, masks of grammars, and random draws from logits, by Triton kernels.

A draw does not sort the vocabulary. Top-k and top-p keep all tokens with logits above a bound, and the first of those
with logits equal to it. The bound is found by bisection over the bits of a float. Each step passes over the row, which
stays in the L2 cache. The drawn token is the one at which the cumulative sum of softmax weights passes a random number.
Weights are fp32, and sums fp64. A first pass sums blocks of tokens; a second one searches in one block. One program
computes one row. Nothing is copied to the host.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.host_copy import upload
from batchgen.ops.sampling import Draws
from batchgen.ops.triton.launch import Launch, power_of_two

_BLOCK = 4096
_WARPS = 16
# Weights that are summed in fp32 before they are added in fp64, of which some GPUs do one in the time of 64: this
# rounds no worse than the weights do.
_SUMMED = tl.constexpr(4)
_NONE = tl.constexpr(float("-inf"))


def argmax(logits: Tensor, *, want_lse: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Find the largest logit of each row, the first one of equals, and compute the log-sum-exp if wanted.

    Args:
        logits: fp32 [rows, columns].
        want_lse: Whether the log-sum-exp is computed.

    Returns:
        Index of the largest logit, int64 [rows]; its value, fp32 [rows]; the log-sum-exp, fp32 [rows], or None.
    """
    index, maximum = logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))
    lse = logits.new_empty(len(logits)) if want_lse else None
    argmax_launch(logits, index, maximum, lse)()
    return index, maximum, lse


def argmax_if_finite(logits: Tensor, otherwise: int) -> tuple[Tensor, Tensor]:
    """Find the largest logit of each row, in one pass. `ops.argmax_if_finite` describes arguments and result."""
    index, maximum = logits.new_empty((2, len(logits)), dtype=torch.int64), logits.new_empty(len(logits))
    argmax_launch(logits, index[0], maximum, None, index[1], otherwise)()
    return index[0], index[1]


def argmax_launch(
    logits: Tensor,
    index: Tensor,
    maximum: Tensor,
    lse: Tensor | None,
    if_finite: Tensor | None = None,
    otherwise: int = 0,
) -> Launch:
    """The launch of the kernel of `argmax`, and of `argmax_if_finite` with a tensor for its second result."""
    results = {"index": index, "maximum": maximum, "lse": lse, "if_finite": if_finite, "otherwise": otherwise}
    return Launch(_argmax, (len(logits),), _logits(logits) | results, _block(logits), _WARPS)


def forbid(logits: Tensor, rows: np.ndarray, allowed: np.ndarray) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place. `ops.forbid` describes the arguments."""
    assert allowed.shape[1] * 32 >= logits.shape[1] and len(allowed) == len(rows)
    forbid_launch(logits, upload(rows, logits.device), upload(allowed, logits.device))()


def forbid_launch(logits: Tensor, rows: Tensor, allowed: Tensor) -> Launch:
    constants = _block(logits)
    args = _logits(logits) | {"rows": rows, "allowed": allowed, "words": allowed.shape[1]}
    return Launch(_forbid, (len(rows), triton.cdiv(logits.shape[1], constants["BLOCK"])), args, constants, 8)


def draw(logits: Tensor, rows: np.ndarray, draws: Draws, out: Tensor) -> None:
    """Draw a random token from each of some rows of logits. `ops.draw` describes the arguments."""
    # Row numbers and top-k are whole numbers far below 2 ** 53: one array, and one copy, does for all.
    draw_launch(
        logits, upload(np.stack([np.asarray(a, dtype=np.float64) for a in (rows, *draws)]), logits.device), out
    )()


def draw_launch(logits: Tensor, parameters: Tensor, out: Tensor) -> Launch:
    """The launch of the kernel that draws tokens.

    Args:
        logits: Logits, fp32 [.., columns].
        parameters: fp64 [6, draws]: row numbers, and the five arrays of `Draws`.
        out: Tensor for token ids, int64 [..].
    """
    args = _logits(logits) | {"parameters": parameters, "num_rows": parameters.shape[1], "out": out}
    return Launch(_draw, (parameters.shape[1],), args, _block(logits), _WARPS)


def _logits(logits: Tensor) -> dict[str, Tensor | int]:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    return {"logits": logits, "stride": logits.stride(0), "columns": logits.shape[1]}


def _block(logits: Tensor) -> dict[str, int]:
    return {"BLOCK": min(_BLOCK, power_of_two(logits.shape[1], 32))}


@triton.jit
def _argmax(logits, stride, columns, index, maximum, lse, if_finite, otherwise, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    lane = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), _NONE, tl.float32)
    first = lane
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        value = tl.load(x + start + lane, mask=start + lane < columns, other=_NONE)
        first = tl.where(value > most, start + lane, first)
        most = tl.where(value > most, value, most)
        if if_finite is not None:
            is_finite = tl.abs(value) < -_NONE  # false for NaN
            bad = tl.where(is_finite | (start + lane >= columns), bad, 1)
    largest = tl.max(most, 0)
    chosen = tl.min(tl.where(most == largest, first, columns - 1), 0).to(tl.int64)
    tl.store(index + row, chosen)
    tl.store(maximum + row, largest)
    if if_finite is not None:
        tl.store(if_finite + row, tl.where(tl.max(bad, 0) == 0, chosen, otherwise))
    if lse is not None:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            value = tl.load(x + start + lane, mask=start + lane < columns, other=_NONE)
            total += tl.exp(value - largest)
        tl.store(lse + row, largest + tl.log(tl.sum(total, 0)))


@triton.jit
def _forbid(logits, stride, columns, rows, allowed, words, BLOCK: tl.constexpr):
    which = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    word = tl.load(allowed + which * words + column // 32, mask=there, other=-1)
    forbidden = (word >> (column % 32)) & 1 == 0
    tl.store(logits + tl.load(rows + which) * stride + column, _NONE, mask=there & forbidden)


# Long: one row from its logits to its token, in the order in which it happens.
@triton.jit(do_not_specialize=["num_rows"])
def _draw(  # a kernel takes pointers and scalars only
    logits, stride, columns, parameters, num_rows, out, BLOCK: tl.constexpr
):
    parameters += tl.program_id(0)
    row = tl.load(parameters).to(tl.int64)
    temperature = tl.load(parameters + num_rows).to(tl.float32)
    top_k = tl.load(parameters + 2 * num_rows)
    top_p = tl.load(parameters + 3 * num_rows)
    min_p = tl.load(parameters + 4 * num_rows).to(tl.float32)
    uniform = tl.load(parameters + 5 * num_rows)
    x = logits + row * stride

    most = tl.full((BLOCK,), _NONE, tl.float32)
    for start in range(0, columns, BLOCK):
        most = tl.maximum(most, _load(x, start, columns, BLOCK))
    largest = tl.max(most, 0)

    # Kept are logits above `least`, and of those equal to it the first `ties`.
    least = tl.full((), _NONE, tl.float32)
    ties = columns.to(tl.int64)
    if (top_k > 0) & (top_k < columns):
        least, above = _cut(x, columns, temperature, largest, min_p, least, top_k, False, BLOCK)
        ties = (top_k - above).to(tl.int64)
    if top_p < 1:
        above, _, _ = _above(x, columns, temperature, largest, min_p, least, least, least, True, BLOCK)
        equal = tl.minimum(_count(x, columns, least, BLOCK), ties)
        mass = top_p * (above + equal * _weight(least, largest, temperature, min_p).to(tl.float64))
        cut, above = _cut(x, columns, temperature, largest, min_p, least, mass, True, BLOCK)
        weight = tl.maximum(_weight(cut, largest, temperature, min_p), 1e-37).to(tl.float64)
        enough = tl.minimum(tl.ceil((mass - above) / weight), columns.to(tl.float64)).to(tl.int64)
        ties = tl.where(cut > least, enough, tl.minimum(enough, ties))
        least = cut

    each = _weight(least, largest, temperature, min_p).to(tl.float64)
    total = each * tl.minimum(_count(x, columns, least, BLOCK), ties)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, columns, BLOCK):
        value = _load(x, start, columns, BLOCK)
        sums += tl.where(value > least, _weight(value, largest, temperature, min_p), 0.0).to(tl.float64)
    wanted = uniform * (total + tl.sum(sums, 0))

    # The last block that has weight and does not begin behind what is wanted: rounding cannot lead past all of them.
    before = tl.full((), 0, tl.float64)
    ties_before = tl.full((), 0, tl.int64)
    block, block_before, block_ties = 0, before, ties_before
    for start in range(0, columns, BLOCK):
        value = _load(x, start, columns, BLOCK)
        equal = tl.sum((value == least).to(tl.int64), 0)
        weight = tl.where(value > least, _weight(value, largest, temperature, min_p), 0.0).to(tl.float64)
        here = tl.sum(weight, 0) + each * tl.minimum(tl.maximum(ties - ties_before, 0), equal)
        found = (here > 0) & (before <= wanted)
        block = tl.where(found, start, block)
        block_before = tl.where(found, before, block_before)
        block_ties = tl.where(found, ties_before, block_ties)
        before += here
        ties_before += equal

    value = _load(x, block, columns, BLOCK)
    tie = (value == least).to(tl.int64)
    kept = (value > least) | ((tie > 0) & (block_ties + tl.cumsum(tie, 0) <= ties))
    weight = tl.where(kept, _weight(value, largest, temperature, min_p), 0.0).to(tl.float64)
    reached = (weight > 0) & (tl.cumsum(weight, 0) - weight <= wanted - block_before)
    column = block + tl.arange(0, BLOCK)
    tl.store(out + row, tl.max(tl.where(reached, column, 0), 0).to(tl.int64))


@triton.jit
def _load(x, start, columns, BLOCK: tl.constexpr):
    """A block of logits of a row; minus infinity for NaN and after the end of the row."""
    column = start + tl.arange(0, BLOCK)
    value = tl.load(x + column, mask=column < columns, other=_NONE)
    return tl.where(value == value, value, _NONE)


@triton.jit
def _weight(value, largest, temperature, min_p):
    """Softmax weights of logits, relative to that of the largest logit; 0 for logits that min-p removes."""
    weight = tl.where(value == largest, 1.0, tl.exp(tl.div_rn(value - largest, temperature)))
    return tl.where((value > _NONE) & (weight >= min_p), weight, 0.0)


# Many operands: a kernel takes pointers and scalars only.
@triton.jit
def _above(  # a kernel takes pointers and scalars only
    x, columns, temperature, largest, min_p, first, second, third, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of softmax weights (with MASS), or the number, of the logits above each of three bounds, as fp64."""
    width: tl.constexpr = BLOCK // _SUMMED
    sums_first = tl.zeros((width,), tl.float64)
    sums_second = tl.zeros((width,), tl.float64)
    sums_third = tl.zeros((width,), tl.float64)
    for start in range(0, columns, BLOCK):
        value = _load(x, start, columns, BLOCK)
        weight = tl.full((BLOCK,), 1.0, tl.float32)
        if MASS:
            weight = _weight(value, largest, temperature, min_p)
        sums_first += _summed(tl.where(value > first, weight, 0.0), BLOCK)
        sums_second += _summed(tl.where(value > second, weight, 0.0), BLOCK)
        sums_third += _summed(tl.where(value > third, weight, 0.0), BLOCK)
    return tl.sum(sums_first, 0), tl.sum(sums_second, 0), tl.sum(sums_third, 0)


@triton.jit
def _summed(weight, BLOCK: tl.constexpr):
    return tl.sum(tl.reshape(weight, (BLOCK // _SUMMED, _SUMMED)), 1).to(tl.float64)


@triton.jit
def _count(x, columns, bound, BLOCK: tl.constexpr):
    """The number of logits of a row that are equal to a bound."""
    count = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        count += (_load(x, start, columns, BLOCK) == bound).to(tl.int64)
    return tl.sum(count, 0)


# Many operands: a kernel takes pointers and scalars only.
@triton.jit
def _cut(  # a kernel takes pointers and scalars only
    x, columns, temperature, largest, min_p, least, limit, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the smallest logit, from `least` on, above which the sum of softmax weights is less than `limit`.

    Without MASS, logits are counted instead of adding their weights. Returns this logit, and the sum or number above
    it.
    """
    low, high = _key(least), _key(largest)
    while low < high:  # into quarters: three bounds cost little more than one
        quarter = (high - low) >> 2
        first, second, third = low + quarter, low + ((high - low) >> 1), high - quarter - 1
        third = tl.maximum(second, third)
        a, b, c = _above(
            x, columns, temperature, largest, min_p, _float(first), _float(second), _float(third), MASS, BLOCK
        )
        high = tl.where(a < limit, first, tl.where(b < limit, second, tl.where(c < limit, third, high)))
        low = tl.where(a < limit, low, tl.where(b < limit, first + 1, tl.where(c < limit, second + 1, third + 1)))
    bound = _float(low)
    above, _, _ = _above(x, columns, temperature, largest, min_p, bound, bound, bound, MASS, BLOCK)
    return bound, above


@triton.jit
def _key(value):
    """An integer for each float, so that integers are in the order of floats."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _float(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
