"""The ways of the papers on an emulated accelerator, predicted and measured: the settings of `way_settings.py`, in each the plan that
the planner chooses and the best one of every way that can be gone. In each another way is the fastest, as something else is scarce.

Times are those of the sweeps. The accelerator has a core of its own, so that CPU attention runs beside it, and sleeps for the rest of
the time that it is to take.

    python benchmarks/way_plans.py --work-dir DIR
    python benchmarks/way_plans.py --dry          # plans and simulates only, for a machine in round numbers; writes nothing

Writes benchmarks/results/way_plans.json: for each setting measured, planned and simulated seconds of each plan, and how much longer the
chosen one took than the fastest.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from random_model import LLAMA_3B
from tier_runs import model_in, prompts, run, write
from way_settings import ROUND_PROCESS_BYTES, SETTINGS, SHAPE, Setting, plans_of, round_machine, seconds_of

from batchgen.core.plan import Plan
from batchgen.engine.loader import process_bytes
from batchgen.job.planning import find_for, find_hardware, on_this_machine
from batchgen.job.simulation import simulate_job
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.profiler.emulated import emulated_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, help="for the model, its store and KV on disk; needed but for --dry")
    parser.add_argument("--rounds", type=int, default=1, help="of each plan; the median counts")
    parser.add_argument("--only", action="append", help="names of settings")
    parser.add_argument("--dry", action="store_true", help="plan and simulate, measure nothing")
    args = parser.parse_args()
    settings = [setting for setting in SETTINGS if not args.only or setting.name in args.only]
    if args.dry:
        _dry(settings)
        return
    if args.work_dir is None:
        parser.error("--work-dir is needed to measure")
    found = [_measure(setting, args.work_dir, args.rounds) for setting in settings]
    result: dict[str, Any] = {}
    for kind in ("planned", "simulated"):
        own = [abs(plan[f"{kind}_s"] / plan["measured_s"] - 1) for entry in found for plan in entry["plans"]]
        result[f"{kind}_error"] = {"median": statistics.median(own), "worst": max(own)}
        print(f"{kind}: median error {statistics.median(own):.1%}, worst {max(own):.1%}")
    if not args.only:
        write("way_plans", result | {"settings": found})


def _dry(settings: list[Setting]) -> None:
    config = ModelConfig.from_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE)
    for setting in settings:
        plans, reasons, goes = plans_of(setting, round_machine(setting.device), config, ROUND_PROCESS_BYTES)
        print(f"{setting.name}: chosen goes the way of {goes}; to win: {' or '.join(setting.winners)}")
        for name, seconds in seconds_of(plans):
            print(f"  {name}: {seconds:.2f} s, {plans[name].policy.kv_seqs}")
        for name, reason in reasons.items():
            print(f"  {name}: {reason}")


def _measure(setting: Setting, work_dir: Path, rounds: int) -> dict[str, Any]:
    model = model_in(work_dir, SHAPE)
    config = read_config(resolve_model(str(model)))
    find = partial(find_hardware, None, dtype="bfloat16", offload_dir=work_dir, model=config, notify=print)
    cpu, core = find_for(setting.device, find)
    process = process_bytes()
    hardware = emulated_profile(on_this_machine(cpu), setting.device, core)
    plans, reasons, goes = plans_of(setting, hardware, config, process)
    measured: dict[str, float] = {}
    entries = []
    for name, plan in plans.items():
        same = [other for other in measured if plans[other].policy == plan.policy]
        measured[name] = measured[same[0]] if same else _seconds(plan, setting, model, work_dir, process, rounds)
        simulated = simulate_job(plan, config, hardware).total_s
        planned = plan.prediction.total_s - plan.prediction.startup_s
        entry = {"way": name, "measured_s": measured[name], "planned_s": planned, "simulated_s": simulated}
        entries.append(entry | {"policy": plan.policy.to_json()})
        print(
            f"  {name}: {measured[name]:.1f} s, planned {planned / measured[name] - 1:+.0%},"
            f" simulated {simulated / measured[name] - 1:+.0%}",
            flush=True,
        )
    ratio = measured["chosen"] / min(measured.values())
    fastest = min((name for name in measured if name != "chosen"), key=measured.__getitem__)
    print(
        f"{setting.name}: chosen goes the way of {goes}, {ratio:.2f} times as long as the fastest; of the ways {fastest} is the"
        f" fastest, to win: {' or '.join(setting.winners)}"
    )
    return {
        "setting": setting.name,
        "scarce": setting.scarce,
        "device": str(setting.device),
        "rows": setting.rows,
        "prompt": setting.prompt,
        "output": setting.output,
        "meant_to_win": list(setting.winners),
        "fastest_way": fastest,
        "chosen_goes": goes,
        "chosen_against_fastest": ratio,
        "reasons": reasons,
        "plans": entries,
    }


def _seconds(plan: Plan, setting: Setting, model: Path, work_dir: Path, process: int, rounds: int) -> float:
    """Of the sweeps, each round in a process of its own."""
    rows = prompts(setting.rows, setting.prompt, vocab_size=SHAPE["vocab_size"])
    kv_tokens = plan.policy.max_num_seqs * (setting.prompt + setting.output)
    return statistics.median(
        run(
            model, setting.device, plan.policy, rows, [setting.output] * setting.rows, work_dir=work_dir, kv_tokens=kv_tokens,
            planned_process_bytes=process,
        )["seconds"]
        for _ in range(rounds)
    )  # fmt: skip


if __name__ == "__main__":
    main()
