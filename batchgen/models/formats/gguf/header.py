"""The header of a GGUF: its key-value pairs and the places of its tensors, read without weights or torch."""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from batchgen.core.errors import InputError
from batchgen.core.file_version import FileVersion, version_of
from batchgen.models.formats.gguf.known_tokens import KNOWN
from batchgen.models.tensor_files.headers import TensorInfo, check_extents

T = TypeVar("T")
VOCABULARY = "tokenizer.ggml."  # begins the names of the pairs that are about a tokenizer


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        metadata: Key-value pairs, without long arrays such as the vocabulary.
        tensors: Tensors by name.
        known_tokens: Ids of the tokens of `KNOWN` that are in the vocabulary, by text.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    known_tokens: dict[str, int] = field(default_factory=dict)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of one GGUF file, of version 2 or 3.

    Long arrays are skipped: a vocabulary of 50,000 tokens takes milliseconds. The result is cached until the file
    changes.

    Raises:
        InputError: The file is corrupt.
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
    except _MALFORMED as error:
        raise InputError(f"{path} is truncated or not a GGUF ({error}): fetch it again") from error
    check_extents(path, header.tensors, file_bytes)
    return replace(header, tensors={name: replace(info, version=version) for name, info in header.tensors.items()})


def read_gguf_vocabulary(path: Path) -> dict[str, Any]:
    """Read the key-value pairs of a GGUF, with the long arrays of its tokenizer.

    Raises:
        InputError: The file is corrupt.
    """
    return _read_pairs(path, lambda parser: parser.pairs(lambda key: key.startswith(VOCABULARY)))


def stated_architecture(begin: bytes) -> str | None:
    """The architecture that the first bytes of a GGUF state; None: they do not."""
    try:
        parser = _GgufParser(Path(), begin)
        for _ in range(parser.num_pairs):
            key = parser.string()
            value = parser.value(parser.scalar("I"), False)
            if key == "general.architecture":
                return str(value)
    except _MALFORMED:  # the rest of the header is behind them
        pass
    return None


def gguf_pairs(path: Path) -> tuple[str, int]:
    """sha256 and number of the bytes of all key-value pairs of a GGUF file. Raises InputError if it is corrupt."""

    def digest(parser: _GgufParser) -> tuple[str, int]:
        start = parser.position
        parser.pairs(lambda key: False)
        with memoryview(parser.data) as data:
            return hashlib.sha256(data[start : parser.position]).hexdigest(), parser.position - start

    return _read_pairs(path, digest)


def _read_pairs(path: Path, read: Callable[[_GgufParser], T]) -> T:
    """The result of a function that parses the key-value pairs of a GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(_GgufParser(path, data))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except _MALFORMED as error:
        raise InputError(f"{path} is truncated or not a GGUF ({error}): fetch it again") from error


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONG_ARRAY = 1024
_MALFORMED = (ValueError, KeyError, OverflowError, RecursionError, struct.error)


class _GgufParser:
    """A parser of a GGUF's header; `position` is the offset of the next byte."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.position = 4
        if (version := self.scalar("I")) not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        self.num_tensors, self.num_pairs = self.scalar("Q"), self.scalar("Q")
        self.known_tokens: dict[str, int] = {}

    def header(self) -> GgufHeader:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        metadata = self.pairs(lambda key: False)
        extents, known = {}, {kind.value for kind in GGMLQuantizationType}
        for _ in range(self.num_tensors):
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
        return GgufHeader(metadata, tensors, self.known_tokens)

    def pairs(self, is_whole: Callable[[str], bool]) -> dict[str, Any]:
        """All key-value pairs.

        Args:
            is_whole: Function that tells for a key whether a long array is read. Other long arrays are skipped.
        """
        pairs = {}
        for _ in range(self.num_pairs):
            key = self.string()
            if key == f"{VOCABULARY}tokens":
                self.known_tokens = self.places_of(KNOWN)
            pairs[key] = self.value(self.scalar("I"), is_whole(key))
        return {key: value for key, value in pairs.items() if value is not None}

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
        """The index of each of some words in the array of strings at `position`; absent words are left out.

        `position` does not change.
        """
        start, places, wanted = self.position, dict[str, int](), {word.encode(): word for word in words}
        kind, item_kind, count = self.scalar("I"), self.scalar("I"), self.scalar("Q")
        if (kind, item_kind) == (_ARRAY, _STRING):
            lengths = {len(word) for word in wanted}
            unpack_length, position = struct.Struct("<Q").unpack_from, self.position
            for i in range(count):
                (length,) = unpack_length(self.data, position)
                position += 8 + length
                if length in lengths and (word := wanted.get(self.data[position - length : position])):
                    places[word] = i
        self.position = start
        return places

    def value(self, kind: int, is_whole: bool) -> Any:
        """The value at `position`; None for a long array, which is skipped unless `is_whole`."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind == _ARRAY:
            arrays = [self.value(item_kind, is_whole) for _ in range(count)]
            return tuple(arrays) if is_whole or count <= _LONG_ARRAY else None
        if item_kind == _STRING:
            return self.strings(count, is_whole)
        size = struct.calcsize(f"<{_SCALARS[item_kind]}")
        if count * size > len(self.data) - self.position:
            raise ValueError("an array runs past the end")
        start, self.position = self.position, self.position + count * size
        if not is_whole and count > _LONG_ARRAY:
            return None
        return struct.unpack_from(f"<{count}{_SCALARS[item_kind]}", self.data, start)

    def strings(self, count: int, is_whole: bool) -> tuple[str, ...] | None:
        """An array of `count` strings; None for a long array, which is skipped unless `is_whole`."""
        if is_whole or count <= _LONG_ARRAY:
            return tuple(self.string() for _ in range(count))
        unpack_length, position = struct.Struct("<Q").unpack_from, self.position
        for _ in range(count):
            position += 8 + unpack_length(self.data, position)[0]
        self.position = position
        return None
