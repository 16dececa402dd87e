"""The headers of safetensors files, read without the weights, and the place of a tensor in a file.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.file_version import FileVersion, version_of
from batchgen.core.typed_json import parse_json, read_typed

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors package


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in a file.

    Attributes:
        path: Path of the file.
        dtype: Dtype in the spelling of the file's format ("BF16", "Q4_1").
        shape: Shape, rows first.
        offset: Offset of the tensor from the start of the file, in bytes.
        num_bytes: Size of the tensor, in bytes.
        version: Version of the file when its header was read; reading fails if the file has changed. None: not checked.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    version: FileVersion | None = None


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, by name.

    Raises:
        InputError: The file cannot be read, or is truncated or corrupt.
    """
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
    check_extents(path, tensors, version.size_bytes)
    return tensors


def _tensor_of(path: Path, entry: dict[str, Any], start: int, version: FileVersion) -> TensorInfo:
    """The place of a tensor from its entry in a header. `start` is the offset of the data.

    A wrong entry raises any error.
    """
    shape = read_typed(tuple[int, ...], entry["shape"], "a shape")
    begin, end = read_typed(tuple[int, int], entry["data_offsets"], "data_offsets")
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape is {list(shape)}")
    return TensorInfo(path, read_typed(str, entry["dtype"], "a dtype"), shape, start + begin, end - begin, version)


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its header has a name twice")
    return entries


def check_extents(path: Path, tensors: dict[str, TensorInfo], file_bytes: int) -> None:
    for name, info in tensors.items():
        if info.offset < 0 or info.num_bytes < 0 or info.offset + info.num_bytes > file_bytes:
            raise InputError(
                f"{path} is truncated: tensor {name!r} ends at byte {info.offset + info.num_bytes:,} of "
                f"{file_bytes:,}: fetch it again"
            )
