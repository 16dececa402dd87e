"""The table of cases that must give the tokens of transformers.

It has every model, wherever weights and KV are, however rows are batched.

fp32, greedy. Weights and KV of 8 and 4 bits must give the tokens of the same engine in memory whose products and
attention torch makes; products of weights of 8 bits are those of integers. A new family, KV placement or kind of Step
that no row of the table has fails a test here.
"""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from fake_device import FIRST_USES, ORDERS, FakeDevice, as_on_a_device, run_on
from greedy_tokens import greedy_tokens
from known_drafts import by_prompt, partly_right
from model_tables import FAMILIES, GGUF_FAMILIES, GGUF_MODELS, MIXED_SIZES, MIXTURES, MODELS, few_experts
from quantized_checkpoints import awq, fp8, gptq, in_mxfp4, pack_quantized, requantize
from rank_threads import make_parts_on_ranks
from thorough import covering, quick_or, rotating, some_of
from tiered import CPU, EMULATED, before_each_step, everything_moves, make_parts, make_policy, once_all_rows_are_there
from tiny_gguf import mixed_types, round_as_gguf, write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.dtypes import EXPERT_FORMATS, FORMAT_BYTES, GGUF_FORMATS, INT4, INT5, INT8, MIXED, NATIVE_FORMATS
from batchgen.core.errors import InputError
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.loader import warm_up
from batchgen.models.families import ARCHITECTURES
from batchgen.models.files import read_config, resolve_model
from batchgen.ops import cpp, int8
from batchgen.ops import dispatch as ops
from batchgen.schedule.step_graph import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPE = "float32"
# KV in these formats is what was computed; in others the tokens are those of the same format in memory (test_tiers.py).
EXACT_KV_FORMATS = [name for name in FORMAT_BYTES if name == DTYPE]
ADMISSIONS = ("continuous", "static")
NUM_BATCHES = (1, 2, 3, 4)
SEQUENCES = 6  # in flight
MAX_TOKENS = 6
# A token whose log-probability is this close to the next one's ends what is compared: attention rounds differently
# where rows are batched differently, and the last bit of an activation may move its code.
CLOSE = 0.03


CODE_SCHEMES = {
    "w4_g32": awq(32), "w4_g64": gptq(64), "w4_g128": pack_quantized(128, symmetric=False),
    "fp8_g32": fp8(
        lambda r, c: (r, c // 32), {"quant_method": "fp8", "weight_block_size": [1, 32]}, "weight_scale_inv"
    ),
    "fp8_g128": fp8(
        lambda r, c: (r // 128, c // 128), {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv"
    ),
}  # fmt: skip


def layers(path, *residencies):
    """Residencies of every group of a layer's tensors: layers in turn on each of these (0: GPU, 1: CPU, 2: disk)."""
    probe = make_policy(path, CPU)
    num_layers = sum(next(iter(probe.weight_layers.values())))
    turns = [residencies[j % len(residencies)] for j in range(num_layers)]
    return dict.fromkeys(probe.weight_layers, tuple(turns.count(tier) for tier in range(3)))


# name -> (device, policy of a model's path)
TIERS = {
    "memory": (CPU, lambda path: {"kv_seqs": {"cpu": SEQUENCES}}),
    "disk": (CPU, lambda path: {"weight_layers": layers(path, 2), "kv_seqs": {"disk": SEQUENCES}}),
    "memory and disk": (CPU, lambda path: {"weight_layers": layers(path, 2, 1), "kv_seqs": {"cpu": 3, "disk": 3}}),
    "streamed": (EMULATED, lambda path: {"weight_layers": layers(path, 1), "kv_seqs": {"streamed": SEQUENCES}}),
    "delegated": (EMULATED, lambda path: {"weight_layers": layers(path, 1), "kv_seqs": {"cpu": SEQUENCES}}),
    "deferred": (EMULATED, lambda path: {"weight_layers": layers(path, 1), "kv_seqs": {"gpu": 2, "deferred": 4}}),
    "streamed layers": (EMULATED, lambda path: {"kv_seqs": {"streamed": SEQUENCES}, "kv_layers": 1}),
    "device": (EMULATED, lambda path: {"kv_seqs": {"gpu": SEQUENCES}}),
    "mixed": (EMULATED, lambda path: moving_fields(path)),
    "unequal batches": (EMULATED, lambda path: {
        "weight_layers": layers(path, 1), "kv_seqs": {"cpu": 3, "gpu": 1, "streamed": 1, "disk": 1},
        "batch_order": "neo",
        "balance_tokens": 10,
    }),
    "experts on demand": (CPU, lambda path: {
        "weight_layers": layers(path, 2), "kv_seqs": {"cpu": SEQUENCES}, "on_demand_tokens": SEQUENCES,
    }),
}  # fmt: skip


def moving_fields(path):
    policy = everything_moves(path, weight_format=DTYPE)
    return {
        "weight_layers": mixed_layers(path),
        "head_tier": policy.head_tier,
        "kv_seqs": {"gpu": 1, "cpu": 1, "streamed": 2, "disk": 1, "deferred": 1},
        "activations on the host": 1,
    }


def mixed_layers(path):
    """Each group of a layer's tensors in another order of residencies."""
    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 2), (2, 0, 1)]
    groups = layers(path, 0)
    return {group: layers(path, *orders[i % len(orders)])[group] for i, group in enumerate(groups)}


def policy_of(path, tier, kv_format, admission, num_batches, weight_format=DTYPE, tiers=TIERS):
    device, fields = tiers[tier][0], tiers[tier][1](path)
    num_batches = 2 if "balance_tokens" in fields else num_batches
    size = -(-SEQUENCES // num_batches)
    spare = size * num_batches - SEQUENCES
    kv_seqs = dict(fields.pop("kv_seqs"))
    kv_seqs[next(iter(kv_seqs))] += spare
    on_host = fields.pop("activations on the host", 0) if device.accelerated else num_batches
    return make_policy(
        path, device, kv_seqs=kv_seqs, gpu_batch_size=size, num_gpu_batches=num_batches, admission=admission,
        activation_batches=(num_batches - on_host, on_host), kv_format=kv_format, weight_format=weight_format,
        max_num_batched_tokens=50, **fields,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def expected(tiny_models):
    """name of a model -> (path, prompts, tokens of transformers)."""
    made = {}

    def get(name):
        if name not in made:
            family, overrides = MODELS[name]
            path, model = tiny_models(family, **overrides)
            rng = random.Random(11)
            prefix = [rng.randrange(4, 500) for _ in range(36)]
            lengths = (1, 3, 16, 17, 9, 30, 5, 2)
            prompts = [prefix * (i % 2) + [rng.randrange(4, 500) for _ in range(n)] for i, n in enumerate(lengths)]
            made[name] = path, prompts, greedy_tokens(model, prompts, MAX_TOKENS)
        return made[name]

    return get


@pytest.fixture(scope="module")
def expected_of_many(tiny_models):
    """name of a model -> (path, `_MANY` short prompts, tokens of transformers)."""

    @cache
    def get(name):
        family, overrides = MODELS[name]
        path, model = tiny_models(family, **overrides)
        prompts = prompts_of(*(1 + i % 5 for i in range(_MANY)))
        return path, prompts, greedy_tokens(model, prompts, MAX_TOKENS)

    return get


def prompts_of(*lengths):
    rng = random.Random(7)
    return [[rng.randrange(4, 250) for _ in range(n)] for n in lengths]


def tokens_of(parts, prompts, **options):
    return [sample.token_ids for sample in samples_of(parts, prompts, **options)]


def samples_of(parts, prompts, drafts=16, **sampling):
    sampling = SamplingParams(max_tokens=MAX_TOKENS, **sampling)
    with Engine.from_parts(parts, sampling=sampling, drafts=drafts) as engine:
        done = {c.index: c for c in engine.generate([Request(prompt) for prompt in prompts])}
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    assert [done[i].error for i in range(len(prompts))] == [None] * len(prompts)
    return [done[i].samples[0] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def expected_of_codes(expected, stores):
    """(name of a model, formats of weights and KV) -> (path, prompts, tokens), as far as these are clear.

    Of an engine in memory, in which torch multiplies weights of 8 bits, and attends where KV is packed.
    """
    made = {}

    def get(name, formats):
        if (name, formats) not in made:
            path, prompts, _ = expected(name)
            weight_format, kv_format = formats
            policy = policy_of(path, "memory", kv_format, "continuous", 1, weight_format)
            with pytest.MonkeyPatch.context() as patch:
                kernel = cpp.linear
                patch.setattr(ops, "pack_weight", lambda weight, **_: weight)
                patch.setattr(cpp, "linear", lambda x, w, *rest, **options: product(w, kernel)(x, w, *rest, **options))
                if kv_format != DTYPE:
                    patch.setattr(cpp, "supports_attention", lambda *_: False)
                samples = samples_of(make_parts(path, CPU, policy, stores), prompts, logprobs=2)
            made[name, formats] = path, prompts, [clear_tokens(sample) for sample in samples]
        return made[name, formats]

    def product(weight, kernel):
        return int8.linear if weight.dtype == torch.int8 else kernel

    return get


def clear_tokens(sample, least=CLOSE):
    close = [p.top[0].logprob - p.top[1].logprob < least for p in sample.logprobs]
    return sample.token_ids[: close.index(True) if True in close else None]


def has_experts(name):
    family, fields = MODELS[name]
    return family in MIXTURES or fields.get("enable_moe_block", False)


# Of a model that ranks run together: no attention is deferred.
RANK_TIERS = {
    **{tier: TIERS[tier] for tier in ("memory", "disk", "memory and disk", "experts on demand")},
    "KV on disk": (CPU, lambda path: {"kv_seqs": {"cpu": 2, "disk": 4}}),
    "device": TIERS["device"],
    "streamed": TIERS["streamed"],
    "mixed": (EMULATED, lambda path: {
        "weight_layers": mixed_layers(path), "kv_seqs": {"gpu": 1, "cpu": 2, "streamed": 2, "disk": 1},
        "activations on the host": 1,
    }),
}  # fmt: skip

# What is for mixtures of experts changes nothing elsewhere.
_CELLS = [(m, tier) for m in MODELS for tier in TIERS if tier != "experts on demand" or has_experts(m)]


def turn(model, tier):
    """The admission and number of micro-batches of a cell in `make test`, which differ from its neighbours'."""
    place = list(MODELS).index(model) + list(TIERS | RANK_TIERS).index(tier)
    return ADMISSIONS[place % len(ADMISSIONS)], NUM_BATCHES[place // 2 % len(NUM_BATCHES)]


def schedules(model, tier):
    """The admissions and numbers of micro-batches of a cell."""
    return quick_or([turn(model, tier)], list(itertools.product(ADMISSIONS, NUM_BATCHES)))


def most_drafts(model, tier):
    """The most drafts of a sequence in a cell; 0 where the CPU attends beside an accelerator, to one token of each."""
    return 0 if tier in ("delegated", "deferred") else (list(MODELS).index(model) + list(TIERS).index(tier)) % 4


def cells_by_day():
    """All cells in `make test-all`.

    In `make test` so many that every tier has every schedule, every model has each admission, and few and many
    micro-batches, and every model is run with drafts and without.
    """
    turns = [(*cell, *turn(*cell)) for cell in _CELLS]
    rows = [
        (m, tier, (tier, order, n), (m, order), (m, n > 2), (m, most_drafts(m, tier) > 0))
        for m, tier, order, n in turns
    ]
    return [(m, tier) for m, tier, *_ in covering(rows, 0, "identity")]


@pytest.mark.parametrize("kv_format", EXACT_KV_FORMATS)
@pytest.mark.parametrize(("model", "tier"), cells_by_day())
def test_tokens_equal_those_of_transformers(model, tier, kv_format, expected, stores):
    path, prompts, wanted = expected(model)
    for admission, num_batches in schedules(model, tier):
        policy = policy_of(path, tier, kv_format, admission, num_batches)
        parts = make_parts(path, TIERS[tier][0], policy, stores, longest_tokens=80)
        most = most_drafts(model, tier)
        drafts = partly_right(by_prompt(prompts, wanted), most=most) if most else 0  # of which some are wrong
        assert tokens_of(parts, prompts, drafts=drafts) == wanted, (admission, num_batches, most)


_MANY = 64  # rows in flight: every expert has several of them, or of many experts most have
_OF_MIXTURES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe, 8 of 128, shares as they are",
    "gpt_oss, 4 of 32, all windows, plain rope",
    "gemma4, experts, keys are values",
]


@pytest.mark.parametrize("model", _OF_MIXTURES)
@pytest.mark.parametrize(("disk", "num_batches"), [(False, 1), (True, 2)])
def test_many_rows_in_flight_give_the_tokens_of_transformers(model, disk, num_batches, expected_of_many, stores):
    path, prompts, wanted = expected_of_many(model)
    policy = make_policy(
        path, CPU, kv_seqs={"cpu": _MANY}, gpu_batch_size=_MANY // num_batches, num_gpu_batches=num_batches,
        max_num_batched_tokens=_MANY * max(map(len, prompts)), activation_batches=(0, num_batches),
        weight_layers=layers(path, 2 if disk else 1),
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    with Engine.from_parts(make_parts(path, CPU, policy, stores), sampling=sampling) as engine:
        rows = engine.generate([Request(prompt) for prompt in prompts], should_stop=once_all_rows_are_there)
        done = {c.index: c.samples[0].token_ids for c in rows}
        assert engine.stats.sweeps <= MAX_TOKENS, "not all of them were in flight at once"
    assert [done[i] for i in range(_MANY)] == wanted


def cells_in(*all_formats):
    return [(*cell, formats) for cell in _CELLS for formats in all_formats]


@pytest.mark.parametrize(
    ("model", "tier", "formats"),
    some_of(cells_in((INT8, DTYPE)), 14, "8 bits")
    + some_of(cells_in((INT4, DTYPE), (DTYPE, INT8), (DTYPE, INT5), (DTYPE, INT4), (INT8, INT8)), 7, "other formats"),
)
def test_tokens_of_codes_equal_those_of_torch(model, tier, formats, expected_of_codes, stores):
    path, prompts, wanted = expected_of_codes(model, formats)
    assert sum(map(len, wanted)) > 0.5 * MAX_TOKENS * len(prompts)
    weight_format, kv_format = formats
    for admission, num_batches in schedules(model, tier):
        policy = policy_of(path, tier, kv_format, admission, num_batches, weight_format)
        found = tokens_of(make_parts(path, TIERS[tier][0], policy, stores, longest_tokens=80), prompts)
        assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted


@pytest.fixture(scope="module")
def expected_as_found(tmp_path_factory):
    """Format of matrices -> (path, prompts, tokens of its weights expanded, in memory, as far as these are clear)."""
    made = {}

    def get(weight_format, family="llama"):
        if (weight_format, family) not in made:
            directory = tmp_path_factory.mktemp(weight_format)
            tokenizer = make_tiny_tokenizer(directory)
            sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}  # for two ranks too
            if weight_format in EXPERT_FORMATS:
                sizes = {"intermediate_size": 128}
            elif weight_format == MIXED:
                sizes = {**MIXED_SIZES, **few_experts(family)}
            family = "gpt_oss" if weight_format in EXPERT_FORMATS else family
            model = make_tiny_model(family, directory, **{"num_hidden_layers": 2} | sizes)
            path = directory
            if weight_format == MIXED:
                path = directory / "model.gguf"
                write_tiny_gguf(model, path, tensor_type=mixed_types(family), tokenizer=tokenizer)
            elif weight_format in GGUF_FORMATS:
                path = directory / "model.gguf"
                write_tiny_gguf(model, path, tensor_type=weight_format.upper(), tokenizer=tokenizer)
            elif weight_format in EXPERT_FORMATS:
                in_mxfp4(path, seed=2)  # most tokens are clear
            else:
                requantize(path, CODE_SCHEMES[weight_format])
            prompts = prompts_of(1, 3, 17, 9, 30, 5)
            samples = samples_of(
                make_parts(path, CPU, policy_of(path, "memory", DTYPE, "continuous", 1), path), prompts, logprobs=2
            )
            made[weight_format, family] = path, prompts, [clear_tokens(sample) for sample in samples]
        return made[weight_format, family]

    return get


_AS_FOUND = [
    (weight_format, tier)
    for weight_format in NATIVE_FORMATS
    for tier in TIERS
    if weight_format != MIXED and (tier != "experts on demand" or weight_format in EXPERT_FORMATS)
]
_IN_MIXTURES = [(f, tier) for f in GGUF_FAMILIES for tier in TIERS if tier != "experts on demand" or f in MIXTURES]


@pytest.mark.parametrize(("weight_format", "tier"), covering(_AS_FOUND, 20, "as found"))
def test_weights_as_found_give_the_tokens_of_expanded_ones(weight_format, tier, expected_as_found, stores):
    path, prompts, wanted = expected_as_found(weight_format)
    assert sum(map(len, wanted)) > 0.5 * MAX_TOKENS * len(prompts)
    for admission, num_batches in schedules("llama", tier):
        policy = policy_of(path, tier, DTYPE, admission, num_batches, weight_format)
        found = tokens_of(make_parts(path, TIERS[tier][0], policy, stores, longest_tokens=80), prompts)
        assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize(("family", "tier"), covering(_IN_MIXTURES, 20, "mixed"))
def test_each_matrix_in_its_own_format_gives_the_tokens_of_expanded_ones(family, tier, expected_as_found, stores):
    path, prompts, wanted = expected_as_found(MIXED, family)
    assert sum(map(len, wanted)) > 0.5 * MAX_TOKENS * len(prompts)
    for admission, num_batches in schedules(family, tier):
        policy = policy_of(path, tier, DTYPE, admission, num_batches, MIXED)
        found = tokens_of(make_parts(path, TIERS[tier][0], policy, stores, longest_tokens=80), prompts)
        assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted


_ON_RANKS = [(m, tier) for m in MODELS for tier in RANK_TIERS if (m, tier) in _CELLS or tier not in TIERS]
_QUICK_ON_RANKS = [[cell for cell in _ON_RANKS if cell[0] == model] for model in MODELS]
_QUICK_ON_RANKS = [cells[i % len(cells)] for i, cells in enumerate(_QUICK_ON_RANKS)]


@pytest.mark.parametrize(("model", "tier"), quick_or(rotating("ranks").sample(_QUICK_ON_RANKS, 20), _ON_RANKS))
def test_tokens_of_ranks_equal_those_of_transformers(model, tier, expected, stores):
    path, prompts, wanted = expected(model)
    heads = read_config(resolve_model(str(path))).num_kv_heads
    for admission, num_batches in schedules(model, tier):
        policy = policy_of(path, tier, DTYPE, admission, num_batches, tiers=RANK_TIERS)
        if heads == 1:
            with pytest.raises(InputError, match="--tensor-parallel 2 does not divide the model's 1 key/value heads"):
                make_parts_on_ranks(2, path, RANK_TIERS[tier][0], policy, stores)
            continue
        parts, first = make_parts_on_ranks(2, path, RANK_TIERS[tier][0], policy, stores, longest_tokens=80)
        assert tokens_of(parts, prompts) == wanted, (admission, num_batches)
        assert first.shared.failures == []
        assert first.shared.reduced >= 2 * parts.config.num_layers * MAX_TOKENS


@pytest.mark.parametrize(
    ("name", "tensor_type"), covering(itertools.product(GGUF_MODELS, ("F32", "Q8_0", "Q4_0")), 0, "GGUF")
)
def test_a_gguf_gives_the_tokens_of_transformers(name, tensor_type, tmp_path):
    """Logits too, and those of packed weights, dequantized or native, equal transformers' with rounded weights."""
    family, overrides = GGUF_MODELS[name]
    tokenizer = make_tiny_tokenizer(tmp_path)
    model = make_tiny_model(family, tmp_path / "hf", **overrides)
    path = write_tiny_gguf(model, tmp_path / "model.gguf", tensor_type=tensor_type, tokenizer=tokenizer)
    model = round_as_gguf(model, tensor_type)
    # A GGUF's texts end at all tokens that llama.cpp knows by their text.
    model.generation_config.eos_token_id = list(read_config(resolve_model(str(path))).eos_token_ids)
    cases = [(64, prompts_of(1, 3, 17, 30, 48, 5))]
    if "longrope" in name:  # of which 64 positions have factors of their own
        cases.append((128, prompts_of(70, 90)))
    for context, prompts in cases:
        wanted = greedy_tokens(model, prompts, MAX_TOKENS)
        assert len(set(wanted)) > 1
        for weight_format in (DTYPE,) if tensor_type == "F32" else (DTYPE, tensor_type.lower()):
            policy = policy_of(path, "memory", DTYPE, "continuous", 1, weight_format)
            policy = replace(policy, max_model_len=context)
            found = tokens_of(make_parts(path, CPU, policy, path, longest_tokens=context), prompts)
            assert found == wanted, weight_format


# Rows long enough for groups and blocks of two ranks: 64 of int4, 256 of a GGUF's.
_WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_WIDE_OF = {
    "opt": {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 128},
    "qwen2_moe": {**_WIDE, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**_WIDE, "moe_intermediate_size": 128},
    "qwen3_5": {**_WIDE, "linear_value_head_dim": 32},
    **{
        family: {
            **_WIDE,
            "linear_value_head_dim": 32,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        }
        for family in ("qwen3_next", "qwen3_5_moe")
    },
    "olmoe": {name: size for name, size in _WIDE.items() if name != "head_dim"},
    "granitemoeshared": {**_WIDE, "shared_intermediate_size": 128},
    "granitemoehybrid": {**_WIDE, "shared_intermediate_size": 128},
}
_INT4_ON_RANKS = [
    (family, tier) for family in FAMILIES for tier in RANK_TIERS if tier != "experts on demand" or family in MIXTURES
]


@pytest.mark.parametrize(("family", "tier"), some_of(_INT4_ON_RANKS, 6, "int4 on ranks"))
def test_ranks_give_the_tokens_of_one_process_in_int4(family, tier, tiny_models, stores):
    path, _ = tiny_models(family, **_WIDE_OF.get(family, _WIDE))
    prompts = prompts_of(1, 3, 16, 17, 9, 30)
    one = policy_of(path, "memory", DTYPE, "continuous", 1, INT4)
    wanted = [clear_tokens(sample) for sample in samples_of(make_parts(path, CPU, one, stores), prompts, logprobs=2)]
    assert sum(map(len, wanted)) > 0.5 * MAX_TOKENS * len(prompts)
    for admission, num_batches in schedules(family, tier):
        policy = policy_of(path, tier, DTYPE, admission, num_batches, INT4, RANK_TIERS)
        parts, first = make_parts_on_ranks(2, path, RANK_TIERS[tier][0], policy, stores, longest_tokens=80)
        found = tokens_of(parts, prompts)
        assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted
        assert first.shared.failures == []


_AS_FOUND_ON_RANKS = [
    (weight_format, tier)
    for weight_format in NATIVE_FORMATS
    for tier in RANK_TIERS
    if weight_format != MIXED and (tier != "experts on demand" or weight_format in EXPERT_FORMATS)  # which ranks expand
]


@pytest.mark.parametrize(("weight_format", "tier"), covering(_AS_FOUND_ON_RANKS, 20, "as found on ranks"))
def test_ranks_give_the_tokens_of_expanded_weights(weight_format, tier, expected_as_found, stores):
    path, prompts, wanted = expected_as_found(weight_format)
    for admission, num_batches in schedules("llama", tier):
        policy = policy_of(path, tier, DTYPE, admission, num_batches, weight_format, RANK_TIERS)
        parts, first = make_parts_on_ranks(2, path, RANK_TIERS[tier][0], policy, stores, longest_tokens=80)
        assert parts.config.num_heads * 2 == read_config(resolve_model(str(path))).num_heads
        found = tokens_of(parts, prompts)
        assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted
        assert first.shared.failures == []


_ON_STREAMS = [(model, tier) for model in MODELS for tier, (device, _) in TIERS.items() if device is EMULATED]


@pytest.mark.parametrize(("model", "tier"), quick_or(rotating("first uses").sample(_ON_STREAMS, 2), _ON_STREAMS))
def test_nothing_is_new_after_warming_up(model, tier, expected, stores, monkeypatch):
    """On a device with streams: no operation and no memory while one of them waits for the host."""
    path, prompts, wanted = expected(model)
    as_on_a_device(monkeypatch)
    turn = list(MODELS).index(model)
    admission, num_batches = schedules(model, tier)[0]
    policy = policy_of(path, tier, DTYPE, admission, num_batches)
    device = FakeDevice(*ORDERS[(turn + 3 * num_batches) % len(ORDERS)], warm=FIRST_USES)
    parts = run_on(make_parts(path, EMULATED, policy, stores, longest_tokens=80), device, monkeypatch)
    warm_up(parts.executor, policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams())
    assert tokens_of(parts, prompts) == wanted


@pytest.mark.parametrize("cells", [_AS_FOUND, _IN_MIXTURES, _AS_FOUND_ON_RANKS], ids=len)
def test_every_format_and_every_tier_is_drawn(cells):
    for drawn, all_of_them in zip(zip(*covering(cells, 1), strict=True), zip(*cells, strict=True), strict=True):
        assert set(drawn) == set(all_of_them)
    assert len(covering(cells, 30, "some")) == quick_or(30, len(cells))


def test_every_schedule_has_its_turn():
    """On every tier all of them, with every model each admission, few and many micro-batches, and drafts."""
    cells = cells_by_day()
    for tier in TIERS:
        on_tier = {schedule for m, other in cells if other == tier for schedule in schedules(m, tier)}
        assert len(on_tier) == len(ADMISSIONS) * len(NUM_BATCHES)
    for model in MODELS:
        of_model = [schedule for m, tier in cells if m == model for schedule in schedules(model, tier)]
        assert {admission for admission, _ in of_model} == set(ADMISSIONS)
        assert {num_batches > 2 for _, num_batches in of_model} == {False, True}
        assert any(most_drafts(m, tier) for m, tier in cells if m == model), "nothing is drafted"


def test_the_table_has_every_family_and_tier(expected, stores):
    families = {family for family, _ in MODELS.values()}
    assert families == set(ARCHITECTURES.values()), "a family is missing from model_tables.MODELS"
    path, prompts, _ = expected("mixtral")
    policies = [policy_of(path, tier, DTYPE, "continuous", 2) for tier in TIERS]
    assert {c for policy in policies for c in policy.kv_seqs} == set(KVPlacement), "a KV placement is in no tier"
    seen = set()
    tables = [*TIERS, "memory"]
    policies.append(policy_of(path, "memory", DTYPE, "continuous", 2, INT4))
    for tier, policy in zip(tables, policies, strict=True):
        parts = make_parts(path, TIERS[tier][0], policy, stores, longest_tokens=80)
        before_each_step(parts, lambda step: seen.add(step.kind))
        tokens_of(parts, prompts)
    # Captured sweeps are a CUDA device's; stages of a pipeline are in test_pipeline.py, swaps and an output matrix on
    # disk in test_tiers.py, chosen pages in test_attention_budget.py.
    others = {"layers", "receive", "send", "swap_in", "swap_out", "choose_pages", "read_head"}
    assert seen == KINDS.keys() - others, "a kind of Step is in no tier"
