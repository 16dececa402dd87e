"""The files of the model that `--model` names, and their configuration and weight format.

A model is a local directory, a GGUF file, a weight store, a hub id or the demo model. Neither torch nor transformers is
imported here, so that a wrong model is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from batchgen.core.dtypes import AUTO, DEQUANTIZED, MIXED, NATIVE, NATIVE_FORMATS, WEIGHTS
from batchgen.core.errors import InputError, naming_files, one_line
from batchgen.models.config import ModelConfig
from batchgen.models.downloads import demo_file
from batchgen.models.formats.base import Scheme
from batchgen.models.formats.gguf.fields import ROPE_FACTORS, check_architecture, config_of_gguf, matrix_formats
from batchgen.models.formats.gguf.split import first_part, gguf_paths, model_stem, read_gguf
from batchgen.models.formats.schemes import read_scheme
from batchgen.models.hf.config import config_of_hf
from batchgen.models.hf.config_files import QUANTIZATION, read_config_json, read_json_object
from batchgen.models.hf.fields import stated_dtype
from batchgen.models.hf.weight_files import find_weight_files, no_config, tensors_of
from batchgen.models.hub import HubName, fetch_configuration, fetch_gguf, fetch_weights
from batchgen.models.lora import CONFIG_FILE, read_lora
from batchgen.models.sentence_modules import transformer_folder
from batchgen.models.store.manifest import RANK_KEY, STORE_MANIFEST, STORE_UNFINISHED, is_store, read_store_manifest
from batchgen.models.tensor_files.headers import TensorInfo, read_safetensors_header

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


ModelKind = Literal["hf", "gguf", "store", "dummy"]


@dataclass(frozen=True)
class ModelFiles:
    """The place and kind of a model on the local disk.

    Attributes:
        path: For kind "hf" (Hugging Face) and "store" (weight store), the directory. For "gguf", the file; if the GGUF
            is split, its first part. For "dummy", the config.json of a model that gets dummy weights.
        kind: Kind of the files.
        name: Name of the model for messages and results.
        lora: Directory of a LoRA adapter that is merged into the weights (`formats/lora.py`); None: there is none.
        hidden_output: Whether the model is wanted for its hidden states, without its output matrix.
        modules: Directory of a model of sentence-transformers whose Transformer is in the subdirectory `path`; None: it
            is `path`.
    """

    path: Path
    kind: ModelKind
    name: str
    lora: Path | None = None
    hidden_output: bool = False
    modules: Path | None = None


def resolve_model(spec: str, lora: str | None = None) -> ModelFiles:
    """The local files of a model. The demo model and models of the hub are downloaded first.

    Args:
        spec: Path, hub id, or `demo`.
        lora: Directory of a LoRA adapter for the model; None: there is none.

    Raises:
        InputError: `spec` names no model, or `lora` no adapter that can be merged into it.
        BatchgenError: The demo model cannot be downloaded.
    """
    return _with_lora(_resolved(spec), lora)


def _with_lora(files: ModelFiles, lora: str | None) -> ModelFiles:
    if lora is None:
        if files.kind == "hf" and (files.path / CONFIG_FILE).exists():
            raise InputError(
                f"{files.path} has an adapter beside the model ({CONFIG_FILE}): give the directory as --lora too, or"
                " move the adapter elsewhere"
            )
        return files
    if files.kind == "store":
        raise InputError(f"{files.path} is a weight store, into which no adapter is merged: give --lora with its model")
    with naming_files(lora):
        adapter = read_lora(Path(os.path.expanduser(lora)))
    if adapter.replaced and files.kind == "gguf":
        raise InputError(
            f"{lora} replaces {next(iter(adapter.replaced))}, which is possible in safetensors alone: give --model the"
            " directory of the model, not a GGUF"
        )
    return replace(files, lora=adapter.path, name=f"{files.name}+{adapter.path.resolve().name}")


def _resolved(spec: str) -> ModelFiles:
    if spec == "demo":
        return ModelFiles(demo_file(), "gguf", "demo")
    with naming_files(spec):
        path = Path(os.path.expanduser(spec))  # a user that it does not know stays as it is
        if path.is_dir():
            if is_store(path):
                return ModelFiles(path, "store", path.resolve().name)
            files = _in_directory(path, path.resolve().name)
            _check_directory(files)
            return files
        if path.is_file():
            return _gguf_files(path)
    if (name := HubName.parse(spec)) is not None:
        return _from_hub(name, spec)
    raise InputError(f"model {spec} does not exist")


def _from_hub(name: HubName, spec: str) -> ModelFiles:
    """The local files of a model of the hub. Weights are fetched once its configuration is known to be supported."""
    if name.gguf is not None:
        return replace(_gguf_files(fetch_gguf(name, check_architecture)), name=spec)
    folder = fetch_configuration(name)
    files = _in_directory(folder, spec)
    with naming_files(spec):
        _config_without_weights(files.path / "config.json")
        stated_scheme(files)
        fetch_weights(name, folder)
        _check_directory(files)
    return files


def resolve_for_planning(spec: str, lora: str | None = None) -> tuple[ModelFiles, ModelConfig]:
    """The files and configuration of a model whose weights are not needed.

    The model may be a `config.json`, or a directory that has no weights. Only small files are downloaded from the hub.

    Args:
        spec: Path, hub id, or `demo`.
        lora: Directory of a LoRA adapter for the model; None: there is none.

    Raises:
        InputError: `spec` names no model, or the model is not supported.
    """
    files, config = _resolved_for_planning(spec)
    return _with_lora(files, lora), config


def _resolved_for_planning(spec: str) -> tuple[ModelFiles, ModelConfig]:
    path = Path(os.path.expanduser(spec))
    with naming_files(spec):
        if path.suffix == ".json" and path.is_file():
            return ModelFiles(path.parent, "hf", path.resolve().parent.name), _config_without_weights(path)
        if path.is_dir() and not is_store(path):
            files = _in_directory(path, path.resolve().name)
            if (files.path / "config.json").exists():
                return files, _config_without_weights(files.path / "config.json")
        name = None if spec == "demo" or path.exists() else HubName.parse(spec)
        if name is not None and name.gguf is None:
            files = _in_directory(fetch_configuration(name), spec)
            return files, _config_without_weights(files.path / "config.json")
        files = _resolved(spec)
        return files, read_config(files)


def _config_without_weights(path: Path) -> ModelConfig:
    config = read_config_json(path)
    with _naming(path):
        parsed = config_of_hf(config)
    # Weights that are published today have 16 bits unless their config says otherwise.
    return parsed if stated_dtype(config) else replace(parsed, dtype="bfloat16")


def without_weights(spec: str) -> ModelFiles:
    """A model with dummy weights (`models.checkpoint.dummy_checkpoint`) and the shape of another one.

    Args:
        spec: Path of a `config.json` or of its directory, or a hub id.

    Raises:
        InputError: There is no `config.json`.
    """
    files, _ = resolve_for_planning(spec)
    if files.kind != "hf":
        raise InputError(f"{spec} has no config.json: dummy weights need one, or leave out --load-format dummy")
    path = Path(os.path.expanduser(spec))
    return ModelFiles(path if path.is_file() else files.path / "config.json", "dummy", files.name)


def weight_paths(files: ModelFiles) -> list[Path]:
    """Paths of the files that have a model's weights, in order.

    Raises:
        InputError: A file is missing.
    """
    if files.kind == "gguf":
        return gguf_paths(files.path)
    if files.kind == "store":
        return [files.path / name for name in read_store_manifest(files.path / STORE_MANIFEST)["files"]]
    return list(find_weight_files(files.path).paths)


def weight_tensors(files: ModelFiles) -> dict[str, TensorInfo]:
    """Every tensor in the files of a GGUF or of a Hugging Face directory, by its name there.

    Raises:
        InputError: A file is missing or corrupt.
    """
    if files.kind == "gguf":
        return read_gguf(files.path).tensors
    return tensors_of(find_weight_files(files.path))


def read_config(files: ModelFiles) -> ModelConfig:
    """The configuration of a model. Of the weight files at most the headers are read.

    Raises:
        InputError: The model is not supported, or its files are broken.
    """
    config = _stated_config(files)
    return config.without_logits() if files.hidden_output else config


def _stated_config(files: ModelFiles) -> ModelConfig:
    if files.kind == "gguf":
        return _gguf_config(files.path)
    if files.kind == "store":
        path = files.path / STORE_MANIFEST
        manifest = read_store_manifest(path)
        with _naming(path):
            if part := manifest["source"]["identity"].get(RANK_KEY):
                raise InputError(f"the store has the part of rank {part[0]} of {part[1]} alone: give the model itself")
            return ModelConfig.from_json(manifest["config"])
    if files.kind == "dummy":
        return _config_without_weights(files.path)
    path = files.path / "config.json"
    config = read_config_json(path)
    generation = files.path / "generation_config.json"
    defaults = read_json_object(generation) if generation.exists() else None
    with _naming(path):
        parsed = config_of_hf(config, defaults)
    if not stated_dtype(config):  # only after all that needs no weight file
        parsed = replace(parsed, dtype=_stored_dtype(files))
    return parsed


def stored_weights(files: ModelFiles) -> str | None:
    """The packed format in which a model's files have the layers' matrices; None: there is none.

    None means that the matrices are numbers, or in a format that has to be dequantized, as all are that an adapter is
    merged into.

    Returns:
        "int8" for compressed-tensors with 8 bits; otherwise one of `NATIVE_FORMATS`.
    """
    if files.lora is not None:
        return None
    if files.kind == "gguf":
        return _gguf_format(files.path)
    if files.kind == "store":
        stored = read_store_manifest(files.path / STORE_MANIFEST)["weight_format"]
        return stored if stored in NATIVE_FORMATS else None
    if (scheme := stated_scheme(files)) is None:
        return None
    matrices = _config_without_weights(files.path / "config.json").layer_matrices.values()
    return scheme.packed_format(_tensors_if_there(files), {n for group in matrices for _, n in group})


def stated_scheme(files: ModelFiles) -> Scheme | None:
    """The quantization that the config.json of a Hugging Face model states; None: it states none.

    Raises:
        InputError: The quantization is not supported.
    """
    path = files.path / "config.json"
    # Not there where only a shape is known, of another name.
    stated = read_config_json(path).get(QUANTIZATION) if files.kind == "hf" and path.exists() else None
    with _naming(path):
        return None if stated is None or stated == {} else read_scheme(stated)


def _tensors_if_there(files: ModelFiles) -> dict[str, TensorInfo]:
    """All tensors of a model's files; none if only the configuration is there, as for planning."""
    try:
        return weight_tensors(files)
    except InputError:
        return {}


def _gguf_format(path: Path) -> str | None:
    """The packed format of a GGUF's layers; `MIXED` if matrices have different formats; None if all are numbers."""
    config = _gguf_config(path)
    if config.layer_formats:
        return MIXED
    return next(iter(matrix_formats(read_gguf(path).tensors, 1)[0].values()), "") or None


def resolve_weights(files: ModelFiles, weights: str, formats: Collection[str] = NATIVE_FORMATS) -> str:
    """The format in which layers are run: the format that is asked for, or the model's own.

    Args:
        files: Files of the model.
        weights: One of `WEIGHTS`, or a result of this function.
        formats: Packed formats of files that the device multiplies as they are.

    Returns:
        "native" if the model's weights are numbers: they are run in the compute dtype. "dequantized" if the model has a
            packed format, but is run in the compute dtype. Otherwise the packed format.

    Raises:
        InputError: `weights` is no format, or not this model's, or the device has no kernels for it.
    """
    stored = stored_weights(files)
    if weights not in (*WEIGHTS, stored):
        raise InputError(f"weights {weights!r} is not one of {', '.join(WEIGHTS)}")
    asked = NATIVE if weights == AUTO else weights
    resolved = stored if asked == NATIVE and stored else asked
    if resolved in NATIVE_FORMATS and resolved not in formats:
        if weights == NATIVE:
            raise InputError(f"--weights native: this device does not multiply weights in {resolved}: leave it out")
        return DEQUANTIZED
    return resolved


def _in_directory(path: Path, name: str) -> ModelFiles:
    """The files of a Hugging Face directory; those of sentence-transformers may have the model in a subdirectory."""
    place = transformer_folder(path)
    return ModelFiles(place, "hf", name, modules=None if place == path else path)


def _check_directory(files: ModelFiles) -> None:
    if (files.path / STORE_UNFINISHED).is_file():
        raise InputError(f"{files.path} is a conversion that has not finished: run its `batchgen convert` again")
    if not (files.path / "config.json").exists():
        raise no_config(files.path)
    _config_without_weights(files.path / "config.json")  # a model that is not supported is told so first
    weight_paths(files)


def _gguf_files(path: Path) -> ModelFiles:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise InputError(f"{path} is not a GGUF; of a safetensors model, pass the directory that holds it")
    files = ModelFiles(first_part(path), "gguf", model_stem(path))
    weight_paths(files)
    return files


def _gguf_config(path: Path) -> ModelConfig:
    header = read_gguf(path)
    factors = {name: _floats(name, header.tensors[name]) for name in ROPE_FACTORS if name in header.tensors}
    with _naming(path):
        dtype = _main_dtype(header.tensors)
        return config_of_gguf(header.metadata, header.tensors, dtype, factors, header.known_tokens)


def _floats(name: str, info: TensorInfo) -> tuple[float, ...]:
    """The values of a short tensor of a GGUF.

    Raises:
        InputError: They cannot be read.
    """
    import numpy as np

    if info.dtype != "F32" or len(info.shape) != 1:
        raise InputError(f"tensor {name} in {info.path} is {info.dtype} {list(info.shape)}, not one row of F32")
    return tuple(np.fromfile(info.path, np.float32, info.shape[0], offset=info.offset).tolist())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Within a `with` block, put the name of the model's file before the text of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:  # a value of the wrong kind
        raise InputError(f"{path} is not a valid model configuration: {one_line(error)}") from error


def _stored_dtype(files: ModelFiles) -> str:
    """The dtype of most of the weights in a model's first weight file."""
    return _main_dtype(read_safetensors_header(weight_paths(files)[0]))


def _main_dtype(tensors: dict[str, TensorInfo]) -> str:
    """The dtype that most of the tensors' bytes have; bfloat16, which has a large range, for quantized formats."""
    sizes: dict[str, int] = {}
    for info in tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    return _SAFETENSORS_DTYPES.get(max(sizes, key=sizes.__getitem__, default=""), "bfloat16")
