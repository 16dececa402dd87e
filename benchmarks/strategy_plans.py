"""The strategies of the papers on an emulated accelerator, predicted and measured, where each of them wins.

For each of the settings in `strategy_settings.py`, the plan that the planner chooses runs beside the best one of every
strategy. Times are those of the sweeps. The accelerator has a core of its own, so that CPU attention runs beside it,
and sleeps for the rest of the time that it is to take.

    python benchmarks/strategy_plans.py --work-dir DIR python benchmarks/strategy_plans.py --dry       # plans and
    simulates only, for a machine in round numbers; writes nothing

Writes benchmarks/results/strategy_plans.json: for each setting measured, planned and simulated seconds of each plan,
how much longer the chosen one took than the fastest, and whether all of them generated the same tokens. With --only,
settings that are left out stay as they are there.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from random_model import LLAMA_3B
from recording import joined, result_path, write
from strategy_settings import (
    FLIPPED,
    ROUND_PROCESS_BYTES,
    SETTINGS,
    SHAPE,
    Setting,
    plans_of,
    round_machine,
    seconds_of,
)
from tier_runs import different_rows, hardware_for, lanes_of, model_in, prediction_errors, prompts, run_undisturbed

from batchgen.core.plan import Plan
from batchgen.engine.loader import process_bytes
from batchgen.models.files import read_config, resolve_model
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.simulation import simulate_job

KNOWN = (*SETTINGS, FLIPPED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, help="for the model, its store and KV on disk; needed but for --dry")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each plan; the median counts")
    parser.add_argument("--only", action="append", help="names of settings")
    parser.add_argument("--dry", action="store_true", help="plan and simulate, measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=result_path("strategy_plans"))
    args = parser.parse_args()
    settings = [setting for setting in KNOWN if not args.only or setting.name in args.only]
    if args.dry:
        _dry(settings)
        return
    if args.work_dir is None:
        parser.error("--work-dir is needed to measure")
    measured = {setting.name: _measure(setting, args.work_dir, args.rounds) for setting in settings}
    entries = joined(args.output, "settings", measured, [setting.name for setting in KNOWN])
    plans = [plan for entry in entries.values() for plan in entry["plans"].values()]
    errors = {f"{kind}_error": prediction_errors(plans, kind) for kind in ("planned", "simulated")}
    print(errors)
    write(args.output, errors | {"settings": entries})


def _dry(settings: list[Setting]) -> None:
    config = config_of_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE)
    for setting in settings:
        plans, reasons, follows = plans_of(setting, round_machine(setting.device), config, ROUND_PROCESS_BYTES)
        print(f"{setting.name}: the chosen plan follows {follows}; to win: {' or '.join(setting.winners)}")
        for name, seconds in seconds_of(plans):
            print(f"  {name}: {seconds:.2f} s, {plans[name].policy.kv_seqs}")
        for name, reason in reasons.items():
            print(f"  {name}: {reason}")


def _measure(setting: Setting, work_dir: Path, rounds: int) -> dict[str, Any]:
    model = model_in(work_dir, SHAPE)
    config = read_config(resolve_model(str(model)))
    process = process_bytes()
    hardware = hardware_for(setting.device, config, work_dir)
    plans, reasons, follows = plans_of(setting, hardware, config, process)
    # A policy that is the chosen one's too is run once.
    distinct = {name: plan for name, plan in plans.items() if name == "chosen" or plan.policy != plans["chosen"].policy}
    runs = _runs(distinct, setting, model, work_dir, process, rounds)
    different = different_rows([run for of_plan in runs.values() for run in of_plan])
    entries = {}
    for name, plan in distinct.items():
        simulated = simulate_job(plan, config, hardware)
        entries[name] = entry = {
            "measured_s": statistics.median(run["seconds"] for run in runs[name]),
            "planned_s": plan.prediction.total_s - plan.prediction.startup_s,
            "simulated_s": simulated.total_s,
            "simulated_busy_s": simulated.busy_s,
            "simulated_stalled_s": simulated.stalled_s,
            "policy": plan.policy.to_json(),
            "runs": [{key: value for key, value in run.items() if key != "tokens"} for run in runs[name]],
        }
        over = {kind: entry[f"{kind}_s"] / entry["measured_s"] - 1 for kind in ("planned", "simulated")}
        shown = ", ".join(f"{kind} {error:+.0%}" for kind, error in over.items())
        print(f"  {name}: {entry['measured_s']:.1f} s, {shown}{lanes_of(entry)}")
    measured = {name: entry["measured_s"] for name, entry in entries.items()}
    same = [name for name in plans if name not in measured]
    measured |= {name: measured["chosen"] for name in same}
    ratio = measured["chosen"] / min(measured.values())
    fastest = min((name for name in measured if name != "chosen"), key=measured.__getitem__)
    print(
        f"{setting.name}: the chosen plan follows {follows}, {ratio:.2f} times as long as the fastest; {fastest} is the"
        f" fastest, to win: {' or '.join(setting.winners)}; {different} of {setting.rows} rows differ",
        flush=True,
    )
    return {
        "scarce": setting.scarce,
        "device": str(setting.device),
        "rows": setting.rows,
        "prompt": setting.prompt,
        "output": setting.output,
        "meant_to_win": list(setting.winners),
        "fastest_strategy": fastest,
        "chosen_strategy": follows,
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
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            kv_tokens = plan.policy.max_num_seqs * (setting.prompt + setting.output)
            run = run_undisturbed(
                model, setting.device, plan.policy, rows, [setting.output] * setting.rows, work_dir=work_dir,
                kv_tokens=kv_tokens, planned_process_bytes=process, kernels=plan.kernels, plan=plan,
            )  # fmt: skip
            runs[name].append(run)
    return runs


if __name__ == "__main__":
    main()
