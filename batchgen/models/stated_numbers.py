"""Checks of numbers that a model's files state, and their form in messages."""

from __future__ import annotations

import math
from typing import Any

from batchgen.core.errors import InputError

# More than any model has: what is above would take all memory, layer by layer, before a weight is looked at.
_MOST_COUNTED = (1 << 31) - 1
_MOST = {
    **dict.fromkeys(("num_layers", "num_hidden_layers", "block_count"), 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "expert_count"), 1 << 16),
}


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_COUNTED


def is_number(value: Any) -> bool:
    """True for a finite JSON number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(name: str, value: Any) -> None:
    """Raise InputError unless a value is a whole number of at least 1 and not larger than that of any model.

    Args:
        name: Name of the number, for the message.
        value: The value.
    """
    if not is_count(value):
        raise InputError(f"{name} must be a whole number of at least 1, not {shown(value)}")
    if value > (most := _MOST.get(name, _MOST_COUNTED)):
        raise InputError(f"{name} {shown(value)} is more than any model has (at most {most:,})")


def shown(value: Any) -> str:
    """A value as JSON writes it, for messages; a long text is cut."""
    known = {None: "null", True: "true", False: "false"}
    text = known[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
