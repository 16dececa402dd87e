"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from batchgen.models.config import ModelConfig


def split_layers(config: ModelConfig, stages: int) -> list[tuple[int, int]]:
    """Layers [first, stop) of each stage, so that the one with most to multiply has as little as can be.

    Weights that a token is multiplied with are counted; the last stage has the output matrix besides.

    Args:
        config: The whole model's.
        stages: At most as many as there are layers.
    """
    head = config.vocab_size * config.embed_size / max(1, config.matmul_params_per_layer)  # in layers
    most = range(1, config.num_layers - stages + 2)
    last = min(
        most, key=lambda count: (max(count + head, -(-(config.num_layers - count) // max(1, stages - 1))), count)
    )
    last = config.num_layers if stages == 1 else last
    others, rest = divmod(config.num_layers - last, max(1, stages - 1))
    counts = [others + (i < rest) for i in range(stages - 1)] + [last]
    stops = [sum(counts[: i + 1]) for i in range(stages)]
    return list(zip([0, *stops], stops, strict=False))
