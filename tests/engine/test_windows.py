"""Layers with a sliding window give KV back.

Tokens are those of transformers, and no block is held that nobody sees any more.

Blocks that are handed out, and those that are given back for good, are filled with NaN: whoever reads one before it is
written gets no tokens at all.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from model_tables import MODELS
from thorough import covering, quick_or
from tiered import CPU, EMULATED, make_parts, make_policy, make_requests

from batchgen.engine.engine import Engine
from batchgen.models.files import read_config, resolve_model
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.window_pool import WindowPool

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, SEQUENCES = 16, 4
WINDOWED = [
    name
    for name, (family, fields) in MODELS.items()
    if family in ("gemma2", "gemma3", "gpt_oss", "olmo3") or fields.get("sliding_window")
]
TIERS = {
    "memory": (CPU, {"kv_seqs": {"cpu": SEQUENCES}}),
    "device": (EMULATED, {"kv_seqs": {"gpu": SEQUENCES}}),
    "streamed": (EMULATED, {"kv_seqs": {"streamed": SEQUENCES}}),
    "delegated": (EMULATED, {"kv_seqs": {"cpu": SEQUENCES}}),
    "deferred": (EMULATED, {"kv_seqs": {"gpu": 2, "deferred": 2}}),
    "with disk": (EMULATED, {"kv_seqs": {"gpu": 1, "cpu": 1, "streamed": 1, "disk": 1}}),
}
ADMISSIONS = ("continuous", "static")
_CELLS = [(name, tier, admission) for name in WINDOWED for tier in TIERS for admission in ADMISSIONS]
# One of each model; every tier with every admission.
_QUICK = [
    (name, list(TIERS)[i % len(TIERS)], ADMISSIONS[i // len(TIERS) % 2])
    for i, name in enumerate(WINDOWED + WINDOWED[: max(0, 12 - len(WINDOWED))])
]


@pytest.mark.thorough  # it makes all models
def test_every_model_with_windows_is_here(tiny_models):
    found = []
    for name, (family, fields) in MODELS.items():
        path, _ = tiny_models(family, **fields)
        if any(window is not None for window in read_config(resolve_model(str(path))).windows):
            found.append(name)
    assert found == WINDOWED


def rows(seed):
    """(prompts, output lengths): several windows long, and half of them with a prefix of several windows in common."""
    rng = random.Random(seed)
    prefix = [rng.randrange(4, 500) for _ in range(90)]
    lengths = [1, 75, 2, 33, 130, 20, 17]
    prompts = [prefix * (i % 2 == 1) + [rng.randrange(4, 500) for _ in range(n)] for i, n in enumerate(lengths)]
    return prompts, [rng.randrange(1, 60) for _ in lengths]


def assert_greedy(model, prompt, tokens):
    """Each token is the likeliest one after those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(tokens)


def poison(engine):
    """Fills blocks of windowed layers that have no content any more, or none yet."""
    cache, config = engine.parts.executor.kv_cache, engine.parts.config
    poisoned = []

    def fill(tier, block):
        poisoned.append(block)
        for layer, window in enumerate(config.windows):
            if window is not None:
                cache.pools[tier][layer][block] = float("nan")

    for tier, pool in engine._pools.items():
        windowed = pool.windowed
        if windowed is None:
            continue
        allocate, release = windowed.allocate, windowed.release

        def allocate_poisoned(after=None, tier=tier, allocate=allocate):
            block = allocate(after)
            fill(tier, block)
            return block

        def release_poisoned(blocks, tier=tier, windowed=windowed, release=release):
            release(blocks)
            for block in blocks:
                if not windowed.num_users(block) and not windowed._may_be_found(block):
                    fill(tier, block)

        windowed.allocate, windowed.release = allocate_poisoned, release_poisoned
    return poisoned


def generate(parts, prompts, output_lens, pools=None, **options):
    """Tokens, and the engine. pools: by tier, blocks of both kinds of layers in place of those that there are."""
    with Engine.from_parts(parts, **options) as engine:
        for tier, (blocks, of_windows) in (pools or {}).items():
            own = engine._pools[tier].windowed
            assert blocks <= engine._pools[tier].num_blocks and of_windows <= own.num_blocks
            window = WindowPool(of_windows, BLOCK, own.window)
            engine._pools[tier] = BlockManager(blocks, BLOCK, engine._pools[tier].share_prefixes, window)
        poisoned, most = poison(engine), []
        of_windows = [pool.windowed for pool in engine._pools.values() if pool.windowed]
        done = {
            c.index: c
            for c in engine.generate(
                make_requests(prompts, output_lens), on_sweep=lambda _: most.append(sum(p.num_used for p in of_windows))
            )
        }
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
        assert poisoned
    assert [done[i].error for i in range(len(prompts))] == [None] * len(prompts)
    return [done[i].samples[0].token_ids for i in range(len(prompts))], engine, max(most)


def parts_of(path, tier, stores, **changes):
    device, fields = TIERS[tier]
    fields = {"gpu_batch_size": SEQUENCES, "max_num_batched_tokens": 50, "max_model_len": 320} | fields | changes
    policy = make_policy(path, device, **fields)
    return make_parts(path, device, policy, stores, longest_tokens=320)


@pytest.mark.parametrize(("model", "tier", "admission"), quick_or(_QUICK, _CELLS))
def test_tokens_equal_those_of_transformers(model, tier, admission, tiny_models, tmp_path):
    family, fields = MODELS[model]
    path, reference = tiny_models(family, **fields)
    prompts, output_lens = rows(seed=list(MODELS).index(model))
    parts = parts_of(path, tier, tmp_path, admission=admission)
    assert parts.memory.window == 20
    found, engine, most = generate(parts, prompts, output_lens)
    for prompt, tokens, length in zip(prompts, found, output_lens, strict=True):
        assert len(tokens) == length
        assert_greedy(reference, prompt, tokens)
    assert engine.stats.preempted == 0
    # Twenty tokens lie in three blocks at most; a sweep has 50 tokens of prompts.
    assert most <= SEQUENCES * 3 + 4


# Tokens of a sweep, and blocks of layers with windows.
_POOLS = [(chunk, of_windows) for chunk in (7, 400) for of_windows in (3, 7)]
_QUICK_POOLS = [(WINDOWED[i * 4], *pool) for i, pool in enumerate(_POOLS)]


@pytest.mark.parametrize(
    ("model", "chunk", "of_windows"), quick_or(_QUICK_POOLS, [(name, *pool) for name in WINDOWED for pool in _POOLS])
)
def test_a_pool_of_few_blocks_changes_no_token(model, chunk, of_windows, tiny_models, tmp_path):
    """Rows are preempted, prefixes recomputed as their last window is gone, and chunks as long as there are blocks."""
    family, fields = MODELS[model]
    path, reference = tiny_models(family, **fields)
    prompts, output_lens = rows(seed=3)
    parts = parts_of(path, "memory", tmp_path, max_num_batched_tokens=chunk)
    found, engine, most = generate(parts, prompts, output_lens, {"cpu": (30, of_windows)}, expected_output_len=1)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_greedy(reference, prompt, tokens)
    assert most <= of_windows
    if chunk == 400 and of_windows == 7:
        assert engine.stats.preempted > 0


def test_a_prefix_is_taken_over_as_far_as_its_last_window_is_there(tiny_models, tmp_path):
    path, reference = tiny_models("gemma3")
    parts = parts_of(path, "memory", tmp_path, max_num_batched_tokens=400)
    rng = random.Random(5)
    prompt = [rng.randrange(4, 500) for _ in range(170)]
    other = [rng.randrange(4, 500) for _ in range(150)]
    with Engine.from_parts(parts) as engine:
        windowed = engine._pools["cpu"].windowed

        def run(*prompts):
            """Prompt tokens that are taken over."""
            before = engine.stats.cached_prompt_tokens
            for completion in engine.generate(make_requests(prompts, [25] * len(prompts))):
                assert_greedy(reference, prompts[completion.index], completion.samples[0].token_ids)
            return engine.stats.cached_prompt_tokens - before

        assert run(prompt) == 0
        assert run([*prompt, 7]) == 160  # all full blocks: their windows have been given back, and are still there
        assert run([*prompt[:100], 7, 8]) == 96
        # The blocks before token 64 are needed for something else, and a block that a prefix of 80 tokens ends with.
        nodes = [node for node in windowed._block_of]
        for node in [*nodes[:4], nodes[7]]:
            windowed.evict_node(node)
        assert run([*prompt[:70], 9]) == 0  # its window begins at token 45
        assert run(other) == 0


@pytest.mark.parametrize("model", WINDOWED)
def test_what_is_planned_is_what_is_allocated(model, tiny_models, tmp_path):
    family, fields = MODELS[model]
    path, _ = tiny_models(family, **fields)
    kinds = itertools.product(("float32", "int8", "int5", "int4"), ("memory", "delegated", "device"))
    for kv_format, tier in covering(kinds, 0, model):
        parts = parts_of(path, tier, tmp_path, kv_format=kv_format)
        try:
            for name, pool in parts.executor.kv_cache.pools.items():
                assert parts.memory.parts[name]["KV"] == sum(layer.nbytes for layer in pool.values())
                config, memory = parts.config, parts.memory
                for layer, window in zip(pool.values(), config.windows, strict=True):
                    assert len(layer) == (memory.kv_blocks if window is None else memory.window_blocks)[name]
        finally:
            parts.executor.close()


def test_where_no_row_is_longer_than_what_windows_keep_all_layers_share_a_table(tiny_models, tmp_path):
    path, _ = tiny_models("gpt_oss")
    for length, window in ((48, None), (49, 20)):
        policy = make_policy(path, CPU, max_model_len=length)
        parts = make_parts(path, CPU, policy, tmp_path, longest_tokens=length)
        assert parts.memory.window == window and bool(parts.memory.window_blocks) == (window is not None)
        parts.executor.close()
    policy = replace(make_policy(path, EMULATED), kv_seqs={"streamed": 8}, kv_layers=1)
    parts = make_parts(path, EMULATED, policy, tmp_path)
    assert parts.memory.window is None, "KV of a layer may lie in either of two tiers"
    parts.executor.close()
