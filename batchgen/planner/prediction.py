"""The plan of a candidate, with the seconds before its first sweep."""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.dtypes import FORMAT_BYTES, INT4, NATIVE_FORMATS, weight_row_bytes
from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import layer_sizes
from batchgen.planner.explain import make_plan
from batchgen.planner.lane_costs import lane_costs
from batchgen.planner.linear import number
from batchgen.planner.memory_requirements import kv_tokens_used
from batchgen.planner.problem import Problem
from batchgen.planner.search import Candidate
from batchgen.planner.sizes import store_bytes

# Bytes of a quantized weight in a GGUF: 4.5 to 5 bits a weight are usual.
_GGUF_WEIGHT_BYTES = 0.6


def plan_of(problem: Problem, candidate: Candidate, simulated_s: float | None = None) -> Plan:
    """A candidate as a plan.

    Args:
        problem: The problem that the candidate solves.
        candidate: The candidate.
        simulated_s: Simulated seconds of all sweeps; None: the cost model's.
    """
    written_bytes = _store_written_bytes(problem, candidate)
    startup_s = problem.startup_s + _until_first_sweep_s(problem, candidate, written_bytes) + _first_touch_s(candidate)
    plan = make_plan(
        problem, candidate, startup_s=startup_s, simulated_s=simulated_s, store_written_bytes=written_bytes
    )
    if simulated_s is None:  # to be compared with others, not to be run
        return plan
    costs = lane_costs(candidate.inputs, candidate.counts.placement(candidate.inputs))
    return replace(plan, prediction=replace(plan.prediction, lane_costs=costs))


def loading_s(
    hardware: HardwareProfile, model: ModelConfig, dtype: str, kind: str, weight_format: str | None = None
) -> float:
    """Seconds to read all weights, which may have to come from disk.

    Args:
        hardware: The machine.
        model: The model's configuration.
        dtype: The compute dtype.
        kind: The kind of the model's files ("hf", "gguf", "store", "dummy").
        weight_format: The layers' format, in which packed weights are read as they are; None: `dtype`.
    """
    rate = min(hardware.load_bytes_per_s, hardware.disk_read_bytes_per_s)
    native_bytes, dequantized = 0, model.held_params
    if weight_format in NATIVE_FORMATS:
        native_bytes = sum(map(sum, (sizes.values() for sizes in layer_sizes(model, dtype, weight_format))))
        here = {"embed": model.has_embeddings, "lm_head": model.has_head}  # a stage may be without
        ends = [end_format for name, end_format in model.end_formats if here.get(name)]
        native_bytes += sum(model.vocab_size * weight_row_bytes(model.embed_size, end_format) for end_format in ends)
        dequantized -= model.layer_params + len(ends) * model.vocab_size * model.embed_size
    seconds = dequantized * FORMAT_BYTES[dtype] / rate
    if kind == "gguf" and hardware.gguf_load_bytes_per_s:
        on_disk = dequantized * _GGUF_WEIGHT_BYTES / hardware.disk_read_bytes_per_s
        seconds = max(on_disk, dequantized * FORMAT_BYTES[dtype] / hardware.gguf_load_bytes_per_s)
    return seconds + native_bytes / rate


def _until_first_sweep_s(problem: Problem, candidate: Candidate, written_bytes: float) -> float:
    """Seconds to read the weights that do not stay on disk, and to write a weight store where there is none yet."""
    s, at = candidate.inputs, candidate.counts.placement(candidate.inputs)
    layers = s.model.layer_params / s.model.held_params
    seconds = problem.loading_s * (1 - number(at.w_disk) * layers)
    seconds += problem.loading_s * bool(written_bytes) + written_bytes / s.hardware.disk_write_bytes_per_s
    return float(seconds)


def _store_written_bytes(problem: Problem, candidate: Candidate) -> float:
    """Bytes of the weight store that a job writes before its first sweep, where it needs one and there is none."""
    s = candidate.inputs
    if not candidate.counts.placement(s).w_disk and s.weight_format != INT4:
        return 0.0
    if s.weight_format == INT4 and problem.weight_formats != (INT4,):  # a plan beside the one that was asked for
        return 0.0 if problem.has_int4_store else float(store_bytes(s.model, s.compute_format, INT4))
    return float(problem.store_bytes)


def _first_touch_s(candidate: Candidate) -> float:
    """Seconds for the kernel to provide the host's KV pages, as they are first used."""
    s, at = candidate.inputs, candidate.counts.placement(candidate.inputs)
    if s.hardware.first_touch_bytes_per_s is None:
        return 0.0
    workload = s.workload
    tokens = workload.num_seqs * (workload.computed_prompt_len + workload.output_len.mean)
    tokens = min(tokens, kv_tokens_used(workload, s.max_num_seqs))
    token_bytes = s.seq_kv_bytes / (s.seq_blocks * s.kv_block_size)  # of all layers
    on_host = number(at.kv_cpu + at.kv_streamed) * tokens * token_bytes
    return float(on_host / s.hardware.first_touch_bytes_per_s)
