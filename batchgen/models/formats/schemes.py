"""The supported quantization schemes of Hugging Face checkpoints, by the `quant_method` in their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from batchgen.core.errors import InputError
from batchgen.models.formats.awq import Awq
from batchgen.models.formats.base import Scheme
from batchgen.models.formats.compressed_tensors import read_compressed_tensors
from batchgen.models.formats.fp8 import Fp8
from batchgen.models.formats.gptq import Gptq
from batchgen.models.formats.mxfp4 import Mxfp4
from batchgen.models.formats.stated import Stated

# quant_method -> what reads the rest of the `quantization_config`. A new format is a new row.
SCHEMES: dict[str, Callable[[Stated], Scheme]] = {
    "mxfp4": Mxfp4.read,
    "gptq": Gptq.read,
    "awq": Awq.read,
    "fp8": Fp8.read,
    "fbgemm_fp8": lambda config: Fp8(),
    "compressed-tensors": read_compressed_tensors,
}


def read_scheme(config: Stated) -> Scheme:
    """The scheme that a `quantization_config` describes.

    Raises:
        InputError: A value is not supported; the message names it.
    """
    if not isinstance(config, Mapping):
        raise InputError(f"quantization_config must be an object, not {config!r}: fetch the model again")
    method = config.get("quant_method") or _unstated_method(config)
    if not isinstance(method, str) or method not in SCHEMES:
        raise InputError(
            f"quantized checkpoints of quant_method {method!r} are not supported (only {', '.join(SCHEMES)}): use the "
            "model's "
            "unquantized safetensors, or a GGUF"
        )
    return SCHEMES[method](config)


def _unstated_method(config: Stated) -> str:
    return "bitsandbytes" if config.get("load_in_4bit") or config.get("load_in_8bit") else "unknown"
