"""How fast a sweep can be at best, whatever is placed where: what the search knows before any solver."""

from __future__ import annotations

import math
from dataclasses import replace

from batchgen.core.hardware import known
from batchgen.planner.costs import (
    can_delegate,
    decode_attention_s,
    dequantize_weights_s,
    elementwise_s,
    experts_frac,
    experts_skipped_frac,
    linear_s,
    moved_bytes,
    prefill_attention_s,
    shared_attention_s,
    streamed_kv_bytes,
    sweep_overhead_s,
)
from batchgen.planner.linear import number
from batchgen.planner.peak_memory import peak_bytes
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs

_NOTHING = Placement(
    w_gpu=0, w_cpu=0, w_disk=0, kv_gpu=0, kv_cpu=0, kv_streamed=0, kv_disk=0, act_gpu=0, act_cpu=0, head_gpu=0, head_cpu=0,
    streamed_peak=0, disk_peak=0,
)  # fmt: skip
_KV_ON_DISK = replace(_NOTHING, kv_disk=1)


def lower_bound_s(s: CostInputs, phases: tuple[Phase, ...]) -> float:
    """Seconds that no placement can beat, without a solver; infinite where weights and KV fit nowhere.

    Compute with decode attention split between GPU and CPU at its best, what the GPU cannot hold and must cross the bus or be
    attended to by the CPU, and what must come from disk. Of what does not fit, that is away which costs least: KV, as far as
    there is any, or weights. With one micro-batch nothing but attention runs beside that of the CPU (`chain` of `costs._chains`).
    """
    layers = s.model.num_layers
    weights, kv = s.layer_bytes * layers, s.max_num_seqs * s.seq_kv_bytes
    free = {tier: s.budgets[tier] - number(taken) for tier, taken in peak_bytes(s, _NOTHING).items()}
    if min(free.values()) < 0:
        return math.inf
    gpu, cpu = free.get("gpu", 0.0), free["cpu"]
    off_gpu = max(0.0, weights + kv - gpu)
    weights_off_gpu = max(0.0, off_gpu - kv) / layers
    on_disk = max(0.0, weights + kv - gpu - cpu)
    total = 0.0
    for phase in phases:
        compute = linear_s(s, phase) + elementwise_s(s, phase) + prefill_attention_s(s, phase)
        skipped = 0.0 if s.on_gpu else experts_skipped_frac(s, phase)  # if experts are read on demand
        compute += shared_attention_s(s, phase) + s.num_gpu_batches * s.rates.step_overhead_s
        compute += dequantize_weights_s(s) * (1 - experts_frac(s.model) * skipped)
        own = decode_attention_s(s, phase, s.rates)
        together = compute + own
        if s.on_gpu:
            # Weights count in full in every sweep, KV as far as it is filled.
            streamed = streamed_kv_bytes(s, phase)
            h2d = known(s.hardware.h2d_bytes_per_s)
            moved = weights_off_gpu + min(1.0, streamed * layers / kv) * min(kv, off_gpu) / layers
            weights_s = weights_off_gpu / h2d
            if own and can_delegate(s):
                delegated = decode_attention_s(s, phase, s.hardware.cpu)
                # With one micro-batch the CPU attends in what its products leave of the time.
                waited = compute if s.num_gpu_batches == 1 else 0.0
                attended = streamed / delegated  # bytes/s
                if s.hardware.shared_cores:
                    together = compute + min(own, delegated)
                else:
                    rest = (compute - waited + own) * delegated / (own + delegated)
                    together = max(compute, waited + rest)
                moved_s = max(weights_s, (moved + waited * attended) / (h2d + attended))
            else:
                moved_s = moved / h2d
            together = together + weights_s if "h2d" in s.runtime.serial else max(together, moved_s)
        total += phase.sweeps * (
            layers * max(together, _disk_s(s, phase, on_disk, skipped)) + sweep_overhead_s(s, phase)
        )
    return total


def _disk_s(s: CostInputs, phase: Phase, on_disk: float, skipped: float) -> float:
    """Seconds of one layer in which so many bytes of weights and KV together, of all layers, come from disk and go there.

    skipped: of experts, those that need not be read, as a fraction.
    """
    if not on_disk:
        return 0.0
    layers, hardware = s.model.num_layers, s.hardware
    moved = moved_bytes(s, phase, _KV_ON_DISK)
    read_s, written_s = (
        number(moved["disk_read"]) / hardware.disk_read_bytes_per_s,
        number(moved["disk_write"]) / hardware.disk_write_bytes_per_s,
    )
    kv_s = max(read_s, written_s) if "disk_read" in s.runtime.serial else read_s + written_s
    # Each: bytes, and the seconds that all of them would take.
    weights = ((s.layer_bytes - s.all_expert_bytes, 1.0), (s.all_expert_bytes, 1 - skipped))
    items = [(size * layers, read * size / hardware.disk_read_bytes_per_s) for size, read in weights]
    items.append((s.max_num_seqs * s.seq_kv_bytes, kv_s))
    seconds = 0.0
    for size, whole_s in sorted((item for item in items if item[0]), key=lambda item: item[1] / item[0]):
        seconds += whole_s * min(1.0, on_disk / size)
        on_disk = max(0.0, on_disk - size)
    return float(seconds)
