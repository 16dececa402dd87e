"""Steps of attention: on the compute device, and on the CPU while the sweep waits (NEO section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from batchgen.core.kv_placement import KVPlacement
from batchgen.models import layers
from batchgen.ops import dispatch as ops
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.runtime.steps.state import send_projected, update_on_cpu, update_states
from batchgen.schedule.step_graph import Step


def attention(context: StepContext, step: Step, batch: BatchState) -> None:
    """Write new KV, and attend on the compute device; in a state layer, update states."""
    if context.config.has_state(step.layer):
        update_states(context, step, batch)
        return
    window = context.windows[step.layer]
    for placement, part in batch.parts.items():
        if placement is KVPlacement.CPU:
            continue
        if placement is KVPlacement.DEVICE:
            tier = context.compute_tier
            kv = context.kv_cache.pool(tier, step.layer)
        elif step.kv_slot is not None:
            tier, kv = "cpu", context.kv_cache.staging(step.kv_slot, step.layer)
        else:  # in this layer the host's pool lies on the device
            tier, part = "cpu", batch.part_in_place
            kv = context.kv_cache.pool(tier, step.layer)
        options = context.rotary(step, batch.positions_of(part.tokens))
        qkv = batch.qkv if len(batch.parts) == 1 else batch.qkv[part.tokens]
        q = _stored(context, step, qkv, kv, part.slots[window], options)
        attended = context.attend(step, q, kv, part.plans[window], tier)
        batch.attended[placement] = layers.gate_attention(context.config, qkv, attended)


def _stored(
    context: StepContext, step: Step, qkv: Tensor, kv: Tensor, slots: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """Write new KV, but in layers that reuse that of another one, and give the queries [tokens, heads, head_dim]."""
    config, kv_format, qkv = context.config, context.kv_cache.format, layers.ungated(context.config, qkv)
    if config.owns_kv(step.layer):
        return ops.rotary_store(qkv, config.num_heads, kv, slots, kv_format, **options)
    return ops.rotary(qkv, config.num_heads, 0, rotate_keys=kv_format.rotates_keys, **options)[0]


def send_qkv(context: StepContext, step: Step, batch: BatchState) -> None:
    """Send queries of sequences that the CPU attends to, and their new KV, to host memory."""
    if context.config.has_state(step.layer):
        send_projected(context, step, batch)
        return
    # What is compute's here outlives this: before it is given up, compute waits for the CPU, which has waited for the
    # copies.
    part, d2h = batch.parts[KVPlacement.CPU], context.tiers.d2h
    q, k, v = qkv_for_host(context, step, batch.qkv[part.tokens], batch.positions_of(part.tokens))
    pool = context.kv_cache.pool("cpu", step.layer)
    if context.config.owns_kv(step.layer):
        flat = pool.view(-1, pool.shape[-1])
        for rows, new in zip(part.rows[context.windows[step.layer]], (k, v), strict=True):
            d2h.scatter(flat, rows, new.reshape(-1, pool.shape[-1]))
    q = q.flatten(1).contiguous()
    sent, attended = context.activations.exchange(len(q), q.shape[1], q.shape[1])
    d2h.copy(sent, q)
    batch.for_cpu[step.layer], batch.from_cpu[step.layer] = (sent, attended), attended


def cpu_attention(context: StepContext, step: Step, batch: BatchState) -> None:
    """Attend on the CPU; in a state layer, update states."""
    if context.config.has_state(step.layer):
        update_on_cpu(context, step, batch)
        return
    kv = context.kv_cache.pool("cpu", step.layer)
    plan = batch.parts[KVPlacement.CPU].plans[context.windows[step.layer]]
    heads = context.config.num_heads
    q, out = (x.view(len(x), heads, -1) for x in batch.for_cpu.pop(step.layer))
    context.attend(step, q, kv, plan, "cpu", out)


def load_attention(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy the results of CPU attention to the accelerator."""
    attended = batch.from_cpu.pop(step.layer)
    target = torch.empty(attended.shape, dtype=attended.dtype, device=context.device)
    attended = context.tiers.h2d.copy(target, attended)
    if not context.config.has_state(step.layer):
        attended = layers.gate_attention(context.config, batch.qkv[batch.parts[KVPlacement.CPU].tokens], attended)
    batch.attended[KVPlacement.CPU] = attended


def qkv_for_host(context: StepContext, step: Step, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries for attention on the CPU, and keys and values as they are stored: without heads where KV is reused.

    Args:
        context: The model and its memory.
        step: A Step of the layer.
        qkv: Result of `layers.pre_attention`.
        positions: Positions of the tokens, int64 [tokens].
    """
    config, kv_format, options = context.config, context.kv_cache.format, context.rotary(step, positions)
    heads = config.num_heads, config.attention_of(step.layer).num_kv_heads if config.owns_kv(step.layer) else 0
    q, k, v = ops.rotary(layers.ungated(config, qkv), *heads, rotate_keys=kv_format.rotates_keys, **options)
    if (bits := kv_format.bits) and heads[1]:
        k, v = ops.quantize(k, bits), ops.quantize(v, bits)
    return q, k, v
