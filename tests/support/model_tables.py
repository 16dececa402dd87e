"""The tables of tiny models: their families, the switches that change what a layer reads, and the fields of each."""

from __future__ import annotations

DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SHORT_CONVS = ("lfm2", "lfm2_moe")
FAMILIES = (
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "phi3",
    "granite",
    "smollm3",
    "seed_oss",
    "olmo2",
    "olmo3",
    "ministral",
    "ministral3",
    "mixtral",
    "olmoe",
    "phimoe",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    *DELTA_NETS,
    *SHORT_CONVS,
)
GEMMA4 = ("gemma4", "gemma4_unified")
GRANITE_MIXTURES = ("granitemoe", "granitemoeshared", "granitemoehybrid")
MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "phimoe", *GRANITE_MIXTURES, "qwen3_next", "qwen3_5_moe",
    "lfm2_moe",
)  # fmt: skip
# What must hold for every model holds for each of these: families as they are, and with the switches that change what a
# layer reads. name -> (family, fields of the transformers config). A test keeps it complete (test_token_identity.py).
MODELS = {
    **{family: (family, {}) for family in FAMILIES},
    "opt, norm after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32, "num_hidden_layers": 2}),
    "llama, tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, head size 24": ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    "mistral, windows": ("mistral", {"sliding_window": 20}),
    "qwen2, windows in some layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "gemma3, every second window, scaled rope": ("gemma3", {
        "sliding_window_pattern": 2, "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }),
    "gemma4, six layers, windows that reuse KV": ("gemma4", {
        "num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }),
    "gemma4, experts, keys are values": ("gemma4", {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 40,
        "attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
    }),
    "gemma4, keys are values, biases, a cap": ("gemma4", {
        "attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_kv_shared_layers": 0, "attention_bias": True,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "phi3, part of each head, windows": ("phi3", {"head_dim": 24, "sliding_window": 20, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    }}),
    "granite, plain factors": ("granite", {
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "attention_multiplier": 0.25,
        "attention_bias": True, "mlp_bias": True,
    }),
    "smollm3, windows in layers without rope": ("smollm3", {
        "use_sliding_window": True, "sliding_window": 20, "no_rope_layers": [1, 0, 0], "tie_word_embeddings": False,
    }),
    "seed_oss, a bias of the output": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "olmo2, one KV head, biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3, scaled rope, one window": ("olmo3", {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": {
            "full_attention": {
                "rope_theta": 5e5, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }),
    "ministral, windows in some layers": ("ministral", {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "ministral3, windows": ("ministral3", {"sliding_window": 20}),
    "mixtral, one of 16, windows": ("mixtral", {
        "num_local_experts": 16, "num_experts_per_tok": 1, "sliding_window": 20, "num_hidden_layers": 2,
    }),
    "phimoe, windows, no biases, plain rope, near scores alone": ("phimoe", {
        "attention_bias": False, "lm_head_bias": False, "sliding_window": 20, "router_jitter_noise": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "olmoe, 3 of 16, shares of 1": ("olmoe", {
        "num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True, "num_key_value_heads": 1,
    }),
    "granitemoehybrid, one MLP, no rope": ("granitemoehybrid", {
        "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": None, "tie_word_embeddings": True,
    }),
    "qwen3_moe, 8 of 128, shares as they are": ("qwen3_moe", {
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False, "num_hidden_layers": 2,
    }),
    "qwen2_moe, a dense layer, windows": ("qwen2_moe", {
        "mlp_only_layers": [1], "num_experts_per_tok": 3, "use_sliding_window": True, "sliding_window": 20,
        "qkv_bias": False,
    }),
    "qwen3_moe, every second layer dense": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "gpt_oss, 4 of 32, all windows, plain rope": ("gpt_oss", {
        "num_local_experts": 32, "num_experts_per_tok": 4, "layer_types": ["sliding_attention"] * 2,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": False,
    }),
    "qwen3_5, four value heads for each key head, all values rotated": ("qwen3_5", {
        "linear_num_value_heads": 8, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }),
    "qwen3_next, a dense layer, shares as they are": ("qwen3_next", {
        "mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_value_heads": 6, "num_hidden_layers": 4,
    }),
    "lfm2, biases, a kernel of 4, two convolutions first": ("lfm2", {
        "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False, "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }),
    "lfm2_moe, one of 8 in every layer, scaled": ("lfm2_moe", {
        "num_dense_layers": 0, "num_experts_per_tok": 1, "routed_scaling_factor": 1.75, "use_expert_bias": False,
        "norm_topk_prob": False, "num_hidden_layers": 2,
    }),
    "qwen3, tied, four layers": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
}  # fmt: skip
VOCAB_SIZE = 512
_FACTORS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.375, "logits_scaling": 0.75, "attention_multiplier": 0.125,
}  # fmt: skip
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20, "tie_word_embeddings": True}
# Heads of two sizes; the last layer reuses KV, and has a wider MLP.
_GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "sliding_window": 20, "num_kv_shared_layers": 1, "use_double_wide_mlp": True,
}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SHARED = {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 72}
_DELTA_NET = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}  # fmt: skip
_GRANITE_EXPERTS = {**_FACTORS, "logits_scaling": 0.25, "num_local_experts": 8}
# Fields of tiny models, beside their sizes.
FIELDS = {
    "qwen3": {"head_dim": 32},  # as in the real ones, not hidden_size / heads
    "seed_oss": {"head_dim": 32},
    "mistral": {"sliding_window": None},
    "olmo3": {"sliding_window": 20},
    "ministral": {"sliding_window": 20, "head_dim": 16},
    "ministral3": {"head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
    }},
    # Small caps, so that they change the tokens; only "eager" knows them.
    "gemma2": {
        **_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "attn_implementation": "eager",
    },
    "gemma3": _GEMMA,
    "gemma4": {**_GEMMA4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma4_unified": _GEMMA4,
    "granite": _FACTORS,
    "granitemoe": {**_GRANITE_EXPERTS},
    "granitemoeshared": {**_GRANITE_EXPERTS, "shared_intermediate_size": 72},
    "granitemoehybrid": {
        **_GRANITE_EXPERTS, "shared_intermediate_size": 72, "position_embedding_type": "rope",
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {
        "num_local_experts": 8, "attention_bias": True, "lm_head_bias": True, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.0, "long_mscale": 1.0,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2_moe": _SHARED,
    "qwen3_moe": {**_QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "qwen3_next": {**_SHARED, **_DELTA_NET},
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": {**_SHARED, **_DELTA_NET},
    "lfm2": {"intermediate_size": 120, "block_multiple_of": 16},
    "lfm2_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_dense_layers": 1,
    },
    "gpt_oss": {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 15e4, "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },
}  # fmt: skip
NORMS_LESS_ONE = ("gemma2", "gemma3", *DELTA_NETS)  # which add 1 to the weights of norms themselves
GGUF_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "granite",
    "smollm3",
    "seed_oss",
    "olmo2",
    "olmo3",
    "ministral3",
    "olmoe",
    "phimoe",
    "granitemoe",
    "granitemoeshared",
    *DELTA_NETS,
    *SHORT_CONVS,
)
# As `MODELS`, of what must hold for every model that is written as GGUF; rows are whole blocks of 32.
GGUF_MODELS = {
    **{family: (family, {}) for family in GGUF_FAMILIES},
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2_moe": ("qwen2_moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 64, "decoder_sparse_step": 2}),
    "granitemoeshared": ("granitemoeshared", {"shared_intermediate_size": 96}),
    "lfm2": ("lfm2", {"block_multiple_of": 32}),
    "lfm2_moe": ("lfm2_moe", {"moe_intermediate_size": 64}),
    "qwen3_next": ("qwen3_next", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3_5_moe": ("qwen3_5_moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3_5, as many key heads as value heads": ("qwen3_5", {
        "linear_num_value_heads": 2, "linear_value_head_dim": 32, "tie_word_embeddings": True,
    }),
    "gemma2, queries by a head's size": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3, scaled rope, an output of its own": ("gemma3", {
        "num_hidden_layers": 7, "tie_word_embeddings": False, "query_pre_attn_scalar": 32, "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }),
    "gemma4, windows that reuse KV": ("gemma4", {
        "num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }),
    "gemma4, experts, keys are values": ("gemma4", {
        **MODELS["gemma4, experts, keys are values"][1], "moe_intermediate_size": 64,
    }),
    "gemma4, keys are values, an output of its own": ("gemma4", {
        **MODELS["gemma4, keys are values, biases, a cap"][1], "attention_bias": False,
    }),
    "gemma3, every second window": ("gemma3", {"sliding_window_pattern": 2}),
    "phi3, windows": ("phi3", {"sliding_window": 20}),
    "smollm3, a layer without rope": ("smollm3", {"num_hidden_layers": 4}),
    "olmo3, scaled rope": ("olmo3", {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_theta": 5e5, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
        },
    }),
    "phi3, part of each head": ("phi3", {"head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    }}),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
    }}),
}  # fmt: skip
# Rows of whole blocks of any format in every family of `GGUF_FAMILIES`.
MIXED_SIZES = {
    "hidden_size_per_layer_input": 256,
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256, "shared_intermediate_size": 256, "num_hidden_layers": 2,
    "linear_value_head_dim": 64, "block_auto_adjust_ff_dim": False,
}  # fmt: skip


def few_experts(family: str) -> dict[str, int]:
    """Fields for four experts in each layer of a mixture, where rows are long."""
    return {name: 4 for name in ("num_experts", "num_local_experts") if name in FIELDS.get(family, {})}
