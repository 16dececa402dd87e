"""The ways of the papers on an emulated accelerator, predicted and measured: four settings, in each the plan that the planner
chooses and the best one of every way that can be gone.

The settings differ in what is scarce: nothing, the link, the accelerator's memory for KV, or for weights. Times are those of the
sweeps. The accelerator is emulated by the cores that also attend: nothing is gained by overlapping the two, so NEO's way and APEX's gain
by the memory of the host alone.

    python benchmarks/way_plans.py --work-dir DIR

Writes benchmarks/results/way_plans.json: for each setting measured, planned and simulated seconds of each plan, and how much longer the
chosen one took than the fastest.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tier_runs import model_in, prompts, run, write

from batchgen.core.device import Device
from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.workload import Workload
from batchgen.engine.loader import process_bytes, store_bytes
from batchgen.job.planning import (
    PlanRequest,
    find_hardware,
    on_this_machine,
    plan_job,
    plan_maker,
    problem_of,
)
from batchgen.job.simulation import simulate_job
from batchgen.job.ways import NoWay, best_plan, way_of, ways_for
from batchgen.models.files import read_config, resolve_model
from batchgen.profiler.emulated import emulated_profile

MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A device, and rows of equal lengths in tokens."""

    name: str
    device: Device
    rows: int
    prompt: int
    output: int


SETTINGS = (
    Setting("all fits", Device("emulated", 1024 * MIB, 3e9, 3e9), 96, 128, 32),
    Setting("KV does not fit, fast link", Device("emulated", 600 * MIB, 8e9, 8e9), 128, 256, 48),
    Setting("KV does not fit, slow link", Device("emulated", 600 * MIB, 3e8, 3e8), 128, 256, 48),
    Setting("weights do not fit", Device("emulated", 320 * MIB, 3e9, 3e9), 96, 128, 32),
)
TIMES = {"startup_s": 0.0, "loading_s": 0.0, "output_len_known": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model, its store and KV on disk")
    parser.add_argument("--rounds", type=int, default=1, help="of each plan; the median counts")
    parser.add_argument("--only", action="append", help="names of settings")
    args = parser.parse_args()
    model = model_in(args.work_dir)
    config = read_config(resolve_model(str(model)))
    find_hardware(None, dtype="bfloat16", offload_dir=args.work_dir, model=config, notify=print)
    process = process_bytes()
    found: list[dict[str, Any]] = []
    for setting in SETTINGS:
        if args.only and setting.name not in args.only:
            continue
        profile = find_hardware(None, dtype="bfloat16", offload_dir=args.work_dir, model=config)
        hardware = emulated_profile(on_this_machine(profile), setting.device)
        request = PlanRequest(
            "model", "bfloat16", config.max_position, process_bytes=process, share_prefixes=False,
            store_bytes=store_bytes(config, "bfloat16", "none"),
        )  # fmt: skip
        problem = problem_of(hardware, config, Workload.uniform(setting.rows, setting.prompt, setting.output), request)
        plans: dict[str, Plan] = {"chosen": plan_job(problem, request, **TIMES)}
        reasons = {}
        for way in ways_for(problem):
            try:
                plans[way.name] = best_plan(way, problem, plan_maker(problem, request, **TIMES))
            except (NoWay, InputError) as error:
                reasons[way.name] = str(error)
        chosen = way_of(plans["chosen"].policy, ways_for(problem))
        measured = {
            name: _measured(plan, setting, model, args.work_dir, process, args.rounds) for name, plan in plans.items()
        }
        ratio = measured["chosen"] / min(measured.values())
        print(f"{setting.name}: chosen goes the way of {chosen}, {ratio:.2f} times as long as the fastest")
        entries = []
        for name, plan in plans.items():
            simulated = simulate_job(plan, config, hardware).total_s
            planned = plan.prediction.total_s - plan.prediction.startup_s
            entries.append(
                {
                    "way": name,
                    "measured_s": measured[name],
                    "planned_s": planned,
                    "simulated_s": simulated,
                    "policy": plan.policy.to_json(),
                }
            )
            print(
                f"  {name}: {measured[name]:.1f} s, planned {planned / measured[name] - 1:+.0%},"
                f" simulated {simulated / measured[name] - 1:+.0%}"
            )
        found.append(
            {
                "setting": setting.name,
                "device": str(setting.device),
                "rows": setting.rows,
                "prompt": setting.prompt,
                "output": setting.output,
                "chosen_goes": chosen,
                "chosen_against_fastest": ratio,
                "reasons": reasons,
                "plans": entries,
            }
        )
    errors = {
        kind: [abs(plan[f"{kind}_s"] / plan["measured_s"] - 1) for entry in found for plan in entry["plans"]]
        for kind in ("planned", "simulated")
    }
    result: dict[str, Any] = {
        f"{kind}_error": {"median": statistics.median(own), "worst": max(own)} for kind, own in errors.items()
    }
    print(", ".join(f"{kind}: median {e['median']:.0%}, worst {e['worst']:.0%}" for kind, e in result.items()))
    if not args.only:
        write("way_plans", result | {"settings": found})


def _measured(plan: Plan, setting: Setting, model: Path, work_dir: Path, process: int, rounds: int) -> float:
    """Seconds of the sweeps, each round in a process of its own."""
    rows, lens = prompts(setting.rows, setting.prompt), [setting.output] * setting.rows
    kv_tokens = plan.policy.max_num_seqs * (setting.prompt + setting.output)
    return statistics.median(
        run(
            model, setting.device, plan.policy, rows, lens, work_dir=work_dir, kv_tokens=kv_tokens,
            planned_process_bytes=process,
        )["seconds"]
        for _ in range(rounds)
    )  # fmt: skip


if __name__ == "__main__":
    main()
