"""The ways of the papers on an emulated accelerator, predicted and measured: the settings of `way_settings.py`, in each the plan that
the planner chooses and the best one of every way that can be gone. In each another way is the fastest, as something else is scarce.

Times are those of the sweeps. The accelerator has a core of its own, so that CPU attention runs beside it, and sleeps for the rest of
the time that it is to take.

    python benchmarks/way_plans.py --work-dir DIR
    python benchmarks/way_plans.py --dry          # plans and simulates only, for a machine in round numbers; writes nothing

Writes benchmarks/results/way_plans.json: for each setting measured, planned and simulated seconds of each plan, how much longer the
chosen one took than the fastest, and whether all of them generated the same tokens. With --only, settings that are left out stay as they
are there.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from random_model import LLAMA_3B
from tier_runs import different_rows, joined, model_in, prompts, results_of, run_undisturbed, write
from way_settings import FLIPPED, ROUND_PROCESS_BYTES, SETTINGS, SHAPE, Setting, plans_of, round_machine, seconds_of

from batchgen.core.plan import Plan
from batchgen.engine.loader import process_bytes
from batchgen.job.planning import find_for, find_hardware, on_this_machine
from batchgen.models.files import read_config, resolve_model
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.simulation import simulate_job
from batchgen.profiler.emulated import emulated_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, help="for the model, its store and KV on disk; needed but for --dry")
    parser.add_argument("--rounds", type=int, default=1, help="of each plan; the median counts")
    parser.add_argument("--only", action="append", help="names of settings")
    parser.add_argument("--dry", action="store_true", help="plan and simulate, measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=results_of("way_plans"))
    args = parser.parse_args()
    known = (*SETTINGS, FLIPPED)
    settings = [setting for setting in known if not args.only or setting.name in args.only]
    if args.dry:
        _dry(settings)
        return
    if args.work_dir is None:
        parser.error("--work-dir is needed to measure")
    found = [_measure(setting, args.work_dir, args.rounds) for setting in settings]
    entries = joined(args.output, found, [setting.name for setting in known])
    result: dict[str, Any] = {}
    for kind in ("planned", "simulated"):
        own = [abs(plan[f"{kind}_s"] / plan["measured_s"] - 1) for entry in entries for plan in entry["plans"]]
        result[f"{kind}_error"] = {"median": statistics.median(own), "worst": max(own)}
        print(f"{kind}: median error {statistics.median(own):.1%}, worst {max(own):.1%}")
    write("way_plans", result | {"settings": entries}, args.output)


def _dry(settings: list[Setting]) -> None:
    config = config_of_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE)
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
    find = partial(
        find_hardware, None, dtype="bfloat16", in_rows=("bfloat16",), offload_dir=work_dir, model=config, notify=print
    )
    cpu, core = find_for(setting.device, find)
    process = process_bytes()
    hardware = emulated_profile(on_this_machine(cpu), setting.device, core)
    plans, reasons, goes = plans_of(setting, hardware, config, process)
    # A policy that is the chosen one's too is run once.
    distinct = {name: plan for name, plan in plans.items() if name == "chosen" or plan.policy != plans["chosen"].policy}
    runs = _runs(distinct, setting, model, work_dir, process, rounds)
    entries = []
    for name, plan in distinct.items():
        seconds = statistics.median(run["seconds"] for run in runs[name])
        simulated = simulate_job(plan, config, hardware)
        planned = plan.prediction.total_s - plan.prediction.startup_s
        entries.append(
            {
                "way": name,
                "measured_s": seconds,
                "planned_s": planned,
                "simulated_s": simulated.total_s,
                "simulated_busy_s": simulated.busy_s,
                "simulated_stalled_s": simulated.stalled_s,
                "policy": plan.policy.to_json(),
                "runs": runs[name],
            }
        )
        print(
            f"  {name}: {seconds:.1f} s, planned {planned / seconds - 1:+.0%}, simulated {simulated.total_s / seconds - 1:+.0%}"
        )
        for lane, busy in runs[name][0]["busy_s"].items():
            stalled = runs[name][0]["stalled_s"][lane]
            print(
                f"    {lane}: busy {busy:.2f} s, simulated {simulated.busy_s[lane]:.2f} s; waited for {stalled:.2f} s,"
                f" simulated {simulated.stalled_s[lane]:.2f} s"
            )
    measured = {entry["way"]: entry["measured_s"] for entry in entries}
    same = [name for name in plans if name not in measured]
    measured |= {name: measured["chosen"] for name in same}
    every = [run for of_plan in runs.values() for run in of_plan]
    different = different_rows(every)
    for one in every:
        del one["tokens"]  # many digests
    ratio = measured["chosen"] / min(measured.values())
    fastest = min((name for name in measured if name != "chosen"), key=measured.__getitem__)
    print(
        f"{setting.name}: chosen goes the way of {goes}, {ratio:.2f} times as long as the fastest; of the ways {fastest} is the"
        f" fastest, to win: {' or '.join(setting.winners)}; {different} of {setting.rows} rows have not the"
        " same tokens in all",
        flush=True,
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
        "same_as_chosen": same,
        "different_rows": different,
        "reasons": reasons,
        "plans": entries,
    }


def _runs(
    plans: dict[str, Plan], setting: Setting, model: Path, work_dir: Path, process: int, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Runs of each plan, the plans in turn, each run in a process of its own."""
    rows = prompts(setting.rows, setting.prompt, vocab_size=SHAPE["vocab_size"])
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            kv_tokens = plan.policy.max_num_seqs * (setting.prompt + setting.output)
            measured = run_undisturbed(
                model, setting.device, plan.policy, rows, [setting.output] * setting.rows, work_dir=work_dir, kv_tokens=kv_tokens,
                planned_process_bytes=process, kernels=plan.kernels,
            )  # fmt: skip
            found[name].append(measured)
    return found


if __name__ == "__main__":
    main()
