"""Attention to chosen pages in whole engines: the same tokens wherever KV is, and those of the rule written plainly.

fp32, greedy. What is compared ends before two tokens that are nearly as likely as each other.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from model_tables import MODELS
from plain_model import PlainModel
from test_token_identity import TIERS, layers
from thorough import some_of
from tiered import CPU, before_each_step, make_parts, make_policy

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.loader import check_attention_budget
from batchgen.models import layers as model_layers
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import read_config, resolve_model
from batchgen.ops import cpp
from batchgen.ops import dispatch as ops

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET, BLOCK, CLOSE, MAX_TOKENS, SEQUENCES = "30%", 8, 1e-3, 20, 6
# A model's layers that choose pages come after the first two.
FOUR_LAYERS = {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


def prompts_of(seed=5):
    rng = random.Random(seed)
    prefix = [rng.randrange(4, 250) for _ in range(70)]
    lengths = (120, 9, 31, 64, 150, 3, 88, 40)
    return [prefix * (i % 2) + [rng.randrange(4, 250) for _ in range(n)] for i, n in enumerate(lengths)]


def policy_of(path, tier, budget=BUDGET, **changes):
    device, fields_of = TIERS[tier]
    fields = {
        "gpu_batch_size": SEQUENCES,
        "max_num_batched_tokens": 50,
        "kv_block_size": BLOCK,
        **fields_of(path),
        **changes,
    }
    on_host = fields.pop("activations on the host", 0)
    if device.accelerated and on_host:
        fields |= {"num_gpu_batches": 2, "gpu_batch_size": SEQUENCES // 2, "activation_batches": (2 - on_host, on_host)}
    return make_policy(path, device, attention_budget=budget, **fields)


def samples_of(path, tier, stores, prompts=None, max_tokens=MAX_TOKENS, **changes):
    policy = policy_of(path, tier, **changes)
    parts = make_parts(path, TIERS[tier][0], policy, stores, longest_tokens=240, most_kv_tokens=8192)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    with Engine.from_parts(parts, sampling=sampling) as engine:
        done = {c.index: c for c in engine.generate([Request(prompt) for prompt in prompts or prompts_of()])}
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    assert [completion.error for completion in done.values()] == [None] * len(done)
    return [done[i].samples[0] for i in range(len(done))]


def clear_tokens(sample):
    close = [p.top[0].logprob - p.top[1].logprob < CLOSE for p in sample.logprobs]
    return sample.token_ids[: close.index(True) if True in close else None]


@pytest.fixture(scope="module")
def expected(tiny_models, stores):
    """name of a model -> (path, tokens of an engine in memory in which torch chooses and attends)."""

    @cache
    def get(name):
        family, overrides = MODELS[name]
        path, _ = tiny_models(family, **overrides)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "has_cpu_attention", lambda *_: False)
            patch.setattr(cpp, "supports_head_dim", lambda *_: False)
            samples = samples_of(path, "memory", stores)
        return path, [clear_tokens(sample) for sample in samples]

    return get


def chooses_pages(path):
    config = read_config(resolve_model(str(path)))
    return any(map(config.chooses_pages, range(config.num_layers)))


CELLS = [(model, tier) for model in MODELS for tier in TIERS if tier != "experts on demand"]


@pytest.mark.parametrize(("model", "tier"), some_of(CELLS, 12, "attention budget"))
def test_tokens_are_the_same_wherever_kv_is(model, tier, expected, tiny_models, stores):
    family, overrides = MODELS[model]
    path, _ = tiny_models(family, **overrides)
    if not chooses_pages(path):
        with pytest.raises(InputError, match="--attention-budget 30%: no layer"):
            check_attention_budget(read_config(resolve_model(str(path))), BUDGET)
        return
    path, wanted = expected(model)
    assert sum(map(len, wanted)) > 0.5 * MAX_TOKENS * len(wanted)
    found = [sample.token_ids for sample in samples_of(path, tier, stores)]
    assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize("tier", TIERS)
def test_a_budget_of_all_pages_gives_the_tokens_of_dense_attention(tier, tiny_models, stores):
    path, _ = tiny_models("llama", **FOUR_LAYERS)
    rows = prompts_of()[:SEQUENCES], 8  # so many prompts that every tier has some of them
    dense, whole = (samples_of(path, tier, stores, *rows, budget=budget) for budget in ("all", "99.99%"))
    assert [s.token_ids for s in whole] == [s.token_ids for s in dense]


class ChoosingModel(PlainModel):
    """The rule in the simplest words: one sequence, all tokens at once, and for each a mask of the pages it sees."""

    prompt_len = 0

    def _attend(self, layer, projected, slots, counts):
        config, positions = self.config, self._positions(slots, counts)
        rope = config.rope_of(layer)
        table = model_layers.rope_table(rope, config.head_dim, config.max_position) if rope else None
        options = model_layers.rotary_options(config, layer, self.layers[layer], table, positions, None)
        qkv = ops.rotary(model_layers.ungated(config, projected), config.num_heads, config.num_kv_heads, **options)
        q, k, v = (x.transpose(0, 1) for x in qkv)
        k, v = (x.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2)
        for position in range(q.shape[1]):
            scores[:, position, position + 1 :] = -torch.inf
            if position >= self.prompt_len and config.chooses_pages(layer):
                scores[:, position, ~self._seen(q[:, position], k, position)] = -torch.inf
        return model_layers.gate_attention(config, projected, (scores.softmax(-1) @ v).transpose(0, 1).contiguous())

    @staticmethod
    def _seen(q, k, position):
        """The keys that a token attends to. q: [heads, head_dim]; k: [heads, tokens, head_dim]."""
        seen, num_pages = torch.zeros(k.shape[1], dtype=torch.bool), position // BLOCK + 1
        pages = [slice(page * BLOCK, min(page * BLOCK + BLOCK, position + 1)) for page in range(num_pages)]
        candidates = range(1, num_pages - 2)
        wanted = AttentionBudget.of(BUDGET).pages(num_pages, BLOCK) - 3
        chosen = list(candidates)
        if wanted < len(candidates):
            bounds = torch.stack([
                torch.maximum(q * k[:, pages[p]].amin(1), q * k[:, pages[p]].amax(1)).sum(-1) for p in candidates
            ])  # fmt: skip
            scores = bounds.softmax(0).sum(1)
            chosen = [candidates[i] for i in scores.topk(wanted).indices.tolist()]
        for page in (0, *chosen, num_pages - 2, num_pages - 1):
            seen[pages[page]] = True
        return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_next"])
def test_tokens_are_those_of_the_rule_written_plainly(family, tiny_models, stores):
    path, _ = tiny_models(family, **FOUR_LAYERS)
    samples = samples_of(path, "memory", stores)
    model = ChoosingModel(open_checkpoint(resolve_model(str(path))), 1)
    changed = 0
    for prompt, sample in zip(prompts_of(), samples, strict=True):
        tokens = clear_tokens(sample)
        model.prompt_len, model.lengths = len(prompt), [0]
        rows = model({0: [*prompt, *tokens][:-1]})[0][len(prompt) - 1 :]
        assert tuple(rows.argmax(-1).tolist()) == tuple(tokens)
        model.prompt_len, model.lengths = 1 << 30, [0]
        changed += not torch.equal(model({0: [*prompt, *tokens][:-1]})[0][len(prompt) - 1 :], rows)
    assert changed, "no row has so many pages that it chooses"


def test_disk_and_memory_share_no_summaries(tiny_models, stores):
    """Blocks of both tiers are numbered from 0."""
    path, _ = tiny_models("llama", **FOUR_LAYERS)
    wanted = [clear_tokens(sample) for sample in samples_of(path, "memory", stores)]
    mixed = {"weight_layers": layers(path, 1), "kv_seqs": {"cpu": 3, "disk": 3}}
    found = samples_of(path, "memory", stores, **mixed)
    assert [s.token_ids[: len(clear)] for s, clear in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize("tier", ["disk", "streamed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_only_chosen_pages_come_where_kv_passes(family, tier, tiny_models, stores):
    """The last two of four layers choose pages: eight of the 20 to 24 pages of a long row."""
    path, _ = tiny_models(family, **FOUR_LAYERS)
    moved, kinds, weights = {}, set(), layers(path, 1 if tier == "disk" else 0)
    for budget in ("all", BUDGET):
        policy = policy_of(path, tier, budget=budget, weight_layers=weights)
        parts = make_parts(path, TIERS[tier][0], policy, stores, longest_tokens=240, most_kv_tokens=8192)
        before_each_step(parts, lambda step: kinds.add(step.kind))
        with Engine.from_parts(parts, sampling=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)) as engine:
            assert all(c.error is None for c in engine.generate([Request(prompt) for prompt in prompts_of()]))
        moved[budget] = parts.executor.bytes_moved["disk_read" if tier == "disk" else "h2d"]
    assert "choose_pages" in kinds
    assert moved[BUDGET] < 0.85 * moved["all"]


def test_models_whose_layers_all_have_windows_are_refused(tiny_models):
    path, _ = tiny_models("mistral", sliding_window=20)
    config = read_config(resolve_model(str(path)))
    with pytest.raises(InputError, match="leave it out"):
        check_attention_budget(config, BUDGET)
    check_attention_budget(replace(config, windows=(None,) * config.num_layers), BUDGET)
    assert make_policy(path, CPU).attention_budget == "all"
