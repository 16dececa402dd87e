"""Mixtures of experts of well-known shapes with random weights of about 4 bits, as a weight store and as a GGUF.

Both are written in pieces. They hold different numbers, as their speed alone is compared. Token i is the word "wI".
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import write_word_tokenizer
from torch import Tensor

from batchgen import __version__
from batchgen.core.dtypes import weight_row_bytes
from batchgen.models.checkpoint import Checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.convert import _Conversion, _plan_files
from batchgen.models.hf.config import config_of_hf
from batchgen.models.layouts import embedding_layout, head_layout, is_quantized, layer_layout, tensor_shapes
from batchgen.models.store.manifest import STORE_FORMAT, STORE_VERSION

# name -> (config.json, format of the layers' matrices)
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 24,
            "hidden_size": 2880,
            "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "vocab_size": 201088, "max_position_embeddings": 131072, "num_local_experts": 32, "num_experts_per_tok": 4,
            "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "tie_word_embeddings": False, "swiglu_limit": 7.0, "hidden_act": "silu", "dtype": "bfloat16",
        },
        "mxfp4",
    ),
    "qwen3-30b-a3b": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "bfloat16",
        },
        "q4_0",
    ),
}  # fmt: skip
_TILE_BLOCKS = 1 << 20  # of 32 numbers; drawn once, and repeated
# Bytes of a block that its scale takes, first in it; about 0.01 times the codes.
_SCALES = {"mxfp4": bytes([121]), "q4_0": np.float16(0.01).tobytes()}


def config_of(shape: str, layers: int | None = None) -> tuple[ModelConfig, str]:
    """The model's configuration, of its first layers perhaps, and the format of its matrices."""
    fields, weight_format = SHAPES[shape]
    layers = layers or fields["num_hidden_layers"]
    if shape == "gpt-oss-20b":
        kinds = ["sliding_attention", "full_attention"] * layers
        fields = fields | {"layer_types": kinds[:layers]}
    return config_of_hf(fields | {"num_hidden_layers": layers}), weight_format


def write_store(path: Path, shape: str, layers: int | None = None, seed: int = 0) -> Path:
    """Write the weight store, unless it is there already; what is missing of it, otherwise. Returns the directory."""
    config, weight_format = config_of(shape, layers)
    tile = _tile(weight_format, seed)
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.empty(8 << 20).normal_(0, 0.02, generator=draw).bfloat16()

    def tensor(name: str, dimensions: tuple[int, ...], *, packed: bool) -> Tensor:
        if packed and is_quantized(name, dimensions):
            size = weight_row_bytes(dimensions[1], weight_format)
            return _repeated(tile, dimensions[0] * size).view(dimensions[0], size)
        if name.endswith("norm.weight"):
            return torch.ones(dimensions, dtype=torch.bfloat16)
        return _repeated(numbers, math.prod(dimensions)).view(dimensions)

    def load(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        layout = embedding_layout(config) if which == "embeddings" else head_layout(config)
        return {name: tensor(name, size, packed=False) for name, size in tensor_shapes(layout).items()}

    def load_stored(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        if which != "layer":
            return load(which, layer, dtype)
        return {n: tensor(n, size, packed=True) for n, size in tensor_shapes(layer_layout(config, layer)).items()}

    header = {
        "format": STORE_FORMAT,
        "format_version": STORE_VERSION,
        "batchgen": __version__,
        "source": {"name": shape, "identity": {"random": seed, "layers": config.num_layers}},
        "dtype": "bfloat16",
        "weight_format": weight_format,
        "config": config.to_json(),
    }
    path.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(config, load, weight_format, load_stored)
    work = _Conversion(path, header, _plan_files(checkpoint, path, "bfloat16", weight_format))
    work.start(overwrite=True)
    work.check_space()
    (path / "tokenizer").mkdir(exist_ok=True)
    write_word_tokenizer(path / "tokenizer", config.vocab_size)
    work.run(checkpoint, lambda done, total: None)
    return path


def write_gguf(path: Path, shape: str, layers: int | None = None, seed: int = 0) -> Path:
    """Writes the GGUF, unless it is there already, with the names of llama.cpp's converter; returns the file.

    It has no tokenizer.
    """
    import gguf

    if path.exists():
        return path
    config, weight_format = config_of(shape, layers)
    fields = SHAPES[shape][0]
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, {"gpt-oss-20b": "gpt-oss", "qwen3-30b-a3b": "qwen3moe"}[shape])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.experts_per_token)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(fields["rope_theta"])
    if shape == "gpt-oss-20b":
        scaling = fields["rope_scaling"]
        writer.add_sliding_window(fields["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    tile, kind = _tile(weight_format, seed).numpy(), gguf.GGMLQuantizationType[weight_format.upper()]
    numbers = np.random.default_rng(seed).normal(0, 0.02, 1 << 20).astype(np.float32)
    tensors = list(_gguf_tensors(config))
    for name, dimensions in tensors:
        if _is_packed(name):
            size = weight_row_bytes(dimensions[-1], weight_format)
            stored = (*dimensions[:-1], size)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), kind)
        else:
            writer.add_tensor_info(name, dimensions, np.dtype(np.float32), 4 * math.prod(dimensions))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, dimensions in tensors:
        if _is_packed(name):
            count = math.prod(dimensions[:-1]) * weight_row_bytes(dimensions[-1], weight_format)
            writer.write_tensor_data(np.resize(tile, count))
        elif name.endswith("norm.weight"):
            writer.write_tensor_data(np.ones(dimensions, np.float32))
        else:
            writer.write_tensor_data(np.resize(numbers, dimensions))
    writer.close()
    os.replace(partial, path)
    return path


def _gguf_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of use."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_oss = config.family == "gpt_oss"
    yield "token_embd.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        matrices = {
            "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate_inp": (experts, hidden), "ffn_gate_exps": (experts, inner, hidden),
            "ffn_up_exps": (experts, inner, hidden), "ffn_down_exps": (experts, hidden, inner),
        }  # fmt: skip
        vectors = {"attn_norm": (hidden,), "post_attention_norm" if is_oss else "ffn_norm": (hidden,)}
        if is_oss:
            vectors["attn_sinks"] = (config.num_heads,)
        else:
            vectors |= {"attn_q_norm": (config.head_dim,), "attn_k_norm": (config.head_dim,)}
        for name, size in (vectors | matrices).items():
            yield f"blk.{i}.{name}.weight", size
            if is_oss and name in matrices:
                yield f"blk.{i}.{name}.bias", size[:-1]
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (config.vocab_size, hidden)


def _is_packed(name: str) -> bool:
    """Matrices of layers but the router, as in the store; embeddings too, which are bfloat16 there."""
    vectors = ("norm.weight", "sinks.weight", "gate_inp.weight", ".bias")
    return not name.endswith(vectors)


def _tile(weight_format: str, seed: int) -> Tensor:
    """Blocks of random codes."""
    scale = _SCALES[weight_format]
    blocks = np.random.default_rng(seed).integers(0, 256, (_TILE_BLOCKS, len(scale) + 16), dtype=np.uint8)
    blocks[:, : len(scale)] = np.frombuffer(scale, np.uint8)
    return torch.from_numpy(blocks).view(-1)


def _repeated(tile: Tensor, count: int) -> Tensor:
    """So many of the tile's values, over and over."""
    return tile.repeat(-(-count // len(tile)))[:count]
