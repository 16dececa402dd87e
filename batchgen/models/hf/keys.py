"""The known keys of a `config.json`, for each family, and the treatment of all others.

A key of transformers' configuration classes is in one of three tables. It is read (`KEYS`), or it does not change
logits (`IGNORED`), or it is refused unless it has the value that batchgen computes with (`FIXED`). Keys that these
classes do not have are refused if they state something, except those of published files that change no logits
(`_NOTES`); some have values that are harmless (`_FOREIGN`). No file is read here, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.core.errors import InputError
from batchgen.models.families import BERTS, GRANITE_MIXTURES, HEAD_NORMS, PROJECTION_NORMS, SHORT_CONVS
from batchgen.models.stated_numbers import is_count, is_index, is_number, require_positive, shown


@dataclass(frozen=True)
class Key:
    """A key that is read.

    Attributes:
        default: Value if the key is absent.
        kind: Kind of its values, a name in `_CHECKS`.
        nullable: Whether null is a valid value.
    """

    default: Any
    kind: str
    nullable: bool = False


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# kind -> (test of a value, words for it)
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "count": (is_count, "a whole number of at least 1"),
    "index": (is_index, "a whole number of at least 0"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "share": (lambda value: is_number(value) and value >= 0, "a number of at least 0"),
    "positive": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "name": (lambda value: isinstance(value, str), "a name"),
    "object": (lambda value: isinstance(value, Mapping), "an object"),
    "names": (_list_of(lambda value: isinstance(value, str)), "a list of names"),
    "layers": (_list_of(_is_token), "a list of layers"),
    "token": (_is_token, "a token id"),
    "tokens": (lambda value: _is_token(value) or _list_of(_is_token)(value), "a token id or a list of them"),
}


def _counts(**values: int) -> dict[str, Key]:
    return {name: Key(value, "count") for name, value in values.items()}


def _flags(**values: bool) -> dict[str, Key]:
    return {name: Key(value, "flag") for name, value in values.items()}


def _ends(bos: int | None, eos: int | None) -> dict[str, Key]:
    return {"bos_token_id": Key(bos, "token", True), "eos_token_id": Key(eos, "tokens", True)}


def _rotary(theta: float = 1e4, eps: float = 1e-6, act: str = "hidden_act", activation: str = "silu") -> dict[str, Key]:
    """The keys of all families with rotary positions, without those of the positions themselves (`hf/rope.py`)."""
    return {"rope_theta": Key(theta, "positive"), "rms_norm_eps": Key(eps, "share"), act: Key(activation, "name")}


_HEADS_NULL = Key(None, "count", True)
_WINDOW = Key(4096, "index", True)  # 0 in files of models that do not use it
_TYPES = {"layer_types": Key(None, "names", True)}
_QWEN_WINDOWS = {**_flags(use_sliding_window=False), "sliding_window": _WINDOW}
_QWEN_EXPERTS = {
    "mlp_only_layers": Key(None, "layers", True),
    **_counts(decoder_sparse_step=1),
    **_flags(norm_topk_prob=False),
}
# A key that transformers' class lacks, and its model reads nevertheless: it may be left out, and not be null.
_DERIVED_HEAD = {"head_dim": Key(None, "count")}
_GEMMA = {
    **_rotary(act="hidden_activation", activation="gelu_pytorch_tanh"),
    **_counts(hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8),
    **_counts(num_key_value_heads=4, head_dim=256),
    **_flags(attention_bias=False, tie_word_embeddings=True),
    **_ends(2, 1),
    **_TYPES,
    "query_pre_attn_scalar": Key(256, "positive"),
    "sliding_window": _WINDOW,
}
_GEMMA4 = {
    **{name: key for name, key in _GEMMA.items() if name not in ("query_pre_attn_scalar", "rope_theta")},
    **_counts(vocab_size=262144, num_hidden_layers=30, global_head_dim=512),
    **_flags(attention_k_eq_v=False, use_double_wide_mlp=False),
    "final_logit_softcapping": Key(None, "positive", True),
    "num_kv_shared_layers": Key(0, "index"),
    "num_global_key_value_heads": _HEADS_NULL,
    "per_layer_config": Key(None, "object"),
}
_OLMO_2 = {
    **_rotary(eps=1e-5),
    **_counts(vocab_size=50304, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
    **_counts(num_attention_heads=32, max_position_embeddings=2048),
    **_flags(attention_bias=False, tie_word_embeddings=False),
    **_ends(None, 50279),
    **_DERIVED_HEAD,
    "num_key_value_heads": _HEADS_NULL,
}
_DELTA_NET = {
    **_rotary(),
    **_counts(num_attention_heads=16, head_dim=256, max_position_embeddings=32768, full_attention_interval=4),
    **_counts(linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128),
    **_counts(linear_num_key_heads=16, linear_num_value_heads=32),
    **_flags(attention_bias=False, tie_word_embeddings=False),
    **_ends(None, None),
    **_TYPES,
}
_SHORT_CONV = {
    **_counts(vocab_size=65536, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
    **_counts(max_position_embeddings=128000, conv_L_cache=3),
    **_flags(conv_bias=False, tie_word_embeddings=True),
    **_ends(1, 2),
    **_TYPES,
    **_DERIVED_HEAD,
    "tie_embedding": Key(None, "flag"),
    "rope_theta": Key(1e6, "positive"),
    "norm_eps": Key(1e-5, "share"),
}
_DELTA_NET_EXPERTS = {
    **_counts(hidden_size=2048, num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512),
}
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")  # Granite's
_MINISTRAL = {
    **_rotary(),
    **_counts(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
    **_counts(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072),
    **_flags(tie_word_embeddings=False),
    **_ends(1, 2),
    "head_dim": _HEADS_NULL,
    "sliding_window": Key(None, "index", True),
}
_GRANITE_MIXTURE = {
    **_rotary(),
    **_counts(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
    **_counts(num_attention_heads=32, max_position_embeddings=2048),
    **_flags(attention_bias=False, tie_word_embeddings=False),
    **_ends(1, 2),
    **_DERIVED_HEAD,
    **dict.fromkeys(_MULTIPLIERS, Key(1.0, "positive")),
    "num_key_value_heads": _HEADS_NULL,
    "num_local_experts": Key(8, "index"),  # 0 in files of Granite 4 that have one MLP
    "num_experts_per_tok": Key(2, "index"),
}
_BERT = {
    **_counts(vocab_size=30522, hidden_size=768, intermediate_size=3072, num_hidden_layers=12),
    **_counts(num_attention_heads=12, max_position_embeddings=512),
    **_flags(tie_word_embeddings=True),
    **_ends(None, None),
    "hidden_act": Key("gelu", "name"),
    "layer_norm_eps": Key(1e-12, "share"),
    "type_vocab_size": Key(2, "index"),
    "pad_token_id": Key(0, "token"),
}
_ROBERTA = {**_BERT, **_counts(vocab_size=50265), "pad_token_id": Key(1, "token")}
_DISTILBERT = {
    **_counts(vocab_size=30522, dim=768, hidden_dim=3072, n_layers=6, n_heads=12, max_position_embeddings=512),
    **_flags(tie_word_embeddings=True),
    **_ends(None, None),
    "activation": Key("gelu", "name"),
}
_MODERNBERT = {
    **_counts(vocab_size=50368, hidden_size=768, intermediate_size=1152, num_hidden_layers=22),
    **_counts(num_attention_heads=12, max_position_embeddings=8192, local_attention=128, global_attn_every_n_layers=3),
    **_flags(attention_bias=False, mlp_bias=False, tie_word_embeddings=True),
    **_ends(50281, 50282),
    **_TYPES,
    "hidden_activation": Key("gelu", "name"),
    "norm_eps": Key(1e-5, "share"),
    "global_rope_theta": Key(160000.0, "positive"),
    "local_rope_theta": Key(1e4, "positive"),
}
_ROTARY_BERT = {
    **_counts(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
    **_flags(tie_word_embeddings=True),
    **_ends(None, None),
    "hidden_act": Key("gelu", "name"),
    "layer_norm_eps": Key(1e-12, "share"),
}
# Family -> keys that it calls by other names than the rest.
OWN_NAMES = {
    "distilbert": {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "activation": "hidden_act",
    }
}
# Family -> keys of earlier files, and what they are called now.
_EARLIER_NAMES = {
    "nomic_bert": {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "layer_norm_epsilon": "layer_norm_eps",
        "max_trained_positions": "max_position_embeddings",
        "rotary_emb_base": "rope_theta",
    }
}
KEYS: dict[str, dict[str, Key]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": {**_ROBERTA, **_counts(vocab_size=30522)},
    "camembert": {**_ROBERTA, **_counts(vocab_size=30522)},
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    "nomic_bert": {
        **_ROTARY_BERT,
        **_counts(vocab_size=30528, max_position_embeddings=2048),
        "hidden_act": Key("silu", "name"),
        "head_dim": _HEADS_NULL,
        "rope_theta": Key(1000.0, "positive"),
        "type_vocab_size": Key(2, "index"),
    },
    "gte": {
        **_ROTARY_BERT,
        **_counts(vocab_size=250048, max_position_embeddings=8192),
        "rope_theta": Key(160000.0, "positive"),
        "type_vocab_size": Key(1, "index"),
    },
    "opt": {
        **_counts(vocab_size=50272, hidden_size=768, num_hidden_layers=12, ffn_dim=3072, num_attention_heads=12),
        **_counts(max_position_embeddings=2048),
        **_flags(do_layer_norm_before=True, _remove_final_layer_norm=False, enable_bias=True, tie_word_embeddings=True),
        **_ends(2, 2),
        "word_embed_proj_dim": Key(None, "count", True),
        "activation_function": Key("relu", "name"),
    },
    "llama": {
        **_rotary(),
        **_counts(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
        **_counts(num_attention_heads=32, max_position_embeddings=2048),
        **_flags(attention_bias=False, mlp_bias=False, tie_word_embeddings=False),
        **_ends(1, 2),
        "num_key_value_heads": _HEADS_NULL,
        "head_dim": _HEADS_NULL,
    },
    "mistral": {
        **_rotary(),
        **_counts(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
        **_counts(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072),
        **_flags(tie_word_embeddings=False),
        **_ends(1, 2),
        **_TYPES,
        "head_dim": _HEADS_NULL,
        "sliding_window": _WINDOW,
    },
    "qwen2": {
        **_rotary(),
        **_counts(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32),
        **_counts(num_attention_heads=32, max_position_embeddings=32768),
        **_flags(tie_word_embeddings=False),
        **_ends(None, None),
        **_QWEN_WINDOWS,
        **_TYPES,
        **_DERIVED_HEAD,
        "num_key_value_heads": Key(32, "count", True),
        "max_window_layers": Key(28, "index"),
    },
    "qwen3": {
        **_rotary(),
        **_counts(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32),
        **_counts(num_attention_heads=32, head_dim=128, max_position_embeddings=32768),
        **_flags(attention_bias=False, tie_word_embeddings=False),
        **_ends(None, None),
        **_QWEN_WINDOWS,
        **_TYPES,
        "num_key_value_heads": Key(32, "count", True),
        "max_window_layers": Key(28, "index"),
    },
    "gemma2": {
        **_GEMMA,
        **_counts(vocab_size=256000, max_position_embeddings=8192),
        "attn_logit_softcapping": Key(50.0, "positive", True),
        "final_logit_softcapping": Key(30.0, "positive", True),
    },
    "gemma3": {
        **_GEMMA,
        **_counts(vocab_size=262208, max_position_embeddings=131072),
        "rope_theta": Key(1e6, "positive"),
        "rope_local_base_freq": Key(1e4, "positive"),
        "sliding_window_pattern": Key(6, "count"),
        "final_logit_softcapping": Key(None, "positive", True),
        "use_bidirectional_attention": Key(False, "flag", True),
    },
    "gemma4": {
        **_GEMMA4,
        **_counts(max_position_embeddings=131072, sliding_window=512, vocab_size_per_layer_input=262144),
        **_flags(enable_moe_block=False),
        "hidden_size_per_layer_input": Key(256, "index"),
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), Key(None, "count", True)),
    },
    "gemma4_unified": {**_GEMMA4, **_counts(max_position_embeddings=262144, sliding_window=1024)},
    "phi3": {
        **_rotary(eps=1e-5),
        **_counts(vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32),
        **_counts(num_attention_heads=32, max_position_embeddings=4096, original_max_position_embeddings=4096),
        **_flags(tie_word_embeddings=False),
        **_ends(1, 32000),
        **_DERIVED_HEAD,
        "num_key_value_heads": _HEADS_NULL,
        "sliding_window": Key(None, "index", True),
    },
    "granite": {
        **_rotary(),
        **_counts(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
        **_counts(num_attention_heads=32, max_position_embeddings=2048),
        **_flags(attention_bias=False, mlp_bias=False, tie_word_embeddings=False),
        **_ends(1, 2),
        **_DERIVED_HEAD,
        **dict.fromkeys(_MULTIPLIERS, Key(1.0, "positive")),
        "num_key_value_heads": _HEADS_NULL,
    },
    "smollm3": {
        **_rotary(theta=2e6),
        **_counts(vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36),
        **_counts(num_attention_heads=16, max_position_embeddings=32768, no_rope_layer_interval=4),
        **_flags(attention_bias=False, mlp_bias=False, tie_word_embeddings=True, use_sliding_window=False),
        **_ends(128000, 128001),
        **_TYPES,
        **_DERIVED_HEAD,
        "num_key_value_heads": Key(4, "count", True),
        "no_rope_layers": Key(None, "layers", True),
        "sliding_window": Key(None, "index", True),
    },
    "seed_oss": {
        **_rotary(),
        **_counts(vocab_size=155136, hidden_size=4096, intermediate_size=27648, num_hidden_layers=64),
        **_counts(num_attention_heads=80, max_position_embeddings=524288),
        **_flags(attention_bias=True, attention_out_bias=False, mlp_bias=False, tie_word_embeddings=False),
        **_ends(0, 2),
        "num_key_value_heads": Key(8, "count", True),
        "head_dim": Key(128, "count", True),
    },
    "olmo2": _OLMO_2,
    "olmo3": {**_OLMO_2, **_TYPES, "rope_theta": Key(5e5, "positive"), "sliding_window": _WINDOW},
    "ministral": _MINISTRAL | {**_rotary(), **_TYPES, "sliding_window": Key(4096, "index")},
    "ministral3": {
        **_MINISTRAL,
        **_counts(vocab_size=131072, num_hidden_layers=34, head_dim=128, max_position_embeddings=262144),
        "rms_norm_eps": Key(1e-5, "share"),
    },
    "olmoe": {
        **_rotary(eps=1e-5),
        **_counts(vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16),
        **_counts(num_attention_heads=16, max_position_embeddings=4096, num_experts_per_tok=8, num_experts=64),
        **_flags(attention_bias=False, tie_word_embeddings=False, norm_topk_prob=False),
        **_ends(None, 50279),
        "num_key_value_heads": _HEADS_NULL,
    },
    "phimoe": {
        **_rotary(theta=1e6, eps=1e-5),
        **_counts(vocab_size=32064, hidden_size=4096, intermediate_size=6400, num_hidden_layers=32),
        **_counts(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, num_local_experts=16),
        **_flags(attention_bias=False, lm_head_bias=False, tie_word_embeddings=False),
        **_ends(1, 2),
        **_DERIVED_HEAD,
        "sliding_window": Key(None, "index", True),
        "router_jitter_noise": Key(0.01, "share"),
    },
    "granitemoe": _GRANITE_MIXTURE,
    "granitemoeshared": {**_GRANITE_MIXTURE, "shared_intermediate_size": Key(0, "index")},
    "granitemoehybrid": {
        **_GRANITE_MIXTURE,
        **_TYPES,
        "shared_intermediate_size": Key(1024, "index"),
        "position_embedding_type": Key(None, "name", True),
    },
    "mixtral": {
        **_rotary(theta=1e6, eps=1e-5),
        **_counts(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
        **_counts(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072),
        **_counts(num_experts_per_tok=2, num_local_experts=8),
        **_flags(tie_word_embeddings=False),
        **_ends(1, 2),
        "head_dim": _HEADS_NULL,
        "sliding_window": Key(None, "index", True),
    },
    "qwen2_moe": {
        **_rotary(),
        **_counts(vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24),
        **_counts(num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=32768),
        **_counts(moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
        **_counts(num_experts_per_tok=4, num_experts=60),
        **_flags(tie_word_embeddings=False, qkv_bias=True),
        **_ends(None, None),
        **_QWEN_WINDOWS,
        **_QWEN_EXPERTS,
        **_TYPES,
        **_DERIVED_HEAD,
        "max_window_layers": Key(28, "index"),
    },
    "qwen3_moe": {
        **_rotary(),
        **_counts(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24),
        **_counts(num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=32768),
        **_counts(moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128),
        **_flags(attention_bias=False, tie_word_embeddings=False),
        **_ends(None, None),
        **_QWEN_WINDOWS,
        **_QWEN_EXPERTS,
        **_DERIVED_HEAD,
    },
    "gpt_oss": {
        "rope_theta": Key(150000.0, "positive"),
        "rms_norm_eps": Key(1e-5, "share"),
        **_counts(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36),
        **_counts(num_attention_heads=64, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072),
        **_counts(num_experts_per_tok=4, num_local_experts=128),
        **_flags(attention_bias=True, tie_word_embeddings=False),
        **_ends(None, None),
        **_TYPES,
        "sliding_window": Key(128, "index", True),
    },
    "lfm2": {
        **_SHORT_CONV,
        **_counts(hidden_size=2560, intermediate_size=12288, block_multiple_of=256),
        **_flags(block_auto_adjust_ff_dim=True),
        "block_ff_dim": Key(None, "count"),
        "block_ffn_dim_multiplier": Key(1.0, "positive"),
        "full_attn_idxs": Key(None, "layers", True),
    },
    "lfm2_moe": {
        **_SHORT_CONV,
        **_counts(hidden_size=2048, intermediate_size=7168, moe_intermediate_size=1792),
        **_counts(num_experts=32, num_experts_per_tok=4),
        **_flags(use_expert_bias=True, norm_topk_prob=True),
        "num_dense_layers": Key(2, "index"),
        "routed_scaling_factor": Key(1.0, "positive"),
    },
    "qwen3_next": {
        **_DELTA_NET,
        **_DELTA_NET_EXPERTS,
        **_counts(vocab_size=151936, num_hidden_layers=48, intermediate_size=5632),
        **_counts(num_experts_per_tok=10, num_experts=512),
        **_QWEN_EXPERTS,
        **_flags(norm_topk_prob=True),
    },
    "qwen3_5": {
        **_DELTA_NET,
        **_counts(vocab_size=248320, num_hidden_layers=32, hidden_size=4096, intermediate_size=12288),
        **_counts(num_key_value_heads=4),
    },
    "qwen3_5_moe": {
        **_DELTA_NET,
        **_DELTA_NET_EXPERTS,
        **_counts(vocab_size=248320, num_hidden_layers=40, num_experts_per_tok=8, num_experts=256),
    },
}
# Read from the file itself, because what they mean depends on which of them are there (`hf/fields.py`, `hf/rope.py`).
READ_APART = frozenset(
    ("architectures", "dtype", "torch_dtype", "rope_parameters", "rope_scaling", "partial_rotary_factor")
)
# Keys of transformers' classes that change no logits.
_OF_TRAINING = (
    "dropout",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "layerdrop",
    "resid_pdrop",
    "embd_pdrop",
    "residual_dropout",
    "initializer_range",
    "init_std",
)
_OF_OUTPUTS = ("output_hidden_states", "output_router_logits", "return_dict", "use_cache", "id2label", "label2id")
_OF_LOSSES = ("input_jitter_noise", "problem_type", "router_aux_loss_coef", "router_jitter_noise")
_OF_FORM = ("transformers_version", "chunk_size_feed_forward", "pad_token_id", "pretraining_tp")
_OF_MAMBA = (  # of layers that Granite 4 may have, and that are refused by layer_types
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"),
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)
IGNORED = frozenset((*_OF_TRAINING, *_OF_OUTPUTS, *_OF_LOSSES, *_OF_FORM, *_OF_MAMBA))
_EVERYWHERE: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (False,)}
_CAUSAL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (None, False)}
_CAUSAL_TEXT: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (None, "vision")}
_NORM_TOPK: dict[str, tuple[Any, ...]] = {"norm_topk_prob": (None, True)}  # a key of other mixtures of experts
_OUTPUT_GATE: dict[str, tuple[Any, ...]] = {  # which the class does not read; swish is of states' gated norm
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "swish", "silu"),
}
_ALL_SPARSE: dict[str, tuple[Any, ...]] = {"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)}
_NO_ROPE: dict[str, tuple[Any, ...]] = {"rope_scaling": (None,), "rope_parameters": (None,)}
# Keys that batchgen computes with these values alone.
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(KEYS, _EVERYWHERE),
    **{name: {**_EVERYWHERE, "position_embedding_type": (None, "absolute"), "is_decoder": (False,)} for name in BERTS},
    "distilbert": {**_EVERYWHERE, "sinusoidal_pos_embds": (False,)},
    "modernbert": {**_EVERYWHERE, "norm_bias": (False,)},
    "nomic_bert": {
        **_EVERYWHERE,
        "activation_function": (None, "swiglu"),
        "rotary_emb_fraction": (None, 1.0),
        **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), (None,)),
        **dict.fromkeys(("prenorm", "parallel_block", "causal", "rotary_emb_interleaved"), (None, False)),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm"), (None, False)),
    },
    "opt": {**_EVERYWHERE, **_NO_ROPE, "layer_norm_elementwise_affine": (True,)},
    "llama": {**_EVERYWHERE, "activation": (None, "swiglu")},  # of Falcon 3, beside its hidden_act
    "gemma2": {**_EVERYWHERE, **_CAUSAL},
    # Transformers does not apply the cap, the name says that it is applied: nobody can say what is meant.
    "gemma3": {**_EVERYWHERE, "attn_logit_softcapping": (None,)},
    "gemma4": {**_EVERYWHERE, **_CAUSAL_TEXT},
    "gemma4_unified": {**_EVERYWHERE, **_CAUSAL_TEXT},
    "mixtral": {**_EVERYWHERE, **_NORM_TOPK},
    **{family: {**_EVERYWHERE, **_NORM_TOPK} for family in GRANITE_MIXTURES},
    "olmoe": {**_EVERYWHERE, "clip_qkv": (None,)},
    "phimoe": {**_EVERYWHERE, "num_experts_per_tok": (2,)},
    "gpt_oss": {**_EVERYWHERE, **_NORM_TOPK, "hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    **{name: {**_EVERYWHERE, "block_use_swiglu": (None, True), "use_pos_enc": (None, True)} for name in SHORT_CONVS},
    "qwen3_next": {**_EVERYWHERE, **_OUTPUT_GATE},
    "qwen3_5": {**_EVERYWHERE, **_OUTPUT_GATE},
    "qwen3_5_moe": {**_EVERYWHERE, **_OUTPUT_GATE, **_NORM_TOPK, **_ALL_SPARSE},
}
# Keys that no class of these families has, and that state other mathematics where they are more than these values.
_FOREIGN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (None, 1)),
    **dict.fromkeys(("attention_multiplier", "scale_emb", "scale_depth", "dim_model_base"), (None, 1)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "alibi", "use_alibi"), (None, False)),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "qk_norm", "use_parallel_residual"), (None, False)),
    **dict.fromkeys(("use_bidirectional_attention", "add_cross_attention"), (None, False)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "clip_qkv", "kv_sharing_modes"), (None,)),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "kv_lora_rank", "n_routed_experts"), (None,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "per_layer_config"), (None,)),
    "transformers_weights": (None,),
    "is_causal": (True,),  # null is not true
}
_QK_NORMS = ("qk_layernorm", "use_qk_norm", "qk_norm")
# Keys that say nothing new of these families, which have biases, or norms of queries and keys, anyway.
_NOT_FOREIGN = {"qwen2": ("attention_bias",), **dict.fromkeys((*HEAD_NORMS, *PROJECTION_NORMS), _QK_NORMS)}
_EXPERTS = ("num_experts", "num_local_experts")


# Keys of published files that change no logits: of versions of transformers, of training, of tokens and generation.
_NAMES_OF_NOTES = """
    auto_map name_or_path base_model_name_or_path model_name unsloth_version unsloth_fixed transformers.js_config
    quantization_config compression_config quantization quant_method cache_implementation generation_config text_config
    finetuning_task task_specific_params torchscript tf_legacy_loss use_bfloat16 tokenizer_class is_decoder
    tie_encoder_decoder cross_attention_hidden_size output_attentions output_scores mamba_ssm_dtype
    prefix sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id bos_token eos_token pad_token
    unk_token image_token_id video_token_id audio_token_id vision_start_token_id vision_end_token_id vision_token_id
    image_token_index boi_token_id eoi_token_id boi_token_index eoi_token_index mm_tokens_per_image vision_config
    boa_token_id eoa_token_id eoa_token_index vision_soft_tokens_per_image
    audio_config projector_hidden_act vision_feature_layer vision_feature_select_strategy spatial_merge_size
    multimodal_projector_bias image_seq_length image_grid_pinpoints use_image_newline_parameter
    do_sample temperature top_k top_p typical_p repetition_penalty length_penalty max_length min_length max_new_tokens
    num_beams num_beam_groups num_return_sequences diversity_penalty no_repeat_ngram_size bad_words_ids early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    remove_invalid_values return_dict_in_generate suppress_tokens begin_suppress_tokens
    activation_dropout hidden_dropout hidden_dropout_prob attn_pdrop ffn_dropout init_method classifier_dropout
    num_labels loss_type neftune_noise_alpha tokenizer_padding_side tokenizer_model_max_length
    gradient_checkpointing router_z_loss_coef aux_loss_alpha is_llama_config rope_interleaved normalization_function
    interpolate_factor full_attn_mod attn_implementation use_flash_attn flash_attention use_liger_kernel
    model_max_length max_sequence_length seq_length initial_context_length experts_per_token max_window_layers
    hidden_act hidden_activation intermediate_size original_max_position_embeddings layer_types
    vocab_size_per_layer_input num_nextn_predict_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings
    output_past pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    directionality sbert_ce_default_activation_function
    sentence_transformers
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init
    conv_dim conv_dim_out conv_use_xavier_init num_heads theta
"""
_NOTES = frozenset(_NAMES_OF_NOTES.split())


# Keys of published files of a family that say again what others say.
_OF_LFM2 = (
    *("block_dim", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"),
    *("conv_use_xavier_init", "num_heads", "use_pos_enc", "theta"),
)
_OF_MODERNBERT = (  # the first ones are of a classifier's head (`classifiers.py`)
    *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "deterministic_flash_attn"),
    *("embedding_dropout", "initializer_cutoff_factor", "layer_norm_eps", "mlp_dropout", "position_embedding_type"),
    *("reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction"),
)
_OF_NOMIC_BERT = (
    *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "n_positions", "pad_vocab_size_multiple"),
    *("parallel_block_tied_norm", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    "use_xentropy",
)
_NOTES_OF = {
    "nomic_bert": _OF_NOMIC_BERT,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _OF_LFM2),
    "distilbert": ("qa_dropout", "seq_classif_dropout", "tie_weights_"),
    "modernbert": _OF_MODERNBERT,
}


def _refuse_unknown(config: Mapping[str, Any], family: str) -> None:
    """Raise InputError for a key that is in no table: it may state other mathematics, and nobody would notice.

    Keys that begin with an underscore are allowed, and those that state nothing: null, false, 0 or an empty value.
    """
    known = {*KEYS[family], *FIXED[family], *_NOTES_OF.get(family, ()), *_FOREIGN, *_EXPERTS}
    for name, value in config.items():
        if value and not name.startswith("_") and name not in known | IGNORED | READ_APART | _NOTES | {"model_type"}:
            raise InputError(
                f"{name} {shown(value)} is a key that is not known of this family ({family}): if it changes nothing, "
                "remove it from config.json"
            )


def read_keys(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The value of every key in `KEYS` of a family: the stated value, or transformers' default.

    Raises:
        InputError: A value has the wrong type or is not supported; the message names the key.
    """
    config = _with_present_names(config, family)
    refuse_unsupported(config, family)
    _refuse_unknown(config, family)
    config = _with_own_name_of_experts(config, family)
    return {name: _value(config, name, key) for name, key in KEYS[family].items()}


def _with_present_names(config: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """The values of a `config.json` by the names that keys have now.

    Raises:
        InputError: A key contradicts another one of which it is the earlier name.
    """
    names = {earlier: now for earlier, now in _EARLIER_NAMES.get(family, {}).items() if earlier in config}
    for earlier, now in names.items():
        if now in config and config[now] != config[earlier]:
            raise InputError(f"{earlier} {shown(config[earlier])} contradicts {now} {shown(config[now])}")
    kept = {name: value for name, value in config.items() if name not in names}
    return kept | {now: config[earlier] for earlier, now in names.items()}


def _value(config: Mapping[str, Any], name: str, key: Key) -> Any:
    value = config.get(name, key.default)
    if value is None and (key.nullable or name not in config):
        return None
    if key.kind == "count":
        require_positive(name, value)
    check, words = _CHECKS[key.kind]
    if not check(value):
        raise InputError(f"{name} must be {words}, not {shown(value)}")
    return value


def refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    """Raise InputError for a key whose value means a computation that batchgen does not support."""
    keys = KEYS[family]
    exempt = _NOT_FOREIGN.get(family, ())
    foreign = {name: known for name, known in _FOREIGN.items() if name not in keys and name not in exempt}
    for name, known in {**foreign, **FIXED[family]}.items():
        if name in config and not any(_equal(config[name], value) for value in known):
            raise InputError(
                f"{name} {shown(config[name])} is not supported for this family ({family}); supported: "
                f"{', '.join(map(shown, known))}"
            )


def _equal(stated: Any, value: Any) -> bool:
    """True for equal values; true and false equal no number."""
    return stated is value if isinstance(value, bool) else bool(stated == value)


def _with_own_name_of_experts(config: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """The values of a `config.json`, with the number of experts under the family's own key.

    Versions of transformers use different keys for it.
    """
    if (own := next((name for name in _EXPERTS if name in KEYS[family]), None)) is None:
        return config
    (other,) = set(_EXPERTS) - {own}
    if other not in config:
        return config
    if own not in config and family != "qwen2_moe":  # transformers does not read the other name of this family
        require_positive(other, config[other])
        return {**config, own: config[other]}
    if config[other] != (count := config.get(own, KEYS[family][own].default)):
        raise InputError(f"{other} {shown(config[other])} contradicts {own} {shown(count)}")
    return config
