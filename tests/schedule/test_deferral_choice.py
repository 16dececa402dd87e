"""How deferred tokens go through a sweep: by APEX's inequality, those under way first, and by what the CPU takes."""

import random

import pytest

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import LaneCosts
from batchgen.core.request import SamplingParams
from batchgen.schedule.deferral_choice import DeferralChoice, PipelineTimes, pipelining_pays
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence

LAYERS = 32
# A sweep takes 10 s, and 0.5 s of attention for each sequence of the GPU: with 20 of them inequality (6) says that the
# CPU has to attend at a fifth of the GPU's rate.
COSTS = LaneCosts(batch_s=10.0, gpu_seq_s=0.5, token_s=0.001, prompt_key_s=0.02)
GPU_SEQS = 20


def sequence(number, placement, num_tokens=10, *, computed=None):
    made = Sequence(number, number, 0, [5] * num_tokens, SamplingParams(max_tokens=60))
    made.num_prompt, made.kv_placement = 4, placement
    made.num_computed = num_tokens - 1 if computed is None else computed
    return made


def decodes(count, placement, start=0):
    return [ScheduledSequence(sequence(start + i, placement), 1) for i in range(count)]


def choice(cpu_seq_s):
    return DeferralChoice(LaneCosts(**(vars(COSTS) | {"cpu_seq_s": cpu_seq_s})), LAYERS)


def begun(sweep):
    return [one.sequence.row_id for one in sweep if one.defers]


def test_a_sweep_of_decodes_is_pipelined_exactly_where_inequality_6_says_so():
    draw = random.Random(1)
    for _ in range(1000):
        products_s, attention_s, gpu_rate, cpu_rate = (10 ** draw.uniform(-2, 2) for _ in range(4))
        times = PipelineTimes(products_s, attention_s, products_s, attention_s)
        assert times.window_s == pytest.approx(times.pipelined_s)
        ratio = products_s / attention_s
        pays = pipelining_pays(times, gpu_rate * attention_s, cpu_rate * times.window_s)
        assert pays == (gpu_rate / cpu_rate < 2 * ratio + 3 + 1 / ratio)


@pytest.mark.parametrize(("cpu_seq_s", "pipelines"), [(1.0, True), (1.6, True), (1.7, False), (10.0, False)])
def test_the_cpu_must_be_fast_enough_for_a_second_micro_batch(cpu_seq_s, pipelines):
    """By (6) it would do with 2.5 s for each; more than overlapping with a margin takes less."""
    sweep = decodes(GPU_SEQS, KVPlacement.DEVICE) + decodes(40, KVPlacement.DEFERRED, 100)
    kept, chosen = choice(cpu_seq_s).choose(sweep)
    assert chosen == pipelines
    assert (len(begun(kept)) < 40) == (pipelines and 40 * cpu_seq_s > 27)


def test_prompts_give_the_cpu_more_time():
    """A CPU that is fast enough beside prompts is too slow where the sweep has nothing but decodes."""
    sweep = decodes(GPU_SEQS, KVPlacement.DEVICE) + decodes(40, KVPlacement.DEFERRED, 100)
    prompt = ScheduledSequence(sequence(99, KVPlacement.DEVICE, 64, computed=0), 60)
    assert not choice(2.0).choose(sweep)[1]
    kept, pipelines = choice(2.0).choose([*sweep, prompt])
    assert pipelines and len(begun(kept)) > 15


def test_without_anything_beside_them_deferred_tokens_overlap():
    assert not choice(0.1).choose(decodes(8, KVPlacement.DEFERRED))[1]
    assert not choice(0.1).choose(decodes(8, KVPlacement.DEVICE))[1]


def test_who_was_left_out_comes_first_in_the_next_sweep():
    on_device, deferring = decodes(GPU_SEQS, KVPlacement.DEVICE), decodes(50, KVPlacement.DEFERRED, 100)
    made, seen = choice(1.0), set()
    for _ in range(2):
        kept, pipelines = made.choose(on_device + deferring)
        assert pipelines
        seen.update(begun(kept))
        for one in kept:  # their tokens are there after the sweep
            if one.defers:
                one.sequence.num_computed += 1
                one.sequence.tokens.append(7)
        made.measured({"cpu_attention": float(len(begun(kept)))})
    assert seen == set(range(100, 150)) and made.num_left_out > 0


def test_sequences_under_way_leave_less_time_for_others():
    on_device, deferring = decodes(GPU_SEQS, KVPlacement.DEVICE), decodes(60, KVPlacement.DEFERRED, 100)
    fresh, busy = choice(1.0), choice(1.0)
    busy._costs = LaneCosts(**(vars(COSTS) | {"cpu_seq_s": 100.0}))
    under_way = deferring[:20]
    assert not busy.choose(on_device + under_way)[1], "so slow a CPU overlaps"
    for one in under_way:
        one.sequence.num_computed += 1
    busy._costs = fresh._costs
    alone, pipelined = fresh.choose(on_device + deferring[20:])
    beside, too = busy.choose(on_device + deferring[20:])
    assert pipelined and too and len(begun(beside)) == len(begun(alone)) - 10


def test_a_cpu_slower_than_planned_is_found_out():
    made, on_device = choice(1.0), decodes(GPU_SEQS, KVPlacement.DEVICE)
    deferring = decodes(20, KVPlacement.DEFERRED, 100)
    pipelined = []
    for _ in range(60):
        kept, pipelines = made.choose(on_device + deferring)
        pipelined.append(pipelines)
        ended = [one.sequence for one in kept if one.defers]
        made.measured({"cpu_attention": 20.0 * len(ended)})
        for one in ended:
            one.num_computed += 1
            one.tokens.append(7)
    assert pipelined[0] and not any(pipelined[-10:])
    assert made.cpu_factor > 10
