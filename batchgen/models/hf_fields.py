"""What the keys of a `config.json` mean, family by family. No file is read here, and no torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError
from batchgen.models.quantization import INT8_CODES, MXFP4, describe, read_scheme
from batchgen.models.rope import RopeConfig

ARCHITECTURES = {
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
# Families with norms around attention and MLP, whose checkpoints hold the weights of norms less one.
GEMMA = ("gemma2", "gemma3")
# Families with a mixture of experts: how many where a config.json does not say, and what it calls the width of each.
MIXTURES = {
    "mixtral": (8, "intermediate_size"),
    "qwen2_moe": (60, "moe_intermediate_size"),
    "qwen3_moe": (128, "moe_intermediate_size"),
    "gpt_oss": (128, "intermediate_size"),
}
QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe")
_MODEL_TYPES = {"gemma3": "gemma3_text"}  # where model_type is not the family
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SWIGLU_OAI = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # gpt-oss's gate
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# What a config.json that leaves a key out means, where the families differ.
_GEMMA_DEFAULTS = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "opt": {"max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 2},
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None},
    "qwen3": {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None, "head_dim": 128},
    "gemma2": {
        **_GEMMA_DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "phi3": {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000, "rms_norm_eps": 1e-5},
    "mixtral": {
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "gemma3": {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "vocab_size": 262208},
}


def refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None and quantization != {}:
        scheme = read_scheme(quantization)
        of_mixture = family in MIXTURES and scheme.layout == INT8_CODES
        if of_mixture or (scheme.layout == MXFP4) != (family == "gpt_oss"):
            raise InputError(f"{family} checkpoints in {describe(scheme)} are not supported: take one in bfloat16")
    if family == "opt" and not config.get("layer_norm_elementwise_affine", True):
        raise InputError("OPT without layer_norm_elementwise_affine is not supported")
    if config.get("use_bidirectional_attention"):
        raise InputError("models that attend in both directions (use_bidirectional_attention) are not supported")


def read_heads(config: Mapping[str, Any], family: str, hidden: int) -> tuple[int, int, int]:
    """(query heads, key/value heads, head_dim)."""
    heads = require_int(config, "num_attention_heads")
    opt = family == "opt"
    kv_heads = heads if opt else get_or(config, "num_key_value_heads", heads)
    head_dim = None if opt else get_or(config, "head_dim", DEFAULTS[family].get("head_dim"))
    if head_dim is None:
        if hidden % heads:
            raise InputError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
        head_dim = hidden // heads
    return heads, kv_heads, head_dim


def read_activation(config: Mapping[str, Any], family: str) -> str:
    if family == "gpt_oss":
        for name, known in _SWIGLU_OAI.items():
            if get_or(config, name, known) != known:
                raise InputError(f"{name} {config[name]!r} is not supported; supported: {known}")
        return "swiglu_oai"
    name, default = {"opt": ("activation_function", "relu")}.get(family, ("hidden_act", "silu"))
    if family in GEMMA:
        name, default = "hidden_activation", "gelu_pytorch_tanh"
    activation = get_or(config, name, default)
    if activation not in _ACTIVATIONS:
        raise InputError(f"activation {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def read_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not names:  # some configs state the model type only
        types = {name: _MODEL_TYPES.get(family, family) for name, family in ARCHITECTURES.items()}
        names = [name for name, model_type in types.items() if model_type == config.get("model_type")]
        names = names or [f"model_type {config.get('model_type')!r}"]
    if names[0] not in ARCHITECTURES:
        raise InputError(f"architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return names[0]


def read_mlps(config: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """The fields of a ModelConfig that say which MLPs layers have, and how wide they are."""
    if family not in MIXTURES:
        return {"intermediate_size": require_int(config, "ffn_dim" if family == "opt" else "intermediate_size")}
    default_count, width = MIXTURES[family]
    # Under either name, by the version of transformers that wrote it.
    count = get_or(config, "num_experts", get_or(config, "num_local_experts", default_count))
    require_positive("num_experts", count)
    dense = _dense_layers(config, layers) if family in QWEN_MIXTURES else ()
    if len(dense) == layers:  # no mixture at all
        return {"intermediate_size": require_int(config, "intermediate_size")}
    return {
        "intermediate_size": require_int(config, width),
        "num_experts": count,
        "experts_per_token": require_int(config, "num_experts_per_tok"),
        "norm_topk": bool(config.get("norm_topk_prob")),
        "shared_expert_size": require_int(config, "shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
        "dense_layers": dense,
        "dense_size": require_int(config, "intermediate_size") if dense else 0,
    }


def _dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers with one MLP in place of experts: those named, and all but every `decoder_sparse_step`-th."""
    named, step = get_or(config, "mlp_only_layers", []), get_or(config, "decoder_sparse_step", 1)
    require_positive("decoder_sparse_step", step)
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        raise InputError(f"mlp_only_layers must be a list of layers, not {named!r}")
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def read_query_scale(config: Mapping[str, Any]) -> float:
    """Gemma's, of queries."""
    if not (scalar := float(config["query_pre_attn_scalar"])) > 0:
        raise InputError(f"query_pre_attn_scalar must be above 0, and is {scalar}")
    return scalar**-0.5


def read_ropes(config: Mapping[str, Any], family: str, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary positions of layers, and where they differ those of layers with a window."""
    params = config.get("rope_parameters") or {}
    if family == "phi3":
        return _read_phi3_rope(config, params or config.get("rope_scaling") or {}, max_position), None
    if family == "gpt_oss":
        params = params or config.get("rope_scaling") or _GPT_OSS_ROPE
    if family != "gemma3":
        return _read_rope(config, params or config.get("rope_scaling") or {}, max_position), None
    everywhere, local = params.get("full_attention"), params.get("sliding_attention")
    if everywhere is None:  # as version 4 spelt them
        everywhere = {"rope_theta": config.get("rope_theta", 1e6), **(params or config.get("rope_scaling") or {})}
    if local is None:
        local = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    return _read_rope(config, everywhere, max_position), _read_rope(config, local, max_position)


def _read_rope(config: Mapping[str, Any], params: Mapping[str, Any], max_position: int) -> RopeConfig:
    if any(isinstance(value, Mapping) for value in params.values()):
        raise InputError("rope parameters that differ between layer types are not supported")
    if get_or(params, "partial_rotary_factor", get_or(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise InputError("models that rotate part of each head (partial_rotary_factor) are not supported")
    kind = get_or(params, "rope_type", get_or(params, "type", "default"))
    original = None
    if kind in ("llama3", "yarn"):
        original = get_or(params, "original_max_position_embeddings", max_position)
        original = get_or(config, "original_max_position_embeddings", original)
    if kind in ("linear", "llama3") and not params.get("factor"):
        raise InputError(f"rope type {kind!r} needs a factor")
    factor = get_or(params, "factor", max_position / original if kind == "yarn" else 1.0)
    optional = ("attention_factor", "mscale", "mscale_all_dim", "truncate", "beta_fast", "beta_slow")
    optional += ("low_freq_factor", "high_freq_factor")
    return RopeConfig(
        theta=float(get_or(params, "rope_theta", get_or(config, "rope_theta", 10000.0))),
        kind=kind,
        factor=float(factor),
        original_max_position=original,
        **{name: params[name] for name in optional if params.get(name) is not None},
    )


def _read_phi3_rope(config: Mapping[str, Any], params: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Of a part of each head, and perhaps with LongRoPE's factors."""
    part = get_or(params, "partial_rotary_factor", get_or(config, "partial_rotary_factor", 1.0))
    heads, hidden = require_int(config, "num_attention_heads"), require_int(config, "hidden_size")
    head_dim = get_or(config, "head_dim", hidden // heads)
    kind = get_or(params, "rope_type", get_or(params, "type", "default"))
    fields: dict[str, Any] = {}
    if kind in ("su", "yarn", "longrope"):  # its earlier names
        original = get_or(params, "original_max_position_embeddings", max_position)
        original = get_or(config, "original_max_position_embeddings", original)
        fields = {
            "kind": "longrope",
            "factor": float(get_or(params, "factor", max_position / original)),
            "original_max_position": original,
            "attention_factor": params.get("attention_factor"),
            "short_factors": tuple(params["short_factor"]) if params.get("short_factor") else None,
            "long_factors": tuple(params["long_factor"]) if params.get("long_factor") else None,
        }
    elif kind != "default":
        raise InputError(f"rope type {kind!r} of Phi-3 is not supported; supported: default, longrope")
    rotated = None if part == 1 else int(head_dim * part)
    theta = float(get_or(params, "rope_theta", get_or(config, "rope_theta", 10000.0)))
    return RopeConfig(theta=theta, rotated=rotated, **fields)


def read_windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    if family in ("opt", "llama"):
        return (None,) * layers
    types = config.get("layer_types")
    if family in ("phi3", "mixtral"):
        return (config.get("sliding_window"),) * layers
    if family == "qwen3_moe":
        return (config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,) * layers
    if family == "mistral":
        if types and set(types) != {"sliding_attention"} and set(types) != {"full_attention"}:
            raise InputError("MistralForCausalLM with layer_types that differ is not supported")
        return (config.get("sliding_window", 4096),) * layers
    always = family in GEMMA or family == "gpt_oss"
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", always) else None
    if types is None and family == "gpt_oss":
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if types is None and family in GEMMA:
        every = config.get("sliding_window_pattern", 6) if family == "gemma3" else 2
        types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if types is None and family == "qwen2_moe":
        last = config.get("max_window_layers", 28)
        types = ["full_attention" if layer % 2 or layer >= last else "sliding_attention" for layer in range(layers)]
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if window is None and always and "sliding_attention" in types:
        raise InputError("layers with sliding attention need a sliding_window")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise InputError(f"layer type {sorted(unknown)[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """The ids in `values`, flattened, each once, in order."""
    lists = [value if isinstance(value, list) else [value] for value in values if value is not None]
    return tuple(dict.fromkeys(i for ids in lists for i in ids))


def get_or(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value, or the default where the key is absent or null."""
    value = config.get(key)
    return default if value is None else value


def require_int(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise InputError(f"the model's configuration has no {key!r}")
    require_positive(key, config[key])
    return config[key]


def require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
