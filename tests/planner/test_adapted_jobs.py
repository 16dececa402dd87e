"""Whole jobs on machines that are not as planned, in simulated time: adaptation makes them about as fast as can be."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.core.device import Device
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.simulation import simulate_job
from batchgen.planner.strategies import strategies_for
from batchgen.planner.strategy_times import best_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from random_model import LLAMA_3B
from strategy_settings import MIB, ROUND_PROCESS_BYTES, SHAPE, Setting, problem_on, round_machine

CONFIG = config_of_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE)
# Memory of the device is scarce, its link slow, and the CPU about as fast as it: NEO's policy has KV on both.
NEO = Setting(
    "both attend", "", (), Device("emulated", 192 * MIB, 2e8, 2e8, slowdown=1.0, cpu_slowdown=2.0), 384, 64, 128
)


def best_of(name, setting):
    problem = problem_on(round_machine(setting.device), CONFIG, setting.workload, ROUND_PROCESS_BYTES)
    return best_plan(next(s for s in strategies_for(problem) if s.name == name), problem)


@pytest.fixture(scope="module")
def plans():
    return {name: best_of(name, NEO) for name in ("NEO", "GPU-only")}


def seconds(plan, cpu_slowdown=2.0, **options):
    device = replace(NEO.device, cpu_slowdown=cpu_slowdown)
    return simulate_job(plan, CONFIG, round_machine(device), **options).total_s


def test_a_job_on_the_machine_that_was_planned_is_not_slower(plans):
    assert seconds(plans["NEO"], adapts=True) < 1.02 * seconds(plans["NEO"])


@pytest.mark.parametrize("cpu_slowdown", [4.0, 8.0, 48.0])
def test_a_cpu_slower_than_planned_costs_little(plans, cpu_slowdown):
    """GPU-only has all of the device's memory for its KV, which the plan for both has not."""
    best = min(seconds(plan, cpu_slowdown) for plan in plans.values())
    adapted = seconds(plans["NEO"], cpu_slowdown, adapts=True)
    assert adapted < 1.15 * best
    assert seconds(plans["NEO"], cpu_slowdown) > 1.3 * adapted


def test_prompts_that_become_longer_in_the_middle_cost_no_more_than_without_adaptation(plans):
    rows = [*itertools.repeat((64, 128), 192), *itertools.repeat((64, 30), 192), *itertools.repeat((180, 12), 192)]
    assert seconds(plans["NEO"], adapts=True, rows=rows) < 1.05 * seconds(plans["NEO"], rows=rows)


def test_a_slow_link_costs_no_more_than_without_adaptation_and_nothing_swings():
    """Sequences that are streamed go to the CPU step by step, which is too slow for all of them."""
    device = Device("emulated", 192 * MIB, 8e9, 8e9, slowdown=2.0, cpu_slowdown=32.0, step_overhead_s=3e-3)
    plan = best_of("FlexGen", Setting("", "", (), device, 96, 128, 64))
    slow = round_machine(replace(device, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8))
    adapted = simulate_job(plan, CONFIG, slow, adapts=True)
    assert adapted.total_s < 0.9 * simulate_job(plan, CONFIG, slow).total_s
    moves = [(change.before, change.after) for change in adapted.changes if change.what == "streamed"]
    assert moves and all(moves[i] != moves[i + 2] for i in range(len(moves) - 2))
