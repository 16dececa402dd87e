"""Shares of a sweep's time by the kind of work, as `core.knowledge` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchgen.core.dtypes import matmul_key
from batchgen.core.knowledge import (
    DECODE,
    DISK,
    ELEMENTWISE,
    FEW,
    MANY,
    OVERHEADS,
    PREFILL,
    SPEED,
    Parts,
    few_share,
    model_name,
    weights_name,
)
from batchgen.planner.costs import (
    phase_decode_attention_s,
    phase_dequantize_s,
    phase_matmul_s,
    phase_prefill_attention_s,
    phase_prefix_attention_s,
    sweep_overhead_s,
)
from batchgen.planner.phases import Phase
from batchgen.planner.problem import CostInputs
from batchgen.planner.step_seconds import elementwise_s, layer_overhead_s, logits_s, sampling_s


def cost_parts(s: CostInputs, phase: Phase, bottleneck: str) -> Parts:
    """The share of each kind of work in the time of a sweep; the disk's alone where everything waits for it.

    Args:
        s: The inputs of the cost model.
        phase: The sweep.
        bottleneck: The lane that takes longest.
    """
    if bottleneck.startswith("disk"):
        return {DISK: 1.0}
    layers, batches = s.model.num_layers, s.num_gpu_batches
    matmul_s = layers * phase_matmul_s(s, phase)
    head_s = logits_s(s, phase.logits_rows, batches)
    few_s = few_share(phase.tokens / batches) * matmul_s + few_share(phase.logits_rows / batches) * head_s
    attention_s = phase_prefill_attention_s(s, phase) + phase_prefix_attention_s(s, phase)
    elementwise = elementwise_s(s, phase.tokens) + phase_dequantize_s(s, phase)
    seconds = {
        FEW: few_s,
        MANY: matmul_s + head_s - few_s,
        PREFILL: layers * attention_s,
        DECODE: layers * phase_decode_attention_s(s, phase, s.rates),
        ELEMENTWISE: layers * elementwise + sampling_s(s, phase.logits_rows),
        OVERHEADS: layers * batches * layer_overhead_s(s.rates) + sweep_overhead_s(s, phase),
    }
    total_s = sum(seconds.values())
    shares = {name: part_s / total_s for name, part_s in seconds.items() if part_s}
    matmul_share = shares.get(FEW, 0.0) + shares.get(MANY, 0.0)
    weights = weights_name(matmul_key(s.main_format, s.compute_format))
    return shares | {SPEED: 1.0, weights: matmul_share, model_name(s.model.hidden_size, layers): 1.0}


def mean_parts(parts: Sequence[tuple[float, Mapping[str, float]]]) -> Parts:
    """The parts of several times together, of (seconds, parts) of each."""
    total_s = sum(seconds for seconds, _ in parts)
    shares: dict[str, float] = {}
    for seconds, of_time in parts:
        for name, share in of_time.items():
            shares[name] = shares.get(name, 0.0) + share * seconds / total_s
    return shares
