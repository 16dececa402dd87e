"""Routing statistics of mixture-of-experts models, counted in a job and cached for the model's next plan."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from batchgen.core.atomic_file import write_atomically
from batchgen.core.cache_folder import cache_dir, is_trusted
from batchgen.core.digest import json_sha256
from batchgen.core.routing import INDEPENDENT, Routing, RoutingCounts
from batchgen.core.typed_json import parse_json, read_typed
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles


def known_routing(files: ModelFiles, config: ModelConfig) -> Routing:
    """The cached routing statistics of a model; without any, tokens are taken to choose experts independently."""
    if not config.num_experts:
        return INDEPENDENT
    path = _path_of(files, config)
    if not is_trusted(path, "what was counted of routers in"):
        return INDEPENDENT
    try:
        routing: Routing = read_typed(Routing, parse_json(path.read_bytes()))
    except (OSError, ValueError):  # the next job replaces a damaged file
        return INDEPENDENT
    return routing


def keep_routing(files: ModelFiles, config: ModelConfig, counts: RoutingCounts) -> None:
    """Cache the routing counts of a job with real weights and enough tokens; errors of the disk are ignored."""
    fitted = counts.fitted()
    if fitted is None or files.kind == "dummy":
        return
    path = _path_of(files, config)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(fitted)).encode(), contended=True, mode=0o600)


def _path_of(files: ModelFiles, config: ModelConfig) -> Path:
    """The cache file of a model. config: configuration of the whole model."""
    key = json_sha256([str(files.path.resolve()), config.to_json()])
    return cache_dir() / "routing" / f"{key[:32]}.json"
