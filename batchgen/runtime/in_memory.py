"""An executor without tiers: all weights, KV and states in the memory of the device that computes."""

from __future__ import annotations

from functools import partial

import torch

from batchgen.core.device import Device
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.models.checkpoint import Checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.state_layers import StateRow
from batchgen.ops.dispatch import CPU
from batchgen.runtime.devices import open_tiers
from batchgen.runtime.executor import Executor
from batchgen.runtime.lanes import OnStep
from batchgen.runtime.memory.kv_cache import KVCache
from batchgen.runtime.memory.state_cache import StateCache
from batchgen.runtime.memory.weights import Weights
from batchgen.runtime.sampler import sample
from batchgen.runtime.sweep_options import SweepOptions, attention_isas
from batchgen.runtime.warm_up import dummy_sweeps
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.packed_batch import pack
from batchgen.schedule.residency import WeightResidency
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.state_slots import StateSlots


def in_memory(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    num_blocks: int,
    kv_block_size: int,
    device: torch.device = CPU,
    captured_tokens: int = 0,
    kernels: KernelChoice = PROCESS_SET,
    on_step: OnStep | None = None,
) -> Executor:
    """An executor with all weights, KV and states in the memory of the device that computes.

    There are as many state slots as blocks of KV.

    Args:
        config: Configuration of the model.
        checkpoint: Checkpoint of the weights.
        dtype: Compute dtype, which weights and KV have too.
        num_blocks: Blocks of KV.
        kv_block_size: Tokens of a KV block.
        device: The CPU, or a CUDA GPU.
        captured_tokens: Most tokens of a sweep that becomes a CUDA graph; 0: none does.
        kernels: Instruction set of each shape on the CPU.
        on_step: Function that is called after each Step with its times; None: none is.
    """
    tiers = open_tiers(Device(device.type))
    name, tier = str(dtype).removeprefix("torch."), tiers.compute_tier
    residency = WeightResidency.in_memory(config, name, tier)
    weights = Weights(config, residency, dtype, checkpoint=checkpoint, tiers=tiers, kernels=kernels)
    kv_cache = KVCache(config, kv_block_size, name, {tier: num_blocks}, tiers=tiers)
    if tiers.driver:
        torch.cuda.synchronize()  # memory is zeroed on another stream than it is used on
    options = SweepOptions(
        config.max_position,
        captured_tokens=captured_tokens,
        attention_isa=attention_isas(config, kernels, name),
        on_step=on_step,
    )
    states = None
    if config.state is not None:
        states = StateCache(config, StateRow(config.state, "float32", name), {tier: num_blocks}, tiers=tiers)
    executor = Executor(config, weights, kv_cache, tiers, options, states)
    if tiers.driver:
        slots = StateSlots(num_blocks) if states is not None else None
        rows, tokens = max(1, min(num_blocks, captured_tokens)), num_blocks * kv_block_size
        limits = SchedulerLimits(rows, tokens, kv_seqs={KVPlacement(tier): rows}, compute_tier=tier)
        key_bytes = config.kv_size * dtype.itemsize
        shape = {"kv_block_size": kv_block_size, "key_bytes": key_bytes, "windows": frozenset(config.window_layers)}
        sweeps = dummy_sweeps(
            Scheduler({tier: BlockManager(num_blocks, kv_block_size, states=slots)}, limits),
            lambda sweep: [sweep],
            partial(pack, **shape, compute_tier=tier),
            max_num_seqs=rows,
            max_num_batched_tokens=tokens,
            longest=min(config.max_position, tokens),
            vocab_size=config.vocab_size,
            sampling=SamplingParams(),
            sampled_token=executor.sampled_token,
        )
        executor.warm_up(sweeps, lambda rows, logits, start: sample(logits, [s for s, _ in rows]).token_ids)
    return executor
