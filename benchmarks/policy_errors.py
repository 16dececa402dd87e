"""Policies drawn at random, predicted and measured in three settings.

The first of each setting is the planner's own choice.

The settings are links about as fast as compute, the CPU and a disk, and a CPU that attends slowly beside an
accelerator. A draw holds the planner to a block size, a number of micro-batches, an admission, tiers of the weights and
classes of the KV; where the rest lies is the placement that the cost model finds best under these. Draws that do not
fit, or whose job would take too long, are drawn again. Times are those of the sweeps. A run keeps to its policy, which
adaptation would change. Each is predicted twice: by the cost model (the LP), and by the simulator.

    python benchmarks/policy_errors.py --work-dir DIR                 # measures
    python benchmarks/policy_errors.py --work-dir DIR --dry           # draws and simulates only, writes nothing

Writes benchmarks/results/policy_errors.json, after each round; with --only, settings that are left out stay as they are
there.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recording import joined, result_path, write
from strategy_settings import MIB, problem_on
from strategy_settings import SHAPE as SMALLER
from tier_runs import SHAPE as LARGER
from tier_runs import different_rows, hardware_for, lanes_of, model_in, prediction_errors, prompts, run_undisturbed

from batchgen.core.device import Device
from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.workload import Workload
from batchgen.engine.loader import process_bytes
from batchgen.models.files import read_config, resolve_model
from batchgen.planner.plan_selection import choose, simulate_candidates
from batchgen.planner.prediction import plan_of
from batchgen.planner.problem import Allowed, Problem
from batchgen.planner.search import Candidate, search
from batchgen.planner.simulation import simulate_job


@dataclass(frozen=True)
class Setting:
    """A device and a job of equal rows.

    Attributes:
        prompt, output: tokens of a row.
        shape: keys of the model's config.json.
        tiers: tiers of the weights that draws choose from.
        kv_placements: KV placements that draws choose from.
        cpu_memory: bytes beside those of the process; None for all that is free.
    """

    name: str
    device: Device
    rows: int
    prompt: int
    output: int
    shape: dict[str, int]
    tiers: tuple[tuple[str, ...], ...]
    kv_placements: tuple[str, ...]
    cpu_memory: int | None = None


_ON_GPU = (("gpu",), ("gpu", "cpu"), ("cpu",))
SETTINGS = (
    Setting(
        "links as fast as compute",
        Device("emulated", 112 * MIB, 4e8, 4e8, slowdown=2.0, step_overhead_s=5e-4),
        64, 96, 32, SMALLER, _ON_GPU, ("gpu", "cpu", "streamed"),
    ),
    Setting(
        "CPU and disk",
        Device("cpu"),
        48, 96, 16, LARGER, (("disk",), ("cpu", "disk")), ("cpu", "disk"), cpu_memory=550 * MIB,
    ),
    Setting(
        "slow CPU attention",
        Device("emulated", 112 * MIB, 1e9, 1e9, slowdown=2.0, cpu_slowdown=8.0, step_overhead_s=5e-4),
        64, 64, 48, SMALLER, (("gpu",), ("gpu", "cpu")), ("gpu", "cpu", "streamed"),
    ),
)  # fmt: skip
_BLOCKS, _BATCHES = (4, 8, 16, 24, 32, 48, 64), (1, 2, 4)


def held(setting: Setting, draw: random.Random) -> dict[str, Any]:
    """Fields of Problem that a draw holds the planner to."""
    batches = draw.choice(_BATCHES)
    placements = tuple(draw.sample(setting.kv_placements, draw.randint(1, len(setting.kv_placements))))
    return {
        "num_gpu_batches": batches,
        "max_num_seqs": draw.choice([size for size in _BLOCKS if size % batches == 0]),
        "admissions": (draw.choice(("continuous", "continuous", "static")),),
        "allowed": Allowed(weight_tiers=draw.choice(setting.tiers), kv_placements=placements),
    }


def drawn(problem: Problem, setting: Setting, seed: int) -> Iterator[tuple[str, Candidate]]:
    """Endless candidates, each with what it was held to in words; those that do not fit are left out."""
    draw = random.Random(seed)
    for _ in range(1000):
        own = held(setting, draw)
        allowed = own["allowed"]
        words = (
            f"{own['num_gpu_batches']} batches of {own['max_num_seqs'] // own['num_gpu_batches']},"
            f" {own['admissions'][0]}, weights {'+'.join(allowed.weight_tiers)},"
            f" KV {'+'.join(sorted(allowed.kv_placements))}"
        )
        try:
            yield words, search(replace(problem, **own))
        except InputError:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the models, their stores and KV on disk")
    parser.add_argument("--count", type=int, default=20, help="policies of each setting, the planner's own among them")
    parser.add_argument("--rounds", type=int, default=3, help="of each policy; the median counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest", type=float, default=12.0, help="simulated seconds of a job; longer ones are drawn again"
    )
    parser.add_argument("--only", action="append", help="names of settings")
    parser.add_argument("--dry", action="store_true", help="measure no job")
    parser.add_argument("-o", "--output", type=Path, default=result_path("policy_errors"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for setting in SETTINGS:
        if not args.only or setting.name in args.only:
            _setting(setting, args)


def _keep(entry: dict[str, Any], output: Path) -> None:
    """Writes the policies of a setting that have been measured so far, beside the other settings of the file."""
    settings = joined(output, "settings", {entry["setting"]: entry}, [s.name for s in SETTINGS])
    policies = [policy for each in settings.values() for policy in each["policies"]]
    result = {f"{name}_error": prediction_errors(policies, name) for name in ("planned", "simulated")}
    write(output, result | {"settings": settings})


def _without_tokens(policy: dict[str, Any]) -> dict[str, Any]:
    """A policy with what is kept of its runs."""
    kept = ("seconds", "busy", "sweeps", "preempted", "busy_s", "stalled_s")
    return policy | {"runs": [{name: run[name] for name in kept} for run in policy["runs"]]}


def _setting(setting: Setting, args: argparse.Namespace) -> None:
    """Draws the policies of one setting, and unless it is a dry run measures them and keeps each at once."""
    work_dir = args.work_dir / ("larger" if setting.shape is LARGER else "smaller")
    model = model_in(work_dir, setting.shape)
    config = read_config(resolve_model(str(model)))
    process = process_bytes()
    hardware = hardware_for(setting.device, config, work_dir, probe_disk=True)
    budgets = {} if setting.cpu_memory is None else {"cpu_memory": process + setting.cpu_memory}
    workload = Workload.uniform(setting.rows, setting.prompt, setting.output)
    problem = problem_on(hardware, config, workload, process, **budgets)
    own = choose(simulate_candidates(problem))
    assert own is not None  # there is no limit of the latency
    rows = prompts(setting.rows, setting.prompt, vocab_size=setting.shape["vocab_size"])
    policies: list[dict[str, Any]] = []
    plans: list[Plan] = []
    for words, candidate in [
        ("planned", own.candidate),
        *_distinct(drawn(problem, setting, args.seed), args.count * 3),
    ]:
        if len(plans) == args.count:
            break
        plan = plan_of(problem, candidate)
        if any(plan.policy == other.policy for other in plans):
            continue
        try:
            simulated = simulate_job(plan, config, hardware)
        except InputError:  # the memory plan does not hold what the cost model thought would fit
            continue
        if simulated.total_s > args.longest and words != "planned":
            continue
        plans.append(plan)
        policies.append(
            {
                "name": words,
                "planned_s": candidate.seconds,
                "simulated_s": simulated.total_s,
                "simulated_sweeps": simulated.sweeps,
                "simulated_busy_s": simulated.busy_s,
                "simulated_stalled_s": simulated.stalled_s,
                "policy": plan.policy.to_json(),
                "runs": [],
            }
        )
        if args.dry:
            print(_line(setting, policies[-1]), flush=True)
    if args.dry:
        return
    # In rounds, so that a moment in which the machine is slow does not decide about one of them.
    for _ in range(args.rounds):
        for plan, entry in zip(plans, policies, strict=True):
            kv_tokens = plan.policy.max_num_seqs * (setting.prompt + setting.output)
            measured = run_undisturbed(
                model, setting.device, plan.policy, rows, [setting.output] * setting.rows, work_dir=work_dir,
                kv_tokens=kv_tokens, planned_process_bytes=process, kernels=plan.kernels, **budgets,
            )  # fmt: skip
            entry["runs"].append(measured)
            entry["measured_s"] = statistics.median(run["seconds"] for run in entry["runs"])
            print(_line(setting, entry), flush=True)
        about = {"rows": setting.rows, "prompt": setting.prompt, "output": setting.output}
        found = {"setting": setting.name, "device": str(setting.device)} | about | _ranked(policies)
        found["different_rows"] = different_rows([run for entry in policies for run in entry["runs"]])
        _keep(found | {"policies": [_without_tokens(policy) for policy in policies]}, args.output)
    print(
        f"{setting.name}: of {len(policies)} policies the plan is number {found['rank_of_plan']},"
        f" {found['plan_against_fastest']:.2f} times as long as the fastest; median error planned"
        f" {found['planned_error']['median']:.1%}, simulated {found['simulated_error']['median']:.1%}; worst"
        f" {found['planned_error']['worst']:.1%} and {found['simulated_error']['worst']:.1%};"
        f" {found['different_rows']} of {setting.rows} rows have not the same tokens in all"
    )


def _line(setting: Setting, entry: dict[str, Any]) -> str:
    """A policy's times for the screen, those of its last run lane by lane."""
    planned, simulated = entry["planned_s"], entry["simulated_s"]
    line = f"{setting.name}: {entry['name']}: planned {planned:.2f} s, simulated {simulated:.2f} s"
    if not entry["runs"]:
        return line
    seconds = entry["measured_s"]
    return f"{line}, measured {seconds:.2f} s: {planned / seconds - 1:+.0%}, {simulated / seconds - 1:+.0%}" + lanes_of(
        entry
    )


def _distinct(pairs: Iterator[tuple[str, Candidate]], most: int) -> Iterator[tuple[str, Candidate]]:
    """At most so many of the candidates, none held to the same as one before."""
    seen: set[str] = set()
    for words, candidate in pairs:
        if words not in seen:
            seen.add(words)
            yield words, candidate
        if len(seen) == most:
            return


def _ranked(policies: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the plan, the first of the policies, stands among all, and how well each prediction does."""
    times = [p["measured_s"] for p in policies]
    return {
        "rank_of_plan": 1 + sum(t < times[0] for t in times),
        "plan_against_fastest": times[0] / min(times),
        "planned_error": prediction_errors(policies, "planned"),
        "simulated_error": prediction_errors(policies, "simulated"),
    }


if __name__ == "__main__":
    main()
