"""What a GGUF's key-value pairs and the names of its tensors mean, family by family. No file is read here, and no torch is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchgen.core.dtypes import GGUF_FORMATS
from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.headers import TensorInfo
from batchgen.models.hf_fields import ARCHITECTURES, get_or, require_int, token_ids
from batchgen.models.rope import RopeConfig

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
_LLAMA_MIXTURE = "MixtralForCausalLM"  # of architecture "llama" too, with experts
# Whether the weights of the experts chosen are made to add up to 1, where the file does not say.
_NORM_TOPK = {"mixtral": True, "qwen2_moe": False, "qwen3_moe": True, "gpt_oss": True}
# Role of a matrix (`layouts.role`) -> its name in a layer; with experts gate, up and down have "_exps" behind theirs.
_MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "shared.gate": "ffn_gate_shexp",
    "shared.up": "ffn_up_shexp",
    "shared.down": "ffn_down_shexp",
}
_VECTORS = {
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_inp_shexp",
}
_ENDS = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)")


def gguf_name(config: ModelConfig, part: str, layer: int) -> tuple[str, int | None]:
    """What a part of a layout is called in the file, and of which expert it is; None: of none.

    part: of `layouts.layout_of` by expert, "experts.3.gate.weight".
    """
    stem, suffix = part.rsplit(".", 1)
    if suffix == "sinks":  # "attention.{layer}"
        return f"blk.{stem.split('.')[1]}.attn_sinks.weight", None
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{suffix}", None
    if of_expert := _EXPERT.fullmatch(stem):
        return f"blk.{layer}.{_MATRICES[of_expert[2]]}_exps.{suffix}", int(of_expert[1])
    if stem == "post_norm" and config.family == "gpt_oss":
        return f"blk.{layer}.post_attention_norm.{suffix}", None
    return f"blk.{layer}.{(_MATRICES | _VECTORS)[stem]}.{suffix}", None


def config_of_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    dtype: str,
    rope_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """The configuration of a GGUF.

    Args:
        metadata: Its key-value pairs.
        tensors: Those that it has.
        dtype: That it states.
        rope_factors: The values of its `rope_freqs.weight`, where it has one.

    Raises:
        InputError: The model is not supported, or something is missing.
    """
    arch = metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise InputError(f"GGUF architecture {arch!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}")
    fields = {k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")}
    experts = get_or(fields, "expert_count", 0)
    architecture = _LLAMA_MIXTURE if arch == "llama" and experts else GGUF_ARCHITECTURES[arch]
    family = ARCHITECTURES[architecture]
    if bool(experts) != (family in _NORM_TOPK):
        raise InputError(f"a GGUF of architecture {arch!r} with {experts} experts (expert_count) is not supported")
    if "token_embd.weight" not in tensors:
        raise InputError("the GGUF has no tensor token_embd.weight")
    hidden = require_int(fields, "embedding_length")
    heads = require_int(fields, "attention.head_count")
    layers = require_int(fields, "block_count")
    if layers > len(tensors):
        raise InputError(
            f"the GGUF states {layers:,} layers (block_count) and has {len(tensors):,} tensors: fetch it again"
        )
    head_dim = get_or(fields, "attention.key_length", hidden // heads)
    if fields.get("attention.value_length", head_dim) != head_dim:
        raise InputError("GGUFs whose key and value heads differ in size are not supported")
    if fields.get("rope.dimension_count", head_dim) != head_dim:
        raise InputError("GGUFs that rotate part of each head (rope.dimension_count) are not supported")
    context, gpt_oss = require_int(fields, "context_length"), family == "gpt_oss"
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    layer_formats, end_formats = _formats(tensors, layers)
    return ModelConfig(
        architecture=architecture,
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        **_mlps(fields, family, tensors, layers),
        num_heads=heads,
        num_kv_heads=get_or(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=tensors["token_embd.weight"].shape[0],
        max_position=context,
        norm="rms",
        norm_eps=float(fields.get("attention.layer_norm_rms_epsilon", 1e-6)),
        activation="swiglu_oai" if gpt_oss else "silu",
        gated_mlp=True,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias=gpt_oss or "blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied_embeddings="output.weight" not in tensors,
        rope=_rope(fields, family, context, rope_factors),
        windows=_windows(fields, family, layers),
        embed_size=hidden,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=token_ids(*ends),
        dtype=dtype,
        router_bias=gpt_oss,
        sinks=gpt_oss,
        layer_formats=layer_formats,
        end_formats=end_formats,
    )


def _mlps(fields: Mapping[str, Any], family: str, tensors: Mapping[str, TensorInfo], layers: int) -> dict[str, Any]:
    """The fields of a ModelConfig that say which MLPs layers have, and how wide they are."""
    if family not in _NORM_TOPK:
        return {"intermediate_size": require_int(fields, "feed_forward_length")}
    if fields.get("expert_gating_func", 1) not in (0, 1, 4) or fields.get("expert_weights_scale", 1.0) not in (
        0.0,
        1.0,
    ):
        raise InputError(
            "GGUFs whose experts are not chosen by a softmax (expert_gating_func), or scaled, are not supported"
        )
    width = "feed_forward_length" if family == "mixtral" else "expert_feed_forward_length"
    shared = "ffn_gate_shexp" if family == "qwen2_moe" else None
    # A layer of one MLP has neither a router nor experts.
    dense = tuple(
        j
        for j in range(layers)
        if f"blk.{j}.ffn_gate.weight" in tensors and f"blk.{j}.ffn_gate_inp.weight" not in tensors
    )
    return {
        "intermediate_size": require_int(fields, width) if width in fields else _rows(tensors, "ffn_gate_exps"),
        "num_experts": require_int(fields, "expert_count"),
        "experts_per_token": require_int(fields, "expert_used_count"),
        "norm_topk": bool(get_or(fields, "expert_weights_norm", _NORM_TOPK[family])),
        "shared_expert_size": get_or(fields, "expert_shared_feed_forward_length", _rows(tensors, shared))
        if shared
        else 0,
        "dense_layers": dense,
        "dense_size": require_int(fields, "feed_forward_length") if dense else 0,
    }


def _rows(tensors: Mapping[str, TensorInfo], name: str) -> int:
    """Rows of a layer's matrix, where older files do not state them. Raises InputError where no layer has it."""
    found = next((info for full, info in tensors.items() if full.endswith(f".{name}.weight")), None)
    if found is None or len(found.shape) < 2:
        raise InputError(f"the GGUF has no tensor blk.0.{name}.weight: it is incomplete")
    return found.shape[-2]


def _windows(fields: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = fields.get("attention.sliding_window") or None
    if family == "gpt_oss":  # every second layer sees all
        return tuple(None if layer % 2 else window for layer in range(layers))
    return (window,) * layers


def _rope(fields: Mapping[str, Any], family: str, context: int, factors: tuple[float, ...] | None) -> RopeConfig:
    linear = fields.get("rope.scale_linear")  # how older files spell linear scaling
    kind = fields.get("rope.scaling.type", "linear" if linear else "none")
    rope = RopeConfig(
        theta=float(fields.get("rope.freq_base", 10000.0)),
        kind="default" if kind == "none" else kind,
        factor=float(fields.get("rope.scaling.factor") or linear or 1.0) if kind != "none" else 1.0,
        original_max_position=fields.get("rope.scaling.original_context_length", context),
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
        truncate=family != "gpt_oss",
        factors=factors,
    )
    extra = fields.get("rope.scaling.attn_factor")  # GGUF's multiplies yarn's own scaling
    if rope.kind != "yarn" or extra is None:
        return rope
    return RopeConfig(**{**rope.__dict__, "attention_factor": extra * rope.attention_scaling()})


# Formats.


def _formats(
    tensors: Mapping[str, TensorInfo], layers: int
) -> tuple[tuple[tuple[tuple[str, str], ...], ...], tuple[tuple[str, str], ...]]:
    """`ModelConfig.layer_formats` and `end_formats`."""
    of_layers = matrix_formats(tensors, layers)
    of_ends = {part: _format(tensors.get(f"{_ENDS[part]}.weight")) for part in ("embed", "lm_head")}
    ends = tuple((part, found) for part, found in of_ends.items() if found)
    alike = len({found for formats in of_layers for found in formats.values()}) <= 1
    if alike:
        return (), ends
    return tuple(tuple((r, found) for r, found in formats.items() if found) for formats in of_layers), ends


def matrix_formats(tensors: Mapping[str, TensorInfo], layers: int) -> list[dict[str, str]]:
    """For each layer the format of each matrix that it has, by role; "": it is in numbers, or in blocks that no kernel knows."""
    found = []
    for layer in range(layers):
        names = {
            role: [name for name in (f"blk.{layer}.{own}.weight", f"blk.{layer}.{own}_exps.weight") if name in tensors]
            for role, own in _MATRICES.items()
        }
        found.append({role: _format(tensors[own[0]]) for role, own in names.items() if own})
    return found


def _format(info: TensorInfo | None) -> str:
    kind = info.dtype.lower() if info else ""
    return kind if kind in GGUF_FORMATS else ""
