"""Seconds from where a job's weights begin to load to its first sweep, by what is placed where."""

from __future__ import annotations

from functools import lru_cache

from batchgen.core.dtypes import FORMAT_BYTES, NATIVE_FORMATS, weight_row_bytes
from batchgen.core.hardware import HardwareProfile
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import layer_sizes
from batchgen.planner.linear import Linear
from batchgen.planner.memory_requirements import kv_tokens_used
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs

# Bytes of a quantized weight in a GGUF: 4.5 to 5 bits a weight are usual.
_GGUF_WEIGHT_BYTES = 0.6


def startup_s(s: CostInputs, at: Placement) -> Linear:
    """Seconds to read the weights that do not stay on disk, to write a weight store, and to touch the host's KV."""
    reading_s = s.loading.read_s * (1 - at.w_disk * _layers_frac(s.model))
    return reading_s + at.needs_store * _store_s(s) + (at.kv_cpu + at.kv_streamed) * _first_touch_s(s)


def least_startup_s(s: CostInputs) -> float:
    """Seconds of the start-up that no placement can beat."""
    on_disk_s = s.loading.read_s * (1 - _layers_frac(s.model)) + _store_s(s)
    return on_disk_s if s.must_write_store else min(s.loading.read_s, on_disk_s)


def spared_by_disk_s(s: CostInputs, *, kv: bool) -> float:
    """The most seconds of the start-up without a GPU that weights on disk can spare, and KV on disk where `kv`."""
    reading_s = s.loading.read_s + (_store_s(s) if s.must_write_store else 0.0)
    return reading_s - least_startup_s(s) + (_first_touch_s(s) if kv else 0.0)


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


@lru_cache(maxsize=64)
def _layers_frac(model: ModelConfig) -> float:
    """The part of all weights that the layers have."""
    return model.layer_params / model.held_params


def _store_s(s: CostInputs) -> float:
    """Seconds to write the weight store; 0 where there is one. All weights are read for it."""
    size = s.loading.store_bytes
    return s.loading.read_s + size / s.hardware.disk_write_bytes_per_s if size else 0.0


def _first_touch_s(s: CostInputs) -> float:
    """Seconds for the kernel to provide the pages of KV, as they are first used, if all KV is in host memory."""
    rate, workload = s.hardware.first_touch_bytes_per_s, s.workload
    if rate is None:
        return 0.0
    tokens = workload.num_seqs * (workload.computed_prompt_len + workload.output_len.mean)
    tokens = min(tokens, kv_tokens_used(workload, s.max_num_seqs))
    token_bytes = s.seq_kv_bytes / (s.seq_blocks * s.kv_block_size)  # of all layers
    return float(tokens * token_bytes / rate)
