"""Checks of the values in a `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError

Stated = Mapping[str, Any]


def whole_number(config: Stated, *names: str) -> int:
    """The whole number under the first of several keys that is present. Raises InputError."""
    value = next((config[name] for name in names if name in config), None)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(
            f"quantization_config: {names[0]} must be a whole number, not {value!r}: fetch the model again"
        )
    return value


def group_size(config: Stated, *names: str) -> int | None:
    """The number of columns of a group, under the first of several keys; None, stated as -1: a whole row.

    Raises:
        InputError: The value is not such a number.
    """
    size = whole_number(config, *names)
    if size == -1:
        return None
    if size < 1:
        raise InputError(f"quantization_config: {names[0]} must be at least 1, or -1, not {size}")
    return size


def flag(config: Stated, name: str, default: bool) -> bool:
    """A boolean value; `default` if it is absent or null. Raises InputError for any other value."""
    value = config.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"quantization_config: {name} must be true or false, not {value!r}: fetch the model again")
    return value


def block_shape(value: Any) -> tuple[int, int] | None:
    """The number of rows and of columns of a block that has one scale; None: no blocks are stated.

    Raises:
        InputError: The value is not a pair of numbers.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise InputError(f"quantization_config: the size of a block must be [rows, columns], not {value!r}")


def require_four_bits(method: str, bits: int) -> None:
    """Raise InputError unless weights have 4 bits.

    Args:
        method: Name of the format, for the message.
        bits: Bits of a weight that the checkpoint states.
    """
    if bits != 4:
        raise InputError(
            f"{method} checkpoints of {bits} bits are not supported, only of 4: use the model's unquantized "
            "safetensors, or a GGUF"
        )


def refuse(method: str, stated: Mapping[str, Any]) -> None:
    """Raise InputError for the first value that is not false or empty.

    Args:
        method: Name of the format, for the message.
        stated: Values that are not supported, by the key that states them.
    """
    for name, value in stated.items():
        if value:
            raise InputError(
                f"{method} checkpoints with {name} {value!r} are not supported: use the model's unquantized "
                "safetensors, or a GGUF"
            )
