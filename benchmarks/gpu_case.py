"""One job of dummy weights and rows on a CUDA GPU that is held to a smaller one's memory, in a process of its own.

Writes JSON: tokens per second beside the predicted ones, the seconds of each lane, and how far that is from the least
time of any schedule.

    python benchmarks/gpu_case.py recipes/throughput/shapes/opt-30b --policy cpu --gpu-memory 16GiB --output case.json

--policy planned needs highspy and pulp. The others are plain, and need nothing: weights that the GPU has no memory for
stay in the host's, and KV is where the policy's name says. "resident": all on the GPU; "cpu": on the host, attended to
by the CPU; "streamed": on the host, staged on the GPU in every pass. Of these, the largest block that memory holds is
taken.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from gpu_bound import Job, Rates, bound
from gpu_parts import PLANNER

from batchgen.core.device import Device, parse_device
from batchgen.core.errors import InputError
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.machine import available_memory_bytes
from batchgen.core.plan import MemoryPlan, Plan, Policy
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.loader import (
    LoadRequest,
    choose_weights,
    in_memory_policy,
    load_parts,
    needs_store,
    process_bytes,
    resolve_budgets,
    resolve_dtype,
)
from batchgen.engine.parts import EngineParts
from batchgen.job.report import engine_report
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles, read_config, without_weights
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.tokenizer import NoText
from batchgen.planner.kv_memory import Demand
from batchgen.planner.memory import plan_memory
from batchgen.schedule.trace import TraceWriter

BUILD = Path(__file__).parents[1] / "build"
POLICIES = ("planned", "resident", "cpu", "streamed")
_MOST_KERNELS = 40
_KV_PLACEMENT = {"resident": "gpu", "cpu": "cpu", "streamed": "streamed"}


def planned(args: argparse.Namespace, files: ModelFiles, config: ModelConfig) -> Plan:
    """The plan that `batchgen run` would make, without the disk. Raises InputError, also where there is no planner."""
    if missing := [name for name in PLANNER if find_spec(name) is None]:
        raise InputError(
            f"--policy planned needs {' and '.join(missing)}: install what is missing, or take a plain policy"
            " (--policy resident, cpu or streamed)"
        )
    from batchgen.core.workload import uniform_workload
    from batchgen.job.job import resolve_job
    from batchgen.job.options import JobOptions
    from batchgen.job.planning import problem_here
    from batchgen.job.workload import EstimatedWorkload
    from batchgen.planner.plan_selection import plan_problem
    from batchgen.planner.problem import Allowed

    options = JobOptions(
        str(files.path), None, None, device=args.device, gpu_memory=args.gpu_memory, cpu_memory=args.host_memory,
        weights=args.weights, dtype=args.dtype, max_model_len=args.input_len + args.output_len,
        hardware=args.hardware,
    )  # fmt: skip
    workload = uniform_workload(args.num_prompts, args.input_len, args.output_len, 1, config.max_position)
    job = resolve_job(options, files, config)
    _, problem = problem_here(job, EstimatedWorkload(workload, True), started_s=time.monotonic())
    allowed = Allowed(weight_tiers=("gpu", "cpu"), kv_placements=("gpu", "cpu", "streamed"))
    return plan_problem(replace(problem, allowed=allowed, startup_s=0.0, loading={}))


def plain_policy(
    args: argparse.Namespace, config: ModelConfig, device: Device, dtype: str, weights: str, budgets: Mapping[str, int]
) -> Policy:
    """The largest block whose KV fits where the policy's name says, and as many layers on the GPU as fit beside it.

    Args:
        args: the command's arguments.
        config: the model.
        device: the device that computes.
        dtype: the compute dtype.
        weights: format of the layers' matrices, as `choose_weights` resolves it.
        budgets: tier -> bytes.

    Raises:
        InputError: not even one sequence fits.
    """
    kv_placement, length = _KV_PLACEMENT[args.policy], args.input_len + args.output_len
    held = process_bytes()

    def made(batch_size: int, kept: int, head_tier: str) -> Policy:
        seqs = batch_size * args.num_gpu_batches
        base = in_memory_policy(
            config, device, dtype=dtype, admission="continuous", max_num_seqs=seqs,
            max_num_batched_tokens=max(args.batched_tokens, seqs), max_model_len=length, share_prefixes=False,
            weights=weights,
        )  # fmt: skip
        return replace(
            base,
            gpu_batch_size=batch_size,
            num_gpu_batches=args.num_gpu_batches,
            weight_layers=dict.fromkeys(config.layer_tensors, (kept, config.num_layers - kept, 0)),
            head_tier=head_tier,
            kv_seqs={kv_placement: seqs},
            activation_batches=(args.num_gpu_batches, 0),
        )

    def memory_of(policy: Policy) -> MemoryPlan:
        return plan_memory(config, policy, Demand(length, length), dtype=dtype, budgets=budgets, process_bytes=held)

    def fits(policy: Policy) -> bool:
        try:
            blocks = memory_of(policy).kv_blocks[KVPlacement(kv_placement).tier]
        except InputError:
            return False
        return blocks >= policy.max_num_seqs * -(-length // policy.kv_block_size)

    most = max(1, args.num_prompts // args.num_gpu_batches)
    for head_tier in ("gpu", "cpu"):
        batch_size = _largest(most, lambda n, tier=head_tier: fits(made(n, 0, tier)))
        if batch_size:
            kept = _largest(config.num_layers, lambda n, size=batch_size, tier=head_tier: fits(made(size, n, tier)))
            return made(batch_size, kept, head_tier)
    memory_of(made(1, 0, "cpu"))  # says what is missing
    raise InputError(f"{args.num_gpu_batches} sequences of {length} tokens do not fit: give more memory")


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, where all smaller ones do; 0: none but perhaps that."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def torch_limit_bytes(device: Device, budgets: Mapping[str, int]) -> int:
    """What the GPU's memory is held to: on a card, all that torch may take of it."""
    if device.kind != "cuda":
        return budgets["gpu"]
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(torch.cuda.get_per_process_memory_fraction() * total)


def run(args: argparse.Namespace) -> dict:
    """Raises InputError."""
    device = parse_device(args.device)
    if not device.accelerated:
        raise InputError("--device must have a memory of its own: cuda, or emulated:gpu-memory=...")
    files = shape_of(args)
    config = read_config(files)
    dtype = resolve_dtype(config, args.dtype, device)
    budgets = resolve_budgets(device, gpu_memory=args.gpu_memory, cpu_memory=args.host_memory)
    started = time.perf_counter()
    plan = planned(args, files, config) if args.policy == "planned" else None
    planning_s = time.perf_counter() - started if plan else 0.0
    weights = choose_weights(files, config, args.weights, dtype, device, available_memory_bytes)
    policy = plan.policy if plan else plain_policy(args, config, device, dtype, weights, budgets)
    store = find_or_convert(files, args.offload_dir, dtype, weights) if needs_store(policy) else None
    trace = TraceWriter(args.trace, files.name) if args.trace else None
    request = LoadRequest(
        files, config, policy, dtype=dtype, device=device, budgets=budgets, min_output_len=args.output_len,
        longest_tokens=args.input_len + args.output_len, on_step=trace and trace.add,
        most_kv_tokens=policy.max_num_seqs * (args.input_len + args.output_len + 16),
        planned_process_bytes=process_bytes(),
        store=store,
    )  # fmt: skip
    parts = load_parts(request, NoText)
    if args.no_graphs:
        capture_nothing(parts)
    with Engine.from_parts(
        parts,
        planned_output_len=plan and args.output_len,
        expected_output_len=args.output_len,
        lane_costs=plan and plan.prediction.lane_costs,
    ) as engine:
        limit = torch_limit_bytes(device, budgets)
        rows = dummy_rows(args, config)
        seconds, account = timed(engine, plan, rows)
        kernels = kernel_seconds(engine, rows[: args.traced_rows], args.kernel_trace) if args.kernel_trace else None
    if trace:
        trace.close()
    return {
        "shape": args.shape.name,
        "job": {n: getattr(args, n) for n in ("num_prompts", "input_len", "output_len", "policy")},
        # What all engines that are compared have to have alike.
        "limits": {"gpu_bytes": limit, "host_bytes": budgets["cpu"], "dtype": dtype},
        "block": policy.max_num_seqs,
        "planning_s": planning_s,
        "predicted_generation_s": plan and plan.prediction.total_s - plan.prediction.startup_s,
        **figures(args, seconds, account),
        "kernels": kernels,
        **of_bound(args, config, policy, dtype, limit, budgets["cpu"], seconds),
        "policy": policy.to_json(),
        "prediction": plan and asdict(plan.prediction),
    }


def capture_nothing(parts: EngineParts) -> None:
    """Have all sweeps launched kernel by kernel. Raises InputError where they are anyway."""
    if parts.executor.context.graphs is None:
        parts.executor.close()
        raise InputError("--no-graphs: no sweep of this job would be captured, leave it out")
    parts.executor.context.graphs = None


def shape_of(args: argparse.Namespace) -> ModelFiles:
    """The shape, or one of fewer layers in a folder of its own."""
    if args.layers is None:
        return without_weights(str(args.shape))
    config = json.loads((args.shape / "config.json").read_text()) | {"num_hidden_layers": args.layers}
    path = args.output.with_suffix(".shape")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return without_weights(str(path))


def dummy_rows(args: argparse.Namespace, config: ModelConfig) -> list[Request]:
    draw, sampling = random.Random(0), SamplingParams(max_tokens=args.output_len, ignore_eos=True)
    return [
        Request([draw.randrange(config.vocab_size) for _ in range(args.input_len)], sampling)
        for _ in range(args.num_prompts)
    ]


def timed(engine: Engine, plan: Plan | None, rows: list[Request]) -> tuple[float, dict]:
    """(seconds, what the engine says of them). Raises InputError where rows fail."""
    list(engine.generate(rows[:2]))  # kernels are compiled, and what is used for the first time is touched
    before = engine_report(engine, plan, 1.0)
    started, host_started = time.perf_counter(), time.thread_time()
    failed = [c.error for c in engine.generate(rows) if c.error]
    seconds, host_s = time.perf_counter() - started, time.thread_time() - host_started
    if failed:
        raise InputError(f"{len(failed)} rows failed: {failed[0]}")
    account = engine_report(engine, plan, seconds)
    for counted in ("busy_s", "bytes_moved"):
        account[counted] = {lane: n - before[counted].get(lane, 0) for lane, n in account[counted].items()}
    account["sweeps"] -= before["sweeps"]
    account["host_s"] = host_s
    return seconds, account


def kernel_seconds(engine: Engine, rows: list[Request], trace: Path) -> list[dict]:
    """Run rows under torch's profiler and write its trace.

    Returns:
        The kernels that took the most seconds on the GPU, or on the CPU where there is none.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    with profile(activities=activities & profiler_activities()) as profiler:
        list(engine.generate(rows))
    profiler.export_chrome_trace(str(trace))
    events = [
        {
            "name": e.key,
            "count": e.count,
            "device_s": e.self_device_time_total / 1e6,
            "cpu_s": e.self_cpu_time_total / 1e6,
        }
        for e in profiler.key_averages()
    ]
    return sorted(events, key=lambda e: (-e["device_s"], -e["cpu_s"]))[:_MOST_KERNELS]


def profiler_activities() -> set:
    from torch.profiler import supported_activities

    return set(supported_activities())


def figures(args: argparse.Namespace, seconds: float, account: dict) -> dict:
    generated, busy = args.num_prompts * args.output_len, account["busy_s"]
    lanes = ("compute", "cpu_attention", "h2d", "d2h")
    return {
        "load_s": account["load_s"],
        "host_s": account["host_s"],  # CPU time of the thread that launches
        "generation_s": seconds,
        "generated_tokens_per_s": generated / seconds,
        "total_tokens_per_s": (generated + args.num_prompts * args.input_len) / seconds,
        "busy_s": busy,
        "gpu_busy_frac": busy.get("compute", 0.0) / seconds,
        "overlap": sum(busy.get(lane, 0.0) for lane in lanes) / seconds,
        "bytes_moved": account["bytes_moved"],
        "sweeps": account["sweeps"],
        "peak_bytes": account["peak_bytes"],
        "versions": account["versions"],
    }


def of_bound(
    args: argparse.Namespace,
    config: ModelConfig,
    policy: Policy,
    dtype: str,
    gpu_bytes: int,
    host_bytes: int,
    seconds: float,
) -> dict:
    """How near the job came to what no schedule can beat (`gpu_bound`); nothing without --rates."""
    if args.rates is None:
        return {}
    rates = Rates(**json.loads(args.rates.read_text())["rates"])
    job = Job(
        args.num_prompts, args.input_len, args.output_len, gpu_bytes, host_bytes, dtype, policy.weight_format,
        policy.kv_format,
    )  # fmt: skip
    least = bound(config, job, rates)
    return {"bound": asdict(least), "rates": asdict(rates), "of_bound": least.seconds / seconds}


def summary(case: dict) -> str:
    """One line for a person."""
    parts = [f"{case['generated_tokens_per_s']:,.0f} generated tokens/s, block of {case['block']}"]
    parts.append(
        f"GPU busy {case['gpu_busy_frac']:.0%}, host {1e3 * case['host_s'] / max(1, case['sweeps']):.1f} ms a sweep"
    )
    if "of_bound" in case:
        parts.append(f"{case['of_bound']:.0%} of the bound ({case['bound']['by']})")
    predicted = case["predicted_generation_s"]
    told = f"predicted {predicted:.1f}" if predicted else "not planned"
    return ", ".join([*parts, f"{case['generation_s']:.1f} s ({told})"])


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=Path, help="directory with a config.json")
    parser.add_argument("--policy", choices=POLICIES, default="planned")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--num-gpu-batches", type=int, default=1, help="with a plain policy")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="most in a sweep, with a plain policy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="auto", help="format of the layers' matrices, as of batchgen run")
    parser.add_argument("--offload-dir", type=Path, default=BUILD / "offload", help="where weights of int4 are kept")
    parser.add_argument("--hardware", help="profile to plan with; without it, this machine is measured")
    parser.add_argument("--rates", type=Path, help="what gpu_rates.py wrote: tells how far from the bound it is")
    parser.add_argument("--no-graphs", action="store_true", help="capture no decode sweeps")
    parser.add_argument("--trace", help="file for the Steps' times")
    parser.add_argument(
        "--kernel-trace", type=Path, help="file for torch's profile of a further run; .gz compresses it"
    )
    parser.add_argument("--traced-rows", type=int, default=16, help="rows of that run")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    try:
        found = run(args)
    except InputError as error:
        sys.exit(f"gpu_case: {error}")
    args.output.write_text(json.dumps(found, indent=1, default=str) + "\n")
    print(f"summary: {summary(found)}")


if __name__ == "__main__":
    main()
