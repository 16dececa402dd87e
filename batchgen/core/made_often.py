"""Values of which a job makes one for each row: frozen for mypy, which refuses assignments to their fields.

At run time nothing refuses them: where `dataclasses` freezes a value, making it takes six times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**options):
        """Python has it from 3.11 on, for type checkers alone."""
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def made_often(cls: type[T]) -> type[T]:
    """Make a class a dataclass whose values nobody changes, and of which many are made."""
    return dataclass(unsafe_hash=True)(cls)
