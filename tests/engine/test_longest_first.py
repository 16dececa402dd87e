"""Rows whose outputs are expected to be long start first, where streamed weights bind; groups of prompts stay whole."""

import heapq
import itertools
import random
import tracemalloc
from array import array
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from tiered import CPU, make_parts, make_policy, once_all_rows_are_there

from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.longest_first import ExpectedLengths, LongestFirst


@dataclass(frozen=True)
class Waiting:
    prompt: array
    length: float


class Source(list):
    """Requests that are all there."""

    @property
    def ready(self):
        return bool(self)

    def take(self, most):
        taken = self[:most]
        del self[:most]
        return taken


def order_of(requests, **limits):
    return list(LongestFirst(Source(requests), lambda request: request.length, **limits))


def test_the_longest_come_first():
    lengths = random.Random(0).sample(range(1, 5000, 7), 300)
    requests = [Waiting(array("i", [k, 5]), length) for k, length in enumerate(lengths)]
    order = [request.length for request in order_of(requests)]
    assert sorted(order) == sorted(lengths)
    assert all(b <= 1.1 * a for a, b in pairwise(order))  # about as long keep the prompts' order


def test_requests_of_equal_lengths_keep_the_order_of_prompts():
    prompts = [(5, 1), (2,), (300, 1), (2, 256), (2, 3)]
    order = order_of([Waiting(array("i", prompt), 7) for prompt in prompts])
    assert [tuple(request.prompt) for request in order] == sorted(prompts)


def test_a_group_with_a_common_prefix_starts_together_when_its_longest_is_due():
    rng = random.Random(1)
    requests = [
        Waiting(
            array("i", [group] * 64 + [rng.randrange(99), k]), rng.randrange(10, 50) + 1000 * (group == 3) * (k == 2)
        )
        for group in range(6)
        for k in range(5)
    ]
    rng.shuffle(requests)
    groups = [request.prompt[0] for request in order_of(requests)]
    assert groups[0] == 3 and sum(a != b for a, b in pairwise(groups)) == 5
    alone = order_of(requests, group_tokens=1 << 40)
    assert alone[0].length > 1000 and alone[1].length >= alone[-1].length


def test_lengths_are_learned_from_prompts_of_like_lengths():
    lengths = ExpectedLengths()
    given = SamplingParams(max_tokens=400)
    assert lengths.expected(20, given) == 400
    for _ in range(100):
        lengths.ended(20, 10)
        lengths.ended(2000, 300)
    assert lengths.expected(24, given) < 40 and lengths.expected(1500, given) > 250
    assert lengths.expected(1500, SamplingParams(max_tokens=100)) == 100
    assert lengths.expected(24, SamplingParams(max_tokens=400, ignore_eos=True)) == 400


def test_waiting_requests_are_put_in_order_anew_when_lengths_are_learned():
    lengths = {0: 5, 1: 5, 2: 5, 3: 5}
    requests = [Waiting(array("i", [k]), 0) for k in range(4)]
    order = LongestFirst(Source(requests), lambda request: lengths[request.prompt[0]])
    assert next(order).prompt[0] == 0
    lengths[3] = 50
    order.learn()
    assert [request.prompt[0] for request in order] == [3, 1, 2]


def test_a_job_of_unequal_outputs_takes_fewer_sweeps_and_has_the_same_tokens(tiny_models, tmp_path):
    model = tiny_models("llama")[0]
    rng = np.random.default_rng(0)
    lengths = np.minimum(60, 1 + rng.lognormal(2.0, 1.0, 40)).astype(int)
    lengths[-1] = 60  # the longest begins last
    requests = [
        Request([7 + k, 9, 11], SamplingParams(max_tokens=int(length), ignore_eos=True))
        for k, length in enumerate(lengths)
    ]
    sweeps, tokens = {}, {}
    policy = make_policy(model, CPU, gpu_batch_size=4, kv_seqs={"cpu": 4})
    for longest_first in (False, True):
        parts = make_parts(model, CPU, policy, tmp_path)
        with Engine.from_parts(parts, longest_first=longest_first) as engine:
            done = list(engine.generate(requests, should_stop=once_all_rows_are_there))
            tokens[longest_first] = {completion.index: completion.samples[0].token_ids for completion in done}
            sweeps[longest_first] = engine.stats.sweeps
    assert tokens[True] == tokens[False]
    assert sweeps[True] < sweeps[False] and sweeps[True] <= 1.1 * max(lengths.sum() / 4, 60)


@pytest.mark.parametrize("seqs", [64, 256])
def test_lengths_of_a_heavy_tail_end_sooner_by_a_tenth_or_more(seqs):
    """Ten times as many rows as in flight; sweeps that take as long with few sequences as with many."""
    rng = np.random.default_rng(3)
    lengths = np.minimum(1000, 1 + rng.lognormal(4.9, 1.0, 10 * seqs)).astype(int)
    requests = [Waiting(array("i", [k]), float(length)) for k, length in enumerate(lengths)]

    def sweeps(of_rows):
        ends = [0] * seqs
        for length in of_rows:
            heapq.heapreplace(ends, ends[0] + length)
        return max(ends)

    assert sweeps(lengths) >= 1.1 * sweeps(int(request.length) for request in order_of(requests))


def test_memory_does_not_grow_with_the_requests_that_have_started():
    def endless(count):
        rng = random.Random(0)
        for k in range(count):
            yield Waiting(array("i", [k] * 500), rng.uniform(100, 109))

    class Endless:
        ready = True

        def __init__(self, count):
            self._requests = endless(count)

        def take(self, most):
            return list(itertools.islice(self._requests, most))

    peaks = []
    for count in (1000, 8000):
        tracemalloc.start()
        order = LongestFirst(Endless(count), lambda request: request.length, most_requests=64)
        assert sum(1 for _ in order) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
