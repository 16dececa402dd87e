"""Micro-batches of unequal size where they win: cost model, simulation and plan agree."""

from dataclasses import replace

import pytest
from known_plans import plan_problem
from planner_cases import llama_8b

from batchgen.core.plan import Plan
from batchgen.core.workload import Lengths, Workload
from batchgen.planner.explain import explain
from batchgen.planner.prediction import plan_of
from batchgen.planner.problem import problem_of
from batchgen.planner.sampled_simulation import simulate_sampled
from batchgen.planner.search import in_orders, search
from batchgen.planner.strategies import NEO
from batchgen.profiler.shipped import shipped_profile

# The host of a g5.8xlarge: the CPU attends to as much as it can hide beside all that the GPU computes, and no more.
HOST = 0.5
WORKLOAD = Workload(600, Lengths(tuple(range(900, 1101, 20))), Lengths(tuple(range(180, 221, 4))), 220)


@pytest.fixture(scope="module")
def case():
    scaled = {"cpu_decode_attention": HOST, "dram_bytes_per_s": HOST, "cpu_memory_bytes": HOST}
    hardware = shipped_profile("a10g").scaled(**scaled)
    given = {"max_model_len": 4096, "admission": "continuous", "process_bytes": 700 << 20, "disk_memory": 0}
    problem = problem_of(hardware, llama_8b(), WORKLOAD, dtype="float16", **given)
    return problem


def simulated_s(candidate, plan, **policy):
    return simulate_sampled(replace(plan, policy=replace(plan.policy, **policy)), candidate).seconds


def test_unequal_batches_are_faster_than_equal_ones_and_than_all_cpu_attention_in_one(case):
    problem = case
    own = NEO.restrict(problem)
    even = search(own)
    unequal, mixed = in_orders(own, even)
    assert [c.inputs.batch_order for c in (unequal, mixed)] == ["neo", "mixed"]
    equal_s = {
        order: simulated_s(even, plan_of(problem, even), batch_order=order) for order in ("even", "mixed", "neo")
    }
    found_s = simulated_s(unequal, plan_of(problem, unequal))
    assert found_s < 0.92 * min(equal_s.values()), (found_s, equal_s)
    assert found_s == pytest.approx(unequal.seconds, rel=0.05), "the cost model cuts sweeps as the simulator does"
    wrong_s = simulated_s(unequal, plan_of(problem, unequal), balance_tokens=1 << 20)
    assert wrong_s > 1.02 * found_s, "with half of what the CPU attends to in each"


def test_the_plan_has_unequal_batches_and_says_so(case):
    problem = case
    plan = plan_problem(problem)
    policy = plan.policy
    assert (policy.batch_order, policy.num_gpu_batches) == ("neo", 2) and policy.balance_tokens > 0
    text = "\n".join(explain(plan))
    assert "= 2 micro-batches of unequal size, continuous admission" in text
    assert "of the sequences that the CPU attends to go with all else" in text
    assert Plan.from_json(plan.to_json()).policy == policy
