"""The weight stores that jobs make of models and keep for later jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from batchgen.core.digest import json_sha256
from batchgen.core.dtypes import INT4, NATIVE, weight_format_of
from batchgen.core.errors import InputError
from batchgen.core.machine import give_back_freed_memory
from batchgen.core.private_files import why_untrusted
from batchgen.models.convert import AnotherConverts, convert, no_progress, source_identity
from batchgen.models.files import ModelFiles
from batchgen.models.shard import Shard
from batchgen.models.store.layout import WeightStore
from batchgen.models.store.manifest import STORE_MANIFEST, STORE_VERSION

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 1.0
_ELSEWHERE = "give another --offload-dir"


def store_path(offload_dir: Path, files: ModelFiles, dtype: str, weights: str, shard: Shard | None = None) -> Path:
    """Path of the weight store that jobs make of a model, or of a tensor-parallel rank's part of it.

    If another user owns or can write what is at the usual path, the path with this user's id appended is used.

    Args:
        offload_dir: Directory that has the stores.
        files: Files of the model.
        dtype: Compute dtype.
        weights: Format of the layers' matrices.
        shard: Part of the model; None: the whole model.

    Raises:
        InputError: Another user owns or can write this user's path, too.
    """
    path = _common_path(offload_dir, files, dtype, weights, shard)
    if why_untrusted(path, path) is None:
        return path
    private = path.with_name(f"{path.name}-user-{os.geteuid()}")
    if reason := why_untrusted(private, private):
        raise InputError(f"the weight store {private} is not used, as {reason}: {_ELSEWHERE}")
    return private


def _common_path(offload_dir: Path, files: ModelFiles, dtype: str, weights: str, shard: Shard | None) -> Path:
    packed = weight_format_of(NATIVE, weights)
    key = json_sha256([source_identity(files, shard), dtype, packed, STORE_VERSION])
    name = re.sub(r"[^\w.-]+", "-", files.name).strip("-.")[:60]
    kind = dtype if packed == NATIVE else f"{packed}-{dtype}"
    if shard is not None:
        kind += f"-rank-{shard.rank}-of-{shard.size}"
    return Path(offload_dir) / "stores" / f"{name}-{kind}-{key[:16]}"


def find_or_convert(
    files: ModelFiles,
    offload_dir: Path,
    dtype: str,
    weights: str = NATIVE,
    *,
    on_layer: Callable[[int, int], None] = no_progress,
    shard: Shard | None = None,
) -> WeightStore:
    """A weight store of a model: the model itself if it is a store, one of an earlier job, or a new one.

    If another process makes the same store, this process waits for it. So workers and ranks that start together use one
    store.

    Args:
        files: Files of the model.
        offload_dir: Directory that has the stores.
        dtype: Compute dtype.
        weights: Format of the layers' matrices (`models.files.resolve_weights`).
        on_layer: Function that is called after each layer with the number of finished layers and of all layers.
        shard: Part of the model to be stored; None: the whole model.

    Raises:
        InputError: The model is broken.
        BatchgenError: The disk is full.
    """
    from batchgen.models.store.weight_store import open_store

    if shard is None and files.kind == "store":
        store = open_store(files.path)
        if (store.dtype, store.weight_format) == (dtype, weight_format_of(dtype, weights)):
            return store
    target = store_path(offload_dir, files, dtype, weights, shard)
    common = _common_path(offload_dir, files, dtype, weights, shard)
    if target != common:
        reason = why_untrusted(common, common)
        logger.warning("the weight store %s is not used, as %s: this user's own is %s", common, reason, target)
    waited_for = ""
    while True:
        if made := made_before(target):
            return made
        try:
            return _make_store(files, offload_dir, target, dtype, weights, on_layer, shard)
        except AnotherConverts as error:
            if error.holder != waited_for:
                logger.info("waiting for %s, which is converting %s into %s", error.holder, files.name, error.target)
            waited_for = error.holder
            time.sleep(_LOCK_POLL_S)


def made_before(target: Path) -> WeightStore | None:
    """The finished store that an earlier job made in a directory; None: there is none."""
    from batchgen.models.store.weight_store import open_store

    if (target / STORE_MANIFEST).exists():
        with contextlib.suppress(InputError):  # a store that lacks something is made again
            return open_store(target)
    return None


def _make_store(
    files: ModelFiles,
    offload_dir: Path,
    target: Path,
    dtype: str,
    weights: str,
    on_layer: Callable[[int, int], None],
    shard: Shard | None,
) -> WeightStore:
    """Convert a model, or a tensor-parallel rank's part of it, into a store.

    A part in int4 is cut out of a store of the whole model.
    """
    source = files
    if shard is not None and weights == INT4:  # the importance of columns is measured on the whole model
        whole = find_or_convert(files, offload_dir, dtype, weights, on_layer=on_layer)
        source = replace(files, path=whole.path, kind="store", lora=None)
    part = f"rank {shard.rank} of {shard.size} of " if shard else ""
    to_format = weight_format_of(dtype, weights)
    begun = f"converting {part}{files.name} to {to_format} in {target}, which later jobs will find there"
    store = convert(
        source,
        target,
        dtype=dtype,
        weights=weights,
        overwrite=True,
        on_start=lambda: logger.info(begun),
        on_layer=on_layer,
        shard=shard,
        elsewhere=_ELSEWHERE,
    )
    give_back_freed_memory()  # the plan has other uses for what the layers were converted in
    return store
