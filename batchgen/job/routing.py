"""Routing statistics of mixture-of-experts models, counted in a job and cached for the model's next plan."""

from __future__ import annotations

from typing import Any

from batchgen.core.routing import INDEPENDENT, Routing, RoutingCounts
from batchgen.job.kept_values import keep_value, kept_value
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles

_FOLDER = "routing"


def known_routing(files: ModelFiles, config: ModelConfig) -> Routing:
    """The cached routing statistics of a model; without any, tokens are taken to choose experts independently."""
    if not config.num_experts:
        return INDEPENDENT
    return kept_value(Routing, _FOLDER, _key_of(files, config), "what was counted of routers in") or INDEPENDENT


def keep_routing(files: ModelFiles, config: ModelConfig, counts: RoutingCounts) -> None:
    """Cache the routing counts of a job with real weights and enough tokens; errors of the disk are ignored."""
    fitted = counts.fitted()
    if fitted is not None and files.kind != "dummy":
        keep_value(fitted, _FOLDER, _key_of(files, config))


def _key_of(files: ModelFiles, config: ModelConfig) -> Any:
    """The key of a model. config: configuration of the whole model."""
    return [str(files.path.resolve()), config.to_json()]
