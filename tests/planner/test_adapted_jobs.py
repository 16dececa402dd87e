"""Whole jobs on machines that are not as planned, in simulated time: adaptation makes them about as fast as can be."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from thorough import quick_or

from batchgen.core.device import Device
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.prediction import plan_of
from batchgen.planner.simulation import simulate_job
from batchgen.planner.strategies import NEO as STRATEGY
from batchgen.planner.strategies import best_candidates, strategies_for
from batchgen.planner.strategy_times import best_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from paper_settings import STRATEGIES, a10g
from random_model import LLAMA_3B
from strategy_settings import MIB, ROUND_PROCESS_BYTES, SETTINGS, SHAPE, Setting, problem_on, round_machine

CONFIG = config_of_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE)
# Memory of the device is scarce, its link slow, and the CPU about as fast as it: NEO's policy has KV on both.
NEO = Setting(
    "both attend", "", (), Device("emulated", 192 * MIB, 2e8, 2e8, slowdown=1.0, cpu_slowdown=2.0), 384, 64, 128
)


def best_of(name, setting):
    problem = problem_on(round_machine(setting.device), CONFIG, setting.workload, ROUND_PROCESS_BYTES)
    return best_plan(next(s for s in strategies_for(problem) if s.name == name), problem)


@pytest.fixture(scope="module")
def orders():
    """Plans with two micro-batches by order: NEO's, of unequal size, and mixed ones, the fastest without adaptation."""
    problem = problem_on(round_machine(NEO.device), CONFIG, NEO.workload, ROUND_PROCESS_BYTES)
    candidates = {candidate.inputs.batch_order: candidate for candidate in best_candidates(STRATEGY, problem)}
    return {order: plan_of(problem, candidate, candidate.seconds) for order, candidate in candidates.items()}


@pytest.fixture(scope="module")
def plans(orders):
    return {"NEO": orders["neo"], "GPU-only": best_of("GPU-only", NEO)}


def seconds(plan, cpu_slowdown=2.0, **options):
    device = replace(NEO.device, cpu_slowdown=cpu_slowdown)
    return simulate_job(plan, CONFIG, round_machine(device), **options).total_s


@pytest.mark.parametrize(("order", "times"), [("neo", 1.02), ("mixed", 1.1)])
def test_a_job_on_the_machine_that_was_planned_is_hardly_slower(orders, order, times):
    """Where micro-batches are mixed, looking what sweeps without CPU attention take costs more than it shows."""
    assert seconds(orders[order], adapts=True) < times * seconds(orders[order])


def test_sequences_that_stream_instead_do_not_cut_sweeps_into_more_micro_batches():
    """Where no KV was to stream, a staging buffer holds a few sequences: with more this job took half as long again."""
    setting = a10g("8x", 200)
    plan = setting.plan(STRATEGIES["NEO"], rows=120)
    adapted = simulate_job(plan, setting.model, setting.hardware, adapts=True)
    assert any(change.what == "streamed" for change in adapted.changes)
    assert adapted.total_s < 1.03 * simulate_job(plan, setting.model, setting.hardware).total_s


@pytest.mark.parametrize("cpu_slowdown", quick_or([4.0, 48.0], [4.0, 8.0, 48.0]))
def test_a_cpu_slower_than_planned_costs_little(plans, cpu_slowdown):
    """GPU-only has all of the device's memory for its KV, which the plan for both has not."""
    fixed = {name: seconds(plan, cpu_slowdown) for name, plan in plans.items()}
    adapted = seconds(plans["NEO"], cpu_slowdown, adapts=True)
    assert adapted < 1.15 * min(fixed.values())
    assert fixed["NEO"] > 1.3 * adapted


def test_prompts_that_become_longer_in_the_middle_cost_no_more_than_without_adaptation(plans):
    rows = [*itertools.repeat((64, 128), 192), *itertools.repeat((64, 30), 192), *itertools.repeat((180, 12), 192)]
    assert seconds(plans["NEO"], adapts=True, rows=rows) < 1.05 * seconds(plans["NEO"], rows=rows)


def test_deferred_attention_on_a_slow_cpu_does_not_make_the_job_long():
    """Rows go on on the accelerator, and fewer are deferred: about as fast as if none were."""
    apex = SETTINGS[-1]
    plan, gpu_only = best_of("APEX", apex), best_of("GPU-only", apex)
    slow = round_machine(replace(apex.device, cpu_slowdown=8 * apex.device.cpu_slowdown))
    adapted = simulate_job(plan, CONFIG, slow, adapts=True)
    assert adapted.total_s < 1.1 * simulate_job(gpu_only, CONFIG, slow).total_s
    assert adapted.total_s < 0.5 * simulate_job(plan, CONFIG, slow).total_s
    assert adapted.moved > 0


def fast_link(mebibytes, slower=1.0):
    """An accelerator beside a slow CPU, whose link is so many times slower than planned."""
    rate = 8e9 / slower
    return Device("emulated", mebibytes * MIB, rate, rate, slowdown=2.0, cpu_slowdown=32.0, step_overhead_s=3e-3)


@pytest.fixture(scope="module")
def plans_that_stream():
    """(plan, GPU-only plan for the same machine), by strategy."""
    settings = {name: Setting("", "", (), fast_link(size), 96, 128, 64) for name, size in SIZES.items()}
    return {name: (best_of(name, setting), best_of("GPU-only", setting)) for name, setting in settings.items()}


SIZES = {"Pie": 256, "FlexGen": 192}


@pytest.mark.parametrize(
    ("strategy", "slower", "most"),
    [("Pie", 10, 1.1), ("Pie", 40, 1.2), ("FlexGen", 10, None), ("FlexGen", 40, None)],
    ids=["Pie-10", "Pie-40", "FlexGen-10", "FlexGen-40"],
)
def test_on_a_slow_link_layers_come_to_the_device(strategy, slower, most, plans_that_stream):
    """Far less long than the plan; and hardly longer than GPU-only, unless weights go on streaming.

    On a link that is 40 times slower, Pie takes 1.15 times as long: nothing changes while the first prompts are
    computed, in nine sweeps that wait for it. A tenth is aimed at.
    """
    plan, gpu_only = plans_that_stream[strategy]
    machine = round_machine(fast_link(SIZES[strategy], slower))
    adapted, fixed = (simulate_job(plan, CONFIG, machine, adapts=adapts).total_s for adapts in (True, False))
    assert adapted < 0.8 * fixed
    if most is not None:
        assert adapted < most * simulate_job(gpu_only, CONFIG, machine).total_s


@pytest.mark.parametrize("strategy", SIZES)
def test_on_the_link_that_was_planned_all_layers_stay_where_they_are(strategy, plans_that_stream):
    plan, _ = plans_that_stream[strategy]
    adapted = simulate_job(plan, CONFIG, round_machine(fast_link(SIZES[strategy])), adapts=True)
    assert not [change for change in adapted.changes if change.what == "streamed_layers"]


def test_nothing_swings_in_a_long_job_on_a_slow_link(plans_that_stream):
    """Where no layer streams one tries the link, now and then, more and more rarely."""
    plan, _ = plans_that_stream["Pie"]
    machine = round_machine(fast_link(SIZES["Pie"], 40))
    adapted = simulate_job(plan, CONFIG, machine, adapts=True, rows=[(128, 64)] * 1500)
    sweeps = [change.sweep for change in adapted.changes if change.what == "streamed_layers" and change.before == 0]
    assert all(b - a < c - b for a, b, c in zip(sweeps, sweeps[1:], sweeps[2:], strict=False))
    assert len(adapted.changes) < adapted.sweeps / 50
