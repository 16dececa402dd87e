"""Overlap: an emulated accelerator whose link is throttled so that copies take about as long as compute; overlapped against
serial, and both against the simulator, which reads the same Steps.

Every sweep has about the same number of tokens, prefilled or decoded, so that copies and compute are about equal in each
sweep and not just in sum.

    python benchmarks/tier_overlap.py --work-dir DIR
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from tier_runs import model_in, prompts, run, write

from batchgen.core.device import Device
from batchgen.core.workload import Workload
from batchgen.engine.loader import process_bytes
from batchgen.job.planning import PlanRequest, find_hardware, on_this_machine, plan_job, problem_of
from batchgen.models.files import read_config, resolve_model
from batchgen.planner.problem import Allowed
from batchgen.planner.simulation import simulate_job
from batchgen.profiler.emulated import emulated_profile

GIB = 1 << 30
PROMPT, OUTPUT = 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--block", type=int, default=256, help="and most tokens of a sweep")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = model_in(args.work_dir)
    config = read_config(resolve_model(str(model)))
    profile = on_this_machine(
        find_hardware(None, dtype="bfloat16", offload_dir=args.work_dir, model=config, notify=print)
    )
    rows, lens = prompts(args.rows, PROMPT), [OUTPUT] * args.rows

    def planned(rate: float):
        device = Device("emulated", 2 * GIB, rate, rate)
        hardware = emulated_profile(profile, device)
        request = PlanRequest(
            "model", "bfloat16", config.max_position, process_bytes=process_bytes(), share_prefixes=False
        )
        problem = problem_of(hardware, config, Workload.uniform(args.rows, PROMPT, OUTPUT), request)
        problem = replace(problem, allowed=Allowed(("cpu",), ("gpu",)), max_num_seqs=args.block, num_gpu_batches=1,
                          max_num_batched_tokens=args.block)  # fmt: skip
        return device, hardware, plan_job(problem, request, startup_s=0, loading_s=0, output_len_known=True)

    def measured(device, plan, serial: bool):
        return run(model, device, plan.policy, rows, lens, work_dir=args.work_dir, serial=serial,
                   kv_tokens=args.block * (PROMPT + OUTPUT))  # fmt: skip

    # Compute by itself, behind a link that is never waited for; then a link that takes as long.
    device, hardware, plan = planned(1e11)
    alone = measured(device, plan, False)
    rate = alone["bytes_moved"]["h2d"] / alone["busy_s"]["compute"]
    device, hardware, plan = planned(rate)
    simulated_s = simulate_job(plan, config, hardware).total_s
    runs: dict[str, list[dict]] = {"overlapped": [], "serial": []}
    for _ in range(args.rounds):
        for name, found in runs.items():
            found.append(measured(device, plan, name == "serial"))
            print(f"{name}: {found[-1]['seconds']:.1f} s, compute {found[-1]['busy_s']['compute']:.1f} s,"
                  f" link {found[-1]['busy_s']['h2d']:.1f} s")  # fmt: skip
    gains = [s["seconds"] / o["seconds"] for s, o in zip(runs["serial"], runs["overlapped"], strict=True)]
    against = statistics.median(o["seconds"] for o in runs["overlapped"]) / simulated_s
    print(f"overlapped is {statistics.median(gains):.2f} times as fast as serial, and takes {against:.2f} times the simulated"
          f" {simulated_s:.1f} s")  # fmt: skip
    write("tier_overlap", {"h2d_bytes_per_s": rate, "gains": gains, "simulated_s": simulated_s,
                           "measured_over_simulated": against, "runs": runs})  # fmt: skip


if __name__ == "__main__":
    main()
