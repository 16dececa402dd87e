"""The manifest of a weight store: the list of its files, groups and tensors (docs/weight_store.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.typed_json import parse_json, read_typed

# A weight store (docs/weight_store.md) by its manifest; until the last of its files is there it has the other name.
STORE_FORMAT, STORE_VERSION = "batchgen weight store", 1
STORE_MANIFEST, STORE_UNFINISHED = "manifest.json", "manifest.partial.json"
RANK_KEY = "rank"  # key of the source's identity in a store that has one rank's part of a model


def is_store(directory: Path) -> bool:
    """True for the directory of a weight store, even a damaged one."""
    try:
        manifest = parse_json((directory / STORE_MANIFEST).read_bytes())
        return isinstance(manifest, dict) and manifest.get("format") == STORE_FORMAT
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return (directory / "embeddings.safetensors").exists()


def read_store_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a weight store and check the manifest's own checksum.

    Raises:
        InputError: The manifest is missing, damaged or of another version.
    """
    try:
        manifest: dict[str, Any] = parse_json(path.read_bytes())
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
            f"{path} is of format version {version}, this batchgen reads {STORE_VERSION}: convert the model again with "
            "--overwrite"
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
    """xxh3_128 of all other values of a manifest, as JSON with sorted keys and without spaces."""
    import xxhash

    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
