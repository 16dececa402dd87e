"""The module of a checkpoint that predicts further tokens (MTP: multi-token prediction), of Qwen3-Next and later.

It is a decoder layer with attention, behind a projection of two vectors: the embedding of the token just drawn, and the
model's last hidden state of the token before it, each normed. Its output, normed, goes through the model's own output
matrix, and is the hidden state for a token further on. Embeddings and output matrix are the model's. The names are
those of vLLM's Qwen3NextMultiTokenPredictor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.core.dtypes import FORMAT_BYTES
from batchgen.core.errors import InputError
from batchgen.models.checkpoint import open_hf
from batchgen.models.config import ModelConfig
from batchgen.models.experts import Weights, split_experts
from batchgen.models.families import DELTA_NETS, NORMS_LESS_ONE
from batchgen.models.files import ModelFiles, weight_tensors
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import NUMBERS, read_numbers

MTP_SEQS, MTP_TOKENS = 64, 256  # sequences that it drafts for at once, and their tokens that it attends to
_PREFIX = "mtp."
_PROJECTION, _EMBEDDING_NORM, _HIDDEN_NORM = "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"


@dataclass(frozen=True)
class MtpModule:
    """The weights of an MTP module.

    Attributes:
        config: Configuration of a model that has its layer alone.
        layer: Tensors of its layer, as `split_experts` names them.
        norm: Norm of its output, [hidden].
        embedding_norm: Norm of the embedding, [hidden].
        hidden_norm: Norm of the hidden state, [hidden].
        projection: Projection of both, the embedding first, [hidden, 2 hidden].
    """

    config: ModelConfig
    layer: Weights
    norm: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Tensor


def mtp_bytes(files: ModelFiles, config: ModelConfig, dtype: str) -> int:
    """Bytes of a model's MTP module in memory, with its KV; 0: it has none that can be used.

    Args:
        files: Files of the model.
        config: Configuration of the whole model.
        dtype: Compute dtype.
    """
    if not _has_mtp(files, config):
        return 0
    hidden, one = config.hidden_size, _of_one_layer(config)
    kv = MTP_SEQS * MTP_TOKENS * 2 * one.kv_size
    return int((one.params_per_layer + 2 * hidden * hidden + kv) * FORMAT_BYTES[dtype])


def load_mtp(files: ModelFiles, config: ModelConfig, dtype: torch.dtype) -> MtpModule | None:
    """Load the MTP module of a model; None: it has none that can be used.

    Args:
        files: Files of the model.
        config: Configuration of the whole model.
        dtype: Compute dtype.
    """
    if not _has_mtp(files, config):
        return None
    all_tensors = weight_tensors(files)
    tensors = {
        f"model.{name[len(_PREFIX) :]}": info
        for name, info in all_tensors.items()
        if name.startswith(_PREFIX) and (".layers." not in name or ".layers.0." in name)  # further ones are not used
    }
    for name, info in all_tensors.items():  # whose shapes are checked
        for end in ("embed_tokens.weight", "lm_head.weight"):
            if name.endswith(end) and not name.startswith(_PREFIX):
                tensors[end if end.startswith("lm_head") else f"model.{end}"] = info
    one = _of_one_layer(config)
    try:
        layer = split_experts(one, open_hf(one, files, tensors).load_layer(0, dtype), 0)
        norm, of_embedding, of_hidden = (
            _norm(one, tensors, name, dtype) for name in ("norm", _EMBEDDING_NORM, _HIDDEN_NORM)
        )
        projection = _numbers(tensors, _PROJECTION, (one.hidden_size, 2 * one.hidden_size), dtype)
    except InputError:  # drafts are not worth a job
        return None
    return MtpModule(one, layer, norm, of_embedding, of_hidden, projection)


def _has_mtp(files: ModelFiles, config: ModelConfig) -> bool:
    if files.kind != "hf" or config.family not in DELTA_NETS or config.model_layers:
        return False
    info = weight_tensors(files).get(f"{_PREFIX}{_PROJECTION}.weight")
    return info is not None and info.dtype in NUMBERS


def _of_one_layer(config: ModelConfig) -> ModelConfig:
    """The configuration of a model with one layer, which attends."""
    return replace(
        config, num_layers=1, windows=(None,), state=None, state_layers=(), dense_layers=(), layer_formats=(),
        end_formats=(),
    )  # fmt: skip


def _norm(config: ModelConfig, tensors: Mapping[str, TensorInfo], name: str, dtype: torch.dtype) -> Tensor:
    weight = _numbers(tensors, name, (config.hidden_size,), torch.float32)
    return (weight + 1 if config.family in NORMS_LESS_ONE else weight).to(dtype)


def _numbers(tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor beside the layer. Raises InputError where it is missing or has another shape or dtype."""
    info = tensors.get(f"model.{name}.weight")
    if info is None or tuple(info.shape) != shape or info.dtype not in NUMBERS:
        raise InputError(f"{_PREFIX}{name}.weight is missing, or is not {shape}")
    numbers = torch.empty(shape, dtype=torch.float32)
    read_numbers(name, info, numbers)
    return numbers.to(dtype)
