"""Models of well-known shapes with random weights of about 4 bits, as a weight store and as a GGUF.

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
from counting_models import circle_points
from random_model import LLAMA_3B, write_word_tokenizer
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
    # A GGUF has the factors of its rotary embedding's scaling as a tensor, which costs nothing: left out here.
    "llama-3.2-3b": ({key: value for key, value in LLAMA_3B.items() if key != "rope_scaling"}, "q4_0"),
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
    "qwen3.6-35b-a3b": (
        {
            "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40,
            "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
            "max_position_embeddings": 262144, "num_experts": 256, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "bfloat16",
        },
        "q4_0",
    ),
    "gemma-4-26b-a4b": (
        {
            "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 30,
            "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704, "num_attention_heads": 16,
            "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
            "vocab_size": 262144, "max_position_embeddings": 262144, "num_experts": 128, "top_k_experts": 8,
            "enable_moe_block": True, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "sliding_window": 1024,
            "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "dtype": "bfloat16",
        },
        "q4_0",
    ),
}  # fmt: skip
_PERIODS = {
    "gpt-oss-20b": ["sliding_attention", "full_attention"],
    "qwen3.6-35b-a3b": ["linear_attention"] * 3 + ["full_attention"],
    "gemma-4-26b-a4b": ["sliding_attention"] * 5 + ["full_attention"],
}
_TILE_BLOCKS = 1 << 20  # of 32 numbers; drawn once, and repeated
_GGUF_NAMES = {
    "llama-3.2-3b": "llama",
    "gpt-oss-20b": "gpt-oss",
    "qwen3-30b-a3b": "qwen3moe",
    "qwen3.6-35b-a3b": "qwen35moe",
    "gemma-4-26b-a4b": "gemma4",
}
_PACKED = {
    "token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_output", "ssm_out",
    "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps",
    "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
}  # fmt: skip
# Bytes of a block that its scale takes, first in it; about 0.01 times the codes.
_SCALES = {"mxfp4": bytes([121]), "q4_0": np.float16(0.01).tobytes()}
_ZERO_CODES = {"mxfp4": 0x00, "q4_0": 0x88}  # of two numbers


def config_of(shape: str, layers: int | None = None) -> tuple[ModelConfig, str]:
    """The model's configuration, of its first layers perhaps, and the format of its matrices."""
    fields, weight_format = SHAPES[shape]
    layers = layers or fields["num_hidden_layers"]
    if period := _PERIODS.get(shape):
        fields = fields | {"layer_types": (period * layers)[:layers]}
    return config_of_hf(fields | {"num_hidden_layers": layers}), weight_format


def write_store(path: Path, shape: str, layers: int | None = None, seed: int = 0, *, counts: bool = False) -> Path:
    """Write the weight store, unless it is there already; what is missing of it, otherwise. Returns the directory.

    Args:
        counts: Whether token i + 1 follows token i (see counting_models.py), for a shape whose output matrix is not
            that of its embeddings: the row of a token is the embedding of the token before it.
    """
    config, weight_format = config_of(shape, layers)
    if counts and config.tied_embeddings:
        raise ValueError(f"the output matrix of {shape} is that of its embeddings")
    tile = _tile(weight_format, seed)
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.empty(8 << 20).normal_(0, 0.02, generator=draw).bfloat16()

    def tensor(name: str, dimensions: tuple[int, ...], *, packed: bool) -> Tensor:
        if counts and name in ("embed.weight", "lm_head.weight"):
            first = -1 if name == "lm_head.weight" else 0
            points = circle_points(first, first + dimensions[0], dimensions[1])
            points[:, 0] = 0  # what all tokens share would send them to the same experts
            return torch.from_numpy(points).bfloat16()
        if counts and name.split(".")[0] in ("out", "down"):
            return _zeros(dimensions, weight_format if packed and is_quantized(name, dimensions) else None)
        if packed and is_quantized(name, dimensions):
            size = weight_row_bytes(dimensions[1], weight_format)
            return _repeated(tile, dimensions[0] * size).view(dimensions[0], size)
        if name.endswith("norm.weight"):
            return torch.ones(dimensions, dtype=torch.bfloat16)
        return _repeated(numbers, math.prod(dimensions)).view(dimensions)

    def load(which: str, layer: int, dtype: torch.dtype, left_out: str | None = None) -> dict[str, Tensor]:
        layout = embedding_layout(config) if which == "embeddings" else head_layout(config)
        return {name: tensor(name, size, packed=False) for name, size in tensor_shapes(layout).items()}

    def load_stored(which: str, layer: int, dtype: torch.dtype, left_out: str | None = None) -> dict[str, Tensor]:
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
    work.check_space("write it elsewhere")
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
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, _GGUF_NAMES[shape])
    _add_fields(writer, config, SHAPES[shape][0])
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
        else:
            writer.write_tensor_data(_gguf_values(name, dimensions, numbers))
    writer.close()
    os.replace(partial, path)
    return path


def _gguf_values(name: str, dimensions: tuple[int, ...], numbers: np.ndarray) -> np.ndarray:
    """Values of a tensor that is stored as numbers: random ones, unless a model cannot compute with them.

    Norms and scales are 1, the decay of a state is negative, and Gemma 4's layers without a window rotate a quarter of
    each head: frequencies of the rest are divided by 1e30.
    """
    if "norm" in name or "scale" in name:
        return np.ones(dimensions, np.float32)
    if name == "rope_freqs.weight":
        pairs = np.arange(dimensions[0])
        return np.where(pairs < dimensions[0] // 4, 1.0, 1e30).astype(np.float32)
    values = np.resize(numbers, dimensions)
    return -np.exp(values) if name.endswith("ssm_a") else values


def _add_fields(writer: Any, config: ModelConfig, fields: dict[str, Any]) -> None:
    """The fields that llama.cpp reads for the shape, under the names of its converter."""
    import gguf

    is_gemma = config.family == "gemma4"
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(fields.get("intermediate_size", config.intermediate_size))
    writer.add_head_count(config.num_heads)
    if config.num_experts:
        writer.add_expert_feed_forward_length(fields.get("moe_intermediate_size", config.intermediate_size))
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if not is_gemma:
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base(config.rope.theta)
    if config.family == "gpt_oss":
        scaling = fields["rope_scaling"]
        writer.add_sliding_window(fields["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if (state := config.state) is not None:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_size)
        writer.add_rope_dimension_count(config.head_dim // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(state.kernel)
        writer.add_ssm_state_size(state.key_dim)
        writer.add_ssm_group_count(state.key_heads)
        writer.add_ssm_time_step_rank(state.value_heads)
        writer.add_ssm_inner_size(state.out_size)
        writer.add_full_attention_interval(fields["full_attention_interval"])
    if is_gemma:
        windowed = [window is not None for window in config.windows]
        attentions = map(config.attention_of, range(config.num_layers))
        writer.add_head_count_kv([attention.num_kv_heads for attention in attentions])
        writer.add_sliding_window(fields["sliding_window"])
        writer.add_sliding_window_pattern(windowed)
        writer.add_shared_kv_layers(0)
        writer.add_embedding_length_per_layer_input(0)
        writer.add_key_length(config.global_head_dim)
        writer.add_value_length(config.global_head_dim)
        writer.add_key_length_swa(config.head_dim)
        writer.add_value_length_swa(config.head_dim)
        writer.add_rope_dimension_count(config.global_head_dim)
        writer.add_rope_dimension_count_swa(config.head_dim)
        writer.add_rope_freq_base(fields["rope_parameters"]["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(fields["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_final_logit_softcapping(fields["final_logit_softcapping"])


def _gguf_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of use."""
    yield "token_embd.weight", (config.vocab_size, config.hidden_size)
    if config.family == "gemma4":
        yield "rope_freqs.weight", (config.global_head_dim // 2,)
    for layer in range(config.num_layers):
        tensors = _experts_tensors(config) if config.num_experts else _mlp_tensors(config)
        if config.has_state(layer):
            tensors |= _state_tensors(config)
        else:
            tensors |= _attention_tensors(config, layer)
        for name, size in tensors.items():
            yield f"blk.{layer}.{name}" if "." in name or name == "ssm_a" else f"blk.{layer}.{name}.weight", size
            if config.family == "gpt_oss" and len(size) > 1:
                yield f"blk.{layer}.{name}.bias", size[:-1]
    yield "output_norm.weight", (config.hidden_size,)
    if not config.tied_embeddings:
        yield "output.weight", (config.vocab_size, config.hidden_size)


def _attention_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, attention = config.hidden_size, config.attention_of(layer)
    gates = 2 if config.family == "qwen3_5_moe" else 1
    tensors: dict[str, tuple[int, ...]] = {
        "attn_q": (gates * attention.q_size, hidden),
        "attn_k": (attention.kv_size, hidden),
        "attn_v": (attention.kv_size, hidden),
        "attn_output": (hidden, attention.q_size),
    }
    if config.family == "gemma4" and config.windows[layer] is None:
        del tensors["attn_v"]
    if config.family == "gpt_oss":
        return tensors | {"attn_sinks": (config.num_heads,)}
    if config.family == "llama":
        return tensors
    return tensors | {"attn_q_norm": (attention.head_dim,), "attn_k_norm": (attention.head_dim,)}


def _state_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, state = config.hidden_size, config.state
    return {
        "attn_qkv": (state.channels, hidden), "attn_gate": (state.out_size, hidden),
        "ssm_conv1d": (state.channels, state.kernel), "ssm_dt.bias": (state.value_heads,),
        "ssm_a": (state.value_heads,), "ssm_beta": (state.value_heads, hidden),
        "ssm_alpha": (state.value_heads, hidden), "ssm_norm": (state.value_dim,),
        "ssm_out": (hidden, state.out_size),
    }  # fmt: skip


def _mlp_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Norms of a layer and its MLP."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "attn_norm": (hidden,), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip


def _experts_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Norms of a layer, its router, its experts and what all tokens go through beside them."""
    hidden, experts = config.hidden_size, config.num_experts
    fields = next(fields for fields, _ in SHAPES.values() if fields["architectures"][0] == config.architecture)
    inner = fields.get("moe_intermediate_size", config.intermediate_size)
    after = "ffn_norm" if config.family == "qwen3_moe" else "post_attention_norm"
    tensors: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), after: (hidden,), "ffn_gate_inp": (experts, hidden),
        "ffn_down_exps": (experts, hidden, inner),
    }  # fmt: skip
    if config.family == "gemma4":
        tensors["ffn_gate_up_exps"] = (experts, 2 * inner, hidden)
    else:
        tensors |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (experts, inner, hidden))
    if shared := 0 if config.family == "gemma4" else config.shared_expert_size:
        tensors |= {
            "ffn_gate_inp_shexp": (hidden,), "ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden),
            "ffn_down_shexp": (hidden, shared),
        }  # fmt: skip
    if config.family == "gemma4":
        dense = fields["intermediate_size"]
        norms = ("ffn_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        tensors |= dict.fromkeys(norms, (hidden,)) | {
            "ffn_gate_inp.scale": (hidden,), "layer_output_scale": (1,), "ffn_down_exps.scale": (experts,),
            "ffn_gate": (dense, hidden), "ffn_up": (dense, hidden), "ffn_down": (hidden, dense),
        }  # fmt: skip
    return tensors


def _is_packed(name: str) -> bool:
    """Matrices of layers but the router, as in the store; embeddings too, which are bfloat16 there."""
    return name.rsplit(".", 1)[0].split(".")[-1] in _PACKED and name.endswith(".weight")


def _tile(weight_format: str, seed: int) -> Tensor:
    """Blocks of random codes."""
    scale = _SCALES[weight_format]
    blocks = np.random.default_rng(seed).integers(0, 256, (_TILE_BLOCKS, len(scale) + 16), dtype=np.uint8)
    blocks[:, : len(scale)] = np.frombuffer(scale, np.uint8)
    return torch.from_numpy(blocks).view(-1)


def _zeros(dimensions: tuple[int, ...], block_format: str | None) -> Tensor:
    """A tensor of zeros in bfloat16, or one of rows in this block format, which has its scale and codes of zero."""
    if block_format is None:
        return torch.zeros(dimensions, dtype=torch.bfloat16)
    rows, width = dimensions
    scale = np.frombuffer(_SCALES[block_format], np.uint8)
    blocks = np.full((width // 32, len(scale) + 16), _ZERO_CODES[block_format], np.uint8)
    blocks[:, : len(scale)] = scale
    return torch.from_numpy(blocks).view(1, -1).repeat(rows, 1)


def _repeated(tile: Tensor, count: int) -> Tensor:
    """So many of the tile's values, over and over."""
    return tile.repeat(-(-count // len(tile)))[:count]
