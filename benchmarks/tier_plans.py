"""Twelve policies, predicted and measured: on an emulated accelerator and on the CPU with a disk; bound by memory, compute,
links or disk. The first of each group is the planner's own choice, the others are held to something else.

Times are those of the sweeps. Each is predicted as `batchgen run` does when it starts, from the measured profile and a look
at how the machine is doing at the moment, and twice: by the cost model that the planner searches with, and by the simulator,
which runs the same Steps as the executor.

    python benchmarks/tier_plans.py --work-dir DIR
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from tier_runs import model_in, prompts, run, write

from batchgen.core.device import Device
from batchgen.core.hardware import HardwareProfile
from batchgen.core.workload import Workload
from batchgen.engine.loader import process_bytes, store_bytes
from batchgen.job.planning import PlanRequest, find_hardware, on_this_machine, plan_job, problem_of
from batchgen.models.files import read_config, resolve_model
from batchgen.planner.problem import Allowed
from batchgen.planner.simulation import simulate_job
from batchgen.profiler.calibration import corrected_by_disk_probe
from batchgen.profiler.emulated import emulated_profile

MIB = 1 << 20
PROMPT, OUTPUT = 128, 32
RESIDENT = ("gpu", "cpu")


def cases(cpu_memory: int) -> list[dict[str, Any]]:
    """group, name, device, budgets, and what the policy is held to (fields of Problem)."""
    device = Device("emulated", 320 * MIB, 3e9, 3e9)
    emulated = {"group": "emulated", "device": device, "budgets": {}}
    disk = {"group": "CPU and disk", "device": Device("cpu"), "budgets": {"cpu_memory": cpu_memory}}
    return [
        emulated | {"name": "planned", "held": {}},
        emulated | {"name": "KV on the device", "held": {"allowed": Allowed(RESIDENT, ("gpu",)), "num_gpu_batches": 1}},
        emulated | {"name": "streamed KV", "held": {"allowed": Allowed(RESIDENT, ("streamed",)), "max_num_seqs": 64}},
        emulated | {"name": "CPU attention", "held": {"allowed": Allowed(RESIDENT, ("cpu",)), "max_num_seqs": 64,
                                                      "num_gpu_batches": 2}},
        emulated | {"name": "weights streamed, small block", "held": {"allowed": Allowed(("cpu",), ("gpu",)),
                                                                      "max_num_seqs": 8, "num_gpu_batches": 1}},
        emulated | {"name": "static, four batches", "held": {"admissions": ("static",), "num_gpu_batches": 4,
                                                             "allowed": Allowed(RESIDENT), "max_num_seqs": 64}},
        emulated | {"name": "weights on disk", "held": {"allowed": Allowed(("disk",), ("gpu",)), "max_num_seqs": 32,
                                                        "num_gpu_batches": 1}},
        disk | {"name": "planned", "held": {}},
        disk | {"name": "weights on disk, small block", "held": {"allowed": Allowed(("disk",), ("cpu",)), "max_num_seqs": 4}},
        disk | {"name": "weights on disk", "held": {"allowed": Allowed(("disk",), ("cpu",)), "max_num_seqs": 48}},
        disk | {"name": "KV on disk", "held": {"allowed": Allowed(("cpu", "disk"), ("disk",)), "max_num_seqs": 48,
                                               "num_gpu_batches": 1}},
        disk | {"name": "static", "held": {"admissions": ("static",), "max_num_seqs": 32}},
    ]  # fmt: skip


def main() -> None:  # a benchmark from top to bottom
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model, its store and KV on disk")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", action="append", help="names of policies")
    args = parser.parse_args()
    model = model_in(args.work_dir)
    config = read_config(resolve_model(str(model)))
    workload = Workload.uniform(args.rows, PROMPT, OUTPUT)

    def machine(device: Device) -> HardwareProfile:
        found = find_hardware(None, dtype="bfloat16", offload_dir=args.work_dir, model=config, notify=print)
        profile = corrected_by_disk_probe(on_this_machine(found), args.work_dir)
        return emulated_profile(profile, device) if device.accelerated else profile

    machine(Device("cpu"))  # measured before memory is looked at
    rows, lens = prompts(args.rows, PROMPT), [OUTPUT] * args.rows
    process = process_bytes()
    # Enough for the process, half of the layers and a small block: what does not fit goes to disk.
    cpu_memory = process + 600 * MIB
    found = []
    for case in cases(cpu_memory):
        if args.only and case["name"] not in args.only:
            continue
        device: Device = case["device"]
        hardware = machine(device)
        request = PlanRequest(
            "model", "bfloat16", config.max_position, process_bytes=process, share_prefixes=False,
            store_bytes=store_bytes(config, "bfloat16", "none"), **case["budgets"],
        )  # fmt: skip
        problem = replace(problem_of(hardware, config, workload, request), **case["held"])
        plan = plan_job(problem, request, startup_s=0.0, loading_s=0.0, output_len_known=True)
        planned_s = plan.prediction.total_s - plan.prediction.startup_s
        simulated = simulate_job(plan, config, hardware)
        times = []
        for _ in range(args.rounds):
            measured = run(
                model, device, plan.policy, rows, lens, work_dir=args.work_dir,
                kv_tokens=plan.policy.max_num_seqs * (PROMPT + OUTPUT), planned_process_bytes=process, **case["budgets"],
            )  # fmt: skip
            times.append(measured["seconds"])
        seconds = statistics.median(times)
        found.append(
            {
                "group": case["group"],
                "name": case["name"],
                "measured_s": seconds,
                "planned_s": planned_s,
                "simulated_s": simulated.total_s,
                "simulated_busy_s": simulated.busy_s,
                "bottleneck": plan.prediction.bottleneck,
                "policy": plan.policy.to_json(),
                "run": measured,
            }
        )
        print(
            f"{case['group']}: {case['name']}: {seconds:.1f} s, planned {planned_s / seconds - 1:+.0%},"
            f" simulated {simulated.total_s / seconds - 1:+.0%}, bound by {plan.prediction.bottleneck}"
        )
        lanes = [lane for lane, busy in measured["busy_s"].items() if busy > 0.5]
        print("  busy, measured / simulated: " + ", ".join(
            f"{lane} {measured['busy_s'][lane]:.1f} / {simulated.busy_s[lane]:.1f} s" for lane in lanes
        ))  # fmt: skip
    result: dict[str, Any] = {"workload": {"rows": args.rows, "prompt": PROMPT, "output": OUTPUT}}
    for kind in ("planned", "simulated"):
        errors = [abs(f[f"{kind}_s"] / f["measured_s"] - 1) for f in found]
        result[f"{kind}_error"] = {"median": statistics.median(errors), "worst": max(errors)}
        print(f"{kind}: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}")
    for group in dict.fromkeys(f["group"] for f in found):
        members = [f for f in found if f["group"] == group]
        own = [f["measured_s"] for f in members if f["name"] == "planned"]
        if own:
            ratio = own[0] / min(f["measured_s"] for f in members)
            result[f"planner's choice against the fastest, {group}"] = ratio
            print(f"{group}: the planner's choice takes {ratio:.2f} times as long as the fastest")
    if not args.only:
        write("tier_plans", result | {"policies": found})


if __name__ == "__main__":
    main()
