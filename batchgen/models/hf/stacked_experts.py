"""Experts that a checkpoint stacks in one tensor for each layer, as single matrices under names of their own.

Checkpoints of Qwen3.5 and Gemma 4 have "experts.gate_up_proj" [experts, gate and up rows, columns] and
"experts.down_proj" in place of a gate, an up and a down projection for each expert. Scales of FP8 are stacked in the
same way. Those of Granite have "input_linear.weight" and "output_linear.weight".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.tensor_files.headers import TensorInfo

# Suffix of a stacked tensor, and of the tensors of its experts.
_SUFFIXES = {"": ".weight", ".weight": ".weight", "_scale_inv": ".weight_scale_inv", "_weight_scale": ".weight_scale"}


def single_experts(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], stem: str, stacked: Mapping[str, tuple[str, ...]]
) -> dict[str, TensorInfo]:
    """The places of all matrices of experts that are stacked, by the names that matrices of single experts have.

    Args:
        config: Configuration of the model.
        tensors: All tensors of the checkpoint.
        stem: Name of a layer's experts, with {} for the number of the layer: "model.layers.{}.mlp.experts".
        stacked: Names of the stacked tensors within a layer, and the parts of each expert in them.

    Raises:
        InputError: A stacked tensor has no matrix for each expert.
    """
    of_layers = stem[: stem.index("{}") + 2]
    return dict(
        single
        for layer in range(config.num_layers)
        for fused, parts in stacked.items()
        for suffix in _SUFFIXES
        if (info := tensors.get(name := f"{of_layers.format(layer)}.{fused}{suffix}")) is not None
        for single in _cut(name, info, config.num_experts, stem.format(layer), parts, _SUFFIXES[suffix])
    )


def _cut(
    name: str, info: TensorInfo, experts: int, stem: str, parts: tuple[str, ...], suffix: str
) -> Iterator[tuple[str, TensorInfo]]:
    """The names and places of the matrices in a stacked tensor: of each expert, its parts one after the other."""
    count = experts * len(parts)
    if len(info.shape) != 3 or info.shape[0] != experts or info.shape[1] % len(parts):
        raise InputError(
            f"tensor {name} in {info.path} is {list(info.shape)}, its config asks for {experts} experts first"
        )
    shape, size = (info.shape[1] // len(parts), info.shape[2]), info.num_bytes // count
    for i in range(count):
        expert, part = divmod(i, len(parts))
        place = replace(info, shape=shape, offset=info.offset + i * size, num_bytes=size)
        yield f"{stem}.{expert}.{parts[part]}{suffix}", place
