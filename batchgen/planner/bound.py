"""A lower bound on the seconds of a job, whatever is placed where, which the search knows before any solver."""

from __future__ import annotations

import math
from dataclasses import replace

from batchgen.core.hardware import known
from batchgen.planner.costs import (
    can_delegate,
    experts_skipped_frac,
    moved_bytes,
    phase_decode_attention_s,
    phase_dequantize_s,
    prompt_compute_s,
    streamed_bytes,
    sweep_overhead_s,
)
from batchgen.planner.linear import number
from batchgen.planner.memory import peak_bytes
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.step_seconds import experts_frac, transfer_s

_NOTHING = Placement(
    w_gpu=0, w_cpu=0, w_disk=0, kv_gpu=0, kv_cpu=0, kv_streamed=0, kv_disk=0, act_gpu=0, act_cpu=0,
    head_gpu=0, head_cpu=0, streamed_peak=0, disk_peak=0,
)  # fmt: skip
_KV_ON_DISK = replace(_NOTHING, kv_disk=1)


def lower_bound_s(s: CostInputs, phases: tuple[Phase, ...]) -> float:
    """Seconds that no placement can beat, without a solver; infinite where weights and KV fit nowhere.

    The bound counts compute with decode attention split between GPU and CPU at its best, what the GPU cannot hold and
    must cross the bus or be attended to by the CPU, and what must come from disk. Where not all fits, what costs least
    is away: KV, as far as there is any, or weights.
    """
    layers = s.model.num_layers
    weights, kv = s.layer_bytes * layers, s.max_num_seqs * (s.seq_kv_bytes + s.seq_state_bytes)
    free = {tier: s.budgets[tier] - number(taken) for tier, taken in peak_bytes(s, _NOTHING).items()}
    if min(free.values()) < 0:
        return math.inf
    gpu, cpu = free.get("gpu", 0.0), free["cpu"]
    off_gpu, on_disk = max(0.0, weights + kv - gpu), max(0.0, weights + kv - gpu - cpu)
    total = 0.0
    for phase in phases:
        skipped = 0.0 if s.on_gpu else experts_skipped_frac(s, phase)  # if experts are read on demand
        compute_s = prompt_compute_s(s, phase) + phase_dequantize_s(s, phase) * (1 - experts_frac(s.model) * skipped)
        attention_s = phase_decode_attention_s(s, phase, s.rates)
        layer_s = compute_s + attention_s
        if s.on_gpu:
            layer_s = _gpu_layer_s(s, phase, compute_s, attention_s, kv, off_gpu)
        layer_s = max(layer_s, _disk_s(s, phase, on_disk, skipped))
        total += phase.sweeps * (layers * layer_s + sweep_overhead_s(s, phase))
    return total


def _gpu_layer_s(s: CostInputs, phase: Phase, compute_s: float, attention_s: float, kv: float, off_gpu: float) -> float:
    """Seconds of one layer with a GPU, whatever it holds.

    With one micro-batch nothing but attention runs beside that of the CPU (`chain` of `costs._chains`).

    Args:
        s: The inputs of the cost model.
        phase: The sweep.
        compute_s: Seconds of one layer's computation but for decode attention.
        attention_s: Seconds of one layer's decode attention on the GPU.
        kv: Bytes of KV and states of all layers.
        off_gpu: Bytes of weights, KV and states of all layers that the GPU cannot hold.
    """
    layers, h2d = s.model.num_layers, known(s.hardware.h2d_bytes_per_s)
    # Weights count in full in every sweep, KV as far as it is filled.
    weights_off_gpu = max(0.0, off_gpu - kv) / layers
    streamed = streamed_bytes(s, phase)
    filled = min(1.0, streamed * layers / kv) if kv else 0.0
    moved = weights_off_gpu + filled * min(kv, off_gpu) / layers
    weights_s = weights_off_gpu / h2d
    layer_s, moved_s = compute_s + attention_s, moved / h2d
    if attention_s and can_delegate(s):
        delegated_s = phase_decode_attention_s(s, phase, s.hardware.cpu)
        # With one micro-batch the CPU attends in the time that the GPU's other computation leaves.
        waited_s = compute_s if s.num_gpu_batches == 1 else 0.0
        attended_bytes_per_s = streamed / delegated_s
        if s.hardware.shared_cores:
            layer_s = compute_s + min(attention_s, delegated_s)
        else:
            rest_s = (compute_s - waited_s + attention_s) * delegated_s / (attention_s + delegated_s)
            layer_s = max(compute_s, waited_s + rest_s)
        moved_s = max(weights_s, (moved + waited_s * attended_bytes_per_s) / (h2d + attended_bytes_per_s))
    return max(layer_s, moved_s)


def _disk_s(s: CostInputs, phase: Phase, on_disk: float, skipped: float) -> float:
    """Seconds of one layer in which its weights and KV on disk come from there and go there.

    Args:
        s: The inputs of the cost model.
        phase: The sweep.
        on_disk: Bytes of weights, KV and states of all layers that must be on disk.
        skipped: The part of the experts that need not be read.
    """
    if not on_disk:
        return 0.0
    layers, hardware = s.model.num_layers, s.hardware
    moved = moved_bytes(s, phase, _KV_ON_DISK)
    read_s = transfer_s(number(moved["disk_read"]), hardware.disk_read_bytes_per_s)
    written_s = transfer_s(number(moved["disk_write"]), hardware.disk_write_bytes_per_s)
    # Each: bytes, and the seconds that all of them would take.
    weights = ((s.layer_bytes - s.all_expert_bytes, 1.0), (s.all_expert_bytes, 1 - skipped))
    items = [(size * layers, transfer_s(read * size, hardware.disk_read_bytes_per_s)) for size, read in weights]
    items.append((s.max_num_seqs * (s.seq_kv_bytes + s.seq_state_bytes), read_s + written_s))
    seconds = 0.0
    for size, whole_s in sorted((item for item in items if item[0]), key=lambda item: item[1] / item[0]):
        seconds += whole_s * min(1.0, on_disk / size)
        on_disk = max(0.0, on_disk - size)
    return float(seconds)
