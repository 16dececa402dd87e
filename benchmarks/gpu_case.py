"""One job of made-up weights and rows on a CUDA GPU that is held to a smaller one's memory, in a process of its own. Writes JSON:
tokens per second beside what was predicted, what each lane did, and how far that is from what the card can do.

    python benchmarks/gpu_case.py recipes/throughput/shapes/opt-30b --gpu-memory 16GiB --num-prompts 64 --output case.json

With PuLP installed the job is planned; without it, or with --policy, a plain policy is taken: what weights do not fit stay in
host memory, and so does the KV of --host-share of the sequences.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from batchgen.device import Device, parse_device
from batchgen.engine import Engine
from batchgen.loading import in_memory_policy, load_parts, process_bytes, resolve_budgets, resolve_dtype
from batchgen.model_config import ModelConfig
from batchgen.model_files import ModelFiles, read_config, without_weights
from batchgen.planner.memory import activation_bytes, group_bytes, kv_block_bytes
from batchgen.policy import Policy
from batchgen.report import engine_account
from batchgen.request import Request, SamplingParams
from batchgen.runtime.trace import TraceWriter
from batchgen.tokenizer import NoText
from batchgen.units import size_bytes

KV_CLASSES = ("gpu", "cpu", "streamed")
_ROOM_FRAC = 0.9  # of the GPU, for a policy that nothing planned


def planned(args: argparse.Namespace, files: ModelFiles, config: ModelConfig, dtype: str):
    """(plan, seconds that planning and measuring took)."""
    from batchgen.job_options import JobOptions
    from batchgen.loading import resolve_context
    from batchgen.planner.lp import Allowed
    from batchgen.planning import machine_of, plan_job, problem_of, request_of
    from batchgen.workload import uniform_workload

    started = time.perf_counter()
    job = JobOptions(
        str(files.path), None, None, device=args.device, gpu_memory=args.gpu_memory, quantization=args.quantization,
        dtype=args.dtype, admission=args.admission, max_model_len=args.input_len + args.output_len,
    )  # fmt: skip
    workload = uniform_workload(args.num_prompts, args.input_len, args.output_len, 1, config.max_position)
    request = request_of(job, files, config, dtype, resolve_context(config, job.max_model_len))
    hardware, request = machine_of(job, files, config, request, print)
    problem = problem_of(hardware, config, workload, request)
    allowed = Allowed(weight_tiers=("gpu", "cpu"), kv_classes=tuple(args.kv_classes))
    plan = plan_job(replace(problem, allowed=allowed), request, startup_s=0.0, loading_s=0.0, output_len_known=True)
    return plan, time.perf_counter() - started


def plain_policy(args: argparse.Namespace, config: ModelConfig, device: Device, dtype: str, budgets) -> Policy:
    """As many layers on the GPU as leave a third of it for KV, and as many sequences as fit there; the others on the host."""
    size = 4 if dtype == "float32" else 2
    layer, length = sum(group_bytes(config, dtype, dtype).values()), args.input_len + args.output_len
    batch = max(2048, args.num_prompts)
    head = config.head_params * size or config.embedding_params * size
    room = _ROOM_FRAC * budgets["gpu"] - activation_bytes(config, size, batch, args.num_prompts, on_gpu=True) - head
    seq = config.num_layers * -(-length // 16) * kv_block_bytes(config, 16, dtype)
    kept = config.num_layers
    if room < config.num_layers * layer + seq:
        kept = max(0, int((room * 2 / 3 - 2 * layer) // layer))
    left = room - kept * layer - (2 * layer if kept < config.num_layers else 0)
    most = max(1, int(left // seq))
    on_host = int(args.host_share * min(args.num_prompts, most))
    seqs = max(1, min(args.num_prompts, most))
    base = in_memory_policy(
        config, device, dtype=dtype, admission="continuous", max_num_seqs=seqs, max_num_batched_tokens=batch,
        max_model_len=length, share_prefixes=False,
    )  # fmt: skip
    kv = {"gpu": seqs - on_host, args.kv_classes[-1] if on_host else "cpu": on_host}
    return replace(
        base,
        weight_layers=dict.fromkeys(config.layer_tensors, (kept, config.num_layers - kept, 0)),
        kv_seqs={c: n for c, n in kv.items() if n},
    )


def run(args: argparse.Namespace) -> dict:
    device = parse_device(args.device)
    files = without_weights(str(args.shape))
    config = read_config(files)
    dtype = resolve_dtype(config, args.dtype, device)
    planning = find_spec("pulp") is not None and not args.policy
    budgets = resolve_budgets(device, gpu_memory=args.gpu_memory)
    plan, planning_s = planned(args, files, config, dtype) if planning else (None, 0.0)
    policy = plan.policy if plan else plain_policy(args, config, device, dtype, budgets)
    trace = TraceWriter(args.trace, files.name) if args.trace else None
    parts = load_parts(
        files, NoText, policy=policy, dtype=dtype, device=device, budgets=budgets, min_output_len=args.output_len,
        longest_tokens=args.input_len + args.output_len, on_step=trace and trace.add,
        most_kv_tokens=policy.max_num_seqs * (args.input_len + args.output_len + 16),
        planned_process_bytes=process_bytes(),
    )  # fmt: skip
    draw, sampling = random.Random(0), SamplingParams(max_tokens=args.output_len, ignore_eos=True)
    rows = [
        Request([draw.randrange(config.vocab_size) for _ in range(args.input_len)], sampling)
        for _ in range(args.num_prompts)
    ]
    output_len = args.output_len if plan else None
    with Engine.from_parts(parts, planned_output_len=output_len, expected_output_len=args.output_len) as engine:
        list(engine.generate(rows[:2]))  # kernels are compiled, and what is used for the first time is touched
        before = engine_account(engine, plan, 1.0)
        started = time.perf_counter()
        failed = [c.error for c in engine.generate(rows) if c.error]
        seconds = time.perf_counter() - started
        account = engine_account(engine, plan, seconds)
    if trace:
        trace.close()
    if failed:
        raise SystemExit(f"{len(failed)} rows failed: {failed[0]}")
    busy = {lane: account["busy_s"][lane] - before["busy_s"][lane] for lane in account["busy_s"]}
    moved = {lane: account["bytes_moved"][lane] - before["bytes_moved"][lane] for lane in account["bytes_moved"]}
    generated = args.num_prompts * args.output_len
    return {
        "shape": args.shape.name,
        "gpu_memory": args.gpu_memory,
        "num_prompts": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "kv_classes": args.kv_classes,
        "planned": planning,
        "planning_s": planning_s,
        "load_s": account["load_s"],
        "generation_s": seconds,
        "predicted_generation_s": plan and plan.prediction.total_s - plan.prediction.startup_s,
        "generated_tokens_per_s": generated / seconds,
        "total_tokens_per_s": (generated + args.num_prompts * args.input_len) / seconds,
        "busy_s": busy,
        "gpu_busy_frac": busy.get("compute", 0.0) / seconds,
        "overlap": sum(busy.get(lane, 0.0) for lane in ("compute", "cpu_attention", "h2d", "d2h")) / seconds,
        "bytes_moved": moved,
        "sweeps": account["sweeps"],
        "peak_bytes": account["peak_bytes"],
        "policy": policy.to_json(),
        "prediction": plan and asdict(plan.prediction),
        **bound(config, dtype, moved, args, seconds),
        "versions": account["versions"],
    }


def bound(config: ModelConfig, dtype: str, moved: dict, args: argparse.Namespace, seconds: float) -> dict:
    """What no schedule can beat: all bytes at the rate of copies, or all FLOPs at that of matrix products."""
    if args.device != "cuda":
        return {}
    import torch

    from batchgen.planner.profile_timing import FULL
    from batchgen.planner.profile_timing import Device as Timed
    from batchgen.planner.profile_transfer import copy_rates

    h2d, _ = copy_rates(Timed("cuda"), FULL)
    torch_dtype = getattr(torch, dtype)
    x = torch.randn(4096, config.hidden_size, device="cuda").to(torch_dtype)
    w = torch.randn(config.intermediate_size, config.hidden_size, device="cuda").to(torch_dtype)
    for _ in range(3):
        torch.mm(x, w.T)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        torch.mm(x, w.T)
    stop.record()
    stop.synchronize()
    gemm = 20 * 2 * len(x) * w.numel() / (start.elapsed_time(stop) / 1e3)
    tokens = args.num_prompts * (args.input_len + args.output_len - 1)
    flops = 2 * tokens * config.num_layers * config.params_per_layer
    best_s = max(moved.get("h2d", 0) / h2d, flops / gemm)
    return {"h2d_bytes_per_s": h2d, "gemm_flops_per_s": gemm, "bound_s": best_s, "of_bound": best_s / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=Path, help="directory with a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--admission", default="auto")
    parser.add_argument("--kv-classes", nargs="+", choices=KV_CLASSES, default=KV_CLASSES)
    parser.add_argument("--policy", action="store_true", help="a plain policy, although jobs could be planned")
    parser.add_argument("--host-share", type=float, default=0.0, help="of sequences, with a plain policy")
    parser.add_argument("--trace")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.gpu_memory:
        size_bytes(args.gpu_memory)
    args.output.write_text(json.dumps(run(args), indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
