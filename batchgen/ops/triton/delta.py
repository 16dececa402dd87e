"""Gated DeltaNet by Triton kernels, over packed tokens and states in slots. All sums are in fp32.

A sequence with few tokens has them one after the other, each a rank-one update of the state: the time is that of
reading and writing the state. A sequence with many has them in chunks, as matrix products (Gated Delta Networks: Yang
et al., 2024, section 3.3). A program has one value head of one sequence and some columns of its state, from the first
token to the last, and the state stays in its registers. What a chunk needs and what does not depend on the state is
computed before, for all chunks at the same time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.state_chunks import CHUNK
from batchgen.ops.state_slots import StateSlots
from batchgen.ops.triton.launch import Card, Launch, card, power_of_two
from batchgen.ops.triton.sequences import sequence_of_tile

# Products in fp32 have no units and take more registers than there are.
_CHUNKED_DTYPES = (torch.bfloat16, torch.float16)
_FEW_TOKENS = 8  # of a sequence, up to which they are computed one by one
_ALL_TOKENS = (1 << 31) - 1
_UPDATED_VALUES = 4096  # of a state, in the registers of a program that computes one token at a time
# Rows and columns of a state that a program multiplies at a time: registers hold no larger operands.
_KEY_BLOCK, _MOST_BLOCKS, _CHUNK_VALUES = 64, 4, 32
_GATES = 1024  # of a program
_NORM_EPS = tl.constexpr(1e-6)
_BLOCK = tl.constexpr(16)  # rows of a triangular matrix that are solved one by one


def delta_rule(  # the operands of one kernel
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: StateSlots,
    *,
    key_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Update the states of Gated DeltaNet by each token, and read each token's result from them.

    `state_dispatch.delta_rule` describes the arguments. The host does not wait for the GPU.
    """
    _, value_heads, _, value_dim = states.shape
    if out is None:
        out = torch.empty(len(qkv), value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    for launch in delta_launches(qkv, g, beta, states, slots, key_heads, out, card(qkv.device)):
        launch()
    return out


def delta_launches(  # the operands of one kernel
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: StateSlots,
    key_heads: int,
    out: Tensor,
    this: Card,
) -> list[Launch]:
    """The kernel launches of an update. They depend on the numbers of tokens and of sequences alone.

    Where there are as many tokens as sequences, or no units for products of this dtype, tokens are computed one by one.
    Otherwise there is a launch for sequences with few tokens and one for those with many. In each, programs of
    other sequences return at once.
    """
    _, value_heads, key_dim, value_dim = states.shape
    sequences = len(slots.source)
    assert qkv.shape[1] == 2 * key_heads * key_dim + value_heads * value_dim and qkv.stride(1) == 1
    assert states[0].is_contiguous() and out.is_contiguous() and g.is_contiguous() and beta.is_contiguous()
    assert len(slots.target) == sequences and len(slots.starts) == sequences + 1
    has_products = this.has_products and qkv.dtype in _CHUNKED_DTYPES and key_dim <= _MOST_BLOCKS * _KEY_BLOCK
    in_chunks = has_products and len(qkv) > sequences
    args = {
        "qkv": qkv,
        "g": g,
        "beta": beta,
        "states": states,
        **slots._asdict(),
        "out": out,
        "qkv_stride": qkv.stride(0),
        "state_stride": states.stride(0),
        "few_tokens": _FEW_TOKENS if in_chunks else _ALL_TOKENS,
    }
    constants = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    keys = power_of_two(key_dim, 16)
    values = min(power_of_two(value_dim, 16), max(16, _UPDATED_VALUES // keys))
    grid = (sequences, value_heads, triton.cdiv(value_dim, values))
    one_by_one = Launch(_update_tokens, grid, args, constants | {"KEYS": keys, "VALUES": values}, warps=4)
    return [one_by_one, *_chunk_launches(args, constants)] if in_chunks else [one_by_one]


def _chunk_launches(args: dict[str, Any], constants: dict[str, int]) -> list[Launch]:
    """The launches for sequences in chunks: what does not depend on states, then states and results.

    Between them there is memory for each token, which the planner counts (`state_chunks.prepared_bytes`).
    """
    qkv, sequences, value_heads = args["qkv"], len(args["source"]), constants["VALUE_HEADS"]
    inverses, weights = torch.empty(2, len(qkv), value_heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    factors = torch.empty(4, len(qkv), value_heads, dtype=torch.float32, device=qkv.device)
    args = args | {"inverses": inverses, "weights": weights, "factors": factors, "factor_stride": factors.stride(0)}
    args["num_sequences"] = sequences
    block = min(_KEY_BLOCK, power_of_two(constants["KEY_DIM"], 16))
    constants = constants | {"BLOCK": block, "TOKENS": CHUNK}
    prepared, updated = (
        {name: args[name] for name in kernel.arg_names if name in args} for kernel in (_prepare_chunks, _update_chunks)
    )
    values = min(_CHUNK_VALUES, power_of_two(constants["VALUE_DIM"], 16))
    grid = (sequences, value_heads, triton.cdiv(constants["VALUE_DIM"], values))
    return [
        Launch(_prepare_chunks, (len(qkv) // CHUNK + sequences, value_heads), prepared, constants, warps=4),
        Launch(_update_chunks, grid, updated, constants | {"VALUES": values}, warps=4),
    ]


# Vectors of a batch's tokens and sequences may begin anywhere in a longer one.
@triton.jit(
    do_not_specialize=["few_tokens"],
    do_not_specialize_on_alignment=["g", "beta", "source", "target", "starts"],
)
def _update_tokens(  # a kernel takes pointers and scalars only
    qkv,
    g,
    beta,
    states,
    source,
    target,
    starts,
    out,
    qkv_stride,
    state_stride,
    few_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Kernel: the tokens of one sequence, one after the other, for one value head and some columns of its state."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    if stop - start > few_tokens:
        return
    key = tl.arange(0, KEYS)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    place = (head * KEY_DIM + key)[:, None] * VALUE_DIM + value[None, :]
    slot = tl.load(source + sequence).to(tl.int64)
    state = _load_state(states + slot * state_stride + place, slot, key, is_value, KEY_DIM)
    q_column = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    for token in range(start, stop):
        row = qkv + token * qkv_stride
        q = tl.load(row + q_column, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(row + KEY_HEADS * KEY_DIM + q_column, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(g + token * VALUE_HEADS + head))
        strength = tl.load(beta + token * VALUE_HEADS + head)
        q *= tl.rsqrt(tl.sum(q * q, 0) + _NORM_EPS) * (KEY_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + _NORM_EPS)
        state *= decay
        added = (v - tl.sum(state * k[:, None], 0)) * strength
        state += k[:, None] * added[None, :]
        result = tl.sum(state * q[:, None], 0)
        tl.store(out + (token * VALUE_HEADS + head) * VALUE_DIM + value, result.to(out.dtype.element_ty), mask=is_value)
    after = tl.load(target + sequence).to(tl.int64)
    _store_state(states + after * state_stride + place, state, after, key, is_value, KEY_DIM)


@triton.jit(
    do_not_specialize=["few_tokens", "num_sequences", "factor_stride"],
    do_not_specialize_on_alignment=["g", "beta", "starts"],
)
def _prepare_chunks(  # a kernel takes pointers and scalars only
    qkv,
    g,
    beta,
    starts,
    inverses,
    weights,
    factors,
    qkv_stride,
    factor_stride,
    few_tokens,
    num_sequences,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Kernel: what the update of one chunk needs and does not depend on the state, for one value head.

    Token i adds strength * (v - what the state holds for k), which includes what the tokens before it add: a triangular
    system, of whose inverse `inverses` gets row i. `weights` gets those of what each token adds in the result of token
    i. `factors` gets, by token, that of the state's part in the system, of its part in the result, of what is added in
    the state after the chunk, and of the state before the chunk in it.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of_tile(starts, num_sequences, chunk, TOKENS)
    start, stop = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    first = start + (chunk - start // TOKENS - sequence) * TOKENS
    if (stop - start <= few_tokens) | (first >= stop):
        return
    row = tl.arange(0, TOKENS)
    token = first + row
    there = token < stop
    rows = qkv + token[:, None] * qkv_stride + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    keys = tl.zeros((TOKENS, TOKENS), tl.float32)
    queries = tl.zeros((TOKENS, TOKENS), tl.float32)
    k_squares = tl.zeros((TOKENS,), tl.float32)
    q_squares = tl.zeros((TOKENS,), tl.float32)
    for block in range(0, KEY_DIM, BLOCK):
        column = block + tl.arange(0, BLOCK)[None, :]
        mask = there[:, None] & (column < KEY_DIM)
        q = tl.load(rows + column, mask=mask, other=0.0)
        k = tl.load(rows + KEY_HEADS * KEY_DIM + column, mask=mask, other=0.0)
        keys = tl.dot(k, tl.trans(k), keys, input_precision="ieee")
        queries = tl.dot(q, tl.trans(k), queries, input_precision="ieee")
        k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        q_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
    k_norm = tl.rsqrt(k_squares + _NORM_EPS)
    q_norm = tl.rsqrt(q_squares + _NORM_EPS) * (KEY_DIM**-0.5)
    # Tokens after the end neither decay nor add anything.
    since_start = tl.cumsum(tl.load(g + token * VALUE_HEADS + head, mask=there, other=0.0), 0)
    strength = tl.load(beta + token * VALUE_HEADS + head, mask=there, other=0.0)
    whole = tl.sum(tl.where(row == TOKENS - 1, since_start, 0.0), 0)
    at = token * VALUE_HEADS + head
    tl.store(factors + at, tl.exp(since_start) * k_norm, mask=there)
    tl.store(factors + factor_stride + at, tl.exp(since_start) * q_norm, mask=there)
    tl.store(factors + 2 * factor_stride + at, tl.exp(whole - since_start) * k_norm, mask=there)
    tl.store(factors + 3 * factor_stride + at, tl.exp(whole) + tl.zeros((TOKENS,), tl.float32), mask=there)
    # decay[i, j]: of what token j adds, the part that is left at token i.
    decay = tl.exp(tl.minimum(since_start[:, None] - since_start[None, :], 0.0)) * k_norm[None, :]
    type: tl.constexpr = weights.dtype.element_ty
    row_at = at[:, None] * TOKENS + row[None, :]
    read = tl.where(row[:, None] >= row[None, :], queries * decay * q_norm[:, None], 0.0)
    tl.store(weights + row_at, read.to(type), mask=there[:, None])
    system = tl.where(row[:, None] > row[None, :], keys * decay * (strength * k_norm)[:, None], 0.0)
    tl.store(inverses + row_at, (_inverse(system, TOKENS) * strength[None, :]).to(type), mask=there[:, None])


@triton.jit(
    do_not_specialize=["few_tokens", "factor_stride"], do_not_specialize_on_alignment=["source", "target", "starts"]
)
def _update_chunks(  # a kernel takes pointers and scalars only
    qkv,
    states,
    source,
    target,
    starts,
    out,
    inverses,
    weights,
    factors,
    qkv_stride,
    state_stride,
    factor_stride,
    few_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Kernel: the tokens of one sequence, chunk by chunk, for one value head and some columns of its state.

    The state is in blocks of BLOCK rows, since registers hold no larger operands of a product.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    if stop - start <= few_tokens:
        return
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_value = value < VALUE_DIM
    slot = tl.load(source + sequence).to(tl.int64)
    key = tl.arange(0, BLOCK)
    place = (head * KEY_DIM + key)[:, None] * VALUE_DIM + value[None, :]
    before = states + slot * state_stride + place
    state_0 = _load_state(before, slot, key, is_value, KEY_DIM)
    if KEY_DIM > BLOCK:
        state_1 = _load_state(before + BLOCK * VALUE_DIM, slot, BLOCK + key, is_value, KEY_DIM)
    if KEY_DIM > 2 * BLOCK:
        state_2 = _load_state(before + 2 * BLOCK * VALUE_DIM, slot, 2 * BLOCK + key, is_value, KEY_DIM)
    if KEY_DIM > 3 * BLOCK:
        state_3 = _load_state(before + 3 * BLOCK * VALUE_DIM, slot, 3 * BLOCK + key, is_value, KEY_DIM)

    row = tl.arange(0, TOKENS)
    for first in range(start, stop, TOKENS):
        token = first + row
        there = token < stop
        rows = qkv + token[:, None] * qkv_stride
        q_rows = rows + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        k_rows = q_rows + KEY_HEADS * KEY_DIM
        k_part = _times_state(k_rows, there, state_0, 0, KEY_DIM, BLOCK)
        q_part = _times_state(q_rows, there, state_0, 0, KEY_DIM, BLOCK)
        if KEY_DIM > BLOCK:
            k_part += _times_state(k_rows, there, state_1, BLOCK, KEY_DIM, BLOCK)
            q_part += _times_state(q_rows, there, state_1, BLOCK, KEY_DIM, BLOCK)
        if KEY_DIM > 2 * BLOCK:
            k_part += _times_state(k_rows, there, state_2, 2 * BLOCK, KEY_DIM, BLOCK)
            q_part += _times_state(q_rows, there, state_2, 2 * BLOCK, KEY_DIM, BLOCK)
        if KEY_DIM > 3 * BLOCK:
            k_part += _times_state(k_rows, there, state_3, 3 * BLOCK, KEY_DIM, BLOCK)
            q_part += _times_state(q_rows, there, state_3, 3 * BLOCK, KEY_DIM, BLOCK)

        mask = there[:, None] & is_value[None, :]
        v_rows = rows + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value[None, :]
        v = tl.load(v_rows, mask=mask, other=0.0)
        at = token * VALUE_HEADS + head
        row_at = at[:, None] * TOKENS + row[None, :]
        missing = v.to(tl.float32) - tl.load(factors + at, mask=there, other=0.0)[:, None] * k_part
        inverse = tl.load(inverses + row_at, mask=there[:, None], other=0.0)
        added = tl.dot(inverse, missing.to(v.dtype), input_precision="ieee")
        result = tl.load(factors + factor_stride + at, mask=there, other=0.0)[:, None] * q_part
        weight = tl.load(weights + row_at, mask=there[:, None], other=0.0)
        result = tl.dot(weight, added.to(v.dtype), result, input_precision="ieee")
        made = out + at[:, None] * VALUE_DIM + value[None, :]
        tl.store(made, result.to(out.dtype.element_ty), mask=mask)

        to_end = tl.load(factors + 2 * factor_stride + at, mask=there, other=0.0)
        added = (added * to_end[:, None]).to(v.dtype)
        left = tl.load(factors + 3 * factor_stride + first * VALUE_HEADS + head)
        state_0 = _plus_keys(state_0 * left, k_rows, there, added, 0, KEY_DIM, BLOCK)
        if KEY_DIM > BLOCK:
            state_1 = _plus_keys(state_1 * left, k_rows, there, added, BLOCK, KEY_DIM, BLOCK)
        if KEY_DIM > 2 * BLOCK:
            state_2 = _plus_keys(state_2 * left, k_rows, there, added, 2 * BLOCK, KEY_DIM, BLOCK)
        if KEY_DIM > 3 * BLOCK:
            state_3 = _plus_keys(state_3 * left, k_rows, there, added, 3 * BLOCK, KEY_DIM, BLOCK)

    slot = tl.load(target + sequence).to(tl.int64)
    after = states + slot * state_stride + place
    _store_state(after, state_0, slot, key, is_value, KEY_DIM)
    if KEY_DIM > BLOCK:
        _store_state(after + BLOCK * VALUE_DIM, state_1, slot, BLOCK + key, is_value, KEY_DIM)
    if KEY_DIM > 2 * BLOCK:
        _store_state(after + 2 * BLOCK * VALUE_DIM, state_2, slot, 2 * BLOCK + key, is_value, KEY_DIM)
    if KEY_DIM > 3 * BLOCK:
        _store_state(after + 3 * BLOCK * VALUE_DIM, state_3, slot, 3 * BLOCK + key, is_value, KEY_DIM)


@triton.jit
def _times_state(rows, there, state, FIRST: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The product of some columns of queries or keys, from FIRST on, and the rows of the state of these columns."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    x = tl.load(rows + column, mask=there[:, None] & (column < KEY_DIM), other=0.0)
    return tl.dot(x, state.to(x.dtype), input_precision="ieee")


@triton.jit
def _plus_keys(state, rows, there, added, FIRST: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows of a state, from FIRST on, plus the product of these columns of keys and what is added for each key."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    k = tl.load(rows + column, mask=there[:, None] & (column < KEY_DIM), other=0.0)
    return tl.dot(tl.trans(k), added, state, input_precision="ieee")


@triton.jit
def _load_state(at, slot, key, is_value, KEY_DIM: tl.constexpr):
    """A part of a state; zeros where the slot is below 0."""
    there = (key < tl.where(slot >= 0, KEY_DIM, 0))[:, None] & is_value[None, :]
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _store_state(at, state, slot, key, is_value, KEY_DIM: tl.constexpr):
    """Store a part of a state, unless the slot is below 0."""
    there = (key < tl.where(slot >= 0, KEY_DIM, 0))[:, None] & is_value[None, :]
    tl.store(at, state.to(at.dtype.element_ty), mask=there)


@triton.jit
def _inverse(lower, N: tl.constexpr):
    """The inverse of I + `lower` [N, N], which is zero on its diagonal and above.

    Blocks on the diagonal are inverted row by row, all at the same time. Then two neighbours become one block: of
    [[A, 0], [C, B]] the inverse is [[A', 0], [-B' C A', B']]. Powers of the matrix, which need fewer steps, would
    cancel where many keys are equal.
    """
    tl.static_assert(N <= 4 * _BLOCK)
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    inner = tl.where(row // _BLOCK == column // _BLOCK, lower, 0.0)
    for i in range(1, _BLOCK):
        # Row i of each block: blocks have no column in common.
        factors = tl.sum(tl.where(row % _BLOCK == i, inner, 0.0), 0)
        solved = tl.sum(factors[:, None] * inverse, 0)[None, :]
        is_row = (row % _BLOCK == i) & (row // _BLOCK == column // _BLOCK)
        inverse = tl.where(is_row, inverse - solved, inverse)
    if N > _BLOCK:
        inverse = _with_corners(inverse, lower, row, column, _BLOCK)
    if N > 2 * _BLOCK:
        inverse = _with_corners(inverse, lower, row, column, 2 * _BLOCK)
    return inverse


@triton.jit
def _with_corners(inverse, lower, row, column, WIDTH: tl.constexpr):
    """The inverses of blocks twice as wide as those that `inverse` has, which are WIDTH wide."""
    is_corner = (row // (2 * WIDTH) == column // (2 * WIDTH)) & (row // WIDTH > column // WIDTH)
    return inverse - _product(inverse, _product(tl.where(is_corner, lower, 0.0), inverse))


@triton.jit
def _product(a, b):
    """The product of two matrices in fp32, each as a sum of two in bf16: 16 digits of theirs, in few registers."""
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
    b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a_high, b_high, tl.dot(a_low, b_high, tl.dot(a_high, b_low)))


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log decay and the strength of each update (`state_dispatch.delta_gates`), both in fp32."""
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    gates_launch(a, b, a_log, dt_bias, g, beta)()
    return g, beta


def gates_launch(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor) -> Launch:
    tokens, heads = a.shape
    assert a.stride(1) == b.stride(1) == 1 and b.shape == a.shape
    args = {
        "a": a,
        "b": b,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "g": g,
        "beta": beta,
        "num_gates": tokens * heads,
        "a_stride": a.stride(0),
        "b_stride": b.stride(0),
    }
    constants = {"HEADS": heads, "BLOCK": _GATES}
    return Launch(_compute_gates, (triton.cdiv(tokens * heads, _GATES),), args, constants)


@triton.jit(do_not_specialize=["num_gates"], do_not_specialize_on_alignment=["a", "b"])
def _compute_gates(  # a kernel takes pointers and scalars only
    a, b, a_log, dt_bias, g, beta, num_gates, a_stride, b_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    gate = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = gate < num_gates
    token, head = (gate // HEADS).to(tl.int64), gate % HEADS
    x = tl.load(a + token * a_stride + head, mask=there, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=there, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=there, other=0.0).to(tl.float32))
    # softplus(x) = max(x, 0) + log(1 + e), where 1 + e is rounded: the quotient takes that back (Kahan).
    e = tl.exp(-tl.abs(x))
    rounded = 1.0 + e
    small = tl.where(rounded == 1.0, e, tl.log(rounded) * (e / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    tl.store(g + gate, -rate * (tl.maximum(x, 0.0) + small), mask=there)
    y = tl.load(b + token * b_stride + head, mask=there, other=0.0).to(tl.float32)
    tl.store(beta + gate, 1.0 / (1.0 + tl.exp(-y)), mask=there)
