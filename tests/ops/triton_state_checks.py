"""The Triton kernels of state layers against float64. `test_triton.py` runs this file, in processes of their own: under
Triton's interpreter, and on a card where there is one."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thorough import quick_or
from triton_device import DEVICE

from batchgen.ops import state_dispatch as ops
from batchgen.ops import state_reference
from batchgen.ops import triton as triton_kernels
from batchgen.ops.state_slots import StateSlots
from batchgen.ops.triton import conv, delta
from batchgen.ops.triton.launch import SHARED_MEMORY, Card

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
MORE = quick_or(0.2, 1) if DEVICE.type == "cpu" else 1
# Operands of products in chunks are rounded to the dtype of queries, keys and values.
DELTA_ERRORS = {torch.float32: 3e-5, torch.bfloat16: 0.02, torch.float16: 3e-3}
# Kernels are compiled for each of these sizes, which takes seconds on a card.
HEADS = [(1, 1), (1, 2), (2, 2), (2, 6)] if DEVICE.type == "cpu" else [(2, 4)]
DIMS = [(16, 16), (24, 40), (32, 64), (64, 16), (128, 128), (256, 32)] if DEVICE.type == "cpu" else [(128, 128)]
if DEVICE.type == "cpu":
    LENGTHS = [1, 1, 1, 2, 3, 8, 9, 63, 64, 65, 130]
else:
    LENGTHS = [1, 1, 2, 8, 9, 64, 65, 130, 1000]
    settings.register_profile("card", derandomize=True, database=None)
    settings.load_profile("card")


def random(seed, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def pool(seed, slots, *shape, dtype):
    """A layer's states as a view of a pool whose slots have other bytes after each state."""
    size = math.prod(shape)
    rows = random(seed, slots, size + 24, dtype=dtype).to(DEVICE)
    return rows[:, :size].unflatten(1, shape)


def slots_of(seed, sequences, in_place):
    """Sources and targets: some sequences start from zeros, two share a source, some leave no state."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(2 * sequences + 2, generator=generator)
    target = order[:sequences].clone()
    source = target.clone() if in_place else order[sequences : 2 * sequences].clone()
    if sequences > 2 and not in_place:
        source[1] = source[2]
    source[torch.rand(sequences, generator=generator) < 0.2] = -1
    target[torch.rand(sequences, generator=generator) < 0.2] = -1
    return source, target


def starts_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def states_before(states, source):
    before = states.double().cpu()[source.clamp(min=0)]
    before[source < 0] = 0
    return before


def check_states(got, before, expected, target, tolerance):
    """Targets have the new states, and nothing else in the pool changed."""
    kept = target >= 0
    torch.testing.assert_close(got.cpu()[target[kept]].double(), expected[kept], atol=tolerance, rtol=tolerance)
    others = torch.ones(len(got), dtype=torch.bool)
    others[target[kept]] = False
    assert torch.equal(got.cpu()[others], before.cpu()[others])


# Convolution.


def wide_conv(x, weight, bias, states, source, starts, silu):
    """Results and states in float64, by torch's own convolution."""
    before = states_before(states, source)
    results, after = [], []
    for inputs, (start, stop) in zip(before, itertools.pairwise(starts.tolist()), strict=True):
        inputs = torch.cat((inputs, x[start:stop].double().t()), 1)
        after.append(inputs[:, stop - start :])
        if stop > start:
            y = F.conv1d(
                inputs[None], weight.double()[:, None], None if bias is None else bias.double(), groups=len(weight)
            )
            results.append((F.silu(y) if silu else y)[0].t())
    return torch.cat(results), torch.stack(after)


@settings(max_examples=int(40 * MORE), deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 5, 33, 70]), min_size=1, max_size=7).filter(any),
    st.sampled_from([1, 40, 300]),
    st.integers(2, 5) if DEVICE.type == "cpu" else st.just(4),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
@example([1] * 9, 300, 4, torch.bfloat16, False, True, True, 0)
@example([40, 1, 31, 33], 70, 4, torch.bfloat16, False, True, False, 1)
def test_convolution(lengths, channels, kernel, dtype, biased, silu, in_place, seed):
    starts, (source, target) = starts_of(lengths), slots_of(seed, len(lengths), in_place)
    x = random(seed, sum(lengths), channels + 16, dtype=dtype)
    weight = random(seed + 1, channels, kernel, dtype=dtype)
    bias = random(seed + 2, channels, dtype=dtype) if biased else None
    states = pool(seed + 3, 2 * len(lengths) + 2, channels, kernel - 1, dtype=dtype)
    before = states.clone()
    expected, after = wide_conv(x[:, 8:-8], weight, bias, before, source, starts, silu)
    view = x.to(DEVICE)[:, 8:-8]
    operands = (None if t is None else t.to(DEVICE) for t in (weight, bias))
    got = triton_kernels.causal_conv(
        view, *operands, states, StateSlots(source.to(DEVICE), target.to(DEVICE), starts.to(DEVICE)), silu=silu
    )
    assert got.dtype == dtype
    tolerance = {"atol": 8 * ROUNDING[dtype], "rtol": 4 * ROUNDING[dtype]}
    torch.testing.assert_close(got.cpu().double(), expected, **tolerance)
    check_states(states, before, after, target, 0)


# The delta rule.


def wide_delta(qkv, g, beta, states, source, starts, key_heads):
    """Results and states in float64, token by token, as the rule is written."""
    _, value_heads, key_dim, value_dim = states.shape
    after = states_before(states, source)
    heads = (key_heads, key_heads, value_heads)
    parts = qkv.double().split([n * d for n, d in zip(heads, (key_dim, key_dim, value_dim), strict=True)], 1)
    q, k, v = (part.unflatten(1, (n, -1)) for part, n in zip(parts, heads, strict=True))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = ((x.repeat_interleave(value_heads // key_heads, 1)) for x in (q * key_dim**-0.5, k))
    g, beta = g.double(), beta.double()
    out = torch.empty(len(qkv), value_heads, value_dim, dtype=torch.float64)
    for i, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        for t in range(start, stop):
            after[i] *= g[t].exp()[:, None, None]
            held = torch.einsum("hkv,hk->hv", after[i], k[t])
            after[i] += k[t][:, :, None] * (beta[t][:, None] * (v[t] - held))[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", after[i], q[t])
    return out, after


def updated(qkv, g, beta, states, source, target, starts, key_heads):
    """On the device. Rows of qkv have gaps between them; what is there is no number."""
    wide = torch.full((len(qkv), qkv.shape[1] + 16), float("nan"), dtype=qkv.dtype, device=DEVICE)
    wide[:, 8:-8] = qkv.to(DEVICE)
    operands = (t.to(DEVICE) for t in (g, beta))
    rows = (t.to(DEVICE) for t in (source, target, starts))
    return triton_kernels.delta_rule(wide[:, 8:-8], *operands, states, StateSlots(*rows), key_heads=key_heads)


def check_delta(
    lengths, heads, dims, dtype, states_dtype, seed, *, in_place=False, g=None, beta=None, equal_keys=False
):
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    starts, (source, target) = starts_of(lengths), slots_of(seed, len(lengths), in_place)
    tokens = sum(lengths)
    qkv = random(seed, tokens, 2 * key_heads * key_dim + value_heads * value_dim, dtype=dtype)
    if equal_keys:
        qkv[:, : 2 * key_heads * key_dim] = qkv[0, : 2 * key_heads * key_dim]
    g = -random(seed + 1, tokens, value_heads).exp() * 0.2 if g is None else torch.full((tokens, value_heads), g)
    beta = random(seed + 2, tokens, value_heads).sigmoid() if beta is None else torch.full((tokens, value_heads), beta)
    states = pool(seed + 3, 2 * len(lengths) + 2, value_heads, key_dim, value_dim, dtype=states_dtype)
    before = states.clone()
    expected, after = wide_delta(qkv, g, beta, before, source, starts, key_heads)
    got = updated(qkv, g, beta, states, source, target, starts, key_heads)
    assert got.dtype == dtype and got.isfinite().all() and states.isfinite().all()
    tolerance = DELTA_ERRORS[dtype]
    torch.testing.assert_close(got.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    rounding = 2**-8 if states_dtype == torch.bfloat16 else 0
    check_states(states, before, after, target, 2 * tolerance + rounding)


@settings(max_examples=int(30 * MORE), deadline=None)
@given(
    st.lists(st.sampled_from([0, *LENGTHS]), min_size=1, max_size=6).filter(any),
    st.sampled_from(HEADS),
    st.sampled_from(DIMS),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**20),
)
@example([1] * 9, (1, 2), (128, 128), torch.bfloat16, torch.float32, True, 0)
@example([66, 9] if DEVICE.type == "cpu" else [130, 1, 9, 8, 64], (1, 2), (256, 256), *[torch.bfloat16] * 2, False, 1)
@example([65, 0, 1, 128], (2, 2), (128, 128), torch.float16, torch.float32, True, 2)
def test_delta_rule(lengths, heads, dims, dtype, states_dtype, in_place, seed):
    check_delta(lengths, heads, dims, dtype, states_dtype, seed, in_place=in_place)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a card has no units for products in fp32")
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (100, 72), (256, 32)], ids=str)
def test_chunks_are_exact_where_their_operands_are(dims, monkeypatch):
    """Chunks in fp32, which are as the reference is, whatever the number of blocks that a state has."""
    monkeypatch.setattr(delta, "_CHUNKED_DTYPES", DTYPES)
    check_delta([130, 1, 64], (1, 2), dims, torch.float32, torch.float32, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("g", [-20.0, -1e4, 0.0])
def test_decay_without_bounds_gives_numbers(dtype, g, monkeypatch):
    """64 tokens that decay by exp(-20) each: factors between them underflow, and their inverses would overflow."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(delta, "_CHUNKED_DTYPES", DTYPES)
    check_delta([1, 64, 130], (1, 1), (64, 64), dtype, torch.float32, 7, g=g)


@pytest.mark.parametrize("beta", [1.0, 0.0])
def test_equal_keys_cancel_nothing(beta, monkeypatch):
    """A prompt of one token many times: every update replaces the one before, and powers of the system are huge."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(delta, "_CHUNKED_DTYPES", DTYPES)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    check_delta([100, 3], (1, 2), (64, 64), dtype, torch.float32, 8, g=0.0, beta=beta, equal_keys=True)


def test_a_prompt_in_parts_leaves_the_state_of_the_whole():
    key_heads, value_heads, key_dim, value_dim = 1, 2, 64, 64
    qkv = random(1, 200, 2 * key_heads * key_dim + value_heads * value_dim, dtype=torch.bfloat16)
    g, beta = -random(2, 200, value_heads).exp() * 0.1, random(3, 200, value_heads).sigmoid()
    whole, parts = (torch.zeros(1, value_heads, key_dim, value_dim, device=DEVICE) for _ in range(2))
    slot = torch.zeros(1, dtype=torch.int64)
    expected = updated(qkv, g, beta, whole, slot - 1, slot, torch.tensor([0, 200]), key_heads)
    results = []
    for i, (start, stop) in enumerate(itertools.pairwise([0, 90, 91, 96, 200])):
        some = slice(start, stop)
        rows = slot if i else slot - 1, slot, torch.tensor([0, stop - start])
        results.append(updated(qkv[some], g[some], beta[some], parts, *rows, key_heads))
    tolerance = DELTA_ERRORS[torch.bfloat16]
    torch.testing.assert_close(torch.cat(results), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(parts, whole, atol=2 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 70])
def test_a_sequence_does_not_depend_on_its_batch(tokens):
    lengths = [tokens, 3, 66, 1, 9]
    operands = random(1, sum(lengths), 2 * 32 + 2 * 32, dtype=torch.bfloat16), -random(2, sum(lengths), 2).abs()
    beta = random(3, sum(lengths), 2).sigmoid()
    together, alone = (pool(4, 6, 2, 32, 32, dtype=torch.float32) for _ in range(2))
    slots = torch.arange(5)
    first = slice(0, tokens)
    got = updated(*operands, beta, together, slots, slots, starts_of(lengths), 1)[first]
    some = [x[first] for x in operands]
    assert torch.equal(updated(*some, beta[first], alone, slots[:1], slots[:1], starts_of([tokens]), 1), got)
    assert torch.equal(alone[0], together[0])


def test_states_beyond_the_reach_of_32_bits():
    """Memory that is not touched takes none."""
    rows = torch.empty(3, 2**30 + 8, dtype=torch.bfloat16, device=DEVICE)
    matrices = rows[:, : 2 * 32 * 32].unflatten(1, (2, 32, 32))
    inputs = rows[:, 2048 : 2048 + 128 * 3].unflatten(1, (128, 3))
    small = [torch.empty(3, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in (matrices, inputs)]
    for i, (large, other) in enumerate(zip((matrices, inputs), small, strict=True)):
        other.copy_(random(i, *other.shape))
        large.copy_(other)
    x, g, beta = random(1, 12, 128, dtype=torch.bfloat16), -random(2, 12, 2).abs(), random(3, 12, 2).sigmoid()
    x, g, beta, slots, starts = (t.to(DEVICE) for t in (x, g, beta, torch.tensor([2, 1]), starts_of([11, 1])))
    weight = random(4, 128, 4, dtype=torch.bfloat16).to(DEVICE)
    results = []
    for states, windows in ((matrices, inputs), small):
        y = triton_kernels.causal_conv(x, weight, None, windows, StateSlots(slots, slots, starts), silu=True)
        results.append(triton_kernels.delta_rule(y, g, beta, states, StateSlots(slots, slots, starts), key_heads=1))
    assert torch.equal(*results)
    assert torch.equal(matrices, small[0]) and torch.equal(inputs, small[1])


# In CUDA graphs.


def test_rows_that_fill_a_graph_read_and_write_no_state():
    """Their slots are -1. Whatever they have as inputs, and whatever is in the pool, states keep their bits."""
    x = torch.full((8, 128), float("nan"), dtype=torch.bfloat16)
    x[:3] = random(1, 3, 128, dtype=torch.bfloat16)
    slots, starts = torch.tensor([4, 0, 2, *[-1] * 5]), torch.arange(9)
    g, beta = torch.full((8, 2), float("nan")), torch.full((8, 2), float("nan"))
    g[:3], beta[:3] = -random(2, 3, 2).abs(), random(3, 3, 2).sigmoid()
    matrices, inputs = pool(4, 6, 2, 32, 32, dtype=torch.float32), pool(5, 6, 128, 3, dtype=torch.bfloat16)
    matrices[5], inputs[5] = float("nan"), float("nan")  # the last slot is one that -1 might be taken for
    weight = random(6, 128, 4, dtype=torch.bfloat16).to(DEVICE)
    few = [t.clone() for t in (matrices, inputs)]

    def run(rows, matrices, inputs):
        at = StateSlots(*(t.to(DEVICE) for t in (slots[:rows], slots[:rows], starts[: rows + 1])))
        y = triton_kernels.causal_conv(x[:rows].to(DEVICE), weight, None, inputs, at, silu=True)
        gates = (t[:rows].to(DEVICE) for t in (g, beta))
        return triton_kernels.delta_rule(y, *gates, matrices, at, key_heads=1)

    assert torch.equal(run(8, matrices, inputs)[:3], run(3, *few))
    for whole, some in zip((matrices, inputs), few, strict=True):
        assert torch.equal(whole[:5], some[:5]) and whole[5].isnan().all()


def test_launches_depend_on_the_numbers_of_tokens_and_sequences_alone():
    weight, inputs = torch.zeros(128, 4), torch.zeros(6, 128, 3)
    matrices, card = torch.zeros(6, 2, 32, 32), Card(90, 132, SHARED_MEMORY[90])
    for tokens, all_starts in ((4, ([0, 1, 2, 3, 4], [0, 0, 4, 4, 4])), (90, ([0, 1, 2, 3, 90], [0, 30, 60, 70, 90]))):
        x, gates = torch.zeros(tokens, 128, dtype=torch.bfloat16), torch.zeros(tokens, 2)
        out, slots = torch.zeros(tokens, 2, 32, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
        made = []
        for starts in all_starts:
            rows = slots, slots, torch.tensor(starts)
            launches = conv.conv_launches(x, weight.bfloat16(), None, inputs.bfloat16(), StateSlots(*rows), True, x)
            launches += delta.delta_launches(x, gates, gates, matrices, StateSlots(*rows), 1, out, card)
            made.append([(launch.kernel, launch.grid, launch.constants) for launch in launches])
        assert made[0] == made[1]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
def test_captured_updates_take_other_slots():
    """And the host waits for nothing."""
    x, weight = random(1, 8, 512, dtype=torch.bfloat16).to(DEVICE), random(2, 512, 4, dtype=torch.bfloat16).to(DEVICE)
    g, beta = -random(3, 8, 2).abs().to(DEVICE), random(4, 8, 2).sigmoid().to(DEVICE)
    slots, starts = torch.full((8,), -1, device=DEVICE), torch.arange(9, device=DEVICE)
    pools = [(pool(5, 9, 2, 128, 128, dtype=torch.float32), pool(6, 9, 512, 3, dtype=torch.bfloat16)) for _ in range(2)]

    def run(matrices, inputs):
        y = triton_kernels.causal_conv(x, weight, None, inputs, StateSlots(slots, slots, starts), silu=True)
        return triton_kernels.delta_rule(y, g, beta, matrices, StateSlots(slots, slots, starts), key_heads=1)

    run(*pools[0])  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*pools[0])
    for now in ([0, 1, 2, 3, 4, 5, 6, 7], [8, 2, 1, -1, -1, -1, -1, -1]):
        slots.copy_(torch.tensor(now))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, run(*pools[1]))
        assert all(torch.equal(a, b) for a, b in zip(*pools, strict=True))


# Gates.


@settings(max_examples=int(25 * MORE), deadline=None)
@given(st.integers(1, 30), st.sampled_from([1, 2, 32, 48]), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_gates_of_the_delta_rule(tokens, heads, dtype, seed):
    both = random(seed, tokens, 2 * heads, dtype=dtype, scale=12)  # large and small arguments of softplus
    a_log, dt_bias = random(seed + 1, heads), random(seed + 2, heads, dtype=dtype)
    here = both.to(DEVICE)
    got = triton_kernels.delta_gates(here[:, heads:], here[:, :heads], a_log.to(DEVICE), dt_bias.to(DEVICE))
    x = both[:, heads:].double() + dt_bias.double()
    expected = -a_log.double().exp() * torch.logaddexp(x, torch.zeros_like(x)), both[:, :heads].double().sigmoid()
    for one, meant in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.cpu().double(), meant, atol=1e-12, rtol=1e-5)


@settings(max_examples=int(25 * MORE), deadline=None)
@given(
    st.integers(1, 20), st.integers(1, 5), st.sampled_from([16, 40, 128, 1000]), st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 2**20),
)  # fmt: skip
def test_gated_norm_and_sigmoid_gate(tokens, heads, dim, dtype, in_place, seed):
    x, z = (
        random(seed, tokens, heads, dim, dtype=dtype),
        random(seed + 1, tokens, heads * dim + 8, dtype=dtype, scale=3),
    )
    weight = random(seed + 2, dim, dtype=dtype)
    gates = z.double()[:, 8:].unflatten(1, (heads, dim))
    expected = F.rms_norm(x.double(), (dim,), weight.double(), 1e-6) * F.silu(gates)
    tolerance = {"atol": 8 * ROUNDING[dtype], "rtol": 4 * ROUNDING[dtype]}
    for operation, meant in (
        (lambda x, z, out: triton_kernels.gated_norm(x, z, weight.to(DEVICE), 1e-6, out), expected),
        (triton_kernels.gated, x.double() * gates.sigmoid()),
    ):
        here = x.clone().to(DEVICE)
        got = operation(here, z.to(DEVICE)[:, 8:], here if in_place else None)
        assert got.dtype == dtype and (got is here) == in_place
        torch.testing.assert_close(got.cpu().double().view(meant.shape), meant, **tolerance)


# The dispatch to them.


@pytest.mark.parametrize("dims", [(32, 32), (512, 16)], ids=["small", "too wide for chunks"])
def test_operations_of_a_state_layer_are_those_of_the_reference(dims, monkeypatch):
    key_dim, value_dim = dims
    lengths, channels = [3, 1, 70], 2 * key_dim + 2 * value_dim
    starts, slots = starts_of(lengths), torch.tensor([1, 0, 3])
    x, weight = random(1, 74, channels + 8, dtype=torch.float16), random(2, channels, 4, dtype=torch.float16)
    ab, z, scale = random(3, 74, 4), random(4, 74, 2 * value_dim, dtype=torch.float16), random(5, value_dim).half()

    def run(device):
        matrices, inputs = random(6, 4, 2, key_dim, value_dim), random(7, 4, channels, 3, dtype=torch.float16)
        here = [t.to(device) for t in (x, weight, ab, z, scale, slots, starts, matrices, inputs)]
        a, b = here[2].split(2, 1)
        rows = here[5], here[5], here[6]
        qkv = ops.causal_conv(here[0][:, 8:], here[1], None, here[8], StateSlots(*rows), silu=True)
        g, beta = ops.delta_gates(a, b, here[2][0, :2], here[2][1, :2])
        y = ops.delta_rule(qkv, g, beta, here[7], StateSlots(*rows), key_heads=1)
        y = ops.gated_norm(y, here[3], here[4], 1e-6)
        return [t.cpu() for t in (ops.gated(y.flatten(1), here[3]), here[7], here[8])]

    monkeypatch.setattr(ops, "_kernels_of", lambda x: state_reference)
    expected = run("cpu")
    monkeypatch.setattr(ops, "_kernels_of", lambda x: triton_kernels)
    for got, meant in zip(run(DEVICE), expected, strict=True):
        torch.testing.assert_close(got, meant, atol=1e-2, rtol=1e-2)
