"""The operations of state layers in torch (`state_reference`) against transformers' Gated DeltaNet, and against
themselves where prompts are cut and states move between slots."""

import itertools

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from batchgen.ops import state_dispatch as ops
from batchgen.ops import state_reference
from batchgen.ops.state_slots import StateSlots

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 6, 16, 24, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
LENGTHS = (1, 130, 64, 1, 7, 65, 200, 1)


def random(seed, *shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def operands(tokens, seed=0):
    """qkv, g and beta; some tokens decay so strongly that nothing of what was before them is left."""
    g = -random(seed + 1, tokens, VALUE_HEADS).exp()
    g[3::17] = -20.0
    return random(seed, tokens, CHANNELS, scale=2), g, random(seed + 2, tokens, VALUE_HEADS).sigmoid()


def heads_of(qkv):
    parts = qkv.split((KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM), dim=1)
    shapes = ((KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM))
    return [part.unflatten(1, shape)[None] for part, shape in zip(parts, shapes, strict=True)]


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def update(qkv, g, beta, states, source, target, lengths):
    source, target = torch.tensor(source), torch.tensor(target, dtype=torch.int32)
    starts = starts_of(lengths)
    return state_reference.delta_rule(qkv, g, beta, states, StateSlots(source, target, starts), key_heads=KEY_HEADS)


@pytest.mark.parametrize("rule", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_the_delta_rule_of_sequences_of_any_length_is_that_of_transformers(rule):
    qkv, g, beta = operands(sum(LENGTHS))
    states = random(5, 20, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    before = states.clone()
    source = [-1, 3, -1, 4, 5, 5, 7, 8]  # two begin at one state
    target = [0, 1, 2, 4, 9, 10, 7, 11]
    out = update(qkv, g, beta, states, source, target, LENGTHS)
    bounds = starts_of(LENGTHS).tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        initial = None if source[i] < 0 else before[source[i]][None]
        gates = {"g": g[None, start:stop], "beta": beta[None, start:stop]}
        q, k, v = heads_of(qkv[start:stop])
        if rule is torch_recurrent_gated_delta_rule:
            q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for x in (q, k))
        expected, after = rule(
            q, k, v, **gates, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(out[start:stop], expected[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(states[target[i]], after[0], atol=2e-5, rtol=2e-5)
    untouched = [slot for slot in range(20) if slot not in target]
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("cuts", [(1,), (63,), (64,), (65, 66), (1, 2, 3, 4), (100, 129)])
def test_a_prompt_cut_anywhere_ends_in_the_same_state(cuts):
    qkv, g, beta = operands(130)
    states = torch.zeros(2, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    whole = update(qkv, g, beta, states, [-1], [0], [130])
    parts, source = [], -1
    for start, stop in zip((0, *cuts), (*cuts, 130), strict=True):
        some = slice(start, stop)
        parts.append(update(qkv[some], g[some], beta[some], states, [source], [1], [stop - start]))
        source = 1
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[1], states[0], atol=1e-5, rtol=1e-5)


def test_states_in_bf16_are_rounded_after_the_sums():
    qkv, g, beta = operands(9)
    states = random(3, 2, VALUE_HEADS, KEY_DIM, VALUE_DIM).bfloat16()
    exact = states.float()
    out = update(qkv, g, beta, states, [0, 1], [0, 1], [8, 1])
    torch.testing.assert_close(out, update(qkv, g, beta, exact, [0, 1], [0, 1], [8, 1]))
    assert torch.equal(states, exact.bfloat16())


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_convolution_of_each_sequence_is_that_of_torch(silu, with_bias):
    x = random(1, sum(LENGTHS), CHANNELS + 5)[:, :CHANNELS]
    weight, bias = random(2, CHANNELS, KERNEL), random(3, CHANNELS) if with_bias else None
    states = random(4, 12, CHANNELS, KERNEL - 1)
    before = states.clone()
    source, target = torch.tensor([-1, 3, 4, 4, 6, 7, -1, 9]), torch.tensor([0, 1, 2, 4, 6, 8, 7, 9])
    starts = starts_of(LENGTHS)
    out = state_reference.causal_conv(x, weight, bias, states, StateSlots(source, target, starts), silu=silu)
    for i, slot in enumerate(source.tolist()):
        first = torch.zeros_like(before[0]) if slot < 0 else before[slot]
        inputs = torch.cat((first, x[starts[i] : starts[i + 1]].t()), 1)
        expected = torch.nn.functional.conv1d(inputs[None], weight[:, None], bias, groups=CHANNELS)[0].t()
        expected = torch.nn.functional.silu(expected) if silu else expected
        torch.testing.assert_close(out[starts[i] : starts[i + 1]], expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(states[target[i]], inputs[:, -KERNEL + 1 :])


def test_a_sequence_without_tokens_has_its_state_copied():
    states, conv = random(1, 3, VALUE_HEADS, KEY_DIM, VALUE_DIM), random(2, 3, CHANNELS, KERNEL - 1)
    qkv, g, beta = operands(0)
    nothing = torch.tensor([0, 0])
    update(qkv, g, beta, states, [1], [2], [0])
    weight = random(3, CHANNELS, KERNEL)
    state_reference.causal_conv(
        qkv, weight, None, conv, StateSlots(torch.tensor([1]), torch.tensor([2]), nothing), silu=True
    )
    assert torch.equal(states[2], states[1]) and torch.equal(conv[2], conv[1])


def test_gates_that_leave_nothing_make_no_nan():
    qkv, g, beta = operands(128)
    states = random(1, 1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    out = update(qkv, torch.full_like(g, -20.0), beta, states, [0], [0], [128])
    assert out.isfinite().all() and states.isfinite().all()


def test_a_layer_of_these_operations_is_transformers_gated_delta_net():
    hidden, rows = 40, 130
    config = Qwen3_5TextConfig(
        hidden_size=hidden,
        num_hidden_layers=1,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=KERNEL,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    layer = Qwen3_5GatedDeltaNet(config, 0)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.4)
    x = random(1, rows, hidden)
    expected = layer(x[None])[0]

    conv, states = torch.zeros(1, CHANNELS, KERNEL - 1), torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    slots = (torch.tensor([-1]), torch.tensor([0]), torch.tensor([0, rows]))
    with torch.no_grad():
        z = layer.in_proj_z(x)
        mixed = ops.causal_conv(
            layer.in_proj_qkv(x), layer.conv1d.weight.squeeze(1), None, conv, StateSlots(*slots), silu=True
        )
        g, beta = ops.delta_gates(layer.in_proj_a(x), layer.in_proj_b(x), layer.A_log, layer.dt_bias)
        y = ops.delta_rule(mixed, g, beta, states, StateSlots(*slots), key_heads=KEY_HEADS)
        y = ops.gated_norm(y, z, layer.norm.weight, layer.norm.variance_epsilon)
        torch.testing.assert_close(layer.out_proj(y.flatten(1)), expected, atol=2e-4, rtol=2e-4)


def test_the_output_gate_may_be_a_view_of_heads():
    x, both = random(1, 5, 12), random(2, 5, 2, 2, 6)
    assert torch.allclose(ops.gated(x, both[:, :, 1]), x * torch.sigmoid(both[:, :, 1].flatten(1)))
