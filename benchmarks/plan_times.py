"""CPU seconds of planning, and predictions against whole simulated jobs: OPT on FlexGen's T4 machine.

The cases are OPT-6.7B, 30B and 175B in 16 and in 4 bits, and jobs of the lengths that FlexGen measured. Each has the
CPU seconds of a plan, its predicted seconds of all sweeps, and those of the whole job in the simulator, with the real
scheduler and the real Steps. The plan's own simulation is a sampled one.

    python benchmarks/plan_times.py              # writes benchmarks/results/plan_times.json
    python benchmarks/plan_times.py --only 30b --times-only
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.dtypes import weight_format_of
from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import Loading, problem_of
from batchgen.planner.simulation import simulate_job
from batchgen.planner.sizes import store_bytes
from batchgen.profiler.shipped import shipped_profile

HERE = Path(__file__).parent
SHAPES = HERE.parent / "recipes" / "throughput" / "shapes"
MODELS = ("opt-6.7b", "opt-30b", "opt-175b")
# (rows, prompt, output)
JOBS = ((1024, 256, 32), (1024, 512, 32), (1024, 1024, 32), (1024, 128, 128))
MACHINE = "t4"
PROCESS_BYTES = 700 << 20


@dataclass(frozen=True)
class Case:
    model: str
    weights: str
    job: tuple[int, int, int]

    @property
    def name(self) -> str:
        rows, prompt, output = self.job
        return f"{self.model}, {'4-bit' if self.weights == 'int4' else 'float16'}, {rows:,} of {prompt:,} + {output}"


CASES = tuple(Case(model, bits, job) for model in MODELS for bits in ("native", "int4") for job in JOBS)


def plan_case(case: Case) -> tuple[Plan, ModelConfig, HardwareProfile]:
    """The plan of a case, with the model and the machine that it is for."""
    config = config_of_hf(json.loads((SHAPES / case.model / "config.json").read_text()))
    hardware = shipped_profile(MACHINE)
    weight_format = weight_format_of("float16", case.weights)
    loading = {weight_format: Loading(store_bytes=store_bytes(config, "float16", weight_format))}
    given = {"weights": case.weights, "process_bytes": PROCESS_BYTES, "loading": loading, "max_model_len": 2048}
    problem = problem_of(hardware, config, Workload.uniform(*case.job), dtype="float16", **given)
    plan = plan_problem(problem)
    return plan, config, hardware


def measured(case: Case, rounds: int, times_only: bool) -> dict[str, Any]:
    """The least CPU seconds of planning over some rounds, and the plan's prediction and policy."""
    warm_up()
    seconds = []
    for _ in range(rounds):
        clear_caches()
        started = time.process_time()
        plan, config, hardware = plan_case(case)
        seconds.append(time.process_time() - started)
    found: dict[str, Any] = {"case": case.name, "planning_cpu_s": min(seconds)}
    predicted_s = plan.prediction.total_s - plan.prediction.startup_s - case.job[0] * hardware.row_overhead_s
    policy = plan.policy
    found |= {
        "predicted_s": predicted_s,
        "block": f"{policy.num_gpu_batches} x {policy.gpu_batch_size}",
        "batch_order": policy.batch_order,
        "max_num_batched_tokens": policy.max_num_batched_tokens,
        "kv_seqs": dict(policy.kv_seqs),
        "bottleneck": plan.prediction.bottleneck,
    }
    if not times_only:
        simulated_s = simulate_job(plan, config, hardware).total_s
        found |= {"simulated_s": simulated_s, "predicted_over_simulated": predicted_s / simulated_s}
    return found


def warm_up() -> None:
    """Plans once, so that solver and profiles are loaded."""
    plan_case(Case("opt-6.7b", "native", (4, 16, 2)))


def clear_caches() -> None:
    """Forgets the phases of earlier plans, which a new process would not have."""
    from batchgen.planner.phases import known_phases, phases_of

    phases_of.cache_clear()
    known_phases.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="cases whose name has this")
    parser.add_argument("--rounds", type=int, default=3, help="of planning; the fastest counts")
    parser.add_argument("--times-only", action="store_true", help="without simulating whole jobs")
    parser.add_argument("--processes", type=int, default=1, help="more than one make the CPU seconds longer")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only is None or args.only in case.name]
    found = []
    # Each case in a process of its own, as each job has: what others have left in memory takes time too.
    alone = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": 1}
    with ProcessPoolExecutor(args.processes, **alone) as pool:
        for entry in pool.map(measured, cases, [args.rounds] * len(cases), [args.times_only] * len(cases)):
            found.append(entry)
            ratio = f", {entry['predicted_over_simulated']:.3f} of the simulated" if not args.times_only else ""
            print(
                f"{entry['case']}: planned in {entry['planning_cpu_s']:.2f} CPU s:"
                f" {entry['predicted_s']:,.1f} s{ratio}",
                flush=True,
            )
    times = sorted(entry["planning_cpu_s"] for entry in found)
    result: dict[str, Any] = {
        "planning_cpu_s": {"median": statistics.median(times), "worst": times[-1]},
    }
    if not args.times_only:
        errors = [abs(entry["predicted_over_simulated"] - 1) for entry in found]
        result["prediction_error"] = {"median": statistics.median(errors), "worst": max(errors)}
    print(result)
    if args.only is None and not args.times_only:
        from recording import result_path, write

        write(result_path("plan_times"), {"machine_planned_for": MACHINE} | result | {"cases": found})


if __name__ == "__main__":
    main()
