"""The factors of embeddings, hidden states and logits, as fields of a ModelConfig."""

from __future__ import annotations

from typing import Any

from batchgen.core.errors import InputError


def scales_of(
    eps: float, *, embedding: float = 1.0, residual: float = 1.0, logits_divisor: float = 1.0
) -> dict[str, Any]:
    """The fields of a ModelConfig that scale embeddings, hidden states and logits.

    Granite multiplies all that a layer adds to the hidden states by one number. Hidden states divided by that number
    need no such product: their norms are the same with a smaller epsilon, and embeddings begin with the division.

    Args:
        eps: Number that norms add to the mean square.
        embedding: Factor of embeddings.
        residual: Factor of what a layer adds to the hidden states.
        logits_divisor: Number by which logits are divided.

    Raises:
        InputError: A number is not above 0.
    """
    for name, value in (("embedding", embedding), ("residual", residual), ("logits", logits_divisor)):
        if not value > 0:
            raise InputError(f"the scale of {name} must be above 0, not {value}")
    return {"norm_eps": eps / residual**2, "embedding_scale": embedding / residual, "logit_scale": 1 / logits_divisor}
