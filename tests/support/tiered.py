"""Engines on an emulated accelerator, or on the CPU and disk, under any policy."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from batchgen.core.device import Device
from batchgen.core.dtypes import DEQUANTIZED
from batchgen.core.plan import Policy
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, load_parts, needs_store
from batchgen.engine.parts import EngineParts, EngineStats
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.runtime.lanes import Lanes
from batchgen.schedule.step_graph import LANES, Step

GIB = 1 << 30
BUDGETS = {"gpu": GIB, "cpu": 4 * GIB, "disk": GIB}
EMULATED, CPU = Device("emulated", GIB), Device("cpu")


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


def everything_moves(model: Path | str, **changes) -> Policy:
    """A policy for an accelerator in which every kind of Step gets its turn.

    Weights are in all tiers, in 4 bits, sequences in all KV placements, two micro-batches have their activations on the
    host, and the output matrix comes in vocabulary chunks.
    """
    fields = {
        "gpu_batch_size": 4,
        "num_gpu_batches": 2,
        "weight_layers": {"qkv": (1, 1, 1), "out": (0, 1, 2), "up": (0, 0, 3), "down": (2, 1, 0)},
        "weight_format": "int4",
        "head_tier": "cpu",
        "kv_seqs": {"gpu": 2, "cpu": 2, "streamed": 1, "disk": 2, "deferred": 1},
        "activation_batches": (0, 2),
    }
    return make_policy(model, EMULATED, **fields | changes)


def make_parts(model: Path | str, device: Device, policy: Policy, offload_dir: Path, **options) -> EngineParts:
    request = make_request(model, device, policy, offload_dir, **options)
    return load_parts(request, lambda: load_tokenizer(request.files))


def make_request(model: Path | str, device: Device, policy: Policy, offload_dir: Path, **options) -> LoadRequest:
    files, shard = resolve_model(str(model), options.pop("lora", None)), options.get("shard")
    store, dtype = options.pop("store", None), options.pop("dtype", "float32")
    if store is None and needs_store(policy):
        policy = policy if find_spec("xxhash") else without_store(policy)
    if store is None and needs_store(policy):
        weights = DEQUANTIZED if policy.weight_format == dtype else policy.weight_format
        store = find_or_convert(files, offload_dir, dtype, weights, shard=shard)
    budgets = {tier: size for tier, size in BUDGETS.items() if device.accelerated or tier != "gpu"}
    options = {"budgets": budgets, "min_output_len": 1, "longest_tokens": 128, "most_kv_tokens": 4096} | options
    config = shard.config if shard else read_config(files)
    return LoadRequest(files, config, policy, dtype, device, offload_dir=offload_dir, store=store, **options)


def without_store(policy: Policy) -> Policy:
    """The policy with weights in host memory instead of on disk, for machines without xxhash."""
    if policy.weight_format == "int4":
        pytest.skip("4-bit weights come from a store, which needs xxhash")
    layers = {group: (gpu, cpu + disk, 0) for group, (gpu, cpu, disk) in policy.weight_layers.items()}
    return replace(policy, weight_layers=layers)


def make_requests(prompts: Iterable[list[int]], output_lens: Iterable[int]) -> list[Request]:
    """Of exactly so many tokens each."""
    return [
        Request(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
        for prompt, n in zip(prompts, output_lens, strict=True)
    ]


def run(
    parts: EngineParts, prompts: list[list[int]], output_lens: list[int], **options
) -> tuple[list[tuple[int, ...]], EngineStats]:
    """The tokens of every prompt, in order, and what it took. The engine is closed then."""
    with Engine.from_parts(parts, **options) as engine:
        done = {c.index: c for c in engine.generate(make_requests(prompts, output_lens))}
        assert engine.used_kv_blocks == 0, "KV blocks leaked"
    for completion in done.values():
        assert completion.error is None, completion.error
    return [done[i].samples[0].token_ids for i in range(len(prompts))], engine.stats


def generate(parts: EngineParts, prompts: list[list[int]], output_lens: list[int], **options) -> list[tuple[int, ...]]:
    """The tokens of every prompt, in order."""
    return run(parts, prompts, output_lens, **options)[0]


def once_all_rows_are_there():
    """Wait, before a sweep, for the thread that reads the rows, however busy the machine is; nothing is stopped."""
    for thread in threading.enumerate():
        if thread.name == "batchgen-input":
            thread.join(timeout=60)
    return False


def before_each_step(parts: EngineParts, act: Callable[[Step], None]) -> None:
    """Has `act` called in the Step's own thread, right before its work."""
    lanes = parts.executor.lanes
    perform = lanes._perform

    def act_and_perform(step: Step) -> None:
        act(step)
        perform(step)

    lanes._perform = act_and_perform


def give_dedicated_cores(parts: EngineParts) -> None:
    """CPU attention does not take turns with compute, as if the accelerator were a real one."""
    parts.executor.lanes._cores = None


def make_uneven(parts: EngineParts, seed: int) -> None:
    """Some Steps take up to a millisecond longer, so that lanes get ahead of each other."""
    rng = random.Random(seed)
    before_each_step(parts, lambda step: time.sleep(rng.random() / 1000) if rng.random() < 0.1 else None)


class ShuffledLanes(Lanes):
    """Lanes that carry out Steps in an arbitrary order that keeps what they wait for, and the order within each lane.

    They run in the caller's thread, so that the order is always the same. What is right by good timing is wrong here.

    As with real lanes, a sweep has ended when its compute has; the rest may come after the next one has begun.
    """

    def __init__(self, perform: Callable[[Step], None], seed: int) -> None:
        super().__init__(perform, serial=True)
        self._rng = random.Random(seed)
        self._left: dict[str, deque[Step]] = {lane: deque() for lane in LANES}
        self._unfinished: set[int] = set()

    def has_ended(self, step_id: int) -> bool:
        return step_id not in self._unfinished

    def execute(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._left[step.lane].append(step)
            self._unfinished.add(step.id)
        # Each sweep has lanes that hurry and lanes that lag.
        haste = {lane: self._rng.random() ** 4 + 1e-3 for lane in LANES}
        while self._left["compute"]:
            ready = [q for q in self._left.values() if q and self._unfinished.isdisjoint(q[0].after)]
            queue = self._rng.choices(ready, [haste[q[0].lane] for q in ready])[0]
            step = queue.popleft()
            self._perform(step)
            self._unfinished.remove(step.id)


def shuffle_steps(parts: EngineParts, seed: int) -> None:
    executor = parts.executor
    executor.lanes = ShuffledLanes(executor._perform, seed)
