"""Jobs on emulated accelerators that are not what was planned, with adaptation and without.

Each case has a plan for one device, and runs it on others: the CPU is slower, the link is slower, or the rows' lengths
change in the middle of the job. Beside it the best plan of other strategies runs, which stays as it is.

    python benchmarks/reaction.py --work-dir DIR --only "slow link"   # one round, measured in wall seconds
    python benchmarks/reaction.py --simulate                          # simulated, for a machine in round numbers

Writes benchmarks/results/reaction.json, or reaction-simulated.json: for each case and device the seconds of all sweeps
under each plan, with adaptation and without, and what adaptation changed. Measured runs are added to those in the file,
and the fastest run of each plan counts: other processes can only make a run longer.
"""

from __future__ import annotations

import argparse
import json
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
    parser.add_argument("--device", action="append", help="names of devices in them")
    parser.add_argument("--simulate", action="store_true", help="simulate a machine in round numbers instead")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.work_dir is None and not args.simulate:
        parser.error("--work-dir is needed to measure")
    path = args.output or result_path("reaction-simulated" if args.simulate else "reaction")
    cases = [_with_devices(case, args.device) for case in CASES if not args.only or case.planned.name in args.only]
    if args.simulate:
        write(path, {"cases": {case.planned.name: _simulated(case) for case in cases}})
        return
    entries = json.loads(path.read_text())["cases"] if path.exists() else {}
    for case in cases:
        _measure(case, args.work_dir, entries.setdefault(case.planned.name, {}))
        write(path, {"cases": entries})


def _with_devices(case: Case, names: list[str] | None) -> Case:
    """The case on some of its devices, or on all of them where no names are given."""
    return replace(case, devices={name: case.devices[name] for name in names or case.devices if name in case.devices})


def _plans(case: Case, hardware: HardwareProfile, config: ModelConfig, process: int) -> dict[str, Plan]:
    problem = problem_on(hardware, config, case.planned.workload, process, disk_memory=0)  # KV there stays there
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


def _measure(case: Case, work_dir: Path, entries: dict[str, Any]) -> None:
    """Measure each way to run a case once on each of its devices, and add that to what is there.

    Args:
        case: The case.
        work_dir: Directory of the model and its store.
        entries: Earlier runs of the case, by device.
    """
    model = model_in(work_dir, SHAPE)
    config, process = read_config(resolve_model(str(model))), process_bytes()
    plans = _plans(case, hardware_for(case.planned.device, config, work_dir), config, process)
    lengths = case.rows or [(case.planned.prompt, case.planned.output)] * case.planned.rows
    longest = max(prompt for prompt, _ in lengths)
    texts = prompts(len(lengths), longest, vocab_size=SHAPE["vocab_size"])
    rows = [text[:prompt] for text, (prompt, _) in zip(texts, lengths, strict=True)]
    outputs, most = [output for _, output in lengths], max(map(sum, lengths))
    for device, actual in case.devices.items():
        runs = {
            name: run_undisturbed(
                model, actual, plan.policy, rows, outputs, work_dir=work_dir,
                kv_tokens=plan.policy.max_num_seqs * most, planned_process_bytes=process, kernels=plan.kernels,
                plan=plan if adapts else None, tries=1,
            )
            for name, plan, adapts in _ways(case, plans)
        }  # fmt: skip
        different = different_rows(list(runs.values()))
        ways = entries.setdefault(device, {})
        for name, run in runs.items():
            ways[name] = _faster(run | {"different_rows": different}, ways.get(name))
        _show(case, device, ways)
        print(f"  {different} of {len(rows)} rows differ", flush=True)


def _faster(run: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The faster of a run and the fastest one before it, with the seconds of all."""
    all_s = [*(earlier["all_s"] if earlier else ()), run["seconds"]]
    kept = earlier if earlier and earlier["seconds"] < run["seconds"] else run
    return {name: value for name, value in kept.items() if name != "tokens"} | {"all_s": all_s}


if __name__ == "__main__":
    main()
