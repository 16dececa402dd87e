"""Plans for the simulator, and what an engine takes to be compared with it."""

from __future__ import annotations

import itertools
from dataclasses import replace

from planner_cases import constant

from batchgen.core.hardware import ComputeRates
from batchgen.core.plan import Plan, Policy, Prediction
from batchgen.core.workload import Workload
from batchgen.planner.parallel import split_layers, stage_policy
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import problem_of

# Copies to the accelerator that compute makes itself; the planner counts them with the link's.
SMALL_COPIES = ("embed", "load_attention", "join_deferred")


def plan_of(policy: Policy, workload: Workload, on: dict, dtype: str = "float16") -> Plan:
    """A policy as a plan, of which nothing is predicted."""
    nothing = Prediction(0, 0, 0, 0, 0, 0, 0, 0, 0, {}, "compute", {"cpu": {"process": 1 << 29}}, {}, {}, (), {}, 0, 0)
    return Plan("model", "machine", dtype, workload, on, policy, {}, nothing)


class Eager:
    """In place of the input thread: all rows are there at once."""

    def __init__(self, items, ahead):
        self._items = iter(list(items))
        self.ready = True

    def take(self, most):
        return list(itertools.islice(self._items, most))

    def close(self):
        pass


def one_byte_a_second():
    """Seconds of moves are bytes."""
    rates = ComputeRates(
        gemm_flops_per_s={"float32": constant(1e12)},
        prefill_attention_flops_per_s={"float32": constant(1e12)},
        decode_attention_bytes_per_s={"float32": constant(1e12)},
        elementwise_bytes_per_s={"float32": constant(1e12)},
    )
    lanes = ("h2d_bytes_per_s", "d2h_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    return rates, dict.fromkeys(lanes, 1.0)


def stages_of(plan, config, count):
    return [(first, stop, stage_policy(plan.policy, stop - first)) for first, stop in split_layers(config, count)]


def planned_stage(hardware, config, workload, count, **options):
    """The plan of a stage, as a job with stages has it."""
    layers = max(stop - first for first, stop in split_layers(config, count))
    given = {"max_model_len": 2048, "process_bytes": 1 << 29, "admission": "continuous"} | options
    problem = problem_of(hardware, config.first_layers(layers), workload, dtype="float16", **given)
    problem = replace(problem, allowed=replace(problem.allowed, kv_placements=("cpu", "disk")))
    return plan_problem(problem)


def prompt_in_order(draw, number, length):
    """A prompt of random tokens that starts after those of the numbers before it."""
    return [5 + number, *(draw.randrange(5, 500) for _ in range(length - 1))]
