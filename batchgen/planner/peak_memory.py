"""Most bytes that a placement holds in each tier, as numbers or as rows of the linear programme."""

from __future__ import annotations

from batchgen.core.direct_io import ALIGNMENT
from batchgen.core.dtypes import INT4
from batchgen.core.plan import PINNED_BYTES, VOCABULARY_CHUNKS, passing_bytes
from batchgen.planner.linear import Linear
from batchgen.planner.memory import (
    DEVICE_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    activation_bytes,
    coded_bytes,
    deferred_bytes,
    planned_logit_rows,
    sent_bytes,
)
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs

# Buffers of one kind: one in use, one being filled.
_SLOTS = 2


def kv_bytes(s: CostInputs, at: Placement) -> dict[str, Linear]:
    """KV reserved in each tier: of its sequences, and in memory once for a prefix that they share."""
    all_seqs = s.swept_seqs * s.seq_kv_bytes
    shared, chunks = s.shared_kv_bytes, s.chunk_kv_bytes * s.swept_seqs / s.max_num_seqs
    deferred = s.deferred_seqs * (s.seq_kv_bytes + s.chunk_kv_bytes / s.max_num_seqs)
    return {
        "gpu": at.kv_gpu * (all_seqs + chunks) + (shared if s.on_gpu else 0.0),
        "cpu": (at.kv_cpu + at.kv_streamed) * (all_seqs + chunks) + deferred + shared,
        "disk": at.kv_disk * (s.swept_seqs * s.disk_seq_kv_bytes),
    }


def peak_bytes(s: CostInputs, at: Placement) -> dict[str, Linear]:
    """Most bytes held in each tier, of the whole job: FlexGen's gpu_peak, cpu_peak and nvme_peak.

    Prefill and decode are one, as both may be in one sweep. Changed: weights in transit are double-buffered in parts of a
    layer's streamed weights; KV in transit for two micro-batches; activations for the tokens of one sweep; logits; KV is
    what the scheduler reserves. It is what `memory.plan_memory` gives the runtime for the same placement, or a little more.
    Of the disk, weights take what they took before.
    """
    model, element = s.model, s.element_bytes
    kv = kv_bytes(s, at)
    weights = s.layer_bytes * model.num_layers
    between = s.batch_tokens * s.hidden_bytes
    rows = planned_logit_rows(model, int(element), s.batch_tokens, s.batch_seqs, s.workload.task)
    captured = s.gpu_batch_size if s.on_gpu else 0
    work = activation_bytes(model, int(element), s.batch_tokens, rows, on_gpu=s.on_gpu, captured_tokens=captured)
    work += coded_bytes(s.weight_format, on_gpu=s.on_gpu)
    dequantized = float(s.dequantized_slot_bytes) if s.weight_format == INT4 else 0.0
    cpu = s.process_bytes + WORKSPACE_BYTES + (1 - at.embed_gpu) * s.embedding_bytes + at.w_cpu * weights + kv["cpu"]
    cpu += at.disk_peak * (_SLOTS * sum(s.disk_group_bytes.values()))
    staging = at.staged_blocks * (_SLOTS * s.kv_block_bytes)
    if s.on_gpu or s.kv_block_bytes % ALIGNMENT:
        # In and out; what attends on the CPU writes what it has read.
        buffers = _SLOTS if s.runtime.attends_disk_kv_on_cpu else 2 * _SLOTS
        cpu += at.disk_blocks * (buffers * s.disk_block_bytes)
    if not s.on_gpu:
        cpu += s.head_bytes + work + dequantized + (s.num_gpu_batches - 1) * between + staging
        return {"cpu": cpu, "disk": kv["disk"]}
    chunks = _SLOTS * -(-model.vocab_size // VOCABULARY_CHUNKS) * s.output_row_bytes
    exchanged = s.batch_seqs * (model.qkv_size + model.num_heads * model.head_dim) * element
    batches = s.num_gpu_batches
    in_transit = at.streamed_peak * (_SLOTS * sum(s.slot_group_bytes.values()))
    gpu = work + DEVICE_WORKSPACE_BYTES + at.w_gpu * weights + in_transit + kv["gpu"]
    whole_logits = 0 if s.workload.task == "score" else s.max_num_seqs * model.vocab_size * 4
    gpu += at.head_gpu * s.head_bytes + at.head_cpu * (chunks + whole_logits)
    gpu += staging + dequantized + at.delegates * dequantized + at.embed_gpu * s.embedding_bytes
    gpu += 2 * passing_bytes(int(s.disk_block_bytes)) + at.delegates * sent_bytes(model, int(element), s.batch_seqs)
    gpu += at.act_gpu * (batches * between) + at.acts_wait * (_SLOTS * between)
    cpu += PINNED_BYTES + at.head_cpu * s.head_bytes + at.act_cpu * (batches * between) + at.delegates * (2 * exchanged)
    if s.deferral:
        cpu += 2 * s.deferred_seqs * model.num_heads * model.head_dim * element
        gpu += deferred_bytes(model, int(element), s.deferred_seqs)
    return {"gpu": gpu, "cpu": cpu, "disk": kv["disk"]}
