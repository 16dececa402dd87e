"""The C++ kernels of state layers against float64, on every instruction set of this machine."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.ops import cpp as kernels
from batchgen.ops import state_dispatch as ops
from batchgen.ops import state_kernels
from batchgen.ops.state_slots import StateSlots

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16)
# Largest error of a result of size 1, for sums in fp32 that are rounded to the type once.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11 + 1e-5}


@pytest.fixture(scope="module", autouse=True)
def known_cases():
    """Keeps cases for all instruction sets: their results in float64 take far longer than the kernels."""
    yield
    known.cache_clear()


@pytest.fixture(params=kernels.instruction_sets(), autouse=True, scope="module")
def instruction_set(request):
    with kernels.using(request.param):
        yield request.param


def random(seed, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def slots_of(lengths, seed):
    """Sources and targets of sequences: in place, elsewhere, from zeros, and two from one slot; and how many slots."""
    source, target = [], []
    for i in range(len(lengths)):
        kind = (seed >> (2 * i)) % 4
        source.append([3 * i, 3 * i + 1, -1, source[-1] if source and source[-1] not in target else -1][kind])
        target.append(3 * i if kind == 0 else 3 * i + 2)
    return torch.tensor(source, dtype=torch.int32), torch.tensor(target), 3 * len(lengths)


def apart(x):
    """The rows of x at a larger distance, with NaN between them."""
    columns = math.prod(x.shape[1:])
    wide = torch.full((len(x), columns + 64), float("nan"), dtype=x.dtype)
    wide[:, :columns] = x.reshape(len(x), columns)
    return wide[:, :columns].view(x.shape)


def l2_normed(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@functools.cache
def known(lengths, heads, dims, dtype, state_dtype, seed, decay=1.0):
    """A case of the delta rule, made once for all instruction sets: operands, states, slots, and what comes out."""
    qkv, g, beta = delta_operands(sum(lengths), heads, dims, dtype, seed)
    g *= decay
    source, target, slots = slots_of(lengths, seed)
    states = apart(random(seed + 3, slots, heads[1], *dims, dtype=state_dtype))
    result = delta_rule_in_float64(qkv, g, beta, states, source, target, lengths, heads[0])
    return (qkv, g, beta), states, (source, target, starts_of(lengths)), result


def check_delta_rule(lengths, heads, dims, dtype, state_dtype, seed, decay=1.0):
    operands, before, slots, (expected, after) = known(lengths, heads, dims, dtype, state_dtype, seed, decay)
    states = apart(before)
    out = ops.delta_rule(*operands, states, StateSlots(*slots), key_heads=heads[0])
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(states.double(), after, atol=ROUNDING[state_dtype], rtol=ROUNDING[state_dtype])
    others = torch.ones(len(states), dtype=torch.bool).index_fill_(0, slots[1], False)
    assert torch.equal(states[others], before[others])


def delta_rule_in_float64(qkv, g, beta, states, source, target, lengths, key_heads):
    """The definition, token by token; the states after it too."""
    _, value_heads, key_dim, value_dim = states.shape
    keys = key_heads * key_dim
    q, k, v = qkv.double().split((keys, keys, value_heads * value_dim), 1)
    q, k = (l2_normed(x.view(-1, key_heads, key_dim)).repeat_interleave(value_heads // key_heads, 1) for x in (q, k))
    v, g, beta = v.view(-1, value_heads, value_dim), g.double(), beta.double()
    results, after = torch.empty_like(v), states.double()
    for i, (start, stop) in enumerate(itertools.pairwise(starts_of(lengths).tolist())):
        state = states[source[i]].double() if source[i] >= 0 else torch.zeros(value_heads, key_dim, value_dim).double()
        for t in range(start, stop):
            state = state * g[t].exp()[:, None, None]
            missing = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
            results[t] = torch.einsum("hkv,hk->hv", state, q[t]) * key_dim**-0.5
        after[target[i]] = state
    return results, after


@st.composite
def batches(draw):
    """Lengths of sequences, heads (key, value), dims (key, value), dtypes of inputs and of states, and a seed."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 17, 63, 64, 65, 100, 130]), min_size=1, max_size=6))
    return (
        tuple(lengths),
        draw(st.sampled_from([(1, 1), (1, 5), (2, 2), (2, 4), (3, 9)])),
        draw(st.sampled_from([(128, 128), (64, 64), (16, 16), (8, 24), (20, 12), (40, 72), (128, 256)])),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(STATE_DTYPES)),
        draw(st.integers(0, 2**20)),
    )


def delta_operands(tokens, heads, dims, dtype, seed):
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    qkv = apart(random(seed, tokens, 2 * key_heads * key_dim + value_heads * value_dim, dtype=dtype, scale=2))
    g = -random(seed + 1, tokens, value_heads).exp() * (0.1, 1, 5)[seed % 3]
    g[seed % 7 :: 11] = -20.0
    return qkv, g, random(seed + 2, tokens, value_heads, scale=2).sigmoid()


@settings(max_examples=some_draws(60), deadline=None)
@given(batches())
def test_the_delta_rule(batch):
    check_delta_rule(*batch)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_long_sequences_beside_single_tokens(state_dtype):
    # With little decay, what early tokens add is still there at the end.
    lengths = (1, 1, 1, 300, 1, 1, 1, 1, 1, 321)
    check_delta_rule(lengths, (2, 4), (128, 128), torch.float32, state_dtype, 1, decay=0.01)


@pytest.mark.parametrize("g", [-20.0, -1000.0, -torch.inf])
def test_gates_that_leave_nothing_make_no_nan(g):
    heads, dims, lengths = (2, 4), (32, 32), [130, 1]
    qkv, _, beta = delta_operands(131, heads, dims, torch.float32, 5)
    states = random(1, 2, heads[1], *dims, scale=1e3)
    gates = torch.full((131, heads[1]), g)
    gates[100:] = -1e-3
    slots = (torch.tensor([0, 1]), torch.tensor([0, 1]))
    expected, after = delta_rule_in_float64(qkv, gates, beta, states, *slots, lengths, heads[0])
    out = ops.delta_rule(qkv, gates, beta, states, StateSlots(*slots, starts_of(lengths)), key_heads=heads[0])
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(states.double(), after, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 70])
def test_what_is_no_number_stays_in_its_sequence(length):
    heads, dims, lengths = (1, 2), (16, 16), [length, length, length]
    qkv, g, beta = delta_operands(3 * length, heads, dims, torch.float32, 6)
    qkv[length] = float("nan")
    states = random(1, 3, heads[1], *dims)
    slots = torch.arange(3)
    out = ops.delta_rule(qkv, g, beta, states, StateSlots(slots, slots, starts_of(lengths)), key_heads=1)
    assert out[length : 2 * length].isnan().all() and states[1].isnan().all()
    others = [0, 2]
    assert out.view(3, length, -1)[others].isfinite().all() and states[others].isfinite().all()


def test_the_delta_rule_does_not_depend_on_the_batch_nor_on_threads():
    lengths, heads, dims = [1, 130, 1, 65, 1], (2, 6), (64, 64)
    qkv, g, beta = delta_operands(sum(lengths), heads, dims, torch.bfloat16, 7)
    slots, starts = torch.arange(len(lengths)), starts_of(lengths)
    states = random(1, len(lengths), heads[1], *dims)
    alone, together, alone_states = [], None, states.clone()
    for i, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        some, slot, bounds = slice(start, stop), slots[i : i + 1], torch.tensor([0, stop - start])
        with kernels.alone():
            alone.append(
                ops.delta_rule(
                    qkv[some], g[some], beta[some], alone_states, StateSlots(slot, slot, bounds), key_heads=2
                )
            )
    together = ops.delta_rule(qkv, g, beta, states, StateSlots(slots, slots, starts), key_heads=2)
    assert torch.equal(torch.cat(alone), together) and torch.equal(alone_states, states)


@settings(max_examples=some_draws(60), deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 5, 64, 65, 200]), min_size=1, max_size=8),
    st.one_of(st.sampled_from([8, 64, 512, 1040]), st.integers(1, 600)),
    st.sampled_from([1, 2, 3, 4, 4, 16]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_the_causal_convolution(lengths, channels, kernel, dtype, silu, with_bias, seed):
    x = apart(random(seed, sum(lengths), channels, dtype=dtype))
    weight = random(seed + 1, channels, kernel, dtype=dtype)
    bias = random(seed + 2, channels, dtype=dtype) if with_bias else None
    source, target, slots = slots_of(lengths, seed)
    states = apart(random(seed + 3, slots, channels, kernel - 1, dtype=dtype))
    before, starts = states.clone(), starts_of(lengths)
    out = ops.causal_conv(x, weight, bias, states, StateSlots(source, target, starts), silu=silu)
    for i, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        first = before[source[i]] if source[i] >= 0 else torch.zeros_like(before[0])
        inputs = torch.cat((first, x[start:stop].t()), 1)
        assert torch.equal(states[target[i]], inputs[:, inputs.shape[1] - kernel + 1 :])
        if stop > start:
            wide = None if bias is None else bias.double()
            expected = F.conv1d(inputs.double()[None], weight.double()[:, None], wide, groups=channels)[0].t()
            expected = F.silu(expected) if silu else expected
            torch.testing.assert_close(out[start:stop].double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    others = torch.ones(slots, dtype=torch.bool).index_fill_(0, target, False)
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 5, 16, 64])
def test_the_gates_of_the_delta_rule(dtype, heads):
    ba = random(1, 300, 2 * heads, dtype=dtype, scale=8)
    ba[::50] *= 10
    b, a = ba.split(heads, 1)
    a_log, dt_bias = random(2, heads), random(3, heads)
    g, beta = ops.delta_gates(a, b, a_log, dt_bias)
    expected = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double(), threshold=50)
    torch.testing.assert_close(g.double(), expected, atol=1e-30, rtol=1e-5)
    torch.testing.assert_close(beta.double(), b.double().sigmoid(), atol=1e-30, rtol=1e-5)
    assert g.dtype == beta.dtype == torch.float32


def test_gates_that_are_no_numbers_stay_so():
    odd = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0]])
    g, beta = ops.delta_gates(odd, odd, torch.zeros(4), torch.zeros(4))
    expected_g, expected_beta = -F.softplus(odd), odd.sigmoid()
    torch.testing.assert_close(g, expected_g, equal_nan=True)
    torch.testing.assert_close(beta, expected_beta, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(1, 128), (3, 40), (4, 7), (32, 128)])
def test_norms_and_outputs_with_gates(dtype, heads, dim):
    x, weight = random(1, 37, heads, dim, dtype=dtype, scale=3), random(2, dim, dtype=dtype)
    gate = apart(random(3, 37, heads * dim, dtype=dtype, scale=3))
    normed = F.rms_norm(x.double(), (dim,), weight.double(), 1e-6) * F.silu(gate.double()).view(x.shape)
    got = ops.gated_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(got.double(), normed, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    assert torch.equal(ops.gated_norm(x, gate.view(x.shape), weight, 1e-6), got)
    expected = x.double().flatten(1) * gate.double().sigmoid()
    flat = x.flatten(1).clone()
    assert ops.gated(flat, gate, flat) is flat
    torch.testing.assert_close(flat.double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(ops.gated(x.flatten(1), gate.view(x.shape)), flat)


def test_slots_and_tokens_that_are_not_there_are_refused():
    qkv, g, beta = delta_operands(2, (1, 1), (8, 8), torch.float32, 1)
    states, conv = torch.zeros(2, 1, 8, 8), torch.zeros(2, 24, 3)
    for source, target, starts in (([2], [0], [0, 2]), ([0], [-1], [0, 2]), ([0], [2], [0, 2]), ([0], [0], [0, 3])):
        slots = tuple(map(torch.tensor, (source, target, starts)))
        with pytest.raises(IndexError):
            ops.delta_rule(qkv, g, beta, states, StateSlots(*slots), key_heads=1)
        with pytest.raises(IndexError):
            ops.causal_conv(qkv, torch.ones(24, 4), None, conv, StateSlots(*slots), silu=True)


def test_larger_kernels_than_those_of_the_library_go_to_torch():
    x, weight, states = random(1, 30, 8), random(2, 8, 20), torch.zeros(1, 8, 19)
    assert not state_kernels.supports_kernel(20)
    slots = (torch.tensor([-1]), torch.tensor([0]), torch.tensor([0, 30]))
    out = ops.causal_conv(x, weight, None, states, StateSlots(*slots), silu=False)
    expected = F.conv1d(F.pad(x.t(), (19, 0))[None], weight[:, None], groups=8)[0].t()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
