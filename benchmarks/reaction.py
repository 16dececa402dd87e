"""Jobs on emulated accelerators that are not what was planned, with adaptation and without.

Each case has a plan for one device, and runs it on others: the CPU is slower, the link is slower, or the rows' lengths
change in the middle of the job. Beside it the best plan of other strategies runs, which stays as it is.

    python benchmarks/reaction.py --work-dir DIR    # measured, in wall seconds
    python benchmarks/reaction.py --simulate        # simulated, for a machine in round numbers

Writes benchmarks/results/reaction.json, or reaction-simulated.json: for each case and device the seconds of all sweeps
under each plan, with adaptation and without, and what adaptation changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from random_model import LLAMA_3B
from recording import result_path, write
from strategy_settings import MIB, ROUND_PROCESS_BYTES, SETTINGS, SHAPE, Setting, problem_on, round_machine
from tier_runs import different_rows, hardware_for, model_in, prompts, run_undisturbed

from batchgen.core.device import Device
from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan
from batchgen.engine.loader import process_bytes
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.simulation import simulate_job
from batchgen.planner.strategies import strategies_for
from batchgen.planner.strategy_times import best_plan

Rows = list[tuple[int, int]]  # prompt and output tokens of each


@dataclass(frozen=True)
class Case:
    """A plan and the machines that it runs on.

    Attributes:
        planned: Device and rows that were planned.
        strategy: Strategy of the plan that is run with adaptation and without.
        others: Strategies whose plans run beside it, without adaptation.
        devices: What the device is instead, by name.
        rows: Lengths of the rows where they are not as planned.
    """

    planned: Setting
    strategy: str
    others: tuple[str, ...]
    devices: dict[str, Device]
    rows: Rows | None = None


_BOTH_ATTEND = Device("emulated", 192 * MIB, 2e8, 2e8, slowdown=1.0, cpu_slowdown=2.0)
_CPU_ATTENDS = Device("emulated", 128 * MIB, 8e9, 8e9, slowdown=4.0)
_CHANGES: Rows = [(64, 128)] * 192 + [(64, 30)] * 192 + [(180, 12)] * 192


def _fast_link(mebibytes: int, slower: int = 1) -> Device:
    """An accelerator with so much memory beside a slow CPU, on a link of 8 GB/s over `slower`."""
    return Device("emulated", mebibytes * MIB, 8e9 / slower, 8e9 / slower, 2.0, 32.0, 3e-3)


CASES = (
    Case(
        Setting("slow CPU", "", (), _BOTH_ATTEND, 384, 64, 128),
        "NEO",
        ("GPU-only",),
        {f"CPU {n} times slower": replace(_BOTH_ATTEND, cpu_slowdown=2.0 * n) for n in (1, 2, 4, 8, 24)},
    ),
    Case(
        Setting("slow CPU, no KV on the accelerator", "", (), _CPU_ATTENDS, 384, 64, 128),
        "NEO",
        ("GPU-only",),
        {f"CPU {n} times slower": replace(_CPU_ATTENDS, cpu_slowdown=1.0 * n) for n in (1, 12, 48)},
    ),
    Case(
        Setting("slow link", "", (), _fast_link(192), 96, 128, 64),
        "FlexGen",
        ("GPU-only",),
        {f"link {n} times slower": _fast_link(192, n) for n in (1, 10, 40)},
    ),
    Case(
        Setting("slow link, KV by layer", "", (), _fast_link(256), 96, 128, 64),
        "Pie",
        ("GPU-only",),
        {f"link {n} times slower": _fast_link(256, n) for n in (1, 10, 40)},
    ),
    Case(
        replace(SETTINGS[-1], name="slow CPU, attention deferred"),
        "APEX",
        ("GPU-only",),
        {
            f"CPU {n} times slower": replace(SETTINGS[-1].device, cpu_slowdown=SETTINGS[-1].device.cpu_slowdown * n)
            for n in (1, 2, 4, 8, 24)
        },
    ),
    Case(
        Setting("lengths change", "", (), _BOTH_ATTEND, 576, 64, 128),
        "NEO",
        ("GPU-only",),
        {"as planned": _BOTH_ATTEND},
        _CHANGES,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, help="for the model and its store; needed to measure")
    parser.add_argument("--only", action="append", help="names of cases")
    parser.add_argument("--simulate", action="store_true", help="simulate a machine in round numbers instead")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.work_dir is None and not args.simulate:
        parser.error("--work-dir is needed to measure")
    cases = [case for case in CASES if not args.only or case.planned.name in args.only]
    entries = {
        case.planned.name: _simulated(case) if args.simulate else _measured(case, args.work_dir) for case in cases
    }
    write(args.output or result_path("reaction-simulated" if args.simulate else "reaction"), {"cases": entries})


def _plans(case: Case, hardware: HardwareProfile, config: ModelConfig, process: int) -> dict[str, Plan]:
    problem = problem_on(hardware, config, case.planned.workload, process)
    strategies = {strategy.name: strategy for strategy in strategies_for(problem)}
    return {name: best_plan(strategies[name], problem) for name in (case.strategy, *case.others)}


def _ways(case: Case, plans: dict[str, Plan]) -> Iterator[tuple[str, Plan, bool]]:
    """Name, plan and whether it adapts, of each way to run a case."""
    yield f"{case.strategy}, adapting", plans[case.strategy], True
    for name, plan in plans.items():
        yield name, plan, False


def _show(case: Case, device: str, ways: dict[str, dict[str, Any]]) -> None:
    seconds = ", ".join(f"{name} {way['seconds']:.1f} s" for name, way in ways.items())
    adapting = ways[f"{case.strategy}, adapting"]
    print(
        f"{case.planned.name}, {device}: {seconds}; left out {adapting['left_out']}, moved {adapting['moved']},"
        f" {len(adapting['changes'])} changes",
        flush=True,
    )


def _simulated(case: Case) -> dict[str, Any]:
    config = config_of_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE)
    plans = _plans(case, round_machine(case.planned.device), config, ROUND_PROCESS_BYTES)
    entries = {}
    for device, actual in case.devices.items():
        ways: dict[str, dict[str, Any]] = {}
        for name, plan, adapts in _ways(case, plans):
            run = simulate_job(plan, config, round_machine(actual), adapts=adapts, rows=case.rows)
            ways[name] = {
                "seconds": run.total_s,
                "sweeps": run.sweeps,
                "stalled_s": run.stalled_s,
                "left_out": run.left_out,
                "moved": run.moved,
                "changes": [change.to_json() for change in run.changes],
            }
        _show(case, device, ways)
        entries[device] = ways
    return entries


def _measured(case: Case, work_dir: Path) -> dict[str, Any]:
    model = model_in(work_dir, SHAPE)
    config, process = read_config(resolve_model(str(model))), process_bytes()
    plans = _plans(case, hardware_for(case.planned.device, config, work_dir), config, process)
    lengths = case.rows or [(case.planned.prompt, case.planned.output)] * case.planned.rows
    longest = max(prompt for prompt, _ in lengths)
    texts = prompts(len(lengths), longest, vocab_size=SHAPE["vocab_size"])
    rows = [text[:prompt] for text, (prompt, _) in zip(texts, lengths, strict=True)]
    outputs, most = [output for _, output in lengths], max(map(sum, lengths))
    entries = {}
    for device, actual in case.devices.items():
        runs = {
            name: run_undisturbed(
                model, actual, plan.policy, rows, outputs, work_dir=work_dir,
                kv_tokens=plan.policy.max_num_seqs * most, planned_process_bytes=process, kernels=plan.kernels,
                plan=plan if adapts else None,
            )
            for name, plan, adapts in _ways(case, plans)
        }  # fmt: skip
        _show(case, device, runs)
        different = different_rows(list(runs.values()))
        print(f"  {different} of {len(rows)} rows differ")
        ways = {name: {k: v for k, v in run.items() if k != "tokens"} for name, run in runs.items()}
        entries[device] = ways | {"different_rows": different}
    return entries


if __name__ == "__main__":
    main()
