"""The versions of a model's files, by which changes of the files during a run are found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchgen.core.errors import InputError, naming_files
from batchgen.core.file_version import FileVersion, version_of
from batchgen.models.files import ModelFiles, weight_paths
from batchgen.models.hf.config_files import STATES_MODEL
from batchgen.models.hf.weight_files import find_weight_files
from batchgen.models.lora import lora_files
from batchgen.models.store.manifest import STORE_MANIFEST

ModelVersions = Mapping[Path, FileVersion]


def model_versions(files: ModelFiles) -> ModelVersions:
    """The current version of each file that determines what the model is.

    For a weight store this is the manifest, which has the checksums of the other files.

    Raises:
        InputError: A file cannot be read.
    """
    with naming_files(str(files.path)):
        if files.kind == "hf":
            index = find_weight_files(files.path).index
            stated = [files.path / name for name in STATES_MODEL if (files.path / name).exists()]
            paths = [*stated, *([index] if index else []), *weight_paths(files)]
        elif files.kind == "store":
            paths = [files.path / STORE_MANIFEST]
        else:
            paths = [files.path] if files.kind == "dummy" else weight_paths(files)
        of_lora = lora_files(files.lora) if files.lora else []
        return {path: version_of(path) for path in (*paths, *of_lora)}


def changed_file(versions: ModelVersions) -> Path | None:
    """The first of a model's files that has been changed or removed since its version was read; or None."""
    for path, version in versions.items():
        try:
            if version_of(path) != version:
                return path
        except OSError:
            return path
    return None


def check_unchanged(versions: ModelVersions) -> None:
    """Raise InputError if a model's files have changed since their versions were read.

    It is called after everything that depends on the files has been read.
    """
    if (path := changed_file(versions)) is not None:
        raise InputError(f"{path} was changed while the model was loaded: run the same command again once it is whole")
