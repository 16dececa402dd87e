"""The meaning of a GGUF's key-value pairs and tensor names, for each family.

No file is read here, and torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.core.dtypes import GGUF_FORMATS
from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.families import (
    ARCHITECTURES,
    DELTA_NETS,
    GEMMA,
    GEMMA4,
    GRANITE_MIXTURES,
    HEAD_NORMS,
    LAYER_NORMS,
    OUTPUT_NORMS,
    PROJECTION_NORMS,
    SHORT_CONVS,
)
from batchgen.models.formats.gguf.delta_net import STATE_MATRICES, STATE_VECTORS, name_in_layer, read_states
from batchgen.models.formats.gguf.gemma4 import (
    BESIDE_EXPERTS,
    GEMMA4_SUFFIXES,
    GEMMA4_VECTORS,
    PER_LAYER_ENDS,
    PER_LAYER_MATRICES,
    read_gemma4,
    read_gemma4_mlps,
    read_gemma4_ropes,
)
from batchgen.models.formats.gguf.known_tokens import end_ids, special_id
from batchgen.models.formats.gguf.short_conv import (
    FINAL_NORM,
    SHORT_CONV_MATRICES,
    SHORT_CONV_SUFFIXES,
    SHORT_CONV_VECTORS,
    read_short_convs,
)
from batchgen.models.nearest import nearest_family, not_a_decoder
from batchgen.models.rope import RopeConfig
from batchgen.models.scales import scales_of
from batchgen.models.stated_numbers import require_positive
from batchgen.models.tensor_files.headers import TensorInfo

GGUF_ARCHITECTURES = {
    # Text models of models that take images, whose positions for images a text does not need.
    "qwen2vl": "Qwen2ForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM",
    "qwen3vlmoe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
_LLAMA_MIXTURE = "MixtralForCausalLM"  # its GGUFs have architecture "llama", and experts
_GRANITE_SHARED = "GraniteMoeSharedForCausalLM"  # its GGUFs have architecture "granitemoe", and a shared expert
_OLMO_WITH_WINDOWS = "Olmo3ForCausalLM"  # its GGUFs have architecture "olmo2", and windows
# Family -> whether the weights of the experts chosen add up to 1, where the file does not say.
_NORM_TOPK = {"mixtral": True, "qwen2_moe": False, "qwen3_moe": True, "gpt_oss": True, "olmoe": False}
_NORM_TOPK |= {"phimoe": False}
_NORM_TOPK |= dict.fromkeys((*GRANITE_MIXTURES, "qwen3_next", "qwen3_5_moe", "lfm2_moe"), True)
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
    **STATE_MATRICES,
    **SHORT_CONV_MATRICES,
    **PER_LAYER_MATRICES,
}
_VECTORS = {
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_inp_shexp",
    **STATE_VECTORS,
    **SHORT_CONV_VECTORS,
    **GEMMA4_VECTORS,
}
_OUTPUT_NORMS = {"out_norm": "post_attention_norm", "down_norm": "post_ffw_norm"}
# Matrices of Phi-3 that are one tensor, one after the other in its rows.
_FUSED = {"q": "attn_qkv", "k": "attn_qkv", "v": "attn_qkv", "gate": "ffn_up", "up": "ffn_up"}
# Layers of the models of 27B, which alone scale queries by another size than that of a head; no file says so.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
_SMOLLM3_PERIOD = 4  # layers, of which the last one does not rotate queries and keys; no file says so
_WINDOW_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma4": 6,
    "olmo3": 4,
}  # family -> layers, of which the last one sees all
_ENDS = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output", **PER_LAYER_ENDS}
_GATE_UP = "ffn_gate_up_exps"  # gate and up of all experts, one expert after the other
_EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)")


@dataclass(frozen=True)
class Place:
    """The place of a part of a layout in the tensors of a GGUF.

    Attributes:
        name: Name of the tensor.
        of: Range of the tensor's rows that are the part, and their total: (first, end, total). If `is_expert`, these
            are numbers of experts, the first dimension of the tensor. None: the part is the whole tensor.
        is_expert: Whether the part belongs to one expert.
        fused: Name of a tensor that some files have in place of `name`, and the number of the part in it: 0 for the
            first half of each expert's rows, 1 for the second one. None: no file has.
    """

    name: str
    of: tuple[int, int, int] | None = None
    is_expert: bool = False
    fused: tuple[str, int] | None = None


def place_of(config: ModelConfig, part: str, layer: int) -> Place:
    """The tensor of a GGUF that has a part of the model, and the range of its rows or experts.

    Args:
        config: Configuration of the model.
        part: Name of the part in `layouts.layout_of` with `unfused`, such as "experts.3.gate.weight".
        layer: Number of the layer; it is ignored for parts before and after the layers.
    """
    stem, suffix = part.rsplit(".", 1)
    if suffix == "sinks":  # "attention.{layer}"
        return Place(f"blk.{stem.split('.')[1]}.attn_sinks.weight")
    if stem == "final_norm" and config.family in SHORT_CONVS:
        return Place(f"{FINAL_NORM}.{suffix}")
    if stem in _ENDS:
        return Place(f"{_ENDS[stem]}.{suffix}")
    if of_expert := _EXPERT.fullmatch(stem):
        expert, which = int(of_expert[1]), of_expert[2]
        name = f"blk.{layer}.{_MATRICES[which]}_exps.{suffix}"
        halves = ("gate", "up")
        fused = (f"blk.{layer}.{_GATE_UP}.{suffix}", halves.index(which)) if which in halves else None
        return Place(name, (expert, expert + 1, config.num_experts), is_expert=True, fused=fused)
    if config.family == "phi3" and stem in _FUSED:
        return Place(f"blk.{layer}.{_FUSED[stem]}.{suffix}", _fused_rows(config, stem))
    if (other := name_in_layer(part) or (GEMMA4_SUFFIXES | SHORT_CONV_SUFFIXES).get(part)) is not None:
        return Place(f"blk.{layer}.{other}")
    if config.mlp_beside_experts and stem in BESIDE_EXPERTS:
        return Place(f"blk.{layer}.{BESIDE_EXPERTS[stem]}.{suffix}")
    if stem == "post_norm" and config.family in ("gpt_oss", "seed_oss", *DELTA_NETS):
        return Place(f"blk.{layer}.post_attention_norm.{suffix}")
    return Place(f"blk.{layer}.{(_MATRICES | _VECTORS | _OUTPUT_NORMS)[stem]}.{suffix}")


def _fused_rows(config: ModelConfig, stem: str) -> tuple[int, int, int]:
    """Rows of a matrix that Phi-3's files fuse with others, in the form of `Place.of`."""
    q, kv = config.q_size, config.kv_size
    inner = config.intermediate_size
    first, rows = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv), "gate": (0, inner), "up": (inner, inner)}[stem]
    return first, first + rows, 2 * inner if stem in ("gate", "up") else q + 2 * kv


def check_architecture(arch: Any) -> str:
    """The architecture that a GGUF names. Raises InputError if it is not supported."""
    if not isinstance(arch, str) or arch not in GGUF_ARCHITECTURES:
        families = {ARCHITECTURES[name]: known for known, name in GGUF_ARCHITECTURES.items()}
        nearest = families[nearest_family(str(arch), families)]
        raise InputError(
            f"GGUF architecture {arch!r} is not supported; {not_a_decoder(str(arch))}the nearest that is: {nearest!r}; "
            f"supported: "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    return arch


def config_of_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    dtype: str,
    rope_factors: Mapping[str, tuple[float, ...]] | None = None,
    known_tokens: Mapping[str, int] | None = None,
) -> ModelConfig:
    """The configuration of the model in a GGUF.

    Args:
        metadata: Key-value pairs of the file.
        tensors: Tensors of the file.
        dtype: Dtype that most bytes of the tensors have.
        rope_factors: Values of the tensors in `ROPE_FACTORS` that the file has, by name.
        known_tokens: Ids of the tokens of `known_tokens.KNOWN` that are in the vocabulary, by text.

    Raises:
        InputError: The model is not supported, or a value is missing.
    """
    arch = check_architecture(metadata.get("general.architecture"))
    fields = {k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")}
    experts = _get_or(fields, "expert_count", 0)
    architecture = _architecture(arch, fields, experts)
    family = ARCHITECTURES[architecture]
    if family not in GEMMA4 and bool(experts) != (family in _NORM_TOPK):
        raise InputError(f"a GGUF of architecture {arch!r} with {experts} experts (expert_count) is not supported")
    if "token_embd.weight" not in tensors:
        raise InputError("the GGUF has no tensor token_embd.weight")
    _refuse_fused_biases(arch, tensors)
    _refuse_unknown_norms(arch, family, tensors)
    hidden = _require_int(fields, "embedding_length")
    heads = _require_int(fields, "attention.head_count")
    layers = _require_int(fields, "block_count") - _get_or(fields, "nextn_predict_layers", 0)  # last, and not read
    if layers > len(tensors):
        raise InputError(
            f"the GGUF states {layers:,} layers (block_count) and has {len(tensors):,} tensors: fetch it again"
        )
    head_dim = _get_or(fields, "attention.key_length", hidden // heads)
    if fields.get("attention.value_length", head_dim) != head_dim:
        raise InputError("GGUFs whose key and value heads differ in size are not supported")
    if family not in ("phi3", *DELTA_NETS, *GEMMA4) and fields.get("rope.dimension_count", head_dim) != head_dim:
        raise InputError(
            f"GGUFs of architecture {arch!r} that rotate part of each head (rope.dimension_count) are not supported"
        )
    context, gpt_oss, gemma = _require_int(fields, "context_length"), family == "gpt_oss", family in (*GEMMA, *GEMMA4)
    layer_formats, end_formats = _formats(tensors, layers)
    windows = _windows(fields, family, layers)
    heads_of = {"num_kv_heads": _get_or(fields, "attention.head_count_kv", heads), "head_dim": head_dim}
    if family in GEMMA4:
        heads_of = read_gemma4(fields, tensors, windows)
    if family in SHORT_CONVS:
        heads_of |= read_short_convs(fields, tensors, layers, hidden)
    attention_softcap, logit_softcap = _softcaps(fields, family)
    return ModelConfig(
        architecture=architecture,
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        **_mlps(fields, family, tensors, layers),
        num_heads=heads,
        **heads_of,
        vocab_size=tensors["token_embd.weight"].shape[0],
        max_position=context,
        norm="layer" if family in LAYER_NORMS else "rms",
        head_bias="output.bias" in tensors,
        **_scales(fields, family, hidden),
        activation="swiglu_oai" if gpt_oss else "gelu_tanh" if gemma else "silu",
        gated_mlp=True,
        qkv_bias=any(name.endswith(".attn_q.bias") for name in tensors),
        out_bias=any(name.endswith(".attn_output.bias") for name in tensors),
        mlp_bias=gpt_oss or "blk.0.ffn_down.bias" in tensors,
        qk_norm=family in HEAD_NORMS and any(name.endswith(".attn_q_norm.weight") for name in tensors),
        **read_states(fields, family, tensors, layers),
        projection_norms=family in PROJECTION_NORMS,
        tied_embeddings="output.weight" not in tensors,
        **_ropes(fields, family, head_dim, context, rope_factors or {}),
        windows=windows,
        embed_size=hidden,
        bos_token_id=special_id(metadata, "bos"),
        eos_token_ids=end_ids(metadata, known_tokens or {}),
        dtype=dtype,
        norm_place="both" if gemma else "outputs" if family in OUTPUT_NORMS else "inputs",
        unrotated_layers=tuple(range(_SMOLLM3_PERIOD - 1, layers, _SMOLLM3_PERIOD)) if family == "smollm3" else (),
        query_scale=_query_scale(fields, family, layers, hidden, heads, head_dim),
        **_query_growth(fields),
        attention_softcap=attention_softcap,
        logit_softcap=logit_softcap,
        router_bias=gpt_oss,
        sinks=gpt_oss,
        layer_formats=layer_formats,
        end_formats=end_formats,
    )


def _architecture(arch: str, fields: Mapping[str, Any], experts: int) -> str:
    """Name of the model's class in transformers. Two families share an architecture of GGUFs."""
    if arch == "llama" and experts:
        return _LLAMA_MIXTURE
    if arch == "olmo2" and fields.get("attention.sliding_window"):
        return _OLMO_WITH_WINDOWS
    if arch == "granitemoe" and fields.get("expert_shared_feed_forward_length"):
        return _GRANITE_SHARED
    return GGUF_ARCHITECTURES[arch]


def _refuse_fused_biases(arch: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise InputError if matrices that the file fuses (Phi-3) have biases."""
    biases = [name for name in tensors if name.endswith((".attn_qkv.bias", ".ffn_up.bias"))]
    if arch == "phi3" and biases:
        raise InputError(f"GGUFs of architecture {arch!r} with biases ({biases[0]}) are not supported")


def _refuse_unknown_norms(arch: str, family: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise InputError if queries and keys have norms that no model of this family has.

    In files of architecture "llama", rows of queries and keys are interleaved. It is not known whether weights of such
    norms are interleaved too, because no program both writes and reads them.
    """
    norms = [name for name in tensors if name.endswith((".attn_q_norm.weight", ".attn_k_norm.weight"))]
    if norms and family not in (*HEAD_NORMS, *PROJECTION_NORMS):
        raise InputError(
            f"GGUFs of architecture {arch!r} with norms of queries and keys ({norms[0]}) are not supported: "
            "use the model's safetensors"
        )


def _mlps(fields: Mapping[str, Any], family: str, tensors: Mapping[str, TensorInfo], layers: int) -> dict[str, Any]:
    """The fields of a ModelConfig that describe the kinds and widths of MLPs."""
    if family in GEMMA4:
        return read_gemma4_mlps(fields, layers)
    if family not in _NORM_TOPK:
        return {"intermediate_size": _require_int(fields, "feed_forward_length")}
    is_lfm = family in SHORT_CONVS
    if fields.get("expert_gating_func", 2 if is_lfm else 1) not in ((2,) if is_lfm else (0, 1, 4)):
        usual = "sigmoid" if is_lfm else "softmax"
        raise InputError(
            f"GGUFs of this family whose experts are not chosen by a {usual} (expert_gating_func) are not supported"
        )
    if not is_lfm and fields.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise InputError("GGUFs whose weights of experts are scaled (expert_weights_scale) are not supported")
    of_all = ("mixtral", "olmoe", "phimoe", *GRANITE_MIXTURES)  # families whose experts have the one width
    width = "feed_forward_length" if family in of_all else "expert_feed_forward_length"
    shared = "ffn_gate_shexp" if family in ("qwen2_moe", "granitemoeshared", *DELTA_NETS) else None
    # A layer of one MLP has neither a router nor experts.
    dense = tuple(
        j
        for j in range(layers)
        if f"blk.{j}.ffn_gate.weight" in tensors and f"blk.{j}.ffn_gate_inp.weight" not in tensors
    )
    return {
        "intermediate_size": _require_int(fields, width) if width in fields else _rows(tensors, "ffn_gate_exps"),
        "num_experts": _require_int(fields, "expert_count"),
        "experts_per_token": _require_int(fields, "expert_used_count"),
        "norm_topk": bool(_get_or(fields, "expert_weights_norm", _NORM_TOPK[family])),
        "shared_expert_size": _get_or(fields, "expert_shared_feed_forward_length", _rows(tensors, shared))
        if shared
        else 0,
        "shared_gate": family not in GRANITE_MIXTURES,
        "sparsemixer_jitter": 0.01 if family == "phimoe" else None,  # of the published models; no file says so
        "dense_layers": dense,
        "dense_size": _require_int(fields, "feed_forward_length") if dense else 0,
        "router_activation": "sigmoid" if is_lfm else "softmax",
        "expert_bias": any(name.endswith(".exp_probs_b.bias") for name in tensors),
        "routed_scale": (_get_or(fields, "expert_weights_scale", 1.0) or 1.0) if is_lfm else 1.0,
    }


def _rows(tensors: Mapping[str, TensorInfo], name: str) -> int:
    """The number of rows of a layer's matrix, which older files do not state.

    Raises:
        InputError: No layer has the matrix.
    """
    matrix = next((info for full, info in tensors.items() if full.endswith(f".{name}.weight")), None)
    if matrix is None or len(matrix.shape) < 2:
        raise InputError(f"the GGUF has no tensor blk.0.{name}.weight: it is incomplete")
    return matrix.shape[-2]


def _windows(fields: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = fields.get("attention.sliding_window")
    if window is None:
        # Older files lack the key: those of Gemma 2, and of Phi-3 with contexts of 4,096.
        of_phi3 = family == "phi3" and fields.get("context_length") == 4096
        window = 4096 if family == "gemma2" else 2047 if of_phi3 else None
    window = window or None
    if family == "gpt_oss":  # every second layer sees all
        return tuple(None if layer % 2 else window for layer in range(layers))
    if family not in _WINDOW_PERIODS:
        return (window,) * layers
    pattern = fields.get("attention.sliding_window_pattern", _WINDOW_PERIODS[family])
    if isinstance(pattern, tuple):  # true for each layer that has a window
        if len(pattern) != layers:
            raise InputError(f"attention.sliding_window_pattern has {len(pattern)} layers of {layers}")
        return tuple(window if local else None for local in pattern)
    if pattern < 1:
        raise InputError(f"attention.sliding_window_pattern {pattern} is not supported")
    return tuple(window if (layer + 1) % pattern else None for layer in range(layers))


def _query_scale(
    fields: Mapping[str, Any], family: str, layers: int, hidden: int, heads: int, head_dim: int
) -> float | None:
    """The factor of queries, if the file states it or it is known for a size of Gemma; None: head_dim ** -0.5."""
    if stated := fields.get("attention.scale"):
        return float(stated)
    if family in GEMMA4:
        return 1.0
    if family not in GEMMA:
        return None
    scale: float = (hidden // heads if layers == _GEMMA_27B[family] else head_dim) ** -0.5
    return scale


def _query_growth(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelConfig that describe how queries grow with their positions (Ministral 3)."""
    beta = float(_get_or(fields, "attention.temperature_scale", 0.0))
    if not beta:
        return {}
    original = "rope.scaling.original_context_length"
    named = "attention.temperature_length" if "attention.temperature_length" in fields else original
    return {"query_growth": beta, "query_growth_period": _require_int(fields, named)}


def _scales(fields: Mapping[str, Any], family: str, hidden: int) -> dict[str, Any]:
    """The fields of a ModelConfig that scale embeddings, hidden states and logits. llama.cpp divides logits."""
    return scales_of(
        float(fields.get("attention.layer_norm_rms_epsilon", 1e-6)),
        embedding=hidden**0.5 if family in (*GEMMA, *GEMMA4) else float(_get_or(fields, "embedding_scale", 1.0)),
        residual=float(_get_or(fields, "residual_scale", 1.0)),
        logits_divisor=float(_get_or(fields, "logit_scale", 1.0)),
    )


def _softcaps(fields: Mapping[str, Any], family: str) -> tuple[float, float]:
    """The caps of attention scores and of logits. Older files of Gemma 2 do not state them."""
    if family not in (*GEMMA, *GEMMA4):
        return 0.0, 0.0
    score_cap, logit_cap = (50.0, 30.0) if family == "gemma2" else (0.0, 0.0)
    attention = float(_get_or(fields, "attn_logit_softcapping", score_cap))
    return attention, float(_get_or(fields, "final_logit_softcapping", logit_cap))


# Tensors that have divisors of rotary frequencies.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def _ropes(
    fields: Mapping[str, Any], family: str, head_dim: int, context: int, factors: Mapping[str, tuple[float, ...]]
) -> dict[str, Any]:
    """The fields of a ModelConfig that describe rotary positions."""
    if family in GEMMA4:
        rope, local = read_gemma4_ropes(fields, factors.get(ROPE_FACTORS[0]))
        return {"rope": rope, "local_rope": local}
    return {"rope": _rope(fields, family, head_dim, context, factors), "local_rope": _local_rope(fields, family)}


def _rope(
    fields: Mapping[str, Any], family: str, head_dim: int, context: int, factors: Mapping[str, tuple[float, ...]]
) -> RopeConfig:
    every, short, long = (factors.get(name) for name in ROPE_FACTORS)
    if family in ("phi3", "phimoe"):
        return _phi3_rope(fields, head_dim, context, every, short, long)
    if short or long:
        raise InputError(f"rope factors for short and long contexts ({ROPE_FACTORS[1]}) are supported of Phi-3 alone")
    linear = fields.get("rope.scale_linear")  # older files spell linear scaling in this way
    kind = fields.get("rope.scaling.type", "linear" if linear else "none")
    log_multiplier = fields.get("rope.scaling.yarn_log_multiplier")  # transformers' mscale_all_dim
    rope = RopeConfig(
        theta=float(fields.get("rope.freq_base", 10000.0)),
        kind="default" if kind == "none" else kind,
        factor=float(fields.get("rope.scaling.factor") or linear or 1.0) if kind != "none" else 1.0,
        original_max_position=fields.get("rope.scaling.original_context_length", context),
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
        truncate=family != "gpt_oss",
        mscale=None if log_multiplier is None else 1.0,
        mscale_all_dim=log_multiplier,
        factors=every,
        rotated=_rotated(fields, head_dim) if family in DELTA_NETS else None,
    )
    extra = fields.get("rope.scaling.attn_factor")  # GGUF's multiplies yarn's own scaling
    if rope.kind != "yarn" or extra is None:
        return rope
    return RopeConfig(**{**rope.__dict__, "attention_factor": extra * rope.attention_scaling()})


def _phi3_rope(
    fields: Mapping[str, Any],
    head_dim: int,
    context: int,
    every: tuple[float, ...] | None,
    short: tuple[float, ...] | None,
    long: tuple[float, ...] | None,
) -> RopeConfig:
    """Rotary positions of Phi-3, which may rotate a part of each head, and may have LongRoPE's factors.

    Only the tensors of the factors show that there are such factors.
    """
    kind = _get_or(fields, "rope.scaling.type", "none")
    if kind not in ("none", "longrope"):
        raise InputError(f"rope type {kind!r} of Phi-3 is not supported; supported: none, longrope")
    rope = RopeConfig(
        theta=float(fields.get("rope.freq_base", 10000.0)), rotated=_rotated(fields, head_dim), factors=every
    )
    if kind == "none" and not (short or long):
        return rope
    original = _get_or(fields, "rope.scaling.original_context_length", context)
    scaled = {
        "kind": "longrope",
        "factor": context / original,
        "original_max_position": original,
        "attention_factor": fields.get("rope.scaling.attn_factor"),
        "short_factors": short,
        "long_factors": long,
    }
    return RopeConfig(**{**rope.__dict__, **scaled})


def _rotated(fields: Mapping[str, Any], head_dim: int) -> int | None:
    """The number of values of a head that are rotated; None: all."""
    rotated: int = _get_or(fields, "rope.dimension_count", head_dim)
    return None if rotated == head_dim else rotated


def _local_rope(fields: Mapping[str, Any], family: str) -> RopeConfig | None:
    """Rotary positions of layers with a sliding window in Gemma and Olmo 3, which are never scaled."""
    usual = {"gemma3": 10000.0, "olmo3": fields.get("rope.freq_base", 10000.0)}.get(family)
    theta = fields.get("rope.freq_base_swa", usual)
    return RopeConfig(theta=float(theta)) if family in _WINDOW_PERIODS and theta is not None else None


# Formats.


def _formats(
    tensors: Mapping[str, TensorInfo], layers: int
) -> tuple[tuple[tuple[tuple[str, str], ...], ...], tuple[tuple[str, str], ...]]:
    """The block formats of a GGUF's matrices: `ModelConfig.layer_formats` and `ModelConfig.end_formats`."""
    of_layers = matrix_formats(tensors, layers)
    of_ends = {part: _format(tensors.get(f"{_ENDS[part]}.weight")) for part in ("embed", "lm_head", "per_layer_embed")}
    ends = tuple((part, name) for part, name in of_ends.items() if name)
    alike = len({name for formats in of_layers for name in formats.values()}) <= 1
    if alike:
        return (), ends
    return tuple(tuple((r, name) for r, name in formats.items() if name) for formats in of_layers), ends


def matrix_formats(tensors: Mapping[str, TensorInfo], layers: int) -> list[dict[str, str]]:
    """The block format of each matrix of each layer, by role. "": it is stored as numbers, or no kernel supports it."""
    formats = []
    for layer in range(layers):
        beside = f"blk.{layer}.ffn_gate_inp.scale" in tensors  # Gemma 4's router, with an MLP beside its experts
        names = {
            role: [
                name
                for name in (f"blk.{layer}.{suffix}.weight" for suffix in _names_of(role, beside))
                if name in tensors
            ]
            for role in _MATRICES
        }
        formats.append({role: _format(tensors[matrices[0]]) for role, matrices in names.items() if matrices})
    return formats


def _names_of(role: str, beside: bool) -> tuple[str, ...]:
    """The names that a layer's matrix may have in a file: its own, that of all experts, or that of a fused matrix.

    Args:
        role: Role of the matrix.
        beside: Whether the layer has an MLP beside its experts.
    """
    name = _MATRICES[role]
    fused = (_FUSED[role],) if role in _FUSED else ()
    experts = (f"{name}_exps", *((_GATE_UP,) if role in ("gate", "up") else ()))
    if beside and role in BESIDE_EXPERTS:
        return (BESIDE_EXPERTS[role],)
    return experts if beside and role in ("gate", "up", "down") else (name, *experts, *fused)


def _format(info: TensorInfo | None) -> str:
    kind = info.dtype.lower() if info else ""
    return kind if kind in GGUF_FORMATS else ""


def _get_or(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key; the default if the key is absent or its value is null."""
    value = config.get(key)
    return default if value is None else value


def _require_int(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise InputError(f"the model's configuration has no {key!r}")
    require_positive(key, config[key])
    return int(config[key])
