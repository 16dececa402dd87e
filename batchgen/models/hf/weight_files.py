"""The safetensors files with the weights of a Hugging Face directory, and the file of each tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchgen.core.errors import InputError, one_line
from batchgen.models.hf.config_files import read_json_object
from batchgen.models.tensor_files.headers import TensorInfo, read_safetensors_header

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_FILE_NAME = re.compile(r"[^/\0]+\.safetensors")
# Weights that are no safetensors of a Hugging Face model: begin and ends of a file's name, its kind, and what to take.
_OTHERS = (
    ("consolidated", (".safetensors", ".pth"), "weights in the layout of Mistral's or Meta's own code",
     "take the repository's model*.safetensors with its config.json"),
    ("adapter_model", (".safetensors", ".bin"), "a LoRA adapter",
     "give its base model as --model, and this directory as --lora"),
    ("", (".gguf",), "a GGUF", "to run it, pass the file itself"),
    ("", (".bin", ".pt", ".pth", ".ckpt"), "PyTorch weights only",
     "convert them to safetensors (save_pretrained of transformers)"),
    ("", (".onnx",), "ONNX", "take the safetensors of the model that it was exported from"),
    ("", (".h5", ".msgpack", ".nemo", ".tflite", ".engine", ".mlmodel", ".mlpackage"), "weights of another framework",
     "take the model's safetensors"),
)  # fmt: skip
_NOT_THE_MODEL = ("consolidated", "adapter_model")  # however it ends
# Suffixes of tensors that some quantization alone has, and its name.
_SIGNS = {
    "qweight": "GPTQ or AWQ, which neither its config.json nor a quantize_config.json states",
    "weight_packed": "compressed-tensors, which its config.json does not state",
    "q_weight": "EXL2",
    "trellis": "EXL3",
    "biases": "MLX",
    "absmax": "bitsandbytes",
    "W_q": "HQQ",
    "codebooks": "AQLM",
}


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a directory.

    Attributes:
        paths: Paths of the files, in order.
        index: Path of the index that names the files; None: there is none.
        weight_map: For each tensor, its file by the index; None: there is no index, and one file has all tensors.
    """

    paths: tuple[Path, ...]
    index: Path | None = None
    weight_map: dict[str, Path] | None = None


def find_weight_files(directory: Path) -> WeightFiles:
    """Find the safetensors files of a directory: `model.safetensors`, those that an index names, or the only one.

    Files that are not in the index are not read.

    Raises:
        InputError: A file is missing, there are several files without an index, or the format is not supported.
    """
    if (directory / _SINGLE).exists():
        return WeightFiles((directory / _SINGLE,))
    names = sorted(entry.name for entry in directory.iterdir())
    safetensors = [name for name in names if name.endswith(".safetensors") and not name.startswith(_NOT_THE_MODEL)]
    indices = [_INDEX] if _INDEX in names else [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if len(indices) == 1:
        return _of_index(directory / indices[0])
    if len(safetensors) == 1 and not indices:
        return WeightFiles((directory / safetensors[0],))
    if safetensors or indices:
        listed = ", ".join((indices or safetensors)[:4]) + (", ..." if len(indices or safetensors) > 4 else "")
        raise InputError(
            f"{directory} has several files of weights ({listed}) and no {_INDEX} that says which has what: fetch that "
            "file, or "
            "leave one model there"
        )
    raise InputError(
        f"{directory} has {_what_else(directory, names) or f'no {_SINGLE}; it holds: {listing(directory)}'}"
    )


def no_config(directory: Path) -> InputError:
    """The error for a directory without a config.json, whose message explains what is wrong."""
    what = _what_else(directory, sorted(entry.name for entry in directory.iterdir()))
    return InputError(f"{directory} has no config.json; it {f'has {what}' if what else f'holds: {listing(directory)}'}")


def tensors_of(files: WeightFiles) -> dict[str, TensorInfo]:
    """Every tensor in safetensors files, by name.

    With an index, a tensor is taken from the file that the index names.

    Raises:
        InputError: A file is corrupt, or two files have a tensor that the index does not name.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in files.paths:
        for name, info in read_safetensors_header(path).items():
            named = files.weight_map.get(name) if files.weight_map else None
            if named is None and name in tensors:
                raise InputError(
                    f"tensor {name} is in {tensors[name].path} and in {path}, and {files.index} names neither: fetch "
                    "the "
                    "model again"
                )
            if named in (None, path):
                tensors[name] = info
    return tensors


class ModelTensors(dict[str, TensorInfo]):
    """All tensors of a model by name.

    The look-up of a missing tensor raises an InputError that explains what is wrong.
    """

    def __init__(self, model: Path, tensors: Mapping[str, TensorInfo]) -> None:
        """Wrap the tensors of the model whose directory or GGUF is at path `model`."""
        super().__init__(tensors)
        self._model = model

    def __missing__(self, name: str) -> TensorInfo:
        raise missing_tensor(self._model, self, name)


def missing_tensor(model: Path, tensors: Iterable[str], name: str) -> InputError:
    """The error for a model that lacks a tensor.

    Its message explains what is wrong, as far as other tensors and the index show it.

    Args:
        model: Path of the directory or of the GGUF.
        tensors: Names of the tensors that the model has.
        name: Name of the missing tensor.
    """
    suffixes = {other.rpartition(".")[2] for other in tensors}
    if sign := next((sign for sign in _SIGNS if sign in suffixes), None):
        return InputError(
            f"{model} has no tensor {name}, but tensors of {_SIGNS[sign]} (*.{sign}): use the model's unquantized "
            "safetensors, "
            "or a GGUF"
        )
    files = find_weight_files(model) if model.is_dir() else WeightFiles(())
    if files.weight_map and (path := files.weight_map.get(name)):
        return InputError(f"{files.index} says that {path.name} has tensor {name}, and it has not: fetch both again")
    return InputError(f"{model} has no tensor {name}: it is incomplete, or its config is wrong")


def listing(directory: Path) -> str:
    """The names of the files in a directory, for a message."""
    names = sorted(entry.name for entry in directory.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") or "nothing"


def _of_index(index: Path) -> WeightFiles:
    stated = read_json_object(index).get("weight_map")
    if not isinstance(stated, dict) or not stated:
        raise InputError(f"{index} has no weight_map: fetch it again")
    for name, file in stated.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise InputError(
                f"the weight_map of {index} names {one_line(repr(file))} for tensor {one_line(name)}, which is no "
                "safetensors file "
                "beside it: fetch it again"
            )
    weight_map = {name: index.parent / file for name, file in stated.items()}
    paths = tuple(sorted(set(weight_map.values())))
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} is missing, though {index.name} lists it: fetch it again")
    return WeightFiles(paths, index, weight_map)


def _what_else(directory: Path, names: list[str]) -> str:
    """Weights of another format in a directory, and what to use instead, for a message; "" if there are none."""
    for begin, ends, what, instead in _OTHERS:
        of_kind = [name for name in names if name.startswith(begin) and name.endswith(ends)]
        if of_kind:
            more = f" and {len(of_kind) - 1} more" if len(of_kind) > 1 else ""
            return f"{what} ({directory / of_kind[0]}{more}): {instead}"
    return ""
