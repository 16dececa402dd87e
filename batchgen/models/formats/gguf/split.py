"""A GGUF that is split into several files by llama-gguf-split: all parts together are one model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.models.formats.gguf.header import GgufHeader, read_gguf_header
from batchgen.models.tensor_files.headers import TensorInfo

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_stem(path: Path) -> str:
    """The name of a GGUF file without its suffix, and without the number of a part."""
    named = _PART_NAME.fullmatch(path.name)
    return named["stem"] if named else path.stem


def first_part(path: Path) -> Path:
    """The first part of a split GGUF, for any of its parts. A GGUF that is not split is returned unchanged.

    The first part has the key-value pairs.

    Raises:
        InputError: The first part does not exist.
    """
    named = _PART_NAME.fullmatch(path.name)
    first = _part(path, named, 1) if named else path
    if not first.exists():
        raise _missing(first, int(named["count"]) if named else 1)
    return first


def gguf_paths(first: Path) -> list[Path]:
    """All files of a GGUF, in order.

    Args:
        first: File with the key-value pairs (`first_part`).

    Raises:
        InputError: A file is missing, or is not a part of this model.
    """
    header = read_gguf_header(first)
    count, named = _count(header), _PART_NAME.fullmatch(first.name)
    if named is None and count > 1:
        raise InputError(
            f"{first} is one of {count} parts of a split GGUF: give them the names that they had, "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    if named is not None and int(named["count"]) != count:
        raise InputError(
            f"{first} has the name of a GGUF in {int(named['count'])} parts, but says that there are {count}"
        )
    paths = [_part(first, named, number) for number in range(1, count + 1)] if count > 1 else [first]
    for number, path in enumerate(paths):
        if not path.exists():
            raise _missing(path, count)
        _check_part(first, header, path, number, count)
    return paths


def read_gguf(first: Path) -> GgufHeader:
    """Read the headers of a GGUF: the key-value pairs of its first part, and the tensors of all parts.

    Args:
        first: File with the key-value pairs (`first_part`).

    Raises:
        InputError: A part is missing, corrupt or of another model.
    """
    paths = gguf_paths(first)
    header, tensors = read_gguf_header(first), dict[str, TensorInfo]()
    for path in paths:
        of_part = read_gguf_header(path).tensors
        if twice := of_part.keys() & tensors.keys():
            name = min(twice)
            raise InputError(f"tensor {name} is in {tensors[name].path} and in {path} again: fetch both again")
        tensors |= of_part
    stated = header.metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and stated != len(tensors):
        raise InputError(
            f"the {len(paths)} parts of {first} have {len(tensors):,} tensors, "
            f"and split.tensors.count says {stated}: fetch them again"
        )
    return replace(header, tensors=tensors)


def _count(header: GgufHeader) -> int:
    """The number of parts. Files that were merged again state 0."""
    count = header.metadata.get("split.count", 1)
    return count if isinstance(count, int) and count > 1 else 1


def _part(path: Path, named: re.Match[str] | None, number: int) -> Path:
    assert named is not None
    return path.with_name(f"{named['stem']}-{number:05}-of-{named['count']}.gguf")


def _missing(path: Path, count: int) -> InputError:
    return InputError(f"{path} is missing: the model has {count} parts, put all of them into one directory")


def _check_part(first: Path, header: GgufHeader, path: Path, number: int, count: int) -> None:
    """Raise InputError unless a file is part number `number`, from 0 on, of the model that `first` belongs to."""
    of_part = read_gguf_header(path)
    if _count(of_part) != count:
        raise InputError(f"{path} is of a GGUF in {_count(of_part)} parts, {first} of one in {count}: fetch both again")
    stated = of_part.metadata.get("split.no", number)
    if stated != number:
        raise InputError(
            f"{path} has the name of part {number + 1}, but its split.no is {stated}, not {number}: fetch it again"
        )
    totals = [each.metadata.get("split.tensors.count") for each in (header, of_part)]
    if totals[0] != totals[1]:
        raise InputError(
            f"{path} is of a model with {totals[1]} tensors, {first} of one with {totals[0]} "
            "(split.tensors.count): fetch both again"
        )
