"""Sequences of placement `deferred`: what is left behind by calls that end early, and who waits for whom."""

import random
import threading

import pytest
from tiered import (
    CPU,
    EMULATED,
    before_each_step,
    generate,
    give_dedicated_cores,
    make_parts,
    make_policy,
    make_requests,
)

from batchgen.engine.engine import Engine
from batchgen.schedule.deferred_batches import MOST_PASSED_BY

pytestmark = pytest.mark.usefixtures("one_thread")

_random = random.Random(5)
PROMPTS = [[_random.randrange(4, 500) for _ in range(n)] for n in (5, 20, 17, 3, 16, 9)]
LENGTHS = [12, 5, 4, 6, 5, 4]


@pytest.fixture
def make(tiny_models, tmp_path):
    path = tiny_models("llama", num_hidden_layers=2)[0]

    def make(device=EMULATED, **kv_seqs):
        policy = make_policy(path, device, kv_seqs=kv_seqs or {"gpu": 1, "deferred": 7})
        return make_parts(path, device, policy, tmp_path)

    return make


def test_where_the_cpu_computes_nothing_is_deferred(make):
    assert generate(make(CPU, deferred=8), PROMPTS, LENGTHS) == generate(make(CPU, cpu=8), PROMPTS, LENGTHS)


def test_a_call_that_is_dropped_leaves_nothing_behind(make):
    expected = generate(make(CPU, cpu=8), PROMPTS, LENGTHS)
    with Engine.from_parts(make()) as engine:
        for rows in (1, 3):
            dropped = engine.generate(make_requests(PROMPTS[::-1], LENGTHS[::-1]))
            for _ in range(rows):
                next(dropped)
            dropped.close()
            assert engine.used_kv_blocks == 0
        done = {c.index: c.samples[0].token_ids for c in engine.generate(make_requests(PROMPTS, LENGTHS))}
    assert [done[i] for i in range(len(PROMPTS))] == expected


def test_calls_that_take_turns_keep_their_rows_apart(make):
    expected = generate(make(CPU, cpu=8), PROMPTS, LENGTHS)
    with Engine.from_parts(make(deferred=8)) as engine:
        calls = [engine.generate(make_requests(PROMPTS, LENGTHS)) for _ in range(2)]
        done = [{}, {}]
        for _ in PROMPTS:
            for call, own in zip(calls, done, strict=True):
                completion = next(call)
                own[completion.index] = completion.samples[0].token_ids
    assert [[own[i] for i in range(len(PROMPTS))] for own in done] == [expected] * 2


def test_the_accelerator_goes_on_while_the_cpu_is_late(make):
    expected = generate(make(CPU, cpu=8), PROMPTS, LENGTHS)
    parts, enough, late = make(), threading.Event(), []
    give_dedicated_cores(parts)

    def hold(step):
        if step.kind == "attend_deferred" and not late:
            late.append(enough.wait(60))

    before_each_step(parts, hold)

    def on_sweep(stats):
        if stats.sweeps == MOST_PASSED_BY // 2:
            enough.set()

    with Engine.from_parts(parts) as engine:
        done = {
            c.index: c.samples[0].token_ids for c in engine.generate(make_requests(PROMPTS, LENGTHS), on_sweep=on_sweep)
        }
    assert [done[i] for i in range(len(PROMPTS))] == expected
    assert late == [True], "sweeps waited for the CPU"
