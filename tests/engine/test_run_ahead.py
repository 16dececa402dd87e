"""Sweeps that are launched before the results of the one before have reached the host: the same tokens and scores.

The executor is the CPU's, which hands tokens over to the next sweep through its table and to the host only when the
engine has waited for the sweep.
"""

import itertools
import random
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from model_tables import MODELS
from test_scoring import check as check_scores
from thorough import some_of
from tiered import CPU, make_parts, make_policy

from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.encode import ENCODE_CHUNK
from batchgen.engine.engine import Engine, _Call, _Sweep
from batchgen.runtime.sampler import Sampled
from batchgen.runtime.token_table import TokenTable

pytestmark = pytest.mark.usefixtures("one_thread")

_random = random.Random(5)
PREFIX = [_random.randrange(4, 500) for _ in range(40)]
PROMPTS = [
    PREFIX[: 20 * (i % 3)] + [_random.randrange(4, 500) for _ in range(n)]
    for i, n in enumerate((5, 30, 17, 1, 16, 40, 9))
]
FREE = SamplingParams(max_tokens=14)


@dataclass(frozen=True)
class NotYet:
    """Sampled tokens that the host does not have before it has waited for their sweep."""

    sampled: Sampled
    number: int
    waited: set[int]

    @property
    def token_ids(self):
        return self.sampled.token_ids

    def tokens(self):
        assert self.number in self.waited, "the host does not have these tokens yet"
        return self.sampled.tokens()


class Ahead:
    """Has an engine's parts run ahead. events: what happened, in order: ("launched", n), ("taken", n)."""

    def __init__(self, parts):
        self.events, self._waited, self._numbers = [], set(), itertools.count()
        executor, real_run, self._sample = parts.executor, parts.executor.run, parts.sample
        executor.context.tokens = TokenTable(executor.context.device)
        self.number = 0

        def run(batches, on_logits, **options):
            number = self.number = next(self._numbers)
            self.events.append(("launched", number))
            assert real_run(batches, on_logits, **options) is None
            return lambda: self._wait(number)

        executor.run = run
        self.parts = replace(parts, sample=self._sample_ahead)

    def _wait(self, number):
        self._waited.add(number)
        self.events.append(("taken", number))

    def _sample_ahead(self, logits, sequences):
        return NotYet(self._sample(logits, sequences), self.number, self._waited)

    @property
    def num_ahead(self):
        """Sweeps that were launched before the one before had been taken."""
        at = {event: i for i, event in enumerate(self.events)}
        return sum(at["launched", n + 1] < at["taken", n] for n in range(self.number))


@pytest.fixture
def parts_of(tiny_models, tmp_path):
    def make(model="llama", tight=False, **policy):
        family, overrides = MODELS[model]
        path = tiny_models(family, **overrides)[0]
        policy = make_policy(path, CPU, gpu_batch_size=4, kv_seqs={"cpu": 4}, max_model_len=128, **policy)
        options = {"longest_tokens": 80, "most_kv_tokens": 1} if tight else {}
        return make_parts(path, CPU, policy, tmp_path, **options)

    return make


def completions(parts, requests, **options):
    with Engine.from_parts(parts, drafts=0, **options) as engine:
        done = sorted(engine.generate(requests), key=lambda c: c.index)
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    return done, engine.stats


def seen(completion):
    """What must be the same; log-probabilities up to rounding, which depends on the rows beside."""
    assert completion.error is None
    samples = [(s.token_ids, s.text, s.finish_reason, s.stop) for s in completion.samples]
    positions = [p for s in completion.samples for p in s.logprobs or ()]
    chosen = [(p.chosen.token_id, pytest.approx(p.chosen.logprob, abs=1e-4)) for p in positions]
    return completion.prompt_tokens, samples, chosen


def both(make, requests, **options):
    """Completions of an engine that runs ahead, held to those of one that does not."""
    expected, before = completions(make(), requests, **options)
    ahead = Ahead(make())
    found, stats = completions(ahead.parts, requests, **options)
    assert [seen(c) for c in found] == [seen(c) for c in expected]
    assert stats.generated_tokens == before.generated_tokens
    assert stats.prompt_tokens == before.prompt_tokens
    return ahead, stats, found


def ends_early(parts_of):
    """Parameters with which rows stop at tokens that some of them come upon."""
    done, _ = completions(parts_of(), [Request(p, replace(FREE, ignore_eos=True)) for p in PROMPTS])
    tokens = [sample.token_ids for completion in done for sample in completion.samples]
    return replace(FREE, ignore_eos=True, stop_token_ids=(tokens[0][2], tokens[1][5], tokens[4][8]))


@pytest.mark.parametrize("model", some_of(MODELS, 12, "ahead"))
def test_the_same_tokens(parts_of, model):
    ahead, stats, _ = both(lambda: parts_of(model), [Request(p, FREE) for p in PROMPTS])
    assert ahead.num_ahead >= stats.sweeps - 3


@pytest.mark.parametrize("admission", ["continuous", "static"])
def test_rows_that_end_when_the_next_sweep_has_them_already(parts_of, admission):
    sampling = ends_early(parts_of)
    ahead, stats, found = both(lambda: parts_of(admission=admission), [Request(p, sampling) for p in PROMPTS])
    assert sum(c.samples[0].finish_reason == "stop" for c in found) >= 3
    assert ahead.num_ahead > stats.sweeps / 2


def test_draws_log_probabilities_and_several_samples(parts_of):
    sampling = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, n=3, seed=3, logprobs=2, stop=("e",))
    both(parts_of, [Request(p, sampling) for p in PROMPTS])


def test_rows_that_are_preempted(parts_of):
    sampling = replace(ends_early(parts_of), max_tokens=30)
    ahead, stats, _ = both(
        lambda: parts_of(tight=True, kv_block_size=8),
        [Request(p, sampling) for p in PROMPTS * 3],
        expected_output_len=1,
    )
    assert stats.preempted > 0 and ahead.num_ahead > stats.sweeps / 2


def test_what_only_the_host_can_choose_is_waited_for(parts_of):
    """The penalty is on tokens that the host has to know.

    Rows without it go on being run ahead when those have ended.
    """
    penalised = replace(FREE, repetition_penalty=1.3, max_tokens=6)
    rows = [Request(p, penalised if i < 2 else FREE) for i, p in enumerate(PROMPTS)]
    ahead, stats, _ = both(parts_of, rows)
    assert 0 < ahead.num_ahead < stats.sweeps - 5


def test_grammars(parts_of):
    sampling = replace(FREE, regex="[a-z]{3} [0-9]{2}")
    _, _, found = both(parts_of, [Request(p, sampling if i % 2 else FREE) for i, p in enumerate(PROMPTS)])
    assert all(len(c.samples[0].text) <= 6 for c in found[1::2])


def test_results_do_not_wait_for_more_input(parts_of):
    """All rows that have come are yielded before the input, which is read some rows at a time, gives another one."""
    yielded, all_yielded = [], threading.Event()

    def rows():
        for _ in range(ENCODE_CHUNK):
            yield Request(PROMPTS[0], replace(FREE, max_tokens=2))
        assert all_yielded.wait(60), "results wait for the next row"
        yield Request(PROMPTS[1], FREE)

    ahead = Ahead(parts_of())
    with Engine.from_parts(ahead.parts, drafts=0) as engine:
        for completion in engine.generate(rows()):
            yielded.append(completion)
            if len(yielded) == ENCODE_CHUNK:
                all_yielded.set()
    assert len(yielded) == ENCODE_CHUNK + 1


def test_an_engine_that_was_stopped_goes_on(parts_of):
    ahead = Ahead(parts_of())
    requests = [Request(p, FREE) for p in PROMPTS]
    with Engine.from_parts(ahead.parts, drafts=0) as engine:
        next(iter(engine.generate(requests)))
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
        stop = len(ahead.events) + 45
        assert 0 < len(list(engine.generate(requests, should_stop=lambda: len(ahead.events) > stop))) < len(PROMPTS)
        again = sorted(engine.generate(requests), key=lambda c: c.index)
    expected, _ = completions(parts_of(), requests)
    assert [c.samples for c in again] == [c.samples for c in expected]


def test_calls_that_take_turns(parts_of):
    """Another call runs while a sweep of the first one is under way.

    What that sweep has sampled is still there afterwards.
    """
    outer = [Request(p, replace(FREE, max_tokens=4 + 2 * i)) for i, p in enumerate(PROMPTS)]
    inner = [Request(p[::-1], FREE) for p in PROMPTS[:2]]

    def nested(parts):
        with Engine.from_parts(parts, drafts=0) as engine:
            return [(c.samples, [d.samples for d in engine.generate(inner)]) for c in engine.generate(outer)]

    assert nested(Ahead(parts_of()).parts) == nested(parts_of())


def test_scores(parts_of, tiny_models):
    ahead = Ahead(parts_of())
    rows = [ScoreRequest(p, ([5, 6, 7], [9], [5, 6, 8, 10]), i) for i, p in enumerate(PROMPTS)]
    with Engine.from_parts(ahead.parts, drafts=0) as engine:
        found = sorted(engine.score(rows), key=lambda scored: scored.index)
    check_scores(tiny_models("llama")[1], rows, found)
    assert ahead.num_ahead >= engine.stats.sweeps - 1


@pytest.mark.parametrize("needs_host", [False, True])
def test_a_call_that_is_closed_waits_for_all_that_is_under_way(needs_host):
    """Also for a second sweep that is due, when the caller stops at a result of the first."""
    waited = []
    scheduler = SimpleNamespace(drafting=None, running=[], waiting=[], finish=None, has_work=False)
    call = _Call(None, scheduler, SimpleNamespace(close=lambda: None))
    first, second = (
        _Sweep(SimpleNamespace(needs_host=needs), lambda n=n: waited.append(n), 0.0)
        for n, needs in enumerate((False, needs_host))
    )
    assert list(call.due(first)) == []
    assert next(call.due(second)) is first and call.has_work
    call.close()
    assert waited == [1]
