"""The rotary positions that a `config.json` states.

They are stated by keys of the file itself, by `rope_scaling`, or by `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from batchgen.core.errors import InputError
from batchgen.models.families import DELTA_NETS, GEMMA4
from batchgen.models.hf.wrappers import OF_IMAGES
from batchgen.models.rope import ROPE_KINDS, RopeConfig, RopeKind
from batchgen.models.stated_numbers import is_number, require_positive, shown

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Family -> the rotary positions of a file that states none.
_USUAL = {"gpt_oss": _GPT_OSS_ROPE, "ministral3": _MINISTRAL3_ROPE}
_OF_GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")  # keys beside those of rotary positions
_PHI3_LONGROPE = ("su", "yarn", "longrope")  # with its earlier names
# Kind -> keys without which it is refused, and others that it reads.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL = {
    "proportional": ("factor",),
    "yarn": ("attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
# Keys of all kinds; "finetuned" is a note that older files with YaRN have.
_COMMON = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
)
# Families whose layers with a window have rotary positions of their own: the key of the base in the other layers, and
# that of these, or a number.
_BY_LAYER_TYPE: dict[str, tuple[str, str | float]] = {
    "gemma3": ("rope_theta", "rope_local_base_freq"),
    "olmo3": ("rope_theta", 5e5),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SCALED = ("llama3", "yarn", "longrope")


def read_ropes(
    config: Mapping[str, Any], keys: Mapping[str, Any], family: str, head_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary positions of a model.

    Args:
        config: Values of `config.json`.
        keys: Values of the keys in `hf.keys.KEYS`.
        family: Family of the model.
        head_dim: Number of values in one head, of which Phi-3 may rotate only some.

    Returns:
        Rotary positions of all layers; rotary positions of layers with a sliding window, or None if they do not differ.

    Raises:
        InputError: A value has the wrong type, is not supported, or is ambiguous.
    """
    old, new = (_table(config, name) for name in ("rope_scaling", "rope_parameters"))
    if family in GEMMA4:
        return _read_gemma4(config, keys, new)
    if family in _BY_LAYER_TYPE:
        return _read_by_layer_type(config, keys, family, old, new)
    if any(name in table for table in (old, new) for name in _LAYER_TYPES):
        raise InputError("rope parameters that differ between layer types are not supported for this family")
    if family in _USUAL and config.get("rope_parameters") is None:
        new = {} if old else _USUAL[family]
    taken = _read(config, keys, family, old or new, head_dim)  # transformers takes one of them, not both
    if old and new and taken != (merged := _read(config, keys, family, _merged(new, old), head_dim)):
        raise InputError(
            "rope_scaling beside rope_parameters can be read in two ways: "
            f'remove rope_scaling and put what it says into rope_parameters, with "rope_theta": {merged.theta!r}'
        )
    return taken, None


def read_query_growth(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of a ModelConfig that describe how queries grow with their positions (Ministral 3)."""
    if family != "ministral3":
        return {}
    old, new = (_table(config, name) for name in ("rope_scaling", "rope_parameters"))
    if not (old or new) and {} in (config.get("rope_scaling"), config.get("rope_parameters")):
        raise InputError("rope_parameters {} state no original_max_position_embeddings: leave the key out")
    params = {**(old or new or _MINISTRAL3_ROPE)}
    beta, period = params.get("llama_4_scaling_beta"), params.get("original_max_position_embeddings")
    if beta is None or not is_number(beta) or beta < 0:
        raise InputError(f"llama_4_scaling_beta of rope_parameters must be a number of at least 0, not {shown(beta)}")
    require_positive("original_max_position_embeddings", period)
    return {"query_growth": float(beta), "query_growth_period": period if beta else 0}


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be an object, not {shown(value)}")
    return value


def _merged(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a file in which `rope_scaling` was added to `rope_parameters`."""
    kinds = ("type", "rope_type") if any(name in old for name in ("type", "rope_type")) else ()
    return {**{name: value for name, value in new.items() if name not in kinds}, **old}


def _read_by_layer_type(
    config: Mapping[str, Any], keys: Mapping[str, Any], family: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[RopeConfig, RopeConfig]:
    if unknown := [name for name in new if name not in _LAYER_TYPES]:
        raise InputError(
            f"rope_parameters of {family} are those of {' and '.join(_LAYER_TYPES)}, and have {shown(unknown[0])}"
        )
    everywhere, local = (_table(new, name) for name in _LAYER_TYPES)
    if old and not everywhere and config.get("rope_parameters") is not None:
        raise InputError("rope_scaling beside rope_parameters without full_attention is not supported: put it there")
    # In its old spelling rope_scaling is added to what all layers have, "rope_type" first of all.
    everywhere = {"rope_type": "default", **everywhere, **old} if old else everywhere
    ropes, (of_others, of_windows) = [], _BY_LAYER_TYPE[family]
    local_theta = keys[of_windows] if isinstance(of_windows, str) else of_windows
    for params, theta in ((everywhere, keys[of_others]), (local, local_theta)):
        if params.get("truncate", True) is not True:  # transformers does not read it of layer types
            raise InputError(
                f"truncate {shown(params['truncate'])} in rope parameters of a layer type is not supported"
            )
        ropes.append(_rope({"rope_theta": theta, **_with_part(config, params)}, keys["max_position_embeddings"], None))
    return ropes[0], ropes[1]


def _read_gemma4(
    config: Mapping[str, Any], keys: Mapping[str, Any], stated: Mapping[str, Any]
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary positions of Gemma 4, which are stated for both types of layers, or for none."""
    if "rope_scaling" in config:
        raise InputError("rope_scaling of Gemma 4 is not supported: state rope_parameters of both layer types")
    if config.get("rope_parameters") is None:
        stated = _GEMMA4_ROPES
    ropes = []
    for layer_type in _LAYER_TYPES:
        params = dict(_table(stated, layer_type))
        if "rope_type" not in params or "rope_theta" not in params:
            raise InputError(f"rope_parameters of Gemma 4 need rope_type and rope_theta of {layer_type}")
        share = 1.0
        if params["rope_type"] == "proportional":
            share = _number(params, "partial_rotary_factor", 1.0)
            params["partial_rotary_factor"] = 1.0
        ropes.append(replace(_rope(params, keys["max_position_embeddings"], None), share=share))
    return ropes[0], ropes[1]


def _read(
    config: Mapping[str, Any], keys: Mapping[str, Any], family: str, stated: Mapping[str, Any], head_dim: int
) -> RopeConfig:
    params = {"rope_theta": keys["rope_theta"], **_with_part(config, stated)}
    original = keys.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if "original_max_position_embeddings" in config:
        require_positive("original_max_position_embeddings", original)
    if family == "phi3":
        return _phi3_rope(params, keys["max_position_embeddings"], original, head_dim)
    if family == "phimoe":
        return _phimoe_rope(params, keys["max_position_embeddings"], original)
    if family == "ministral3":
        params = {name: value for name, value in params.items() if name not in _OF_GROWTH}
    if family in DELTA_NETS:
        return _delta_net_rope(params, keys["max_position_embeddings"], original, head_dim)
    return _rope(params, keys["max_position_embeddings"], original)


def _with_part(config: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, with the part of each head that is rotated, which may be stated outside of them."""
    if "partial_rotary_factor" not in config:
        return dict(params)
    return {"partial_rotary_factor": config["partial_rotary_factor"], **params}


def _phi3_rope(params: dict[str, Any], max_position: int, original: int, head_dim: int) -> RopeConfig:
    """The rotary positions of Phi-3, which may rotate a part of each head, and may have LongRoPE's factors."""
    kind = _kind(params)
    if kind not in ("default", *_PHI3_LONGROPE):
        raise InputError(f"rope_type {kind!r} of Phi-3 is not supported; supported: default, longrope")
    rotated = _rotated(params, 1.0, head_dim)
    named = {**params, "rope_type": "longrope" if kind in _PHI3_LONGROPE else kind, "partial_rotary_factor": 1.0}
    named.pop("type", None)
    return _rope(named, max_position, original, rotated)


def _phimoe_rope(params: dict[str, Any], max_position: int, original: int | None) -> RopeConfig:
    """The rotary positions of Phi-3.5-MoE, whose LongRoPE states its factor of cos and sin."""
    kind = _kind(params)
    if kind not in ("default", "longrope"):
        raise InputError(f"rope_type {kind!r} of Phi-3.5-MoE is not supported; supported: default, longrope")
    if kind == "default":
        return _rope(params, max_position, original)
    short, long = (_number(params, name, None) for name in ("short_mscale", "long_mscale"))
    if short != long:
        raise InputError(f"short_mscale {short} and long_mscale {long} that differ are not supported")
    plain = {name: value for name, value in params.items() if name not in ("short_mscale", "long_mscale")}
    return replace(_rope(plain, max_position, original), attention_factor=short)


def _delta_net_rope(params: dict[str, Any], max_position: int, original: int | None, head_dim: int) -> RopeConfig:
    """The rotary positions of Qwen3-Next and Qwen3.5, which rotate a part of each head.

    Sections of the head for positions of images (`mrope_section`) make no difference: those of a text are all equal.
    """
    if (kind := _kind(params)) == "proportional":
        raise InputError(f"rope_type {kind!r} is not supported for this family")
    if not isinstance(sections := params.get("mrope_section"), list | None):
        raise InputError(f"mrope_section must be a list of sizes, not {shown(sections)}")
    rotated = _rotated(params, 0.25, head_dim)
    plain = {name: value for name, value in params.items() if name not in OF_IMAGES}
    return _rope({**plain, "partial_rotary_factor": 1.0}, max_position, original, rotated)


def _rotated(params: Mapping[str, Any], default: float, head_dim: int) -> int | None:
    """The number of values of a head that are rotated; None: all."""
    part = _number(params, "partial_rotary_factor", default)
    if not 0 < part <= 1:
        raise InputError(f"partial_rotary_factor must be above 0 and at most 1, not {part}")
    return None if part == 1 else int(head_dim * part)


def _rope(params: Mapping[str, Any], max_position: int, original: int | None, rotated: int | None = None) -> RopeConfig:
    """The rotary positions that parameters describe.

    Args:
        params: Values of `rope_scaling` or `rope_parameters`.
        max_position: Longest context, in tokens.
        original: Context length before scaling, in tokens, if it is stated outside of `params`; it takes precedence.
        rotated: Number of values of a head that are rotated; None: all.
    """
    kind = _kind(params)
    if kind not in ROPE_KINDS:
        raise InputError(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    needed, optional = _NEEDED.get(kind, ()), _OPTIONAL.get(kind, ())
    may_be_null = ("factor",) if kind == "yarn" else ()
    if missing := [n for n in needed if n not in params or (params[n] is None and n not in may_be_null)]:
        raise InputError(f"rope_type {kind!r} needs {' and '.join(missing)}")
    for name, value in params.items():
        if name not in (*_COMMON, *needed, *optional) and value is not None:
            raise InputError(
                f"{name} {shown(value)} is not known for rope_type {kind!r}: transformers does not read it, so remove "
                "it"
            )
    if _number(params, "partial_rotary_factor", 1.0) != 1.0:
        raise InputError("models that rotate part of each head (partial_rotary_factor) are not supported")
    theta, fields = _number(params, "rope_theta", None), _fields(params, (*needed, *optional))
    if kind in _SCALED:
        original = original or params.get("original_max_position_embeddings", max_position)
        require_positive("original_max_position_embeddings", original)
        fields["original_max_position"] = original
        if fields.get("factor") is None and kind != "llama3":
            fields["factor"] = max_position / original
    further = fields.pop("attn_factor", 1.0)
    rope = RopeConfig(theta=theta, kind=cast(RopeKind, kind), rotated=rotated, **fields)
    if further == 1.0 or "attention_factor" in fields:
        return rope
    # As its authors' code has it: a factor beside that of the formula. Transformers does not read it.
    return replace(rope, attention_factor=further * rope.attention_scaling())


def _kind(params: Mapping[str, Any]) -> str:
    """The kind of scaling, under either of two keys. If both are present, they must agree."""
    kind = params.get("rope_type", params.get("type", "default"))
    if not isinstance(kind, str):
        raise InputError(f"rope_type must be a name, not {shown(kind)}")
    if params.get("type", kind) != kind:
        raise InputError(f"type {shown(params['type'])} contradicts rope_type {kind!r}")
    return kind


def _fields(params: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a RopeConfig that parameters state. A null means the same as in transformers."""
    fields: dict[str, Any] = {}
    for name in names:
        if name in ("short_factor", "long_factor"):
            fields[f"{name}s"] = _numbers(params, name)
        elif name == "truncate":  # null is not true
            fields[name] = _flag(params, name)
        elif params.get(name) is not None and (params[name] or name not in ("beta_fast", "beta_slow")):
            fields[name] = _number(params, name, None)
    return fields


def _number(params: Mapping[str, Any], name: str, default: float | None) -> float:
    value = params.get(name, default)
    if not is_number(value):
        raise InputError(f"{name} must be a number, not {shown(value)}")
    return float(value)


def _numbers(params: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = params[name]
    if not isinstance(value, list) or not value or not all(is_number(each) and each > 0 for each in value):
        raise InputError(f"{name} must be a list of numbers above 0, not {shown(value)}")
    return tuple(value)


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name, True)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {shown(value)}")
    return bool(value)
