"""Drafted tokens change no text, whoever drafts them, however many are wrong, and wherever weights and KV are."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
from known_drafts import partly_right
from rank_threads import make_parts_on_ranks
from stages import make_pipeline
from test_partials import SAMPLING, assert_same, prompts_of, requests_of, undisturbed
from test_pipeline import stages_of
from test_token_identity import SEQUENCES, TIERS, policy_of
from thorough import covering, rotating
from tiered import CPU, make_parts, make_policy
from tiny_models import make_tiny_model

from batchgen.core.draft_rates import MOST_DRAFTS
from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.generation import Generation
from batchgen.engine.longest_first import ExpectedLengths
from batchgen.runtime.grammar import Constraint
from batchgen.schedule.drafting import Drafting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def path(tiny_models):
    return tiny_models("llama")[0]


@pytest.fixture(scope="module")
def wanted(path, stores):
    """Kind of sampling -> samples of each row, by an engine that drafts nothing."""

    @cache
    def get(kind):
        if "regex" in SAMPLING[kind] or "json_schema" in SAMPLING[kind]:
            pytest.importorskip("llguidance")
        parts = make_parts(path, CPU, policy_of(path, "memory", "float32", "continuous", 1), stores)
        with Engine.from_parts(parts, drafts=0) as engine:
            return undisturbed(engine, requests_of(prompts_of(), SAMPLING[kind]))

    return get


def run(parts, kind, drafts):
    with Engine.from_parts(parts, drafts=drafts) as engine:
        done = undisturbed(engine, requests_of(prompts_of(), SAMPLING[kind]))
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return done, engine.stats


def answers_of(wanted):
    return {
        (tuple(prompt), sample): found.token_ids
        for row, prompt in enumerate(prompts_of())
        for sample, found in enumerate(wanted[row])
    }


STATE_CASES = [
    (family, tier)
    for family in ("qwen3_5", "qwen3_next", "lfm2")
    for tier in ("memory", "disk", "memory and disk", "streamed", "device", "mixed")
]
CASES = [(kind, tier) for kind in SAMPLING for tier in TIERS]


@pytest.mark.parametrize(("kind", "tier"), covering(CASES, 0, "drafts"))
def test_drafts_of_which_some_are_wrong_change_no_sample(kind, tier, path, stores, wanted):
    device, _ = TIERS[tier]
    admission, num_batches = ("static", 2) if len(kind + tier) % 3 == 0 else ("continuous", 1 + len(tier) % 3)
    parts = make_parts(path, device, policy_of(path, tier, "float32", admission, num_batches), stores)
    done, stats = run(parts, kind, partly_right(answers_of(wanted(kind)), most=4))
    assert_same(done, wanted(kind))
    if tier not in ("delegated", "deferred"):
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("kind", SAMPLING)
def test_drafts_of_all_proposers_change_no_sample(kind, path, stores, wanted):
    parts = make_parts(path, CPU, policy_of(path, "memory", "float32", "continuous", 1), stores)
    done, stats = run(parts, kind, lambda: Drafting(always=5))
    assert_same(done, wanted(kind))
    if kind in ("greedy", "a schema"):  # whose texts repeat themselves, or are forced
        assert stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", ["penalties", "a schema", "stop strings", "logprobs"])
def test_drafts_in_a_pipeline_change_no_sample(kind, path, stores, wanted):
    stages = stages_of(path, CPU, (1, 3), kv_seqs={"cpu": 6}, max_num_batched_tokens=50)
    drafts = partly_right(answers_of(wanted(kind)), most=3)
    done, stats = run(make_pipeline(path, CPU, stages, stores), kind, drafts)
    assert_same(done, wanted(kind))
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_drafts_on_ranks_that_share_every_layer_change_no_sample(path, stores, wanted):
    policy = policy_of(path, "memory", "float32", "continuous", 1)
    parts, first = make_parts_on_ranks(2, path, CPU, policy, stores)
    done, stats = run(parts, "drawn", partly_right(answers_of(wanted("drawn")), most=3))
    assert_same(done, wanted("drawn"))
    assert first.shared.failures == []
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize(("family", "tier"), rotating("drafts with states").sample(STATE_CASES, 6))
def test_states_go_back_to_before_a_refused_draft(family, tier, tiny_models, stores):
    path, _ = tiny_models(family)
    policy = policy_of(path, tier, "float32", "continuous", 1 + len(tier) % 2)
    device = TIERS[tier][0]
    plain, without = run(make_parts(path, device, policy, stores), "drawn", 0)
    drafts = partly_right(answers_of(plain), most=4)
    done, stats = run(make_parts(path, device, policy, stores), "drawn", drafts)
    assert_same(done, plain)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.generated_tokens == without.generated_tokens


def test_an_engine_refuses_more_drafts_than_a_sweep_checks(path):
    for drafts in (-1, MOST_DRAFTS + 1):
        with pytest.raises(InputError, match=f"drafts must be 0 to {MOST_DRAFTS}, not {drafts}"):
            Engine(str(path), drafts=drafts)


def test_accepted_drafts_save_sweeps(path, stores, wanted):
    policy = policy_of(path, "memory", "float32", "continuous", 1)
    _, without = run(make_parts(path, CPU, policy, stores), "greedy", 0)
    _, stats = run(make_parts(path, CPU, policy, stores), "greedy", partly_right(answers_of(wanted("greedy")), most=4))
    assert stats.generated_tokens == without.generated_tokens
    assert stats.sweeps < 0.75 * without.sweeps
    assert stats.decode_keys <= without.decode_keys


LITERALS = {"enum": ["The first of two long texts", "Whatever is in the other one"]}


FORCED = {
    "greedy": {}, "samples": {"temperature": 1.0, "n": 3}, "stop": {"stop": ("two",)}, "short": {"max_tokens": 9},
    "logprobs": {"logprobs": 1},
}  # fmt: skip
FORCED_IN = [("llama", "memory"), ("llama", "mixed"), ("qwen3_5", "streamed")]


@pytest.mark.parametrize(("where", "kind"), covering(itertools.product(FORCED_IN, FORCED), 0, "forced tokens"), ids=str)
def test_forced_tokens_take_no_sweep_and_change_no_sample(where, kind, tiny_models, stores, monkeypatch):
    pytest.importorskip("llguidance")
    family, tier = where
    path, _ = tiny_models(family)
    sampling = {"json_schema": LITERALS, "ignore_eos": False, "max_tokens": 60, **FORCED[kind]}
    requests = requests_of(prompts_of(), sampling)
    policy = policy_of(path, tier, "float32", "continuous", 2)

    def found(drafts):
        with Engine.from_parts(make_parts(path, TIERS[tier][0], policy, stores), drafts=drafts) as engine:
            return undisturbed(engine, requests), engine.stats

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "takes_ahead", property(lambda _: False, lambda *_: None), raising=False)
        wanted, without = found(0)
    assert not without.forced_tokens
    for drafts in (0, lambda: Drafting(always=4)):
        done, stats = found(drafts)
        assert_same(done, wanted)
        assert stats.generated_tokens == without.generated_tokens
        assert stats.prefilled_tokens == without.prefilled_tokens
        assert stats.decoded == without.decoded - stats.forced_tokens - stats.accepted_tokens
        assert (stats.forced_tokens > 0) == ("logprobs" not in kind)
        if "logprobs" not in kind or (drafts and (family, tier) == ("llama", "memory")):
            assert stats.sweeps < without.sweeps


def test_forced_tokens_are_taken_no_further_than_a_sample_may_be_long(path, stores, monkeypatch):
    """However long the text that a grammar forces: without a bound, masks of all of it hold every other row up."""
    pytest.importorskip("llguidance")
    taken = []
    ahead = Constraint.take_ahead
    monkeypatch.setattr(Constraint, "take_ahead", lambda self: taken.append(ahead(self)) or taken[-1])
    parts = make_parts(path, CPU, policy_of(path, "memory", "float32", "continuous", 1), stores)
    with Engine.from_parts(parts, drafts=0) as engine:
        for length in (1, 2, 7):
            sampling = {"choice": ("\u4e2d" * 300,), "max_tokens": length}
            done = undisturbed(engine, requests_of([[5, 6, 7]], sampling))
            assert [len(sample.token_ids) for sample in done[0]] == [length]
    assert list(map(len, taken)) == [1, 6]


@pytest.mark.parametrize("drafts", [0, lambda: Drafting(always=4)], ids=["no drafts", "drafts"])
@pytest.mark.parametrize(
    "end", [{"stop": ("b",)}, {"max_tokens": 2}, {"stop_token_ids": "b"}, {"stop": ("b",), "logprobs": 1}]
)
def test_a_sample_that_ends_in_forced_text_ends_well_though_no_token_follows(end, drafts, tmp_path, stores):
    """A grammar whose text goes on with a byte that the model has no token for, which the tokenizer has."""
    pytest.importorskip("llguidance")
    make_tiny_model("llama", tmp_path, vocab_size=98)
    parts = make_parts(tmp_path, CPU, policy_of(tmp_path, "memory", "float32", "continuous", 1), stores)
    with Engine.from_parts(parts, drafts=drafts) as engine:
        if "stop_token_ids" in end:
            end = {"stop_token_ids": (parts.tokenizer.token_id("b"),)}
        sampling = SamplingParams(choice=("ab\u4e2d",), **{"max_tokens": 9, **end})
        (done,) = engine.generate([Request([5, 6, 7], sampling)])
        (failed,) = engine.generate([Request([5, 6, 7], replace(sampling, stop=(), stop_token_ids=(), max_tokens=9))])
    assert done.error is None
    assert len(done.samples[0].token_ids) == 2
    assert "as its grammar wants" in failed.error


def test_rows_that_end_with_forced_tokens_count_for_the_lengths_of_others(path, stores, monkeypatch):
    pytest.importorskip("llguidance")
    ended = []
    monkeypatch.setattr(ExpectedLengths, "ended", lambda self, prompt_len, generated: ended.append(generated))
    parts = make_parts(path, CPU, policy_of(path, "memory", "float32", "continuous", 1), stores)
    with Engine.from_parts(parts, drafts=0, longest_first=True) as engine:
        done = undisturbed(engine, requests_of(prompts_of(), {"choice": ("\u4e2d\u6587",), "ignore_eos": False}))
    assert sorted(ended) == sorted(len(sample.token_ids) for samples in done.values() for sample in samples)


def test_with_an_attention_budget_each_forced_token_attends_by_itself(path, stores, monkeypatch):
    """Tokens that go through the layers together attend to all pages, as those of a prompt do."""
    pytest.importorskip("llguidance")
    policy = make_policy(path, CPU, kv_seqs={"cpu": SEQUENCES}, attention_budget="4", kv_block_size=4)
    requests = requests_of(prompts_of(), {"regex": "(\u4e2d\u6587){3}[a-z]{20}", "ignore_eos": False})
    with monkeypatch.context() as patch:
        patch.setattr(Generation, "takes_ahead", property(lambda _: False, lambda *_: None), raising=False)
        with Engine.from_parts(make_parts(path, CPU, policy, stores), drafts=0) as engine:
            wanted = undisturbed(engine, requests)
    with Engine.from_parts(make_parts(path, CPU, policy, stores), drafts=0) as engine:
        assert_same(undisturbed(engine, requests), wanted)
