"""GPTQ of 4 bits (Frantar et al., 2022), as AutoGPTQ and GPTQModel write it.

| tensor | shape | words |
|---|---|---|
| `qweight` | [columns / 8, rows] | nibble i of word w is column 8 w + i |
| `qzeros` | [groups, rows / 8] | nibble i of word w is row 8 w + i |
| `scales` | [groups, rows] | |

In checkpoint_format "gptq" stored zero points are one less than they count.

"dynamic" has values for modules whose names match a pattern. Those of a pattern after "-:" are not quantized, and have
plain numbers in the file, so that the pattern need not be read. Other values than those of all modules are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import InputError
from batchgen.models.formats.base import NamedTensor
from batchgen.models.formats.groups import GroupScheme, ReadQuants
from batchgen.models.formats.stated import Stated, flag, group_size, refuse, require_four_bits, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.layouts import Shape


@dataclass(frozen=True)
class Gptq(GroupScheme):
    """GPTQ with 4 bits.

    Attributes:
        zero_offset: Number to be added to a stored zero point.
    """

    zero_offset: int = 0
    label = "GPTQ of 4 bits"

    @classmethod
    def read(cls, config: Stated) -> Gptq:
        """The scheme that a `quantization_config` describes.

        Raises:
            InputError: A value is not supported; the message names it.
        """
        require_four_bits("GPTQ", whole_number(config, "bits"))
        version = config.get("checkpoint_format", "gptq")
        refuse("GPTQ", {
            "checkpoint_format": version not in ("gptq", "gptq_v2") and (version or repr(version)),
            "is_marlin_format": flag(config, "is_marlin_format", False), "dynamic": _overrides(config),
        })  # fmt: skip
        size, act_order = group_size(config, "group_size"), flag(config, "desc_act", False)
        return cls(size, act_order=act_order, zero_offset=1 if version == "gptq" else 0)

    def shapes(self, rows: int, columns: int, groups: int) -> tuple[Shape, Shape]:
        return (-(-columns // 8), rows), (groups, -(-rows // 8))

    def read_quants(self, quants: NamedTensor) -> ReadQuants:
        from batchgen.models.formats.group_matrix import nibbles
        from batchgen.models.tensor_files.reading import read_rows

        words = read_rows(*quants, 0, quants[1].shape[0])
        return lambda start, stop: nibbles(words[:, start:stop].t())

    def zero_points(self, words: Tensor) -> Tensor:
        from batchgen.models.formats.group_matrix import nibbles

        # A number that lacks 1 is kept in four bits, so 15 stands for 0.
        return (nibbles(words) + self.zero_offset) & 15


def _overrides(config: Stated) -> dict[str, Any]:
    """The patterns of "dynamic" that give modules other values than all have, with these values.

    Raises:
        InputError: "dynamic" is no object of objects.
    """
    stated = config.get("dynamic") or {}
    if not isinstance(stated, Mapping) or not all(isinstance(each, Mapping | None) for each in stated.values()):
        raise InputError(f"quantization_config: dynamic must be an object, not {stated!r}: fetch the model again")
    quantized = {pattern: each or {} for pattern, each in stated.items() if not pattern.startswith("-:")}
    others = {
        pattern: {name: value for name, value in each.items() if name not in config or config[name] != value}
        for pattern, each in quantized.items()
    }
    return {pattern: each for pattern, each in others.items() if each}
