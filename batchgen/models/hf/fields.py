"""The meaning of the keys of a `config.json`, for each family.

No file is read here, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError
from batchgen.models.config import Activation, NormPlace
from batchgen.models.families import (
    ARCHITECTURES,
    BERTS,
    DELTA_NETS,
    ENCODERS,
    GEMMA,
    GEMMA4,
    GRANITE_MIXTURES,
    LEARNED_POSITIONS,
    MIXTURES,
    OUTPUT_NORMS,
    ROBERTAS,
    ROTARY_BERTS,
    SHORT_CONVS,
)
from batchgen.models.formats.schemes import read_scheme
from batchgen.models.hf.keys import KEYS, OWN_NAMES, read_keys, refuse_unsupported
from batchgen.models.hf.wrappers import OUTER_KEYS
from batchgen.models.nearest import nearest_family, not_a_decoder
from batchgen.models.scales import scales_of
from batchgen.models.state_layers import DeltaNet, ShortConv
from batchgen.models.stated_numbers import is_count, require_positive, shown

# Models that take images too, whose text model alone is read.
_WITH_IMAGES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Architecture -> model_type, where that is not the family.
_MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Activations that linear layers end with, and those of a gate, which are one with the product that follows.
_ALONE, _GATES = ("relu", "gelu", "gelu_tanh"), ("silu", "gelu", "gelu_tanh")
_EPSILONS = ("norm_eps", "rms_norm_eps", "layer_norm_eps")  # names of what norms add
_GEMMA4_PERIOD = 6  # layers, of which the last one has no window


def read_config_keys(config: Mapping[str, Any], architecture: str) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The keys of the text model in a `config.json`, and their values with defaults.

    Args:
        config: Values of `config.json`.
        architecture: Name of the model's class in transformers.

    Returns:
        The stated keys; the values of all keys that are read.

    Raises:
        InputError: A value has the wrong type or is not supported; the message names the key.
    """
    family = family_of(architecture)
    if architecture in _WITH_IMAGES:
        config = _text_part(config, family)
    _refuse_quantization(config.get("quantization_config"), family)
    names = OWN_NAMES.get(family, {})
    return config, {names.get(name, name): value for name, value in read_keys(config, family).items()}


def family_of(architecture: str) -> str:
    """The family of an architecture, which is known."""
    return ENCODERS.get(architecture) or ARCHITECTURES[architecture]


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a `config.json` states; None: it states none. Raises InputError for an unsupported one."""
    text = config.get("text_config")
    for keys in (config, text if isinstance(text, Mapping) else {}):
        for name in ("dtype", "torch_dtype"):
            if (stated := keys.get(name)) is None:
                continue
            if not isinstance(stated, str):
                raise InputError(f"{name} must be a name, not {shown(stated)}")
            return stated.removeprefix("torch.")
    return None


def _text_part(config: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """The values of `text_config`, with those that are stated outside of it.

    Raises:
        InputError: A value inside contradicts one outside.
    """
    text = {} if config.get("text_config") is None else config["text_config"]
    if not isinstance(text, Mapping):
        raise InputError(f"text_config must be an object, not {shown(text)}")
    refuse_unsupported(config, family)
    if family == "gemma3" and text.get("final_logit_softcapping") is not None:
        raise InputError(
            "final_logit_softcapping in text_config is not supported: transformers does not apply it there"
        )
    defaults = {name: key.default for name, key in KEYS[family].items() if name not in ("bos_token_id", "eos_token_id")}
    defaults |= dict.fromkeys(("rope_scaling", "rope_parameters", "partial_rotary_factor"))
    for name, default in defaults.items():
        inside = text.get(name, default)
        # In the outer configuration ties have the default of the text model's own.
        outside = config.get(name, default if name == "tie_word_embeddings" else inside)
        if outside != inside:
            raise InputError(f"{name} {shown(outside)} contradicts that of text_config, {shown(inside)}")
    ends = token_ids(config.get("eos_token_id"), text.get("eos_token_id", KEYS[family]["eos_token_id"].default))
    return {**text, **{name: config[name] for name in OUTER_KEYS if name in config}, "eos_token_id": list(ends)}


def _refuse_quantization(quantization: Any, family: str) -> None:
    if quantization is None or quantization == {}:
        return
    scheme = read_scheme(quantization)
    if not scheme.supports(family):
        raise InputError(f"{family} checkpoints in {scheme.describe()} are not supported: take one in bfloat16")


def read_heads(keys: Mapping[str, Any], family: str) -> tuple[int, int, int]:
    """The number of query heads, the number of key and value heads, and the number of values in one head."""
    heads, hidden = keys["num_attention_heads"], keys["hidden_size"]
    kv_heads, head_dim = (keys.get(name) for name in ("num_key_value_heads", "head_dim"))
    if head_dim is None:
        if hidden % heads:
            raise InputError(f"hidden_size {hidden} is not a multiple of {heads} attention heads: state head_dim")
        head_dim = hidden // heads
    if family == "olmoe" and head_dim * heads != hidden:
        raise InputError(f"head_dim {head_dim} of {heads} heads does not fit hidden_size {hidden}, as olmoe needs it")
    return heads, kv_heads or heads, head_dim


def read_activation(keys: Mapping[str, Any], family: str) -> Activation:
    if family == "gpt_oss":
        return "swiglu_oai"
    if family in SHORT_CONVS:
        return "silu"
    names = ("activation_function", "hidden_activation", "hidden_act")
    name, stated = next((name, keys[name]) for name in names if name in keys)
    computed: tuple[str, ...] = _ALONE if family in LEARNED_POSITIONS else _GATES
    if family in DELTA_NETS:  # the convolution before the recurrence has it too
        computed = ("silu",)
    if keys.get("hidden_size_per_layer_input"):  # the gate of Gemma 4's per-layer embeddings has it too
        computed = ("gelu_tanh",)
    known = {name: activation for name, activation in _ACTIVATIONS.items() if activation in computed}
    if stated not in known:
        raise InputError(f"{name} {stated!r} is not supported for this family; supported: {', '.join(known)}")
    return known[stated]


def has_layers_alone(config: Mapping[str, Any]) -> bool:
    """Tell whether the class that a `config.json` names has a decoder's layers without an output matrix."""
    stated = config.get("architectures") or []
    return bool(stated) and stated[0] not in ARCHITECTURES


def _with_head(name: str) -> str:
    """The class with an output matrix that has the layers of another class: Qwen3ForCausalLM for Qwen3Model."""
    for end in ("TextModel", "Model", "ForSequenceClassification"):
        if name not in ARCHITECTURES and name.endswith(end) and f"{name[: -len(end)]}ForCausalLM" in ARCHITECTURES:
            return f"{name[: -len(end)]}ForCausalLM"
    return name


def read_architecture(config: Mapping[str, Any]) -> str:
    """The class whose layers a model has, as transformers names it; of a decoder the one with an output matrix."""
    stated, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        raise InputError(f"architectures must be a list of names, not {shown(stated)}")
    families = {**ARCHITECTURES, **ENCODERS}
    types = {name: _MODEL_TYPES.get(name, family) for name, family in families.items()}
    # Some configs state the model type only.
    names = list(map(_with_head, stated)) or [name for name, known in types.items() if known == model_type]
    if not names and model_type is None:
        raise InputError("neither architectures nor model_type is stated: take the model's own config.json")
    if not names or names[0] not in families:
        name = f"architecture {names[0]}" if names else f"model_type {shown(model_type)}"
        raise InputError(f"{name} is not supported; {_instead(config, names[0] if names else str(model_type))}")
    architecture: str = names[0]
    if model_type not in (None, types[architecture]):
        raise InputError(
            f"model_type {shown(model_type)} contradicts architecture {architecture}, which is "
            f"{types[architecture]!r}: take the model's own config.json, or a GGUF of it"
        )
    return architecture


def _instead(config: Mapping[str, Any], name: str) -> str:
    """Words for what can be taken in place of a model that is not supported.

    Args:
        config: Values of `config.json`.
        name: Name of the model's class in transformers, or its `model_type`.
    """
    text = config.get("text_config", config.get("llm_config"))  # the latter in InternVL's files
    text_type = text.get("model_type") if isinstance(text, Mapping) else None
    families = {_MODEL_TYPES.get(known, family): family for known, family in ARCHITECTURES.items()}
    of_text = families.get(text_type) if isinstance(text_type, str) else None
    family = of_text or nearest_family(name, families.values())
    nearest = next(known for known, each in ARCHITECTURES.items() if each == family)
    words = f"its text model is supported ({text_type}): take a GGUF of it; " if of_text else not_a_decoder(name)
    return f"{words}the nearest that is: {nearest} ({family}); all: docs/getting_started.md"


def read_norm_place(keys: Mapping[str, Any], family: str) -> NormPlace:
    if family in (*BERTS, *ROTARY_BERTS) or not keys.get("do_layer_norm_before", True):
        return "sums"
    return "both" if family in (*GEMMA, *GEMMA4) else "outputs" if family in OUTPUT_NORMS else "inputs"


def read_mlps(keys: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """The fields of a ModelConfig that describe the kinds and widths of MLPs."""
    if family == "lfm2":
        return {"intermediate_size": _adjusted_width(keys)}
    if family in GEMMA4:
        return _gemma4_mlps(keys, layers)
    if family not in MIXTURES:
        return {"intermediate_size": keys["ffn_dim" if family == "opt" else "intermediate_size"]}
    if family in GRANITE_MIXTURES:
        return _granite_mlps(keys)
    count, width = MIXTURES[family]
    dense = _dense_layers(keys, layers)
    if len(dense) == layers:  # no mixture at all
        return {"intermediate_size": keys["intermediate_size"]}
    return {
        "intermediate_size": keys[width],
        "num_experts": keys[count],
        "experts_per_token": keys.get("num_experts_per_tok", 2),  # the one number that Phi-3.5-MoE is computed with
        "norm_topk": keys.get("norm_topk_prob", family != "phimoe"),
        "sparsemixer_jitter": keys.get("router_jitter_noise"),
        "shared_expert_size": keys.get("shared_expert_intermediate_size", 0),
        "dense_layers": dense,
        "dense_size": keys["intermediate_size"] if dense else 0,
        "router_activation": "sigmoid" if family in SHORT_CONVS else "softmax",
        "expert_bias": keys.get("use_expert_bias", False),
        "routed_scale": float(keys.get("routed_scaling_factor", 1.0)),
    }


def _adjusted_width(keys: Mapping[str, Any]) -> int:
    """The width of LFM2's MLP: two thirds of the stated one, times a factor, up to a multiple, or the stated one."""
    width: int = keys["block_ff_dim"] or keys["intermediate_size"]
    if keys["block_auto_adjust_ff_dim"]:
        multiple = keys["block_multiple_of"]
        width = -(-int(keys["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple
    return width


def _gemma4_mlps(keys: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The MLPs of Gemma 4: wider ones in layers without KV of their own, or one MLP beside experts in each layer."""
    inner, shared = keys["intermediate_size"], keys["num_kv_shared_layers"]
    is_wide = keys["use_double_wide_mlp"] and shared > 0
    if not keys.get("enable_moe_block", False):
        wide = {"dense_layers": tuple(range(max(0, layers - shared), layers)), "dense_size": 2 * inner}
        return {"intermediate_size": inner, **(wide if is_wide else {})}
    sizes = {name: keys[name] for name in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    if missing := [name for name, value in sizes.items() if value is None]:
        raise InputError(f"enable_moe_block needs {' and '.join(missing)}")
    if is_wide:
        raise InputError("use_double_wide_mlp in layers with experts (enable_moe_block) is not supported")
    return {
        "intermediate_size": sizes["moe_intermediate_size"],
        "num_experts": sizes["num_experts"],
        "experts_per_token": sizes["top_k_experts"],
        "norm_topk": True,
        "shared_expert_size": inner,
        "shared_gate": False,
        "mlp_beside_experts": True,
    }


def read_gemma4(keys: Mapping[str, Any], family: str, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """The fields of a ModelConfig that Gemma 4 alone has.

    Args:
        keys: Values of the keys in `hf.keys.KEYS`.
        family: Family of the model.
        windows: Sliding window of each layer.
    """
    if family not in GEMMA4:
        return {}
    width, keys_are_values = keys.get("hidden_size_per_layer_input", 0), keys["attention_k_eq_v"]
    if width and keys["vocab_size_per_layer_input"] != keys["vocab_size"]:
        raise InputError(
            f"vocab_size_per_layer_input {keys['vocab_size_per_layer_input']} must be vocab_size {keys['vocab_size']}"
        )
    head_dim, kv_heads = _global_heads(keys, windows)
    return {
        "global_head_dim": 0 if head_dim == keys["head_dim"] else head_dim,
        "global_kv_heads": 0 if kv_heads == keys["num_key_value_heads"] else kv_heads,
        "shared_kv_layers": keys["num_kv_shared_layers"],
        "keys_are_values": keys_are_values,
        "value_norm": True,
        "layer_scale": True,
        "per_layer_size": width,
    }


def _global_heads(keys: Mapping[str, Any], windows: tuple[int | None, ...]) -> tuple[int, int]:
    """The size of a head, and the number of key and value heads, in layers of Gemma 4 without a sliding window.

    Files that transformers has saved state them by layer, in `per_layer_config`.
    """
    by_layer = keys["per_layer_config"]
    if by_layer is None:
        kv_heads = keys["num_global_key_value_heads"] if keys["attention_k_eq_v"] else None
        return keys["global_head_dim"], kv_heads or keys["num_key_value_heads"]
    usual = {"head_dim": keys["head_dim"], "num_key_value_heads": keys["num_key_value_heads"]}
    heads: dict[bool, set[tuple[int, ...]]] = {}
    for layer, window in enumerate(windows):
        stated = by_layer.get(str(layer), {})
        if not isinstance(stated, Mapping) or set(stated) - set(usual) or not all(map(is_count, stated.values())):
            raise InputError(f"per_layer_config of layer {layer} is not supported: {shown(stated)}")
        heads.setdefault(window is None, set()).add(tuple({**usual, **stated}.values()))
    if len(heads.get(True, ())) > 1 or heads.get(False, {tuple(usual.values())}) != {tuple(usual.values())}:
        raise InputError("per_layer_config: layers of one kind whose heads differ are not supported")
    ((head_dim, kv_heads),) = heads.get(True, {tuple(usual.values())})
    return head_dim, kv_heads


def _granite_mlps(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Granite's MLPs. Without experts, its shared expert is its one MLP."""
    experts, shared = keys["num_local_experts"], keys.get("shared_intermediate_size", 0)
    if not experts:
        require_positive("shared_intermediate_size", shared)
        return {"intermediate_size": shared}
    require_positive("num_experts_per_tok", keys["num_experts_per_tok"])
    return {
        "intermediate_size": keys["intermediate_size"],
        "num_experts": experts,
        "experts_per_token": keys["num_experts_per_tok"],
        "norm_topk": True,
        "shared_expert_size": shared,
        "shared_gate": False,
    }


def _dense_layers(keys: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of layers with one MLP in a model with experts.

    They are the first `num_dense_layers`, or those that are named and all but every `decoder_sparse_step`-th.
    """
    if "decoder_sparse_step" not in keys:
        return tuple(range(min(layers, keys.get("num_dense_layers", 0))))
    named, step = set(keys["mlp_only_layers"] or ()), keys["decoder_sparse_step"]
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def read_biases(keys: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of a ModelConfig that tell which linear layers have biases."""
    if family == "opt":
        return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), keys["enable_bias"])
    if family in (*BERTS, "gte"):
        return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
    attention = keys.get("attention_bias", False)
    return {
        "qkv_bias": attention or keys.get("qkv_bias", family == "qwen2"),
        "out_bias": keys.get("attention_out_bias", attention),
        "mlp_bias": family == "gpt_oss" or keys.get("mlp_bias", False),
    }


def read_encoder(keys: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of a ModelConfig that only encoders have."""
    if family == "modernbert":
        return {"causal": False, "embed_norm": True, "bare_first_layer": True}
    if family not in (*BERTS, *ROTARY_BERTS):
        return {"causal": False} if keys.get("use_bidirectional_attention") else {}
    return {"causal": False, "embed_norm": True, "token_types": keys.get("type_vocab_size", 0)}


def read_learned_positions(keys: Mapping[str, Any], family: str) -> tuple[int, int]:
    """Number of rows of learned position embeddings before the one of position 0, and the number of positions."""
    rows: int = keys["max_position_embeddings"]
    if family == "opt":
        return 2, rows
    offset = keys["pad_token_id"] + 1 if family in ROBERTAS else 0
    return offset, rows - offset


def read_ties(keys: Mapping[str, Any]) -> bool:
    """Tell whether the token embedding is also the output matrix; LFM2's files have a key of their own for it."""
    own = keys.get("tie_embedding")
    tied: bool = keys["tie_word_embeddings"] if own is None else own
    return tied


def read_scales(keys: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of a ModelConfig that scale embeddings, hidden states and logits, and what norms add."""
    eps = next((keys[name] for name in _EPSILONS if name in keys), 1e-12 if family == "distilbert" else 1e-5)
    return scales_of(
        float(eps),
        embedding=keys["hidden_size"] ** 0.5
        if family in (*GEMMA, *GEMMA4)
        else float(keys.get("embedding_multiplier", 1.0)),
        residual=float(keys.get("residual_multiplier", 1.0)),
        logits_divisor=float(keys.get("logits_scaling", 1.0)),
    )


def read_unrotated_layers(keys: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the layers of SmolLM3 and Granite 4 that do not rotate queries and keys."""
    if "position_embedding_type" in keys:
        kind = keys["position_embedding_type"]
        if kind not in (None, "rope", "nope"):
            raise InputError(f"position_embedding_type {shown(kind)} is not supported; supported: rope, nope, null")
        return () if kind == "rope" else tuple(range(layers))
    if "no_rope_layers" not in keys:
        return ()
    stated, interval = keys["no_rope_layers"], keys["no_rope_layer_interval"]
    rotated = [(layer + 1) % interval != 0 for layer in range(layers)] if stated is None else stated
    if len(rotated) < layers or any(value not in (0, 1) for value in rotated):
        raise InputError(f"no_rope_layers must have a 0 or a 1 for each of {layers} layers, not {shown(stated)}")
    return tuple(layer for layer in range(layers) if not rotated[layer])


def read_query_scale(keys: Mapping[str, Any], family: str) -> float | None:
    """The factor of queries of Gemma and Granite; None: head_dim ** -0.5."""
    if family in GEMMA4:
        return 1.0
    if "attention_multiplier" in keys:
        return float(keys["attention_multiplier"])
    return keys["query_pre_attn_scalar"] ** -0.5 if "query_pre_attn_scalar" in keys else None


def read_windows(
    config: Mapping[str, Any], keys: Mapping[str, Any], family: str, layers: int
) -> tuple[int | None, ...]:
    """The sliding window of each layer, in positions; None: the layer has no window."""
    window = keys.get("sliding_window") if keys.get("use_sliding_window", True) else None
    if window is not None and keys.get("use_bidirectional_attention"):  # of both sides together
        window = window // 2 + 1
    if family == "modernbert":
        window = keys["local_attention"] // 2 + 1
    types = keys.get("layer_types")
    types = _layer_types(keys, family, layers, window) if types is None else types
    types = ["full_attention" if kind == "attention" else kind for kind in types]  # as Granite 4 has it
    if family not in _OF_LAYER_TYPES and (stated := config.get("layer_types")) not in (None, types):
        raise InputError(
            f"layer_types {shown(stated)} contradicts sliding_window {shown(window)}, which holds for all layers"
        )
    mixers = {_STATE_TYPES.get(family, "sliding_attention")}
    if unknown := sorted(set(types) - {*mixers, "full_attention"}):
        if family == "granitemoehybrid":
            raise InputError(
                f"layer_types: layers of Mamba ({unknown[0]!r}) are not supported; supported of Granite 4: models "
                "whose layers all have attention"
            )
        raise InputError(f"layer_types: layer type {unknown[0]!r} is not supported")
    if family in GEMMA4:  # whatever is stated
        types = [*types[:-1], "full_attention"]
    if window is None and "sliding_attention" in types:
        raise InputError("layer_types: layers with sliding attention need a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_states(keys: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """The fields of a ModelConfig that describe its state layers."""
    if family not in _STATE_TYPES:
        return {}
    types = keys["layer_types"] or _layer_types(keys, family, layers, None)
    states = tuple(layer for layer, kind in enumerate(types) if kind == _STATE_TYPES[family])
    if len(states) == layers:
        raise InputError(f"layer_types: at least one of {layers} layers (num_hidden_layers) must have full_attention")
    if family in SHORT_CONVS:
        conv = ShortConv(keys["hidden_size"], keys["conv_L_cache"], keys["conv_bias"])
        return {"state": conv if states else None, "state_layers": states}
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    shape = DeltaNet(*(keys[f"linear_{name}"] for name in names))
    return {"output_gate": True, "state": shape if states else None, "state_layers": states}


# Family -> the type of its state layers.
_STATE_TYPES = dict.fromkeys(DELTA_NETS, "linear_attention") | dict.fromkeys(SHORT_CONVS, "conv")
_OF_LAYER_TYPES = tuple(family for family, keys in KEYS.items() if "layer_types" in keys)


def _layer_types(keys: Mapping[str, Any], family: str, layers: int, window: int | None) -> list[str]:
    """The type of each layer's attention, for a file that does not state it."""

    def has_window(layer: int) -> bool:
        if family in ("gemma2", "gpt_oss"):
            return layer % 2 == 0
        if family == "modernbert":
            return bool(layer % keys["global_attn_every_n_layers"])
        if family in GEMMA4:
            return bool((layer + 1) % _GEMMA4_PERIOD)
        if family == "gemma3":
            return bool((layer + 1) % keys["sliding_window_pattern"])
        if family == "olmo3":
            return (layer + 1) % 4 != 0
        if family == "smollm3":  # windows are of the layers without rotary positions
            return window is not None and layer in read_unrotated_layers(keys, layers)
        if family == "qwen2_moe":
            return keys["use_sliding_window"] and layer % 2 == 0 and layer < keys["max_window_layers"]
        return window is not None and layer >= keys.get("max_window_layers", 0)

    if family == "lfm2_moe":
        raise InputError("layer_types must be stated: conv or full_attention for each layer")
    if family == "lfm2":
        attending = keys["full_attn_idxs"]
        return ["full_attention" if attending is None or layer in attending else "conv" for layer in range(layers)]
    if family == "granitemoehybrid":
        return ["mamba"] * layers
    if family in DELTA_NETS:
        period = keys["full_attention_interval"]
        return ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return ["sliding_attention" if has_window(layer) else "full_attention" for layer in range(layers)]


def token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """The token ids in numbers and lists of numbers: flattened, in order, without repetitions.

    Values of other types are kept: `ModelConfig` and `read_keys` refuse them by name.
    """
    lists = [value if isinstance(value, list) else [value] for value in values if value is not None]
    ids = [i for each in lists for i in each]
    return tuple(value for place, value in enumerate(ids) if value not in ids[:place])
