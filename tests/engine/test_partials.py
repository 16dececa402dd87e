"""Rows that a stop cuts off go on from their tokens: however often they are stopped, their samples are the same."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from rank_threads import make_parts_on_ranks
from test_pipeline import in_memory, memory_policy, prompts_of
from tiered import CPU, make_parts

from batchgen.core.partial import PartialCompletion, PartialSample
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 6}
SAMPLING = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    "several samples": {"temperature": 1.0, "n": 3},
    "logprobs": {"logprobs": 3},
    "log-probabilities of the prompt": {"prompt_logprobs": 1, "temperature": 1.0, "n": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "stop strings": {"temperature": 1.5, "stop": ("e", "a", "1"), "n": 2},
    "a schema": {"json_schema": json.dumps(NUMBERS), "temperature": 1.0, "n": 2},
    "a regular expression": {"regex": "[a-f]{3,20}", "logprobs": 0},
    "end of text": {"temperature": 1.5, "ignore_eos": False, "n": 4},
}


def requests_of(prompts, sampling, partials=()):
    by_row = {partial.row: partial for partial in partials}
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **sampling})
    return [
        Request(prompt, params, id=f"row {row}", row=row, partial=by_row.get(row)) for row, prompt in enumerate(prompts)
    ]


def undisturbed(engine, requests):
    return {completion.row: completion.samples for completion in engine.generate(requests)}


def stopped_often(engine, prompts, sampling, sweeps=2, stops=80, **options):
    """The samples of a job that is stopped after every few sweeps, and the number of its stops."""
    done, partials, count = {}, [], 0
    for count in range(stops + 1):
        left = itertools.count()
        requests = [r for r in requests_of(prompts, sampling, partials) if r.row not in done]
        last = count == stops
        should_stop = (lambda: False) if last else (lambda left=left: next(left) >= sweeps)
        for completion in engine.generate(requests, should_stop=should_stop, **options):
            assert completion.error is None
            done[completion.row] = completion.samples
        assert engine.used_kv_blocks == 0
        partials = engine.partials()
        assert not {partial.row for partial in partials} & set(done)
        if len(done) == len(prompts):
            break
    return done, count


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def path(tiny_models):
    return tiny_models("llama")[0]


@pytest.fixture(scope="module")
def engine(path, stores):
    with Engine.from_parts(make_parts(path, CPU, memory_policy(path), stores)) as engine:
        yield engine


@pytest.mark.parametrize("kind", SAMPLING)
def test_a_job_that_is_stopped_often_gives_the_samples_of_an_undisturbed_one(kind, engine):
    sampling = SAMPLING[kind]
    if "regex" in sampling or "json_schema" in sampling:
        pytest.importorskip("llguidance")
    prompts = prompts_of()
    wanted = undisturbed(engine, requests_of(prompts, sampling))
    done, stops = stopped_often(engine, prompts, sampling)
    assert stops >= (20 if kind == "greedy" else 5)
    assert_same(done, wanted)


def assert_same(done, wanted):
    assert done.keys() == wanted.keys()
    for row, samples in wanted.items():
        assert [replace(s, logprobs=None) for s in done[row]] == [replace(s, logprobs=None) for s in samples]
        for sample, same in zip(done[row], samples, strict=True):
            assert (sample.logprobs is None) == (same.logprobs is None)
            for position, other in zip(sample.logprobs or (), same.logprobs or (), strict=True):
                assert position.chosen.token_id == other.chosen.token_id
                assert position.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
                assert [t.token_id for t in position.top] == [t.token_id for t in other.top]


def test_no_token_is_generated_twice(engine):
    prompts = prompts_of()
    before = engine.stats.generated_tokens
    undisturbed(engine, requests_of(prompts, {}))
    once = engine.stats.generated_tokens - before
    _, stops = stopped_often(engine, prompts, {})
    assert stops > 3
    assert engine.stats.generated_tokens - before - once == once


@pytest.mark.parametrize("kind", ["greedy", "several samples", "penalties", "a regular expression"])
def test_rows_go_on_in_a_pipeline(kind, engine, path, stores):
    if kind == "a regular expression":
        pytest.importorskip("llguidance")
    prompts = prompts_of()
    wanted = undisturbed(engine, requests_of(prompts, SAMPLING[kind]))
    with Engine.from_parts(in_memory(path, stores, (1, 3))) as staged:
        done, stops = stopped_often(staged, prompts, SAMPLING[kind], sweeps=8)
    assert stops >= 3
    assert_same(done, wanted)


@pytest.mark.parametrize("kind", ["greedy", "several samples"])
def test_rows_go_on_with_tensor_parallelism(kind, engine, path, stores):
    prompts = prompts_of()
    parts, _ = make_parts_on_ranks(2, path, CPU, memory_policy(path), stores)
    with Engine.from_parts(parts) as ranks:
        wanted = undisturbed(ranks, requests_of(prompts, SAMPLING[kind]))
        done, stops = stopped_often(ranks, prompts, SAMPLING[kind])
    assert stops >= 3
    assert_same(done, wanted)


def test_rows_go_on_after_preemption(engine, path, stores):
    """Outputs grow beyond a small pool, so sequences with restored tokens are preempted and computed again."""
    prompts = [prompt[-5:] for prompt in prompts_of()]
    sampling = {"max_tokens": 36}
    wanted = undisturbed(engine, requests_of(prompts, sampling))
    policy = replace(memory_policy(path), share_prefixes=False, max_model_len=48)
    parts = make_parts(path, CPU, policy, stores, min_output_len=36, longest_tokens=48, most_kv_tokens=64)
    with Engine.from_parts(parts, expected_output_len=1) as small:
        preempted = []
        done, stops = stopped_often(
            small, prompts, sampling, 25, on_sweep=lambda stats: preempted.append(stats.preempted)
        )
    assert stops >= 2 and max(preempted) > 0
    assert_same(done, wanted)


def test_a_changed_prompt_or_sampling_begins_anew(engine):
    prompts = prompts_of()
    left = itertools.count()
    list(engine.generate(requests_of(prompts, {}), should_stop=lambda: next(left) >= 5))
    partials = engine.partials()
    assert partials
    changed = [[9, *prompt] for prompt in prompts]
    for rows, sampling in ((changed, {}), (prompts, {"repetition_penalty": 1.5})):
        wanted = undisturbed(engine, requests_of(rows, sampling))
        assert undisturbed(engine, requests_of(rows, sampling, partials)) == wanted


def test_the_draws_of_greedy_requests_are_no_change(engine):
    """Values that no greedy token depends on."""
    prompts = prompts_of()
    left = itertools.count()
    list(engine.generate(requests_of(prompts, {}), should_stop=lambda: next(left) >= 5))
    partials, before = engine.partials(), engine.stats.generated_tokens
    wanted = undisturbed(engine, requests_of(prompts, {"seed": 5}))
    generated = engine.stats.generated_tokens - before
    assert undisturbed(engine, requests_of(prompts, {"seed": 5}, partials)) == wanted
    saved = sum(partial.num_tokens for partial in partials)
    assert engine.stats.generated_tokens - before - generated == generated - saved > 0


def test_a_row_whose_samples_have_all_ended_needs_no_sweep(engine):
    request = requests_of([[5, 6, 7]], {"max_tokens": 4})[0]
    (completion,) = engine.generate([request])
    sample = completion.samples[0]
    left = itertools.count()
    list(engine.generate([request], should_stop=lambda: next(left) >= 2))
    digest = engine.partials()[0].digest
    whole = PartialCompletion(0, digest, (PartialSample(np.array(sample.token_ids, np.int32)),))
    sweeps = engine.stats.sweeps
    (again,) = engine.generate([replace(request, partial=whole)])
    assert again.samples == completion.samples and engine.stats.sweeps == sweeps


def test_partials_of_another_number_of_samples_are_not_used(engine):
    request = requests_of([[5, 6, 7]], {"max_tokens": 4})[0]
    left = itertools.count()
    list(engine.generate([request], should_stop=lambda: next(left) >= 2))
    (partial,) = engine.partials()
    two = replace(partial, samples=partial.samples * 2)
    (wanted,) = engine.generate([request])
    (found,) = engine.generate([replace(request, partial=two)])
    assert found.samples == wanted.samples
