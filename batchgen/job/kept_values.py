"""Values that jobs measure and keep for later jobs, a small file each in the cache folder."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from batchgen.core.atomic_file import write_atomically
from batchgen.core.cache_folder import cache_dir, is_trusted
from batchgen.core.digest import json_sha256
from batchgen.core.typed_json import parse_json, read_typed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")


def kept_value(kind: type[Value], folder: str, key: Any, what: str) -> Value | None:
    """A value that an earlier job has kept; None: there is none.

    Args:
        kind: Dataclass of the value.
        folder: Name of the folder of such values.
        key: JSON value that says what it is of.
        what: Beginning of a warning about a file of somebody else, which ends with its path.
    """
    path = _path_of(folder, key)
    if not is_trusted(path, what):
        return None
    try:
        value: Value = read_typed(kind, parse_json(path.read_bytes()))
    except (OSError, ValueError):  # the next job replaces a damaged file
        return None
    return value


def keep_value(value: DataclassInstance, folder: str, key: Any) -> None:
    """Keep a value for later jobs; errors of the disk are ignored.

    Args:
        value: The value.
        folder: Name of the folder of such values.
        key: JSON value that says what it is of.
    """
    path = _path_of(folder, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(value)).encode(), contended=True, mode=0o600)


def _path_of(folder: str, key: Any) -> Path:
    return cache_dir() / folder / f"{json_sha256(key)[:32]}.json"
