"""Captured sweeps give the tokens of others.

On a card those others are sweeps launched kernel by kernel. `test_triton.py` runs this file in a process of its own,
with Triton's interpreter, where a capture is the launches once more, and the others are sweeps of the CPU's kernels.
"""

import random
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from thorough import quick_or
from tiered import make_parts, make_policy
from tiny_models import make_tiny_model
from triton_device import DEVICE

from batchgen.core.device import Device
from batchgen.core.plan import MemoryPlan, Policy
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.parts import EngineParts
from batchgen.models.checkpoint import dummy_checkpoint
from batchgen.models.hf.config import config_of_hf
from batchgen.models.tokenizers.tokenizer import NoText
from batchgen.ops import dispatch as ops
from batchgen.ops import state_dispatch
from batchgen.ops import triton as triton_kernels
from batchgen.runtime import graphs, token_table
from batchgen.runtime.in_memory import in_memory
from batchgen.runtime.memory.weight_packing import WeightPacker
from batchgen.runtime.sampler import sample
from batchgen.schedule.packed_batch import pack

BLOCKS, BLOCK_SIZE, SEQS = 160, 16, 20
TIER = "cpu" if DEVICE.type == "cpu" else "gpu"
_random = random.Random(5)
# Rows start in the order of their prompts: that of this list.
PROMPTS = [[row, *(_random.randrange(96) for _ in range(n - 1))] for row, n in enumerate((5, 30, 17, 1, 40, 22))]
LENGTHS = [4, 7, 5, 7, 6, 3]
if DEVICE.type == "cpu":  # where every program is interpreted
    PROMPTS, LENGTHS = quick_or((PROMPTS[:3], [3, 6, 4]), (PROMPTS, LENGTHS))

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128,
    "dtype": "float32",
}  # fmt: skip
WINDOWS = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20,
}  # fmt: skip
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 64,
    "dtype": "float32",
    "do_layer_norm_before": True,
}  # fmt: skip
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
}  # fmt: skip
QWEN_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "full_attention_interval": 2,
}  # fmt: skip


def weights_as_on_a_card(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(ops, "pack_weight", lambda weight, **_: weight)
        monkeypatch.setattr(ops, "bind_weight", lambda weight, isa: weight)
        monkeypatch.setattr(WeightPacker, "splits_experts", False)
        monkeypatch.setattr(ops, "multiplies_packed", lambda device: True)


def kernels_as_on_a_card(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(ops, "_has_kernels", lambda *a: False)
        monkeypatch.setattr(ops, "device_kernels", lambda device: triton_kernels)
        monkeypatch.setattr(state_dispatch, "_kernels_of", lambda x: triton_kernels)
        monkeypatch.setattr(ops, "linear", linear_as_on_a_card)
        monkeypatch.setattr(
            ops,
            "prepare_attention",
            lambda plan, operands, device, **_: triton_kernels.prepare_attention(plan, operands, device),
        )


def linear_as_on_a_card(x, weight, bias=None, **options):
    """Multiply packed rows by a card's kernels, and weights that are numbers as the CPU does."""
    packed = isinstance(weight, torch.Tensor) and weight.dtype == torch.uint8
    return (triton_kernels.packed_linear if packed else _linear)(x, weight, bias, **options)


_linear = ops.linear


def capture_sweeps(executor, most_tokens=SEQS):
    executor.capture_sweeps(executor.lanes._driver if DEVICE.type == "cuda" else _Again(), most_tokens)


def engine(config, monkeypatch, *, captured, **policy_fields):
    if captured:
        weights_as_on_a_card(monkeypatch)
    executor = in_memory(config, dummy_checkpoint(config), torch.float32, BLOCKS, BLOCK_SIZE, DEVICE)
    if captured:
        kernels_as_on_a_card(monkeypatch)
        capture_sweeps(executor, captured)
    tier = TIER
    policy = Policy(
        admission="static", gpu_batch_size=SEQS, num_gpu_batches=1, max_num_batched_tokens=512,
        max_model_len=config.max_position, kv_block_size=BLOCK_SIZE, kv_blocks={tier: BLOCKS}, share_prefixes=True,
        weight_format="float32", kv_format="float32", kv_seqs={tier: SEQS},
    )  # fmt: skip
    policy = replace(policy, **policy_fields)
    slots = {tier: BLOCKS} if config.state is not None else {}
    memory = MemoryPlan({}, {}, policy.kv_blocks, 0, 512, state_slots=slots)
    windows = frozenset(config.windows)
    parts = EngineParts(
        config, NoText(), executor, lambda sweep, **_: [sweep],
        lambda batch: pack(batch, kv_block_size=BLOCK_SIZE, key_bytes=256, windows=windows, compute_tier=tier),
        sample, policy, memory, frozenset(), "float32", 0, tier,
    )  # fmt: skip
    return Engine.from_parts(parts)


class _Again:
    def __init__(self):
        self.captured = 0

    def capture(self, work):
        self.captured += 1
        return work


def tokens(engine, **sampling):
    requests = [
        Request(p, SamplingParams(max_tokens=n, ignore_eos=True, **sampling))
        for p, n in zip(PROMPTS, LENGTHS, strict=True)
    ]
    with engine:
        done = sorted(engine.generate(requests), key=lambda c: c.index)
    return [c.samples[0].token_ids for c in done]


CONFIGS = {"llama": LLAMA, "windows": LLAMA | WINDOWS, "opt": OPT, "experts": LLAMA | QWEN_MOE}
CONFIGS["states"] = LLAMA | QWEN_MOE | QWEN_NEXT


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_captured_sweeps_give_the_same_tokens(config, monkeypatch):
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    config = config_of_hf(config)
    expected = tokens(engine(config, monkeypatch, captured=0))
    made = engine(config, monkeypatch, captured=SEQS)
    made_graphs = made.parts.executor.context.graphs
    replayed = count_replays(made_graphs)
    assert tokens(made) == expected
    assert len(replayed) >= 3 and all(chooses for chooses, _ in replayed)
    assert any(size.tokens % 8 == 0 for size in made_graphs._buffers)


def count_replays(made_graphs):
    """A list to which each replay is added: (whether it chooses tokens, number of prompts' tokens)."""
    replayed, run = [], made_graphs.run

    def noted(sweep, hidden):
        buffers, count = made_graphs._buffers[sweep.size], sweep.packed.num_tokens
        if buffers is None or buffers.replay is None:
            return run(sweep, hidden)
        replayed.append((sweep.chooses, count - len(sweep.packed.logits_rows)))
        if buffers.hidden is not None:  # what an earlier sweep left must not matter
            buffers.hidden.fill_(float("nan"))
        buffers.memory.fill_(1 << 20)
        result = run(sweep, hidden)
        assert all((slots[count:] == graphs.NOT_STORED).all() for slots in buffers.slots.values())
        return result

    made_graphs.run = noted
    return replayed


@pytest.mark.parametrize("case", ["random draws", "embedded on the host"])
def test_captured_layers_are_between_what_is_launched(case, monkeypatch):
    """Where tokens are drawn at random, or the embedding is not on the device."""
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    config, sampling = config_of_hf(LLAMA), {"temperature": 0.7} if case == "random draws" else {}
    expected = tokens(engine(config, monkeypatch, captured=0), **sampling)
    made = engine(config, monkeypatch, captured=SEQS)
    if case == "embedded on the host":
        made.parts.executor.context.graphs.embeds = False
    replayed = count_replays(made.parts.executor.context.graphs)
    assert tokens(made, **sampling) == expected
    assert replayed and all(chooses == (case != "random draws") for chooses, _ in replayed)


def test_graphs_are_captured_again_when_the_memory_beside_them_has_moved(monkeypatch):
    """The table of sampled tokens, and the memory of logits, grow with the sequences in flight."""
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    monkeypatch.setattr(token_table, "_FIRST_PLACES", 2)
    config = config_of_hf(LLAMA)
    expected = tokens(engine(config, monkeypatch, captured=0, **ARRIVING))
    made = engine(config, monkeypatch, captured=16, **ARRIVING)
    context, forgotten = made.parts.executor.context, []
    context.tokens, forget = token_table.TokenTable(DEVICE), context.graphs.forget
    context.graphs.forget = lambda: forgotten.append(len(context.tokens._ids)) or forget()
    assert tokens(made) == expected
    assert len(set(forgotten)) > 1


@pytest.mark.skipif(find_spec("xxhash") is None, reason="4-bit weights come from a store, which needs xxhash")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_captured_sweeps_take_the_weights_of_each_layer_in_4_bits(family, monkeypatch, tmp_path):
    """All layers share the buffers that they are expanded into. In small sweeps they are multiplied as they are."""
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    path = tmp_path / "model"
    make_tiny_model(family, path, num_hidden_layers=2)
    device, folder = Device(DEVICE.type), tmp_path / "offload"
    policy = make_policy(path, device, weight_format="int4", embedding_tier="cpu" if DEVICE.type == "cpu" else "gpu")
    given, replays = [], []
    for captured, packed_tokens in ((False, 0), (True, 0), (False, 1 << 20), (True, 8)):
        weights_as_on_a_card(monkeypatch)
        parts = make_parts(path, device, replace(policy, packed_tokens=packed_tokens), folder)
        kernels_as_on_a_card(monkeypatch)
        executor = parts.executor
        executor.context.graphs = None
        if packed_tokens > policy.max_num_batched_tokens:
            monkeypatch.setattr(executor.weights, "dequantize", None)
        if captured:
            capture_sweeps(executor)
            replays.append(count_replays(executor.context.graphs))
        given.append(tokens(Engine.from_parts(parts)))
    assert given == [given[0]] * 4
    assert sum(map(len, replays)) >= 4


# Prompts arrive while others decode, in parts of up to 16 tokens.
ARRIVING = {"admission": "continuous", "gpu_batch_size": 2, "max_num_batched_tokens": 16}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_captured_sweeps_may_have_prompts(config, monkeypatch):
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    config = config_of_hf(config)
    expected = tokens(engine(config, monkeypatch, captured=0, **ARRIVING))
    made = engine(config, monkeypatch, captured=16, **ARRIVING)
    replayed = count_replays(made.parts.executor.context.graphs)
    assert tokens(made) == expected
    assert sum(more > 0 for _, more in replayed) >= 2


def test_a_captured_sweep_may_ask_for_no_logits(monkeypatch):
    """One that has a part of a prompt alone."""
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    config, alone = config_of_hf(LLAMA), ARRIVING | {"gpu_batch_size": 1, "kv_seqs": {TIER: 1}}
    expected = tokens(engine(config, monkeypatch, captured=0, **alone))
    made = engine(config, monkeypatch, captured=16, **alone)
    replayed = count_replays(made.parts.executor.context.graphs)
    assert tokens(made) == expected
    assert any(more == 16 for _, more in replayed)


def test_larger_sweeps_are_not_captured(monkeypatch):
    made = engine(config_of_hf(LLAMA), monkeypatch, captured=SEQS)
    seen = []
    sweep = made.parts.executor.context.graphs.sweep
    made.parts.executor.context.graphs.sweep = lambda packed, kept=None: (
        seen.append((packed.num_tokens, sweep(packed, kept))) or seen[-1][1]
    )
    tokens(made)
    assert seen[0] == (sum(map(len, PROMPTS)), None)


def sized(*programs, tokens=8):
    """The size of sweeps with one window and so many items of few and of many rows, and merges."""
    few, many, merges = programs
    return graphs.Size(tokens, None, ((None, triton_kernels.Capacity(few, many, 512, merges, 512)),))


def test_a_graph_serves_sweeps_that_leave_few_of_its_programs_without_work():
    large = sized(1024, 64, 0)
    assert large.serves(large) and large.serves(sized(512, 0, 0)) and large.serves(sized(256, 64, 0))
    assert not large.serves(sized(128, 8, 0))
    assert not large.serves(sized(1024, 64, 8)) and not large.serves(sized(1024, 64, 0, tokens=16))
    assert sized(64, 64, 128).serves(sized(8, 0, 0))  # too few to matter


def test_a_graph_serves_sweeps_of_somewhat_fewer_tokens():
    large = sized(64, 0, 0, tokens=640)
    assert large.serves(sized(64, 0, 0, tokens=480)) and not large.serves(sized(64, 0, 0, tokens=472))
    assert not large.serves(sized(64, 0, 0, tokens=648))
    with_rows = replace(large, rows=256)
    assert with_rows.serves(replace(with_rows, rows=192)) and not with_rows.serves(large)
    assert not with_rows.serves(replace(with_rows, rows=184)) and not with_rows.serves(replace(with_rows, rows=264))
    with_states = replace(large, sequences=8)
    assert with_states.serves(with_states) and not with_states.serves(replace(with_states, tokens=632))


def test_a_size_that_serves_two_has_the_larger_of_each_length():
    both = sized(16, 0, 8).enlarged(sized(8, 64, 0))
    assert both == sized(16, 64, 8)
    assert both.serves(sized(16, 0, 8)) and both.serves(sized(8, 64, 0))


def test_few_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    made = engine(config_of_hf(LLAMA), monkeypatch, captured=SEQS)
    kept = made.parts.executor.context.graphs
    assert len(tokens(made)) == len(PROMPTS)
    assert len(kept._buffers) <= 2


@pytest.mark.parametrize("most", [1, 8, 20, 100, 512])
def test_sizes_are_few_and_not_much_too_large(most):
    sizes = {graphs.rounded_up(n) for n in range(1, most + 1)}
    assert len(sizes) <= 40
    assert all(n <= graphs.rounded_up(n) <= max(8, 1.25 * n) + 7 for n in range(1, most + 1))
