"""Steps of attention: on the compute device, and on the CPU while the sweep waits (NEO section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.core.kv_placement import KVPlacement
from batchgen.ops import dispatch as ops
from batchgen.ops.dispatch import CPU
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.step_graph import Step


def attention(context: StepContext, step: Step, batch: BatchState) -> None:
    """Write new KV, and attend on the compute device."""
    window = context.config.windows[step.layer]
    for placement, part in batch.parts.items():
        if placement is KVPlacement.CPU:
            continue
        if placement is KVPlacement.DEVICE:
            kv = context.kv_cache.pools[context.compute_tier][step.layer]
        elif step.kv_slot is not None:
            kv = context.kv_cache.staging(step.layer, step.kv_slot)
        else:  # in this layer the host's pool lies on the device
            part, kv = batch.part_in_place, context.kv_cache.pools["cpu"][step.layer]
        options = context.rotary(step, batch.positions_of(part.tokens))
        qkv = batch.qkv if len(batch.parts) == 1 else batch.qkv[part.tokens]
        kv_format, heads = context.kv_cache.shapes.format, context.config.num_heads
        if context.config.owns_kv(step.layer):
            q = ops.rotary_store(qkv, heads, kv, part.slots[window], kv_format, **options)
        else:
            q, _, _ = ops.rotary(qkv, heads, 0, rotate_keys=kv_format.rotates_keys, **options)
        plan = part.plans[window]
        batch.attended[placement] = ops.paged_attention(q, kv, plan, **context.softmax(step, context.device))


def send_qkv(context: StepContext, step: Step, batch: BatchState) -> None:
    """Send queries of sequences that the CPU attends to, and their new KV, to host memory."""
    # What is compute's here outlives this: before it is given up, compute waits for the CPU, which has waited for the
    # copies.
    part, d2h = batch.parts[KVPlacement.CPU], context.tiers.d2h
    q, k, v = qkv_for_host(context, step, batch.qkv[part.tokens], batch.positions_of(part.tokens))
    pool = context.kv_cache.pools["cpu"][step.layer]
    if context.config.owns_kv(step.layer):
        flat = pool.view(-1, pool.shape[-1])
        for rows, new in zip(part.rows[context.config.windows[step.layer]], (k, v), strict=True):
            d2h.scatter(flat, rows, new.reshape(-1, pool.shape[-1]))
    sent, attended = context.activations.exchange(*q.shape)
    d2h.copy(sent, q.contiguous())
    batch.for_cpu[step.layer], batch.from_cpu[step.layer] = (sent, attended), attended


def cpu_attention(context: StepContext, step: Step, batch: BatchState) -> None:
    """Attend on the CPU."""
    kv = context.kv_cache.pools["cpu"][step.layer]
    plan = batch.parts[KVPlacement.CPU].plans[context.config.windows[step.layer]]
    q, out = batch.for_cpu.pop(step.layer)
    ops.paged_attention(q, kv, plan, out=out, **context.softmax(step, CPU))


def load_attention(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy the results of CPU attention to the accelerator."""
    attended = batch.from_cpu.pop(step.layer).flatten(1)
    target = torch.empty(attended.shape, dtype=attended.dtype, device=context.device)
    batch.attended[KVPlacement.CPU] = context.tiers.h2d.copy(target, attended)


def qkv_for_host(context: StepContext, step: Step, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries for attention on the CPU, and keys and values as they are stored; without any in layers that reuse KV.

    Args:
        context: The model and its memory.
        step: A Step of the layer.
        qkv: Output of the QKV matmul, [tokens, qkv size].
        positions: Positions of the tokens, int64 [tokens].
    """
    config, kv_format = context.config, context.kv_cache.shapes.format
    kv_heads = config.attention_of(step.layer).num_kv_heads if config.owns_kv(step.layer) else 0
    options = context.rotary(step, positions)
    q, k, v = ops.rotary(qkv, config.num_heads, kv_heads, rotate_keys=kv_format.rotates_keys, **options)
    if bits := kv_format.bits:
        k, v = ops.quantize(k, bits), ops.quantize(v, bits)
    return q, k, v
