"""The manifest of a run directory: the record of the job that the directory belongs to, and of its progress."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen._version import __version__
from batchgen.core.atomic_file import write_atomically
from batchgen.core.digest import json_sha256
from batchgen.core.errors import InputError
from batchgen.core.kernel_choice import KernelChoice
from batchgen.core.typed_json import parse_json, read_typed
from batchgen.output.result_counts import ResultCounts

FORMAT_VERSION = 2
_SHOWN_CHARS = 48
_FILES = "input.files"  # field of fingerprints


class DamagedManifest(InputError):
    """A manifest file whose content is not valid."""


@dataclass(frozen=True)
class Manifest:
    """The record of a job in its run directory.

    Attributes:
        fingerprint: Everything that decides the job's output, as nested dicts of JSON values.
        state: "running" or "complete".
        may_replace: True where an existing output file may be replaced without asking: the user allowed that, or this
            job wrote the file.
        totals: Counts of rows and tokens of a complete output; None before.
        counts: Counts over the results of a complete output; None before.
        files: Bytes of each file of a complete output, by file name; None before.
        kernels: Kernels that compute the rows; None: no row has been started.
        weight_format: Format of the layers' weights that compute the rows; None: no row has been started.
        parts: Number of part files when a run last ended in order. A run that was killed may have added more.
        first: SHA-256 of the fingerprint of the first of several growing jobs, where this job reuses rows of smaller
            ones.
    """

    fingerprint: dict[str, Any]
    state: str = "running"
    may_replace: bool = False
    totals: dict[str, int] | None = None
    counts: ResultCounts | None = None
    files: dict[str, int] | None = None
    kernels: KernelChoice | None = None
    parts: int = 0
    first: str | None = None
    weight_format: str | None = None

    @property
    def results_per_row(self) -> int:
        """Number of results that the parts have for each row: one a step."""
        prompt = self.fingerprint.get("prompt")
        steps = prompt.get("steps") if isinstance(prompt, dict) else None
        return len(steps) if isinstance(steps, list) and steps else 1

    def write(self, path: Path) -> None:
        """Write the manifest to a file in one step. Raises OSError."""
        versions = {"batchgen": __version__, "python": platform.python_version(), "pyarrow": pa.__version__}
        record = {"format_version": FORMAT_VERSION, "versions": versions, **asdict(self)}
        write_atomically(path, (json.dumps(record, indent=2, sort_keys=True) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Read a manifest; None where the file does not exist.

        Raises:
            InputError: Another version of batchgen wrote the manifest.
            DamagedManifest: The content is not valid.
        """
        try:
            record = parse_json(path.read_bytes())
            if record["format_version"] != FORMAT_VERSION:
                writer = record["versions"]["batchgen"]
                raise InputError(
                    f"{path} was written by batchgen {writer}, in a format that this version does not read: "
                    "use that version, or start again with --overwrite"
                )
            found: Manifest = read_typed(cls, {name: record[name] for name in cls.__dataclass_fields__})
            if min(found.parts, *(found.totals or {"": 0}).values(), *(found.files or {"": 0}).values()) < 0:
                raise ValueError("numbers below 0")
            return found
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedManifest(
                f"{path} is damaged, and its parts do not tell that they are of this job: start again with --overwrite"
            ) from error


def read_kernels(values: Any) -> KernelChoice | None:
    """Read the kernels that a manifest or a part file records; None where it records none. Raises InputError."""
    return None if values is None else read_typed(KernelChoice, values, "kernels")


def describe_changes(
    old: dict[str, Any], new: dict[str, Any], describe_files: Callable[[dict[str, Any]], str] | None = None
) -> str:
    """The fields in which two fingerprints differ, as text such as "sampling.seed was 0, now 1"; "" for none.

    Args:
        old: The earlier fingerprint.
        new: The fingerprint now.
        describe_files: Function from the earlier identity of the input to a text on how its files differ now; None: the
            lists of files are shown as other fields are.
    """
    was, now = _flat(old), _flat(new)
    changes = []
    for name in sorted(was.keys() | now.keys()):
        if name == _FILES and describe_files and name in was and name in now and was[name] != now[name]:
            changes.append(describe_files(old["input"]))
            continue
        old_text, new_text = (_shown(fields, name) for fields in (was, now))
        if old_text != new_text:
            changes.append(f"{name} was {_cut(old_text, new_text)}, now {_cut(new_text, old_text)}")
    return "; ".join(changes)


def without_lists(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A copy of a fingerprint whose size does not grow with the number of input files.

    The lists of files and partitions are replaced by a count and one digest.
    """
    given = fingerprint.get("input", {})
    lists = {name: {"count": len(v), "sha256": json_sha256(v)} for name, v in given.items() if isinstance(v, list)}
    return {**fingerprint, "input": given | lists} if lists else fingerprint


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts into one dict whose keys are joined by dots."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = item
    return flat


def _shown(fields: dict[str, Any], name: str) -> str:
    return json.dumps(fields[name], ensure_ascii=False, sort_keys=True) if name in fields else "not set"


def _cut(text: str, other: str) -> str:
    """Shorten a long text to the part where it starts to differ from `other`."""
    if len(text) <= _SHOWN_CHARS:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other))
    start = max(0, min(same - _SHOWN_CHARS // 3, len(text) - _SHOWN_CHARS))
    end = start + _SHOWN_CHARS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
