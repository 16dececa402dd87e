"""How a checkpoint says that it is quantized: `quantization_config` of its config.json, and what is supported of it.

No torch here. What the tensors are is in `group_codes.py` (4 bits), `fp8.py`, `fused_experts.py` (MXFP4) and `checkpoint.py` (int8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.core.dtypes import FP8_FORMATS, GROUP_FORMATS
from batchgen.core.errors import InputError
from batchgen.models.tensor_files.headers import TensorInfo

INT8_CODES, MXFP4, FP8 = "int8", "mxfp4", "fp8"
PACK_QUANTIZED, GPTQ, AWQ = "pack-quantized", "gptq", "awq"
GROUP_LAYOUTS = (PACK_QUANTIZED, GPTQ, AWQ)
# What is never quantized with the other matrices of a layer, or counts as a number wherever it is: routers and the shared expert's gate.
_ROUTERS = (".gate", ".router", ".shared_expert_gate")


@dataclass(frozen=True)
class Scheme:
    """How linear layers are stored.

    layout: one of the names above. Of 4 bits: group_size, the values of a row that have one scale, None: all of them; symmetric:
    there are no zero points (of pack-quantized); zero_offset: what stored zero points lack; act_order: groups may be of any columns. Of FP8: block, the
    rows and columns that have one scale, None: all of a row or of a matrix.
    """

    layout: str
    group_size: int | None = None
    symmetric: bool = False
    zero_offset: int = 0
    act_order: bool = False
    block: tuple[int, int] | None = None


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`. Raises InputError, naming what is not supported."""
    if not isinstance(config, Mapping):
        raise InputError(f"quantization_config must be an object, not {config!r}: fetch the model again")
    method = config.get("quant_method") or _unstated_method(config)
    readers = {
        "mxfp4": lambda: Scheme(MXFP4),
        "gptq": lambda: _gptq(config),
        "awq": lambda: _awq(config),
        "fp8": lambda: _fp8(config),
        "fbgemm_fp8": lambda: Scheme(FP8),
        "compressed-tensors": lambda: _compressed_tensors(config),
    }
    if not isinstance(method, str) or method not in readers:
        raise InputError(
            f"quantised checkpoints of quant_method {method!r} are not supported (only {', '.join(readers)}): use the model's "
            "unquantised safetensors, or a GGUF"
        )
    return readers[method]()


def _unstated_method(config: Mapping[str, Any]) -> str:
    return "bitsandbytes" if config.get("load_in_4bit") or config.get("load_in_8bit") else "unknown"


def describe(scheme: Scheme) -> str:
    """For people: "GPTQ, 4 bits, groups of 128"."""
    if scheme.layout == FP8:
        block = f", blocks of {scheme.block[0]} x {scheme.block[1]}" if scheme.block else ""
        return f"FP8{block}"
    if scheme.layout in GROUP_LAYOUTS:
        name = {PACK_QUANTIZED: "compressed-tensors W4A16", GPTQ: "GPTQ of 4 bits", AWQ: "AWQ of 4 bits"}[scheme.layout]
        size = f"groups of {scheme.group_size}" if scheme.group_size else "a scale for each row"
        return f"{name}, {size}{', act-order' if scheme.act_order else ''}"
    return {INT8_CODES: "compressed-tensors W8A8", MXFP4: "experts in MXFP4"}[scheme.layout]


def packed_format(scheme: Scheme, tensors: Mapping[str, TensorInfo], columns: Iterable[int]) -> str | None:
    """One of `BLOCK_FORMATS` that holds the layers' matrices as they are; None: they have to be expanded.

    Args:
        scheme: Of the checkpoint.
        tensors: All of its tensors; none where only the configuration is known.
        columns: Of each of the layers' matrices.
    """
    if scheme.layout not in (*GROUP_LAYOUTS, FP8) or scheme.act_order:
        return None
    formats = FP8_FORMATS if scheme.layout == FP8 else GROUP_FORMATS
    shared, rows = scheme.block[1] if scheme.block else scheme.group_size, set(columns)
    if scheme.layout != FP8 and any(n % (shared or n) for n in rows):  # a last group that is shorter
        return None
    fitting = [name for name in formats if all(name in fitting_blocks(formats, n, shared) for n in rows)]
    if not fitting or any(_is_in_the_way(scheme, name, info) for name, info in tensors.items()):
        return None
    return fitting[-1]  # of the largest blocks


def fitting_blocks(formats: Mapping[str, tuple[int, int]], n: int, shared: int | None) -> list[str]:
    """Those of these formats, smallest blocks first, of which whole blocks make up a row of n columns, each with one scale.

    Args:
        formats: `GROUP_FORMATS` or `FP8_FORMATS`.
        n: Columns.
        shared: Columns in a row that have one scale; None: all.
    """
    return [name for name, (size, _) in formats.items() if n % size == 0 and (shared or n) % size == 0]


def _is_in_the_way(scheme: Scheme, name: str, info: TensorInfo) -> bool:
    """A matrix of a layer in numbers of 16 bits or more, or scales that a block has no room for."""
    stem, _, suffix = name.rpartition(".")
    if not re.search(r"(^|\.)layers\.\d+\.", name) or len(info.shape) != 2:
        return False
    plain = suffix == "weight" and not stem.endswith(_ROUTERS) and not info.dtype.startswith("F8_")
    return plain or (scheme.layout != FP8 and suffix in ("scales", "weight_scale") and info.dtype in ("F32", "F64"))


def _whole(config: Mapping[str, Any], *names: str) -> int:
    """A whole number under the first of these names that is there."""
    found = next((config[name] for name in names if name in config), None)
    if not isinstance(found, int) or isinstance(found, bool):
        raise InputError(
            f"quantization_config: {names[0]} must be a whole number, not {found!r}: fetch the model again"
        )
    return found


def _group_size(config: Mapping[str, Any], *names: str) -> int | None:
    size = _whole(config, *names)
    if size == -1:
        return None
    if size < 1:
        raise InputError(f"quantization_config: {names[0]} must be at least 1, or -1, not {size}")
    return size


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """What is true or false, and `default` where it is not stated."""
    found = config.get(name, default)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise InputError(f"quantization_config: {name} must be true or false, not {found!r}: fetch the model again")
    return found


def _four_bits(method: str, bits: int) -> None:
    if bits != 4:
        raise InputError(
            f"{method} checkpoints of {bits} bits are not supported, only of 4: use the model's unquantised safetensors, or a GGUF"
        )


def _refuse(method: str, what: Mapping[str, Any]) -> None:
    for name, stated in what.items():
        if stated:
            raise InputError(
                f"{method} checkpoints with {name} {stated!r} are not supported: use the model's unquantised safetensors, or a GGUF"
            )


def _gptq(config: Mapping[str, Any]) -> Scheme:
    _four_bits("GPTQ", _whole(config, "bits"))
    form = config.get("checkpoint_format", "gptq")
    _refuse("GPTQ", {
        "checkpoint_format": form not in ("gptq", "gptq_v2") and (form or repr(form)),
        "is_marlin_format": _flag(config, "is_marlin_format", False), "dynamic": config.get("dynamic"),
    })  # fmt: skip
    return Scheme(
        GPTQ,
        _group_size(config, "group_size"),
        zero_offset=1 if form == "gptq" else 0,
        act_order=_flag(config, "desc_act", False),
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    _four_bits("AWQ", _whole(config, "bits", "w_bit"))
    stated = config.get("version", "gemm")
    version = stated.lower() if isinstance(stated, str) else repr(stated)
    _refuse("AWQ", {"version": version != "gemm" and version})
    _flag(config, "zero_point", True)
    return Scheme(AWQ, _group_size(config, "group_size", "q_group_size"))


def _fp8(config: Mapping[str, Any]) -> Scheme:
    number = config.get("fmt", "e4m3")
    _refuse("FP8", {"fmt": number != "e4m3" and (number or repr(number))})
    return Scheme(FP8, block=_block(config.get("weight_block_size")))


def _block(stated: Any) -> tuple[int, int] | None:
    if stated is None:
        return None
    if isinstance(stated, list | tuple) and len(stated) == 2 and all(type(n) is int and n > 0 for n in stated):
        return stated[0], stated[1]
    raise InputError(f"quantization_config: the size of a block must be [rows, columns], not {stated!r}")


# compressed-tensors.

_INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    """All linear layers, but for `ignore`, must be in one scheme."""
    stated = config.get("config_groups") or {}
    if not isinstance(stated, Mapping):
        raise InputError(f"quantization_config: config_groups must be an object, not {stated!r}: fetch the model again")
    schemes = []
    for name, group in (stated or {"": {}}).items():
        if not isinstance(group, Mapping):
            raise InputError(
                f"quantization_config: config_groups.{name} must be a scheme, not {group!r}: fetch the model again"
            )
        schemes.append(_scheme_of_group(config, group))
    if len(set(schemes)) > 1:
        raise InputError(
            "compressed-tensors checkpoints in several schemes at once are not supported: use the model's unquantised safetensors"
        )
    if config.get("kv_cache_scheme"):
        raise InputError(
            "compressed-tensors checkpoints with a kv_cache_scheme are not supported: remove it from config.json"
        )
    _refuse_beside(config)
    return schemes[0]


def _scheme_of_group(config: Mapping[str, Any], group: Mapping[str, Any]) -> Scheme:
    form = group.get("format") or config.get("format")
    weights, activations = group.get("weights"), group.get("input_activations")
    wrong = ""
    if form == "int-quantized":
        wrong = _difference(weights, _INT8_WEIGHTS) or _difference(activations, _INT8_ACTIVATIONS)
    elif form == "pack-quantized":
        wrong = _difference(weights, {"num_bits": 4, "type": "int"}) or ("activations" if activations else "")
    elif form in ("float-quantized", "naive-quantized"):
        wrong = _difference(weights, {"num_bits": 8, "type": "float"})
    else:
        raise _refused(form, group, "")
    if form != "int-quantized" and not wrong and weights.get("strategy") not in _STRATEGIES[form]:
        wrong = f"strategy {weights.get('strategy')!r}"
    if wrong or group.get("output_activations"):
        raise _refused(form, group, wrong)
    if form == "int-quantized":
        return Scheme(INT8_CODES)
    if form == "pack-quantized":
        size = _group_size(weights, "group_size") if weights["strategy"] == "group" else None
        return Scheme(
            PACK_QUANTIZED,
            size,
            symmetric=_flag(weights, "symmetric", True),
            act_order=_act_order(weights.get("actorder")),
        )
    return Scheme(FP8, block=_block(weights.get("block_structure")) if weights["strategy"] == "block" else None)


def _act_order(stated: Any) -> bool:
    """Whether groups may be of any columns: under either of two names each."""
    if stated in (None, "weight", "static") or stated is False:
        return False
    if stated in ("group", "dynamic") or stated is True:
        return True
    raise InputError(
        f"quantization_config: actorder must be one of group, dynamic, weight, static, not {stated!r}: fetch the"
        " model again"
    )


_STRATEGIES = {
    "pack-quantized": ("group", "channel"),
    "float-quantized": ("tensor", "channel", "block"),
    "naive-quantized": ("tensor", "channel"),
}


def _refuse_beside(config: Mapping[str, Any]) -> None:
    """Raise InputError for what changes the meaning of the tensors beside the scheme. Sparsity that is "dense" changes nothing."""
    sparsity = config.get("sparsity_config")
    dense = isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"
    for name, stated in {
        "transform_config": config.get("transform_config"),
        "sparsity_config": not dense and sparsity,
    }.items():
        if stated:
            raise InputError(
                f"compressed-tensors checkpoints with a {name} are not supported: use the model's unquantised safetensors"
            )


def _difference(stated: Any, wanted: Mapping[str, Any]) -> str:
    """The first field that is another than what is wanted, as "field value"; "" where there is none."""
    if not isinstance(stated, Mapping):
        return "nothing stated"
    found = {name: stated.get(name) for name in wanted}
    return next(
        (f"{n} {found[n]!r}" for n, value in wanted.items() if (type(found[n]), found[n]) != (type(value), value)), ""
    )


def _refused(form: Any, group: Mapping[str, Any], wrong: str) -> InputError:
    bits = "".join(
        f"{letter}{part.get('num_bits', 16) if isinstance(part := group.get(name), Mapping) else 16}"
        for letter, name in (("W", "weights"), ("A", "input_activations"))
    )
    detail = f", {wrong}" if wrong else ""
    return InputError(
        f"compressed-tensors checkpoints in the scheme {bits} ({form or 'no format'}{detail}) are not supported, only int-quantized"
        " W8A8 (weights by channel, activations by token), pack-quantized W4A16 and float-quantized FP8: use the model's unquantised"
        " safetensors"
    )
