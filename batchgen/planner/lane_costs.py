"""Predicted seconds of a sweep by what it has, under one placement, by which a running job chooses its sweeps."""

from __future__ import annotations

from collections.abc import Callable

from batchgen.core.lane_costs import NOT_KNOWN, LaneCosts
from batchgen.planner.balance import products_line
from batchgen.planner.costs import (
    can_delegate,
    head_lanes,
    layer_lanes,
    phase_decode_attention_s,
    phase_dequantize_s,
    phase_prefill_attention_s,
)
from batchgen.planner.linear import number
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.step_seconds import COPIES_SENT, attention_input_bytes, query_bytes, schedule_s, transfer_s


def lane_costs(s: CostInputs, at: Placement) -> LaneCosts:
    """The cost model's seconds of a sweep where a GPU has some of its KV in host memory; all 0 elsewhere.

    Those of CPU attention are 0 where the CPU attends to no sequence, deferred ones included.

    Args:
        s: Inputs of the cost model.
        at: The placement.
    """
    cpu_seqs = number(at.kv_cpu) * s.swept_seqs
    delegates = can_delegate(s) and cpu_seqs >= 1
    if not s.on_gpu or not (delegates or number(at.kv_streamed) or s.deferral):
        return NOT_KNOWN
    layers, hardware, one = s.model.num_layers, s.hardware, s.one_batch
    fixed_s, token_s = products_line(s, max(1.0, cpu_seqs / 2))
    rows = max(1, s.swept_seqs)
    logits = Phase(1, 0, 0, rows, 1.0)
    nothing = layer_lanes(s, Phase(1, 0, 0, 0, 1.0), at)
    prompt = Phase(1, s.workload.computed_prompt_len, 1, 0, 1.0)
    prompt_keys = max(1.0, s.workload.prompt_len.mean_square / 2)
    gpu_seqs = max(1.0, s.swept_seqs - cpu_seqs)
    gpu_seq_s, gpu_key_s = _attention_line(s, lambda phase: phase_decode_attention_s(one, phase, s.rates), gpu_seqs)
    attended, cpu_seq_s, cpu_key_s = max(1.0, cpu_seqs / s.num_gpu_batches), 0.0, 0.0
    if s.deferral and not delegates:
        attended = max(1.0, s.deferred_seqs / layers)
    if delegates or s.deferral:
        cpu_seq_s, cpu_key_s = _attention_line(
            s, lambda phase: phase_decode_attention_s(one, phase, hardware.cpu), attended
        )
    sent_s = transfer_s(attention_input_bytes(s), hardware.d2h_bytes_per_s)
    sent_s += transfer_s(query_bytes(s), hardware.h2d_bytes_per_s)
    copies_s = (COPIES_SENT + 1) * hardware.link_overhead_s
    return LaneCosts(
        sweep_s=schedule_s(s, rows, 1),
        next_batch_s=hardware.batch_overhead_s,
        transfer_s=layers * max(number(nothing[lane]) for lane in ("h2d", "disk_read")),
        batch_s=layers * (fixed_s + s.rates.waking_overhead_s + phase_dequantize_s(one, logits) / s.num_gpu_batches),
        token_s=layers * token_s,
        row_s=number(head_lanes(one, logits, at)["compute"]) / rows,
        prompt_key_s=layers * phase_prefill_attention_s(one, prompt) / prompt_keys,
        gpu_seq_s=layers * gpu_seq_s,
        gpu_key_s=layers * gpu_key_s,
        cpu_batch_s=layers * (hardware.cpu.waking_overhead_s + copies_s) if delegates else 0.0,
        cpu_seq_s=layers * cpu_seq_s,
        cpu_key_s=layers * cpu_key_s,
        streamed_key_s=transfer_s(s.read_kv_bytes(1, 1), hardware.h2d_bytes_per_s),
        sent_seq_s=layers * sent_s,
    )


def _attention_line(s: CostInputs, seconds: Callable[[Phase], float], seqs: float) -> tuple[float, float]:
    """Seconds of one layer's decode attention for each sequence and for each token that it attends to.

    Args:
        s: Inputs of the cost model.
        seconds: Gives the seconds of a phase.
        seqs: Sequences that are attended to together.
    """
    shortest = max(1.0, s.workload.prompt_len.mean)
    longest = shortest + max(1.0, s.workload.output_len.mean)
    low_s, high_s = (seconds(Phase(1, 0, 0, seqs, context)) / seqs for context in (shortest, longest))
    key_s = max(0.0, (high_s - low_s) / (longest - shortest))
    return max(0.0, low_s - key_s * shortest), key_s
