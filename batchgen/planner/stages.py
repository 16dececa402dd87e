"""Which layers each stage of a pipeline has."""

from __future__ import annotations

import itertools

from batchgen.models.config import ModelConfig


def split_layers(config: ModelConfig, stages: int) -> list[tuple[int, int]]:
    """Layers [first, stop) of each stage, so that the one with most to multiply has as little as can be.

    Weights that a token is multiplied with are counted; the last stage has the output matrix besides.

    Args:
        config: The whole model's.
        stages: At most as many as there are layers.
    """
    head = config.vocab_size * config.embed_size / max(1, config.matmul_params_per_layer)  # in layers
    if stages == 1:
        return [(0, config.num_layers)]

    def unevenness(last: int) -> tuple[float, float, int]:
        fewest, rest = divmod(config.num_layers - last, stages - 1)
        return max(last + head, fewest + bool(rest)), -min(last + head, fewest), last

    last = min(range(1, config.num_layers - stages + 2), key=unevenness)
    others, rest = divmod(config.num_layers - last, stages - 1)
    counts = [*(others + (i < rest) for i in range(stages - 1)), last]
    stops = list(itertools.accumulate(counts))
    return list(zip([0, *stops], stops, strict=False))
