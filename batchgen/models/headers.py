"""What weight files hold, read from their headers alone: safetensors and GGUF, without weights or torch."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.file_version import FileVersion, version_of
from batchgen.core.typed_json import parse_json, read_typed

# Tokens that end a turn of a chat, in the vocabularies of Gemma and of Phi-3.
TURN_ENDS = ("<end_of_turn>", "<|end|>")

_MOST_HEADER_BYTES = 100_000_000  # as the safetensors package has it


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. shape: rows first. dtype: as the format spells it ("BF16", "Q4_1").

    offset: bytes from the start of the file. version: the file's as its header was read, which readers hold it to; None: any.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    version: FileVersion | None = None


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF, or one of its parts, has at its beginning.

    metadata: key-value pairs, less the long arrays (vocabulary, merges). turn_ends: the ids of those of `TURN_ENDS` that the
    vocabulary has.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    turn_ends: dict[str, int] = field(default_factory=dict)


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises InputError where the file is truncated or corrupt."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file: fetch it again")
        with path.open("rb") as file:
            version = version_of(file.fileno())
            start = 8 + int.from_bytes(file.read(8), "little")
            if not 8 < start <= min(version.size_bytes, _MOST_HEADER_BYTES):
                raise ValueError("its header does not fit the file")
            entries = parse_json(file.read(start - 8), _no_name_twice)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor_of(path, entry, start, version) for name, entry in entries.items()}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is truncated or not safetensors ({one_line(error)}): fetch it again") from error
    _check_extents(path, tensors, version.size_bytes)
    return tensors


def _tensor_of(path: Path, entry: dict[str, Any], start: int, version: FileVersion) -> TensorInfo:
    """A tensor by its entry in the header. start: where data begin. Raises what a wrong entry leads to."""
    shape = read_typed(tuple[int, ...], entry["shape"], "a shape")
    begin, end = read_typed(tuple[int, int], entry["data_offsets"], "data_offsets")
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape is {list(shape)}")
    return TensorInfo(path, read_typed(str, entry["dtype"], "a dtype"), shape, start + begin, end - begin, version)


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def read_gguf_header(path: Path) -> GgufHeader:
    """Key-value pairs and tensors of one file of a GGUF, versions 2 and 3. Raises InputError where it is corrupt.

    Long arrays are stepped over: a vocabulary of 50,000 takes milliseconds. What was read is kept for as long as the file
    stays as it is.
    """
    try:
        version = version_of(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    return _parse_gguf_header(path, version)


@lru_cache(maxsize=64)  # files: a model may be in many
def _parse_gguf_header(path: Path, version: FileVersion) -> GgufHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _GgufParser(path, data).header()
            file_bytes = len(data)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, OverflowError, struct.error) as error:
        raise InputError(f"{path} is truncated or not a GGUF ({error}): fetch it again") from error
    _check_extents(path, header.tensors, file_bytes)
    return replace(header, tensors={name: replace(info, version=version) for name, info in header.tensors.items()})


def _check_extents(path: Path, tensors: dict[str, TensorInfo], file_bytes: int) -> None:
    for name, info in tensors.items():
        if info.offset < 0 or info.num_bytes < 0 or info.offset + info.num_bytes > file_bytes:
            raise InputError(
                f"{path} is truncated: tensor {name!r} ends at byte {info.offset + info.num_bytes:,} of "
                f"{file_bytes:,}: fetch it again"
            )


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONG_ARRAY = 1024


class _GgufParser:
    """Walks through the header; `position` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def header(self) -> GgufHeader:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.position = 4
        if (version := self.scalar("I")) not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        num_tensors, num_pairs = self.scalar("Q"), self.scalar("Q")
        metadata, turn_ends = {}, dict[str, int]()
        for _ in range(num_pairs):
            key = self.string()
            if key == "tokenizer.ggml.tokens":
                turn_ends = self.places_of(TURN_ENDS)
            metadata[key] = self.value(self.scalar("I"))
        metadata = {key: value for key, value in metadata.items() if value is not None}
        extents, known = {}, {kind.value for kind in GGMLQuantizationType}
        for _ in range(num_tensors):
            name = self.string()
            if (num_dims := self.scalar("I")) > 8:
                raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
            shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
            if (number := self.scalar("I")) not in known:
                raise ValueError(f"tensor {name!r} has the unknown type {number}")
            kind = GGMLQuantizationType(number)
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if block_size > 1 and (not shape or shape[-1] % block_size):
                raise ValueError(
                    f"tensor {name!r} has rows of {shape[-1:]} values in {kind.name}'s blocks of {block_size}"
                )
            extents[name] = (kind.name, shape, self.scalar("Q"), math.prod(shape) // block_size * block_bytes)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors = {
            name: TensorInfo(self.path, kind, shape, start + offset, num_bytes)
            for name, (kind, shape, offset, num_bytes) in extents.items()
        }
        return GgufHeader(metadata, tensors, turn_ends)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self.data[self.position : self.position + length]
        if len(raw) != length:
            raise ValueError("a string runs past the end")
        self.position += length
        return raw.decode("utf-8", errors="replace")

    def places_of(self, words: tuple[str, ...]) -> dict[str, int]:
        """Where words stand in the array of strings at `position`, which stays; of those that are there."""
        start, found, wanted = self.position, dict[str, int](), {word.encode(): word for word in words}
        kind, item_kind, count = self.scalar("I"), self.scalar("I"), self.scalar("Q")
        if (kind, item_kind) == (_ARRAY, _STRING):
            lengths = {len(word) for word in wanted}
            unpack_length, position = struct.Struct("<Q").unpack_from, self.position
            for i in range(count):
                (length,) = unpack_length(self.data, position)
                position += 8 + length
                if length in lengths and (word := wanted.get(self.data[position - length : position])):
                    found[word] = i
        self.position = start
        return found

    def value(self, kind: int) -> Any:
        """The value at `position`; None for an array too long to be about the model's shape."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if count <= _LONG_ARRAY:
            return tuple(self.value(item_kind) for _ in range(count))
        if item_kind == _STRING:
            unpack_length, position = struct.Struct("<Q").unpack_from, self.position
            for _ in range(count):
                position += 8 + unpack_length(self.data, position)[0]
            self.position = position
        elif item_kind == _ARRAY:
            for _ in range(count):
                self.value(item_kind)
        else:
            self.position += count * struct.calcsize(f"<{_SCALARS[item_kind]}")
        return None
