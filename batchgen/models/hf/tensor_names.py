"""The names of a model's tensors in its safetensors files, for each family.

In a name, {} stands for the number of the layer.
"""

from __future__ import annotations

from batchgen.models.config import ModelConfig
from batchgen.models.families import (
    BERTS,
    DELTA_NETS,
    GEMMA,
    GEMMA4,
    GRANITE_MIXTURES,
    OUTPUT_NORMS,
    QWEN_MIXTURES,
    SHORT_CONVS,
)

_LLAMA_NAMES = {
    "embed": "embed_tokens",
    "final_norm": "norm",
    "input_norm": "layers.{}.input_layernorm",
    "q": "layers.{}.self_attn.q_proj",
    "k": "layers.{}.self_attn.k_proj",
    "v": "layers.{}.self_attn.v_proj",
    "q_norm": "layers.{}.self_attn.q_norm",
    "k_norm": "layers.{}.self_attn.k_norm",
    "out": "layers.{}.self_attn.o_proj",
    "post_norm": "layers.{}.post_attention_layernorm",
    "gate": "layers.{}.mlp.gate_proj",
    "up": "layers.{}.mlp.up_proj",
    "down": "layers.{}.mlp.down_proj",
}
_GEMMA_NAMES = _LLAMA_NAMES | {
    "out_norm": "layers.{}.post_attention_layernorm",
    "post_norm": "layers.{}.pre_feedforward_layernorm",
    "down_norm": "layers.{}.post_feedforward_layernorm",
}
_GEMMA4_NAMES = _GEMMA_NAMES | {
    "block": "layers.{}",
    "per_layer_embed": "embed_tokens_per_layer",
    "per_layer_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "per_layer_up": "layers.{}.per_layer_input_gate",
    "per_layer_down": "layers.{}.per_layer_projection",
    "per_layer_norm": "layers.{}.post_per_layer_input_norm",
}
_OLMO_NAMES = _LLAMA_NAMES | {
    "out_norm": "layers.{}.post_attention_layernorm",
    "down_norm": "layers.{}.post_feedforward_layernorm",
}
_PHI3_NAMES = _LLAMA_NAMES | {"qkv": "layers.{}.self_attn.qkv_proj", "gate_up": "layers.{}.mlp.gate_up_proj"}
_DELTA_NET_NAMES = {
    "in_qkv": "layers.{}.linear_attn.in_proj_qkv",
    "in_z": "layers.{}.linear_attn.in_proj_z",
    "in_qkvz": "layers.{}.linear_attn.in_proj_qkvz",
    "b": "layers.{}.linear_attn.in_proj_b",
    "a": "layers.{}.linear_attn.in_proj_a",
    "ba": "layers.{}.linear_attn.in_proj_ba",
    "conv": "layers.{}.linear_attn.conv1d",
    "linear_attn": "layers.{}.linear_attn",
    "state_norm": "layers.{}.linear_attn.norm",
    "state_out": "layers.{}.linear_attn.out_proj",
}
_LFM_NAMES = _LLAMA_NAMES | {
    "final_norm": "embedding_norm",
    "input_norm": "layers.{}.operator_norm",
    "q_norm": "layers.{}.self_attn.q_layernorm",
    "k_norm": "layers.{}.self_attn.k_layernorm",
    "out": "layers.{}.self_attn.out_proj",
    "in_bcx": "layers.{}.conv.in_proj",
    "short_conv": "layers.{}.conv.conv",
    "conv_out": "layers.{}.conv.out_proj",
    "post_norm": "layers.{}.ffn_norm",
    "gate": "layers.{}.feed_forward.w1",
    "up": "layers.{}.feed_forward.w3",
    "down": "layers.{}.feed_forward.w2",
    "router": "layers.{}.feed_forward.gate",
    "feed_forward": "layers.{}.feed_forward",
}
# The tensors of Qwen3-VL's mixtures that have all experts of a layer, and each expert's parts in them.
EXPERTS_OF_QWEN3_VL = {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
}
_OPT_NAMES = {
    "embed": "embed_tokens",
    "positions": "embed_positions",
    "embed_proj": "project_in",
    "head_proj": "project_out",
    "final_norm": "final_layer_norm",
    "input_norm": "layers.{}.self_attn_layer_norm",
    "q": "layers.{}.self_attn.q_proj",
    "k": "layers.{}.self_attn.k_proj",
    "v": "layers.{}.self_attn.v_proj",
    "out": "layers.{}.self_attn.out_proj",
    "post_norm": "layers.{}.final_layer_norm",
    "up": "layers.{}.fc1",
    "down": "layers.{}.fc2",
}

_BERT_NAMES = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "q": "encoder.layer.{}.attention.self.query",
    "k": "encoder.layer.{}.attention.self.key",
    "v": "encoder.layer.{}.attention.self.value",
    "out": "encoder.layer.{}.attention.output.dense",
    "input_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "up": "encoder.layer.{}.intermediate.dense",
    "down": "encoder.layer.{}.output.dense",
    "post_norm": "encoder.layer.{}.output.LayerNorm",
}
_DISTILBERT_NAMES = {
    **{part: _BERT_NAMES[part] for part in ("embed", "positions", "embed_norm")},
    "q": "transformer.layer.{}.attention.q_lin",
    "k": "transformer.layer.{}.attention.k_lin",
    "v": "transformer.layer.{}.attention.v_lin",
    "out": "transformer.layer.{}.attention.out_lin",
    "input_norm": "transformer.layer.{}.sa_layer_norm",
    "up": "transformer.layer.{}.ffn.lin1",
    "down": "transformer.layer.{}.ffn.lin2",
    "post_norm": "transformer.layer.{}.output_layer_norm",
}
_MODERNBERT_NAMES = {
    "embed": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "final_norm": "final_norm",
    "input_norm": "layers.{}.attn_norm",
    "qkv": "layers.{}.attn.Wqkv",
    "out": "layers.{}.attn.Wo",
    "post_norm": "layers.{}.mlp_norm",
    "gate_up": "layers.{}.mlp.Wi",
    "down": "layers.{}.mlp.Wo",
}
_NOMIC_NAMES = {
    **{part: _BERT_NAMES[part] for part in ("embed", "token_types")},
    "embed_norm": "emb_ln",
    "qkv": "encoder.layers.{}.attn.Wqkv",
    "out": "encoder.layers.{}.attn.out_proj",
    "input_norm": "encoder.layers.{}.norm1",
    "gate": "encoder.layers.{}.mlp.fc12",
    "up": "encoder.layers.{}.mlp.fc11",
    "down": "encoder.layers.{}.mlp.fc2",
    "post_norm": "encoder.layers.{}.norm2",
}
_GTE_NAMES = {
    **{part: _BERT_NAMES[part] for part in ("embed", "token_types", "embed_norm")},
    "qkv": "encoder.layer.{}.attention.qkv_proj",
    "out": "encoder.layer.{}.attention.o_proj",
    "input_norm": "encoder.layer.{}.attn_ln",
    "gate_up": "encoder.layer.{}.mlp.up_gate_proj",
    "down": "encoder.layer.{}.mlp.down_proj",
    "post_norm": "encoder.layer.{}.mlp_ln",
}


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """For each part of a layout, its name in safetensors files, without a checkpoint's prefix of all names."""
    families = {
        **_mixture_names(config.num_experts),
        "gpt_oss": _gpt_oss_names(config.num_layers),
        "opt": _OPT_NAMES,
        **dict.fromkeys(BERTS, _BERT_NAMES),
        "distilbert": _DISTILBERT_NAMES,
        "modernbert": _MODERNBERT_NAMES,
        "nomic_bert": _NOMIC_NAMES,
        "gte": _GTE_NAMES,
        "phi3": _PHI3_NAMES,
        **dict.fromkeys(GEMMA, _GEMMA_NAMES),
        **dict.fromkeys(GEMMA4, _GEMMA4_NAMES | _gemma4_mixture_names(config.num_experts)),
        **dict.fromkeys(OUTPUT_NORMS, _OLMO_NAMES),
        **dict.fromkeys(SHORT_CONVS, _lfm_names(config.num_experts)),
        **dict.fromkeys(GRANITE_MIXTURES, _granite_names(config.num_experts)),
    }
    names = families.get(config.family, _LLAMA_NAMES)
    return names | _DELTA_NET_NAMES if config.family in DELTA_NETS else names


def _lfm_names(num_experts: int) -> dict[str, str]:
    names = dict(_LFM_NAMES)
    for e in range(num_experts):
        for part in ("gate", "up", "down"):
            stem, name = _LFM_NAMES[part].rsplit(".", 1)
            names[f"experts.{e}.{part}"] = f"{stem}.experts.{e}.{name}"
    return names


def _granite_names(num_experts: int) -> dict[str, str]:
    """The names of Granite's mixtures, whose experts are stacked. Without experts, the shared expert is the one MLP."""
    shared = "shared." if num_experts else ""
    names = _LLAMA_NAMES | {"router": "layers.{}.block_sparse_moe.router.layer"}
    names |= {f"{shared}gate_up": "layers.{}.shared_mlp.input_linear"}
    names |= {f"{shared}down": "layers.{}.shared_mlp.output_linear"}
    for e in range(num_experts):
        for part in ("gate", "up", "down"):
            names[f"experts.{e}.{part}"] = f"layers.{{}}.block_sparse_moe.experts.{e}.{part}_proj"
    return names


def stacked_experts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The tensors that have all experts of a layer, by name, and the parts of each expert in them; or nothing."""
    if not config.num_experts:
        return {}
    if config.family in (*DELTA_NETS, *GEMMA4):
        stem = "experts" if config.family in GEMMA4 else "mlp.experts"
        return {f"{stem}.gate_up_proj": ("gate_proj", "up_proj"), f"{stem}.down_proj": ("down_proj",)}
    if config.family in GRANITE_MIXTURES:
        moe = "block_sparse_moe"
        return {f"{moe}.input_linear": ("gate_proj", "up_proj"), f"{moe}.output_linear": ("down_proj",)}
    return {}


def _gpt_oss_names(num_layers: int) -> dict[str, str]:
    """The names of gpt-oss, whose experts are fused, and whose sinks of all layers are loaded together."""
    names = _LLAMA_NAMES | {"router": "layers.{}.mlp.router", "experts": "layers.{}.mlp.experts"}
    return names | {f"attention.{layer}": f"layers.{layer}.self_attn" for layer in range(num_layers)}


def _gemma4_mixture_names(num_experts: int) -> dict[str, str]:
    """The names in layers of Gemma 4 with experts, and with the MLP beside them in place of a shared expert."""
    if not num_experts:
        return {}
    names = {
        "router": "layers.{}.router.proj",
        "router_input": "layers.{}.router",
        "experts_norm": "layers.{}.pre_feedforward_layernorm_2",
        "experts_out_norm": "layers.{}.post_feedforward_layernorm_2",
        "shared_out_norm": "layers.{}.post_feedforward_layernorm_1",
    }
    for part in ("gate", "up", "down"):
        names[f"shared.{part}"] = f"layers.{{}}.mlp.{part}_proj"
        names |= {f"experts.{e}.{part}": f"layers.{{}}.experts.{e}.{part}_proj" for e in range(num_experts)}
    return names


def _mixture_names(num_experts: int) -> dict[str, dict[str, str]]:
    """The names of experts' tensors, for each family with a mixture of experts."""
    mixtral, qwen = dict(_LLAMA_NAMES), dict(_LLAMA_NAMES)
    mixtral["router"], qwen["router"] = "layers.{}.block_sparse_moe.gate", "layers.{}.mlp.gate"
    for e in range(num_experts):
        for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            mixtral[f"experts.{e}.{part}"] = f"layers.{{}}.block_sparse_moe.experts.{e}.{name}"
            qwen[f"experts.{e}.{part}"] = f"layers.{{}}.mlp.experts.{e}.{part}_proj"
    qwen["shared_gate"] = "layers.{}.mlp.shared_expert_gate"
    for part in ("gate", "up", "down"):
        qwen[f"shared.{part}"] = f"layers.{{}}.mlp.shared_expert.{part}_proj"
    return {"mixtral": mixtral, "phimoe": mixtral, **dict.fromkeys((*QWEN_MIXTURES, "olmoe"), qwen)}
