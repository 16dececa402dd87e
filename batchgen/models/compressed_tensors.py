"""Checkpoints of compressed-tensors: which scheme their config.json names, and whether it can be loaded as it is.

The one that can is `int-quantized`, W8A8: weights of 8 bits with a scale for each output channel, activations quantized for
each token as they come. That is what `ops/int8.py` multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError

_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether experts are in blocks of MXFP4, as gpt-oss's are (models/fused_experts.py): `quantization_config` of config.json."""
    return config.get("quant_method") == "mxfp4"


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raise InputError unless all linear layers, but for `ignore`, are int-quantized: `quantization_config` of config.json."""
    method = config.get("quant_method", "unknown")
    if method != "compressed-tensors":
        raise InputError(
            f"quantised checkpoints are not supported (quant_method {method!r}): use the model's "
            "unquantised safetensors, or a GGUF"
        )
    groups = config.get("config_groups")
    schemes = groups if isinstance(groups, Mapping) else {}
    for name, scheme in (schemes or {"": {}}).items():
        if not isinstance(scheme, Mapping):
            raise InputError(
                f"quantization_config of config.json: config_groups.{name} must be a scheme, not {scheme!r}: fetch the model again"
            )
        wrong = _difference(scheme.get("weights"), _WEIGHTS) or _difference(
            scheme.get("input_activations"), _ACTIVATIONS
        )
        if config.get("format") != "int-quantized" or wrong or scheme.get("output_activations"):
            raise _refused(config, scheme, wrong)
    if config.get("kv_cache_scheme"):
        raise InputError(
            "compressed-tensors checkpoints with a kv_cache_scheme are not supported: remove it from config.json"
        )
    _refuse_beside(config)


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
    return next((f"{name} {stated.get(name)!r}" for name, value in wanted.items() if stated.get(name) != value), "")


def _refused(config: Mapping[str, Any], scheme: Mapping[str, Any], wrong: str) -> InputError:
    bits = "".join(
        f"{letter}{part.get('num_bits', 16) if isinstance(part := scheme.get(name), Mapping) else 16}"
        for letter, name in (("W", "weights"), ("A", "input_activations"))
    )
    detail = f", {wrong}" if wrong and config.get("format") == "int-quantized" else ""
    return InputError(
        f"compressed-tensors checkpoints in the scheme {bits} ({config.get('format', 'no format')}{detail}) are not supported:"
        " only int-quantized W8A8, weights by channel and activations by token, is; use the model's unquantised safetensors"
    )
