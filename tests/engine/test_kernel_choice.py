"""Models whose shapes run on what was chosen for each, by the plain twins of the sets that this machine may lack."""

import dataclasses
import itertools

import numpy as np
import pytest
from model_tables import MODELS
from thorough import some_of
from tiered import CPU, EMULATED, make_parts, make_policy

from batchgen.core.kernel_choice import TORCH, KernelChoice, Measured
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.files import read_config, resolve_model
from batchgen.ops import cpp, dispatch
from batchgen.ops.attention_plan import SequenceSlice, SweepTables, plan_attention
from batchgen.ops.cpp import BoundWeight, PackedWeight

pytestmark = pytest.mark.usefixtures("one_thread")

SETS = (*cpp.plain_twins(), *cpp.instruction_sets())
SAMPLING = SamplingParams(max_tokens=5, logprobs=1, ignore_eos=True)
PROMPTS = [[(7 * i + j * j) % 500 + 4 for j in range(n)] for i, n in enumerate((1, 3, 16, 40, 9, 2, 5))]


def chosen(path, dtype, isas):
    """Its shapes on the sets, in turn."""
    keys, turns = read_config(resolve_model(str(path))).kernel_keys(dtype), itertools.cycle(isas)
    linear = {key: Measured(next(turns)) for key in keys[:-1]}
    return KernelChoice(linear, {keys[-1]: Measured(next(isa for isa in turns if isa != TORCH))}, "scalar")


def answers(path, dtype, policy, stores, device=CPU, kernels=None, prompts=PROMPTS):
    """Tokens and their logprobs, to the last bit."""
    options = {} if kernels is None else {"kernels": kernels}
    parts = make_parts(path, device, policy, stores, dtype=dtype, **options)
    with Engine.from_parts(parts, sampling=SAMPLING) as engine:
        done = sorted(engine.generate([Request(prompt) for prompt in prompts]), key=lambda c: c.index)
    assert not any(c.error for c in done)
    return [(c.samples[0].token_ids, [p.chosen.logprob for p in c.samples[0].logprobs]) for c in done]


def policies(path, dtype):
    """Weights that are packed, that are read from disk as they lie, and that come over a link."""
    fields = {"weight_format": dtype, "kv_format": dtype, "max_num_batched_tokens": 512}
    memory = make_policy(path, CPU, **fields)
    count = sum(next(iter(memory.weight_layers.values())))
    streamed = dict.fromkeys(memory.weight_layers, (0, count, 0))
    on_disk = dict.fromkeys(memory.weight_layers, (0, 0, count))
    return {
        "memory": (CPU, memory),
        "disk": (CPU, dataclasses.replace(memory, weight_layers=on_disk)),
        "streamed": (EMULATED, make_policy(path, EMULATED, weight_layers=streamed, head_tier="cpu", **fields)),
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", SETS)
def test_all_on_one_set_is_that_set_for_the_process(isa, dtype, tiny_models, tmp_path):
    """But for norms and logprobs, which the process's set goes on making."""
    path, _ = tiny_models("llama")
    for tier, (device, policy) in some_of(policies(path, dtype).items(), 1, isa, dtype):
        with cpp.using(isa):
            expected = answers(path, dtype, policy, tmp_path, device)
        got = answers(path, dtype, policy, tmp_path, device, chosen(path, dtype, [isa]))
        for (tokens, a), (wanted, b) in zip(got, expected, strict=True):
            assert tokens == wanted, tier
            assert a == pytest.approx(b, abs=0.1 if dtype == "bfloat16" else 1e-4)


def test_sets_round_differently_so_that_the_above_means_something(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    _, policy = policies(path, "bfloat16")["memory"]
    found = {str(answers(path, "bfloat16", policy, tmp_path, kernels=chosen(path, "bfloat16", [isa]))) for isa in SETS}
    assert len(found) > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tier", ["memory", "disk", "streamed"])
def test_rows_do_not_depend_on_those_beside_them_whatever_was_chosen(tier, dtype, tiny_models, tmp_path):
    path, _ = tiny_models("qwen3")
    device, policy = policies(path, dtype)[tier]
    policy = dataclasses.replace(policy, share_prefixes=False)
    mixed = chosen(path, dtype, SETS)
    together = answers(path, dtype, policy, tmp_path, device, mixed)
    alone = [answers(path, dtype, policy, tmp_path, device, mixed, [prompt])[0] for prompt in PROMPTS[2:5]]
    assert alone == together[2:5]


@pytest.mark.parametrize("model", some_of(MODELS, 12, "kernels"))
def test_tokens_are_those_of_the_process_whatever_was_chosen(model, tiny_models, tmp_path):
    """fp32, every family; torch's own linear among the sets."""
    family, overrides = MODELS[model]
    path, _ = tiny_models(family, **overrides)
    _, policy = policies(path, "float32")["memory"]
    plain = answers(path, "float32", policy, tmp_path)
    mixed = answers(path, "float32", policy, tmp_path, kernels=chosen(path, "float32", [TORCH, *SETS]))
    assert [tokens for tokens, _ in mixed] == [tokens for tokens, _ in plain]
    for (_, a), (_, b) in zip(mixed, plain, strict=True):
        assert a == pytest.approx(b, abs=1e-3)


def test_weights_are_bound_to_what_their_shape_runs_on(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    names = chosen(path, "bfloat16", SETS).names()
    for device, policy in policies(path, "bfloat16").values():
        parts = make_parts(path, device, policy, tmp_path, dtype="bfloat16", kernels=chosen(path, "bfloat16", SETS))
        weights = parts.executor.weights
        found = [w for w in weights.layer(1, 0).values() if isinstance(w, (PackedWeight, BoundWeight))]
        rows = [weights.vocabulary_chunk(0, 0)[1]]
        parts.executor.close()
        assert len(found) == 4
        for weight in found:
            assert weight.isa == names["{}x{} bfloat16".format(*weight.shape)]
        assert {weight.isa for weight in rows} == {names["512x64 bfloat16"]}, "a chunk runs as the whole"


def test_a_set_that_is_not_there_is_an_error():
    weight = dispatch.bind_weight(cpp.torch.ones(8, 16), "mmx")
    with pytest.raises(ValueError, match="mmx is not there; this machine has"):
        dispatch.linear(cpp.torch.ones(2, 16), weight)
    packed = dataclasses.replace(cpp.pack(cpp.torch.ones(8, 16)), isa="mmx")
    with pytest.raises(ValueError, match="mmx is not there"):
        dispatch.linear(cpp.torch.ones(2, 16), packed)


def test_a_packed_weight_is_read_by_the_set_it_was_packed_for():
    """Whatever the process's set is by then."""
    x, w = (cpp.torch.randn(n, 64, generator=cpp.torch.Generator().manual_seed(n)).bfloat16() for n in (5, 48))
    for packing, running in itertools.permutations(SETS, 2):
        with cpp.using(packing):
            packed, expected = cpp.pack(w), cpp.linear(x, w)
        with cpp.using(running):
            assert cpp.torch.equal(cpp.linear(x, packed), expected)
            assert cpp.torch.equal(cpp.linear(x, BoundWeight(w, packing)), expected)


def test_attention_runs_on_the_set_of_its_plan():
    """To the last bit, whatever the process's set is."""
    sequences = [
        SequenceSlice(1, 40, np.arange(3, dtype=np.int32)),
        SequenceSlice(20, 30, np.arange(3, 7, dtype=np.int32)),
    ]
    plan = plan_attention(SweepTables.of(sequences), [], kv_block_size=16, key_bytes=128)
    generator = cpp.torch.Generator().manual_seed(5)
    q = cpp.torch.randn(21, 8, 64, generator=generator).bfloat16()
    kv = cpp.torch.randn(7, 2, 2, 16, 64, generator=generator).bfloat16()
    found = {}
    for isa in SETS:
        with cpp.using(isa):
            found[isa] = cpp.attention(q, kv, cpp.attention_plan(plan, 2, 4, 16, 128))
    for isa, running in itertools.permutations(SETS, 2):
        with cpp.using(running):
            assert cpp.torch.equal(cpp.attention(q, kv, cpp.attention_plan(plan, 2, 4, 16, 128, isa)), found[isa])
    assert not cpp.torch.equal(found["amx_plain"], found["scalar"])
