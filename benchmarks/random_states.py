"""Hugging Face directories of the shapes of Qwen3.5-2B and Qwen3.5-4B with random weights.

Three of four layers keep a state. Names and shapes of the tensors are those of transformers. Token i is the word "wI".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from random_model import write_shards, write_word_tokenizer

_BOTH: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", "head_dim": 256,
    "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None,  # no token ends a text
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-2b": _BOTH | {
        "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16,
    },
    "qwen3.5-4b": _BOTH | {
        "num_hidden_layers": 32, "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
}  # fmt: skip


def make_model(path: Path, shape: str, *, seed: int = 0) -> Path:
    """Writes the model to a directory, unless it is there already, and returns the directory.

    It needs transformers, for the names and shapes of the tensors.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    fields = SHAPES[shape] | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}
    fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    config_file = path / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) == fields:
        return path
    path.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields))
    tensors = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}  # a tied matrix once
    write_shards(path, tensors, fields["initializer_range"], seed)
    write_word_tokenizer(path, fields["vocab_size"])
    config_file.write_text(json.dumps(fields, indent=2) + "\n")  # last: it says that the model is whole
    return path
