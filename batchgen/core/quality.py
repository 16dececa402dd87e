"""Losses of quality by formats of weights and KV, and the classes of losses that `--quality` names.

A loss is the part by which perplexity is higher than with weights and KV in fp32. It was measured once for each format,
on the demo model and English text (benchmarks/perplexity.py, of whose result file these are the figures).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from batchgen.core.dtypes import INT4, INT5, INT8

WEIGHT_LOSSES = {INT8: 0.0044, INT4: 0.0755}
KV_LOSSES = {INT8: 0.0006, INT5: 0.0156, INT4: 0.0727}
# Values of `--quality`: the most that weights and KV may lose together.
EXACT, NEAR, SMALL = "exact", "near", "small"
QUALITIES = {EXACT: 0.0, NEAR: 0.01, SMALL: 0.1}


def loss_of(weight_format: str, kv_format: str) -> float:
    """The loss of weights and KV in two formats; 0 in formats that hold the model's own numbers.

    Perplexities multiply: int4 weights with int5 KV were measured too, and lose 0.2 % less than by this product.

    Args:
        weight_format: The format of the layers' weights.
        kv_format: The format of KV.
    """
    return (1 + WEIGHT_LOSSES.get(weight_format, 0.0)) * (1 + KV_LOSSES.get(kv_format, 0.0)) - 1


def allowed(formats: Iterable[str], losses: Mapping[str, float], quality: str) -> tuple[str, ...]:
    """The formats that a quality allows by themselves.

    Args:
        formats: Names of formats.
        losses: `WEIGHT_LOSSES` or `KV_LOSSES`.
        quality: A key of `QUALITIES`.
    """
    return tuple(name for name in formats if losses[name] <= QUALITIES[quality])


def format_losses(losses: Mapping[str, float]) -> str:
    """Losses in the order of their formats, as a list in words."""
    return ", ".join(map(format_loss, losses.values()))


def format_loss(loss: float) -> str:
    """A loss in percent, such as "1.6 %"."""
    return f"{100 * loss:.2f} %" if loss < 0.001 else f"{100 * loss:.1f} %"
