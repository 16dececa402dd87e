"""Budgets are kept: what the plan reserves bounds what is used, and what it refuses would not have fitted."""

import contextlib
import itertools
import math
import random
import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from thorough import covering, some_of
from tiered import BUDGETS, CPU, EMULATED, everything_moves, make_parts, make_policy, make_request, make_requests, run
from torch.profiler import ProfilerActivity, profile

from batchgen.core.direct_io import ALIGNMENT
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.machine import resident_bytes
from batchgen.core.plan import PINNED_BYTES
from batchgen.core.request import ScoreRequest
from batchgen.core.units import parse_bytes
from batchgen.engine import loader as loading
from batchgen.engine.engine import Engine
from batchgen.engine.loader import plan_load
from batchgen.models.files import resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.planner.sizes import DEVICE_WORKSPACE_BYTES, workspace_bytes
from batchgen.runtime.memory.transfers import Arena
from batchgen.runtime.memory.weights import Weights
from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.residency import WeightResidency

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20
# Of the workspace, which is there for attention's gathers and tiles of scores, these small models need no more.
ATTENTION_BYTES = 8 * MIB
SHAPE = {
    "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 512,
    "vocab_size": 4000,
}  # fmt: skip
WIDE = {
    "opt": SHAPE | {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "llama": SHAPE | {"intermediate_size": 1408, "num_key_value_heads": 2},
}
BATCH_TOKENS = 1500


def prompts_of(count, length, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(4, 500) for _ in range(length)] for _ in range(count)]


def peak_of_tensors(work):
    """The most bytes of tensors that `work` holds at once of those it makes; pools and buffers are mapped apart."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


# Prompts of 120 tokens that fill every micro-batch, some of them in sweeps in which earlier ones decode.
POLICIES = {
    "one batch": {"num_gpu_batches": 1, "gpu_batch_size": 12, "kv_seqs": {"gpu": 12}, "activation_batches": (1, 0)},
    "three batches": {"kv_seqs": {"gpu": 36}, "activation_batches": (3, 0)},
    "activations on the host": {"kv_seqs": {"gpu": 36}, "activation_batches": (0, 3)},
    "streamed, 5-bit": {"kv_seqs": {"streamed": 36}, "activation_batches": (1, 2), "kv_format": "int5"},
    "streamed in one of two layers": {"kv_seqs": {"streamed": 36}, "activation_batches": (3, 0), "kv_layers": 1},
    "delegated": {"kv_seqs": {"cpu": 36}, "activation_batches": (3, 0)},
    "unequal batches": {
        "num_gpu_batches": 2, "kv_seqs": {"gpu": 8, "cpu": 16}, "activation_batches": (1, 1), "batch_order": "neo",
        "balance_tokens": 50,
    },
    "all together": {
        "kv_seqs": {"gpu": 9, "cpu": 9, "streamed": 9, "disk": 9}, "activation_batches": (1, 2), "head_tier": "cpu",
    },
}  # fmt: skip


CASES = [*((kind, None) for kind in POLICIES), ("one batch", 200), ("all together", 200)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "chunk"), some_of([(family, *case) for family in WIDE for case in CASES], 6, "sweeps")
)
def test_what_is_reserved_bounds_what_a_sweep_makes(tiny_models, tmp_path, monkeypatch, family, kind, chunk):
    """Serially, in one thread, so that peaks of different Steps do not add up by chance. Activations that cross between
    the memories have fixed buffers, with reservations of their own; so does the output matrix's result, where it comes
    in vocabulary chunks."""
    if chunk:
        for module in ("planner.sizes", "engine.loader"):
            monkeypatch.setattr(f"batchgen.{module}.chunk_tokens", lambda *_, **__: chunk)
    model = tiny_models(family, **WIDE[family])[0]
    fields = {"gpu_batch_size": 12, "num_gpu_batches": 3, "share_prefixes": False} | POLICIES[kind]
    tokens = BATCH_TOKENS * fields["num_gpu_batches"]
    policy = make_policy(model, EMULATED, max_num_batched_tokens=tokens, **fields)
    parts = make_parts(
        model, EMULATED, policy, tmp_path, serial=True, longest_tokens=128, most_kv_tokens=128 * policy.max_num_seqs
    )
    rows = make_requests(prompts_of(policy.max_num_seqs + 8, 120), [1, 2, 3, 4] * ((policy.max_num_seqs + 8) // 4))
    with Engine.from_parts(parts) as engine:
        peak = peak_of_tensors(lambda: list(engine.generate(rows)))
        assert engine.stats.generated_tokens == sum(r.sampling.max_tokens for r in rows)
        peak += parts.executor.context.activations.num_bytes
    reserved = parts.memory.parts["gpu"]["activations"] - DEVICE_WORKSPACE_BYTES
    reserved += parts.memory.parts["cpu"]["activations"] - workspace_bytes(128) - PINNED_BYTES
    reserved += parts.memory.parts["gpu"].get("logits", 0)
    assert peak <= reserved + ATTENTION_BYTES
    assert peak > (1 if chunk else 2) * ATTENTION_BYTES, "too small to tell"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    some_of(itertools.product(WIDE, ("one batch", "activations on the host", "all together")), 3, "scoring"),
)
def test_what_is_reserved_bounds_what_scoring_makes(tiny_models, tmp_path, monkeypatch, family, kind):
    """Every token's logits asked for: more rows than are made together, by far."""
    monkeypatch.setattr("batchgen.planner.sizes.logit_rows", lambda *_: 200)
    model = tiny_models(family, **WIDE[family])[0]
    fields = {"gpu_batch_size": 12, "num_gpu_batches": 3, "share_prefixes": False} | POLICIES[kind]
    tokens = BATCH_TOKENS * fields["num_gpu_batches"]
    policy = make_policy(model, EMULATED, max_num_batched_tokens=tokens, **fields)
    parts = make_parts(
        model, EMULATED, policy, tmp_path, serial=True, longest_tokens=128, most_kv_tokens=128 * policy.max_num_seqs,
        task="score",
    )  # fmt: skip
    rows = [ScoreRequest((), (text,), logprobs=5) for text in prompts_of(policy.max_num_seqs + 8, 120)]
    with Engine.from_parts(parts) as engine:
        peak = peak_of_tensors(lambda: list(engine.score(rows)))
        assert engine.stats.scored_tokens == 120 * len(rows)
        peak += parts.executor.context.activations.num_bytes
    reserved = parts.memory.parts["gpu"]["activations"] - DEVICE_WORKSPACE_BYTES
    reserved += parts.memory.parts["cpu"]["activations"] - workspace_bytes(128) - PINNED_BYTES
    assert "logits" not in parts.memory.parts["gpu"] and parts.memory.logit_rows == 200
    assert ATTENTION_BYTES < peak <= reserved + ATTENTION_BYTES


def test_freed_memory_does_not_count_as_the_process(monkeypatch):
    """Memory that imports and a tokenizer have freed is given back to the system before the process is counted."""
    monkeypatch.setattr(loading, "TYPICAL_PROCESS_BYTES", 1 << 50)  # so that no garbage is collected
    before = loading.process_bytes()
    blocks = [bytes(60_000) for _ in range(2000)]
    assert loading.process_bytes() > before + 80 * MIB
    del blocks[:-1]
    assert loading.process_bytes() < before + 20 * MIB


class Guesses:
    """Drafts as many tokens as a sequence may have."""

    def begin(self, sequences):
        pass

    def propose(self, sequence, most):
        return Proposal([5] * most, 0)

    def ended(self, sequence):
        pass


@pytest.mark.parametrize(
    ("what", "num_gpu_batches"), covering(itertools.product(("drafts", "scored prompts"), (1, 2)), 0, "held logits")
)
def test_what_is_reserved_bounds_logits_of_all_chunks_of_the_vocabulary(
    tiny_models, tmp_path, monkeypatch, what, num_gpu_batches
):
    """They are held for all rows of a sweep, which has more of them than sequences."""
    monkeypatch.setattr("batchgen.planner.sizes.logit_rows", lambda *_: 4)
    model = tiny_models("llama", num_hidden_layers=2, vocab_size=16000)[0]
    fields = {"num_gpu_batches": num_gpu_batches, "gpu_batch_size": 12 // num_gpu_batches, "kv_seqs": {"gpu": 12}}
    policy = make_policy(model, EMULATED, max_num_batched_tokens=500, head_tier="cpu", share_prefixes=False, **fields)
    parts = make_parts(
        model, EMULATED, policy, tmp_path, serial=True, longest_tokens=128, most_kv_tokens=128 * 12, task=None
    )
    rows = make_requests(prompts_of(16, 40), [6] * 16)
    if what == "scored prompts":
        rows = [replace(row, sampling=replace(row.sampling, prompt_logprobs=1)) for row in rows]
    drafts = (lambda: Drafting([Guesses()], always=12)) if what == "drafts" else 0
    with Engine.from_parts(parts, drafts=drafts) as engine:
        peak = peak_of_tensors(lambda: list(engine.generate(rows)))
        assert engine.stats.generated_tokens == 6 * len(rows)
        assert engine.stats.drafted_tokens > 20 or what != "drafts"
    of_a_row = parts.config.vocab_size * 4
    assert parts.memory.held_logit_rows == 12 + 4
    assert parts.memory.parts["gpu"]["logits"] == 16 * of_a_row
    others = parts.memory.parts["gpu"]["activations"] - DEVICE_WORKSPACE_BYTES
    assert 4 * of_a_row < peak <= 16 * of_a_row + others + MIB


TIERED = {
    "resident": {},
    "everything moves": None,
    "weights streamed": {
        "weight_layers": {"qkv": (1, 2, 0), "out": (0, 3, 0), "up": (0, 1, 2), "down": (3, 0, 0)},
        "embedding_tier": "gpu",
        "kv_seqs": {"gpu": 4, "cpu": 2, "disk": 2},
    },
    "KV of some layers": {"kv_seqs": {"streamed": 8}, "kv_layers": 2},
    "unequal batches": {
        "gpu_batch_size": 4, "num_gpu_batches": 2, "kv_seqs": {"gpu": 2, "cpu": 6}, "activation_batches": (1, 1),
        "batch_order": "neo",
        "balance_tokens": 50,
    },
    "5-bit KV, head in vocabulary chunks": {
        "kv_format": "int5", "kv_seqs": {"gpu": 2, "streamed": 6}, "head_tier": "cpu", "activation_batches": (0, 1),
    },
}  # fmt: skip

# Summaries of pages lie where these are chosen: on the accelerator, or where the CPU attends to some in host memory.
CHOOSING = {
    "chosen pages": {"kv_seqs": {"gpu": 2, "streamed": 4, "disk": 2}, "attention_budget": "10%"},
    "chosen pages of the disk alone": {"kv_seqs": {"disk": 8}, "attention_budget": "10%"},
    "chosen pages of KV of some layers": {"kv_seqs": {"streamed": 8}, "kv_layers": 2, "attention_budget": "10%"},
    "chosen pages beside CPU attention": {
        "kv_seqs": {"gpu": 2, "cpu": 2, "streamed": 2, "disk": 2}, "attention_budget": "10%",
    },
}  # fmt: skip


def tiered_policy(model, kind):
    changes = (TIERED | CHOOSING)[kind]
    return everything_moves(model) if changes is None else make_policy(model, EMULATED, **changes)


@pytest.mark.parametrize(("family", "kind"), some_of(itertools.product(("opt", "llama"), TIERED), 2, "just enough"))
def test_a_budget_that_is_just_enough(tiny_models, tmp_path, family, kind):
    """The smallest budget that is accepted carries a job of the longest rows it was made for.

    With 2 % less it is refused before weights are read, and the line that says so names a budget that does.
    """
    model = tiny_models(family)[0]
    policy = replace(tiered_policy(model, kind), max_model_len=128)

    def load(gpu_memory):
        budgets = {"gpu": gpu_memory, "cpu": 4 << 30, "disk": 1 << 30}
        return make_parts(model, EMULATED, policy, tmp_path, budgets=budgets, min_output_len=127, most_kv_tokens=1)

    low, high = DEVICE_WORKSPACE_BYTES, 64 * MIB  # refused, accepted
    while high - low > 32 << 10:
        middle = (low + high) // 2
        try:
            load(middle).executor.close()
            high = middle
        except InputError:
            low = middle
    parts = load(high)
    arena = parts.executor.weights.arenas["gpu"]
    assert arena.allocated_bytes <= sum(parts.memory.parts["gpu"].values()) <= high
    prompts = prompts_of(6, 100)
    found, _ = run(parts, prompts, [28] * 6)
    assert arena.allocated_bytes <= high, "it grew while it ran"
    plain = make_parts(model, CPU, make_policy(model, CPU, weight_format=policy.weight_format), tmp_path)
    if policy.kv_format != "int5":
        assert found == run(plain, prompts, [28] * 6)[0]
    else:
        plain.executor.close()

    with pytest.raises(InputError) as refused:
        load(int(high * 0.98))
    message = str(refused.value)
    assert "\n" not in message and "--gpu-memory" in message
    needed = parse_bytes(re.search(r"give at least ([\d.]+ \w+)", message)[1])
    assert 0.98 * high < needed < 1.1 * high
    load(needed).executor.close()


@pytest.mark.parametrize("kind", [*TIERED, *CHOOSING])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_what_is_planned_is_what_is_allocated(tiny_models, tmp_path, family, kind):
    """But for little: expanded biases and norms are counted, and there are none."""
    model = tiny_models(family)[0]
    parts = make_parts(model, EMULATED, tiered_policy(model, kind), tmp_path)
    try:
        planned, arenas = parts.memory.parts, parts.executor.weights.arenas
        on_gpu = sum(planned["gpu"].values())
        if parts.policy.head_tier == "cpu":  # the result of its chunks is made when it is needed
            on_gpu -= planned["gpu"]["logits"]
        unused = on_gpu - arenas["gpu"].allocated_bytes
        assert 0 <= unused <= 0.03 * planned["gpu"].get("expanded weights", 0)
        on_host = sum(planned["cpu"].values()) - planned["cpu"]["process"] - planned["cpu"]["activations"]
        assert 0.98 * on_host - 4096 <= arenas["cpu"].allocated_bytes <= on_host
        assert parts.executor.kv_cache.disk_bytes == planned["disk"].get("KV", 0)
    finally:
        parts.executor.close()


@pytest.mark.parametrize("part", ["whole", "first stage", "last stage", "hidden states"])
@pytest.mark.parametrize("tied", [True, False])
def test_tables_on_disk_are_planned_and_held_in_no_memory(tiny_models, tmp_path, part, tied):
    """Neither by a pipeline's stage, nor where no logits are made, of a store that has an output matrix."""
    model = tiny_models("llama", vocab_size=4000, tie_word_embeddings=tied)[0]
    request = make_request(model, CPU, make_policy(model, CPU, head_tier="disk", embedding_tier="disk"), tmp_path)
    stop = request.config.num_layers
    parts = {"first stage": (0, 1), "last stage": (1, stop)}
    config = request.config.stage(*parts[part]) if part in parts else request.config
    config = config.without_logits() if part == "hidden states" else config
    layers = dict.fromkeys(config.layer_tensors, (0, config.num_layers, 0))
    policy = replace(request.policy, weight_layers=layers)
    planned = plan_load(replace(request, config=config, policy=policy)).parts["cpu"]["weights"]
    residency = WeightResidency.of_policy(policy, config)
    with contextlib.closing(Weights(config, residency, torch.float32, store=request.store)) as weights:
        assert weights.num_bytes <= planned < 1.1 * weights.num_bytes


@pytest.mark.parametrize("weight_format", ["float32", "int8", "int4"])
@pytest.mark.parametrize("dense_size", [96, 330, 2001])  # beside 8 experts of 40
def test_buffers_that_serve_layers_of_two_kinds_are_planned(
    dense_size, weight_format, tiny_models, tmp_path, monkeypatch
):
    """One kind of layer may have the larger MLP, and the other a router and a shared expert beside it."""
    model = tiny_models("qwen2_moe", intermediate_size=dense_size, mlp_only_layers=[1], num_hidden_layers=2)[0]
    layers = dict.fromkeys(("qkv", "out", "up", "down"), (0, 2, 0))
    made, empty = defaultdict(int), Arena.empty

    def counted(arena, shape, dtype, what):
        made[arena.flag, what] += math.prod(shape) * dtype.itemsize
        return empty(arena, shape, dtype, what)

    monkeypatch.setattr(Arena, "empty", counted)
    parts = make_parts(
        model, EMULATED, make_policy(model, EMULATED, weight_layers=layers, weight_format=weight_format), tmp_path
    )
    parts.executor.close()
    planned, gpu = parts.memory.parts["gpu"], parts.executor.weights.arenas["gpu"].flag
    assert made[gpu, "weights in transit"] == planned["weights in transit"]
    of_norms_and_routers = (10 * parts.config.hidden_size + parts.config.qkv_size + 9 * parts.config.hidden_size) * 4
    unused = planned.get("expanded weights", 0) - made[gpu, "expanded weights"]
    assert 0 <= unused <= of_norms_and_routers


@pytest.mark.parametrize("weight_format", ["float32", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "opt"])
def test_what_was_read_is_not_kept_beside_what_was_packed(family, weight_format, tiny_models, tmp_path):
    """Norms and sinks lie in the same stretch of a store as matrices that products want in another order.

    OPT's positions beside embeddings that are the output matrix too.
    """
    model = tiny_models(family)[0]
    store = find_or_convert(
        resolve_model(str(model)), tmp_path, "float32", "native" if weight_format == "float32" else weight_format
    )
    parts = make_parts(model, CPU, make_policy(model, CPU, weight_format=weight_format), tmp_path, store=store)
    weights = parts.executor.weights
    held = [w for tensors in (weights.embeddings, weights.head, *weights._resident) for w in tensors.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(data_of, held)}
    try:
        assert sum(storages.values()) <= weights.num_bytes + ALIGNMENT * len(store.files) * 4
    finally:
        parts.executor.close()


def data_of(weight):
    return weight if isinstance(weight, torch.Tensor) else weight.data


@pytest.mark.parametrize("on_host", [0, 1])
def test_embeddings_in_either_memory_give_the_same_tokens(tiny_models, tmp_path, on_host):
    model = tiny_models("llama")[0]
    policy, found = make_policy(model, EMULATED, activation_batches=(1 - on_host, on_host)), {}
    for tier in ("cpu", "gpu"):
        parts = make_parts(model, EMULATED, replace(policy, embedding_tier=tier), tmp_path)
        table = parts.executor.weights.embeddings["embed.weight"].nbytes
        arena = parts.executor.weights.arenas[tier]
        found[tier], _ = run(parts, prompts_of(6, 20), [4] * 6)
        moved = parts.executor.bytes_moved
        assert table <= arena.allocated_bytes
        # Into host memory only if they are made in the accelerator's, and from there only otherwise, or with the
        # layers.
        assert (moved["h2d"] > 0) == (tier == "cpu" or on_host == 1)
        assert (moved["d2h"] > 0) == (on_host == 1)
    assert found["cpu"] == found["gpu"]


def test_the_process_has_what_the_plan_left_it(tiny_models, tmp_path):
    """However much it holds at the moment, or the KV pools would not be those that sequences were counted for."""
    model = tiny_models("llama")[0]
    policy = make_policy(model, CPU, kv_seqs={"cpu": 8})
    planned = resident_bytes() + 300 * MIB
    options = {"budgets": {"cpu": planned + 300 * MIB, "disk": 0}, "planned_process_bytes": planned}
    blocks = []
    for growing in range(2):
        held = bytearray(growing * 16 * MIB)
        parts = make_parts(model, CPU, policy, tmp_path, most_kv_tokens=1 << 30, **options)
        parts.executor.close()
        blocks.append(parts.memory.kv_blocks["cpu"])
        assert parts.memory.parts["cpu"]["process"] == planned
        del held
    assert blocks[0] == blocks[1] > 0


def test_memory_that_the_plan_left_out_is_refused_where_it_is_allocated(tiny_models, tmp_path, monkeypatch):
    """The second line of defence: were the plan wrong, the accelerator's memory would say so."""
    model = tiny_models("opt")[0]
    real = loading.plan_memory

    def plan_for_more(*args, budgets, **options):
        return real(*args, budgets=budgets | {"gpu": 1 << 30}, **options)

    monkeypatch.setattr(loading, "plan_memory", plan_for_more)
    with pytest.raises(BatchgenError, match=r"--gpu-memory 33.0 MiB does not hold .*; raise it") as refused:
        make_parts(model, EMULATED, everything_moves(model), tmp_path, budgets=BUDGETS | {"gpu": 33 * MIB})
    assert "\n" not in str(refused.value)
