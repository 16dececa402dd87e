"""Reading of the JSON files in a Hugging Face directory.

In older checkpoints, some values of `config.json` are in other files of the directory.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.typed_json import parse_json

_MAY_BE_INFINITE = ("time_step_limit",)  # a bound of Mamba's time steps
_MOST_BYTES = 256 << 20  # an index of a million tensors has 100 MB
QUANTIZATION = "quantization_config"
# Files of AutoGPTQ and AutoAWQ that state the quantization of older checkpoints, and the `quant_method` of each.
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_MODELOPT = "hf_quant_config.json"
# Files that say what a model is, beside its weights and its tokenizer.
STATES_MODEL = ("config.json", "generation_config.json", *_BESIDE, _MODELOPT)


def read_json_object(path: Path) -> dict[str, Any]:
    """The values of a file that must be one JSON object.

    Raises:
        InputError: The file cannot be read, or is not a JSON object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise InputError(f"{path} is no file of JSON of at most {_MOST_BYTES >> 20} MiB: fetch it again")
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({one_line(error)}): fetch it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object: fetch it again")
    if (key := _key_of_no_number(value)) is not None:
        raise InputError(f"{path} has a {key} that is no finite number: fetch it again")
    return value


def _key_of_no_number(value: Any) -> str | None:
    """The path within a JSON value to a NaN or an infinity; None: there is none.

    transformers writes such a number as a literal, or as an object {"__float__": ...}.
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    if isinstance(value, dict) and list(value) == ["__float__"]:
        return ""
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if name not in _MAY_BE_INFINITE}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        if not isinstance(each, str) and (inside := _key_of_no_number(each)) is not None:
            return f"{name}.{inside}".rstrip(".")
    return None


def read_config_json(path: Path) -> dict[str, Any]:
    """The values of a model's `config.json`.

    Older checkpoints have the `quantization_config` in another file, which is then added.

    Raises:
        InputError: A file is broken, or the model's format is not supported.
    """
    config = read_json_object(path)
    if _is_of_mlx(config.get("quantization")):
        raise InputError(
            f"{path} is of a model that MLX has quantized: take the original model's directory, or its GPTQ, AWQ or "
            "GGUF"
        )
    if config.get(QUANTIZATION) or path.name != "config.json":
        return config
    if stated := config.get("compression_config"):  # its first name in compressed-tensors
        return config | {QUANTIZATION: _with_method(stated, "compressed-tensors")}
    for name, method in _BESIDE.items():
        if (path.parent / name).exists():
            return config | {QUANTIZATION: _with_method(read_json_object(path.parent / name), method)}
    if (path.parent / _MODELOPT).exists():
        return config | {QUANTIZATION: {"quant_method": "modelopt"}}
    return config


def _is_of_mlx(stated: Any) -> bool:
    return isinstance(stated, Mapping) and "bits" in stated


def _with_method(stated: Any, method: str) -> Any:
    return {"quant_method": method} | stated if isinstance(stated, dict) else stated
