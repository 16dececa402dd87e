"""Log-probabilities of prompts, beside generation, are those of transformers in fp32, however they are made."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from fake_device import ORDERS, FakeDevice, as_on_a_device, run_on
from model_tables import FAMILIES
from rank_threads import make_parts_on_ranks
from test_pipeline import in_memory as pipeline_of
from thorough import covering, quick_or, some_of
from tiered import CPU, EMULATED, everything_moves, make_parts, make_policy

import batchgen
from batchgen.core.errors import InputError
from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine
from batchgen.schedule.scheduler import Scheduler

CLOSE = 1e-4
MAX_TOKENS = 5


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


def rows_of(seed=0, count=12, **more):
    """Prompts of one token and more: half begin alike, two thirds ask for log-probabilities, some for samples."""
    rng = random.Random(seed)
    prefix = [rng.randrange(4, 500) for _ in range(40)]
    rows = []
    for i in range(count):
        prompt = prefix * (i % 2) + [rng.randrange(4, 500) for _ in range(rng.choice((1, 2, 15, 16, 17, 30)))]
        drawn = {"n": 3, "temperature": 1.0} if i % 4 == 3 else {}
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS, ignore_eos=True, prompt_logprobs=(None, 0, 3)[i % 3], **drawn, **more
        )
        rows.append(Request(prompt, sampling, id=f"row-{i}"))
    return [*rows, Request([9], SamplingParams(max_tokens=2, prompt_logprobs=1), id="one token")]


def run(engine, rows):
    completions = sorted(engine.generate(rows), key=lambda completion: completion.index)
    assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return completions


def check(model, rows, completions):
    assert [completion.error for completion in completions] == [None] * len(rows)
    for completion, request in zip(completions, rows, strict=True):
        prompt = request.prompt
        assert completion.prompt_token_ids == tuple(prompt) and completion.prompt_tokens == len(prompt)
        assert len(completion.samples) == request.sampling.n
        if request.sampling.prompt_logprobs is None:
            assert completion.prompt_logprobs is None
            continue
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        first, *others = completion.prompt_logprobs
        assert (first.chosen.token_id, first.chosen.logprob, first.top) == (prompt[0], None, ())
        assert [position.chosen.token_id for position in others] == prompt[1:]
        for position, expected in zip(others, logprobs, strict=False):
            assert position.chosen.logprob == pytest.approx(expected[position.chosen.token_id].item(), abs=CLOSE)
            best = expected.topk(request.sampling.prompt_logprobs).values.tolist()
            assert [token.logprob for token in position.top] == pytest.approx(best, abs=CLOSE)
            # Of two as likely as each other either may come first.
            assert [expected[token.token_id].item() for token in position.top] == pytest.approx(best, abs=CLOSE)


def texts(completions):
    return [[sample.token_ids for sample in completion.samples] for completion in completions]


def engine_of(path, **options):
    return batchgen.Engine(str(path), **{"dtype": "float32", "cpu_memory": "4GiB", **options})


@pytest.mark.parametrize("family", some_of(FAMILIES, 12, "prompts"))
def test_log_probabilities_of_a_prompt_equal_those_of_transformers(tiny_models, family):
    """And what is generated is what it is without them."""
    path, model = tiny_models(family)
    rows = rows_of()
    with engine_of(path) as engine:
        completions = run(engine, rows)
        check(model, rows, completions)
        plain = [Request(row.prompt, replace(row.sampling, prompt_logprobs=None), row.id) for row in rows]
        assert texts(run(engine, plain)) == texts(completions)


@pytest.mark.parametrize(
    ("admission", "max_num_batched_tokens", "share_prefixes"),
    covering(itertools.product(("continuous", "static"), (7, 64), (True, False)), 4, "chunks"),
)
def test_chunks_and_shared_prefixes_change_nothing(tiny_models, admission, max_num_batched_tokens, share_prefixes):
    path, model = tiny_models("qwen3")
    rows = rows_of(1)
    options = {"admission": admission, "max_num_seqs": 3, "share_prefixes": share_prefixes}
    with engine_of(path, max_num_batched_tokens=max_num_batched_tokens, **options) as engine:
        check(model, rows, run(engine, rows))


def test_every_position_has_its_logits_though_another_row_has_computed_the_prefix(tiny_models):
    """The prompt is computed once more for them, and once for all samples; nothing counts as taken from other rows."""
    path, model = tiny_models("llama")
    prompt = [random.Random(5).randrange(4, 500) for _ in range(65)]
    plain = SamplingParams(max_tokens=1, ignore_eos=True)
    wanted = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1, n=4, temperature=1.0)
    with engine_of(path) as engine:
        run(engine, [Request(prompt, plain)])
        before = engine.stats.computed_tokens
        completions = run(engine, [Request(prompt, wanted)])
        check(model, [Request(prompt, wanted)], completions)
        assert engine.stats.computed_tokens - before == 64 + 4 * 1 + 4 * 1
        assert completions[0].cached_tokens == 0
        (later,) = run(engine, [Request(prompt, plain)])
        assert later.cached_tokens == 64


@pytest.mark.parametrize("where", ["memory", "everything moves", "streamed", "disk", "pipeline", "ranks"])
def test_log_probabilities_wherever_weights_and_kv_are(tiny_models, stores, tmp_path, where, one_thread):
    path, model = tiny_models("llama")
    if where == "pipeline":
        parts = pipeline_of(path, stores, (2, 3))
    elif where == "ranks":
        parts, _ = make_parts_on_ranks(2, path, CPU, make_policy(path, CPU, kv_seqs={"cpu": 8}), stores)
    elif where == "memory":
        parts = make_parts(path, CPU, make_policy(path, CPU, kv_seqs={"cpu": 8}), stores)
    elif where == "everything moves":
        parts = make_parts(path, EMULATED, everything_moves(path, weight_format="float32"), stores)
    else:
        policy = make_policy(path, EMULATED, kv_seqs={where: 8}, max_num_batched_tokens=24)
        parts = make_parts(path, EMULATED, policy, stores)
    rows = rows_of(2, repetition_penalty=1.2)
    with Engine.from_parts(parts) as engine:
        check(model, rows, run(engine, rows))


@pytest.mark.parametrize("seed", range(quick_or(1, 2)))
def test_log_probabilities_on_a_device_with_streams(tiny_models, stores, monkeypatch, seed, one_thread):
    """Whose next sweep begins before the host has read the tokens of the last one."""
    as_on_a_device(monkeypatch)
    path, model = tiny_models("llama")
    policy = make_policy(path, EMULATED, kv_seqs={"gpu": 8}, max_num_batched_tokens=24)
    parts = make_parts(path, EMULATED, policy, stores)
    run_on(parts, FakeDevice(*ORDERS[seed]), monkeypatch)
    rows = rows_of(3)
    with Engine.from_parts(parts) as engine:
        completions = run(engine, rows)
    check(model, rows, completions)
    with engine_of(path) as engine:
        assert texts(run(engine, rows)) == texts(completions)


@pytest.mark.parametrize("kv_placement", ["gpu", "streamed", "disk"])
def test_preempted_prompts_are_scored_once(tiny_models, stores, monkeypatch, kv_placement):
    path, model = tiny_models("llama")
    rng = random.Random(2)
    real, asked = Scheduler.schedule, []

    def schedule(self):
        if self.running and rng.random() < 0.5:
            self._preempt(rng.choice(list(self.running)))
        sweep = real(self)
        asked.extend((s.sequence, position) for s in sweep for position in s.logits_positions if s.sequence.targets)
        return sweep

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    policy = make_policy(path, EMULATED, kv_seqs={kv_placement: 8}, max_num_batched_tokens=24)
    rows = rows_of(4)
    with Engine.from_parts(make_parts(path, EMULATED, policy, stores)) as engine:
        check(model, rows, run(engine, rows))
        assert engine.stats.preempted > 3
    assert len(asked) == len(set(asked)) > 0


def test_several_prompts_of_a_request_have_each_their_own(tiny_models):
    path, model = tiny_models("llama")
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=2, n=2, temperature=1.0)
    prompts = [[5, 6, 7], [8], [5, 6, 9, 10]]
    with engine_of(path) as engine:
        (completion,) = run(engine, [Request(prompts[0], sampling, more_prompts=tuple(prompts[1:]))])
        assert [list(prompt.token_ids) for prompt in completion.prompts] == prompts and len(completion.samples) == 6
        alone = [run(engine, [Request(prompt, sampling)])[0] for prompt in prompts]
        check(model, [Request(prompt, sampling) for prompt in prompts], alone)
        for prompt, other in zip(completion.prompts, alone, strict=True):
            found, expected = (
                [p.chosen.logprob for p in logprobs] for logprobs in (prompt.logprobs, other.prompt_logprobs)
            )
            assert found[0] is expected[0] is None and found[1:] == pytest.approx(expected[1:], abs=CLOSE)


def test_a_generated_text_scores_as_a_prompt_what_it_scored_as_output(tiny_models):
    """With the log-probabilities of `Engine.score`, too."""
    path, _ = tiny_models("gemma2")
    with engine_of(path) as engine:
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
        (first,) = run(engine, [Request([5, 6, 7], sampling)])
        generated = first.samples[0].token_ids
        (again,) = run(engine, [Request([5, 6, 7, *generated], SamplingParams(max_tokens=1, prompt_logprobs=0))])
        (scored,) = engine.score([ScoreRequest((5, 6, 7), (generated,))])
        as_prompt = [position.chosen.logprob for position in again.prompt_logprobs[3:]]
        assert as_prompt == pytest.approx([p.chosen.logprob for p in first.samples[0].logprobs], abs=CLOSE)
        assert as_prompt == pytest.approx([p.chosen.logprob for p in scored.scores[0].tokens], abs=CLOSE)


def test_what_could_not_fit_into_memory_is_refused(tiny_models):
    with pytest.raises(InputError, match="prompt_logprobs must be between 0 and 100"):
        SamplingParams(prompt_logprobs=101)
    with pytest.raises(InputError, match="lower prompt_logprobs"):
        SamplingParams(prompt_logprobs=100, max_tokens=1).check_result_size(1, 1 << 20)
