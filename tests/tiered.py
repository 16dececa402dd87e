"""Engines on an emulated accelerator, or on the CPU and disk, under any policy."""

from __future__ import annotations

from pathlib import Path

from batchgen.convert import find_or_convert
from batchgen.device import Device
from batchgen.engine import Engine, EngineParts
from batchgen.loading import load_parts, needs_store
from batchgen.model_files import read_config, resolve_model
from batchgen.policy import Policy
from batchgen.request import Request, SamplingParams
from batchgen.tokenizer import load_tokenizer

GIB = 1 << 30
BUDGETS = {"gpu": GIB, "cpu": 4 * GIB, "disk": GIB}


def make_policy(model: Path | str, device: Device, **changes) -> Policy:
    """Everything in the compute device's memory, but for `changes`."""
    config = read_config(resolve_model(str(model)))
    home = "gpu" if device.accelerated else "cpu"
    layers = (config.num_layers, 0, 0) if device.accelerated else (0, config.num_layers, 0)
    fields = {
        "admission": "continuous",
        "gpu_batch_size": 8,
        "num_gpu_batches": 1,
        "max_num_batched_tokens": 64,
        "max_model_len": config.max_position,
        "kv_block_size": 16,
        "kv_blocks": {},
        "share_prefixes": True,
        "weight_format": "float32",
        "kv_format": "float32",
        "weight_layers": dict.fromkeys(config.layer_tensors, layers),
        "head_tier": home,
        "kv_seqs": {home: 8},
        "activation_batches": (1, 0) if device.accelerated else (0, 1),
    }
    return Policy(**fields | changes)


def make_parts(model: Path | str, device: Device, policy: Policy, offload_dir: Path, **options) -> EngineParts:
    files = resolve_model(str(model))
    store = None
    if needs_store(policy):
        store = find_or_convert(files, offload_dir, "float32", "int4" if policy.weight_format == "int4" else "none")
    budgets = {tier: size for tier, size in BUDGETS.items() if device.accelerated or tier != "gpu"}
    options = {"budgets": budgets, "min_output_len": 1, "longest_tokens": 128, "most_kv_tokens": 4096} | options
    return load_parts(
        files, lambda: load_tokenizer(files), policy=policy, dtype="float32", device=device, offload_dir=offload_dir,
        store=store, **options,
    )  # fmt: skip


def generate(parts: EngineParts, prompts: list[list[int]], output_lens: list[int], **options) -> list[tuple[int, ...]]:
    """The tokens of every prompt, in order."""
    requests = [
        Request(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
        for prompt, n in zip(prompts, output_lens, strict=True)
    ]
    with Engine.from_parts(parts, **options) as engine:
        done = {c.index: c for c in engine.generate(requests)}
    for completion in done.values():
        assert completion.error is None, completion.error
    return [done[i].samples[0].token_ids for i in range(len(prompts))]
