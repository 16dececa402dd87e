"""Which kernels run which shape of a model: chosen by measurement, handed over frozen, recorded with a job's rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchgen.core.dtypes import BLOCK_FORMATS, product_key
from batchgen.core.errors import InputError
from batchgen.core.typed_json import read_typed

TORCH = "torch"  # torch's own linear, a candidate beside the instruction sets


@dataclass(frozen=True)
class Measured:
    """What runs one shape, and the rates it was chosen by.

    Attributes:
        isa: the instruction set, or TORCH.
        rates: candidate -> what was timed ("128 tokens") -> FLOP/s; of decode attention bytes of KV a second. One that was
            far slower than another is not timed further.
        refused: candidate -> why it may not run this shape although it is faster.
    """

    isa: str
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelChoice:
    """What each shape runs on: one candidate for any number of tokens, so that a row never rounds as its batch has it.

    Attributes:
        linear: by `linear_key`; of weights in rows of blocks by their format alone, as `product_key` names it.
        attention: by `attention_key`; prefill and decode alike.
        default: the instruction set of shapes that are not named; "": the process's (BATCHGEN_ISA, or the machine's first).

    Raises:
        ValueError: TORCH is to attend, to read rows of blocks, or is the default. It has linear layers of numbers alone.
    """

    linear: Mapping[str, Measured] = field(default_factory=dict)
    attention: Mapping[str, Measured] = field(default_factory=dict)
    default: str = ""

    def __post_init__(self) -> None:
        of_blocks = {key: measured for key, measured in self.linear.items() if key.partition(" ")[0] in BLOCK_FORMATS}
        on_torch = [k for table in (self.attention, of_blocks) for k, m in table.items() if m.isa == TORCH]
        if self.default == TORCH:
            on_torch.append("default")
        if on_torch:
            raise ValueError(
                f"{on_torch[0]!r} must name an instruction set: {TORCH!r} is for linear layers of numbers alone"
            )

    def linear_isa(self, columns: int, depth: int, dtype: str) -> str:
        """What multiplies weights [columns, depth] of this dtype; "": the process's instruction set."""
        found = self.linear.get(linear_key(columns, depth, dtype))
        return found.isa if found else self.default

    def blocks_isa(self, weight_format: str, dtype: str) -> str:
        """What multiplies weights that are rows of blocks, of any shape, and never TORCH; "": the process's instruction set.

        weight_format: of `BLOCK_FORMATS`. Apart from what runs weights of numbers: sets may multiply codes in another way.
        """
        found = self.linear.get(product_key(weight_format, dtype))
        return found.isa if found else self.default

    def attention_isa(self, heads: int, kv_heads: int, head_dim: int, dtype: str) -> str:
        """What attends with queries of this dtype, and never TORCH; "": the process's instruction set."""
        found = self.attention.get(attention_key(heads, kv_heads, head_dim, dtype))
        return found.isa if found else self.default

    def names(self) -> dict[str, str]:
        """Each named shape -> what it runs on."""
        return {key: measured.isa for table in (self.linear, self.attention) for key, measured in table.items()}

    def among(self, available: Collection[str], default: str) -> KernelChoice:
        """As far as it names what is available; the rest is left to the default."""
        known = self.of([key for key, isa in self.names().items() if isa in available])
        return replace(known, default=self.default if self.default in available else default)

    def of(self, keys: Collection[str]) -> KernelChoice:
        """Of these shapes alone."""
        linear, attention = ({k: m for k, m in t.items() if k in keys} for t in (self.linear, self.attention))
        return replace(self, linear=linear, attention=attention)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> KernelChoice:
        """Read what `to_json` gives. Raises InputError."""
        try:
            made: KernelChoice = read_typed(cls, values, "kernels")
        except ValueError as error:
            raise InputError(f"not a choice of kernels ({error}): take `kernels` out, or measure anew") from error
        return made


PROCESS_SET = KernelChoice()  # everything on the process's instruction set


def linear_key(columns: int, depth: int, dtype: str) -> str:
    """A weight's shape as files and people have it: "3072x576 bfloat16"."""
    return f"{columns}x{depth} {dtype}"


def attention_key(heads: int, kv_heads: int, head_dim: int, dtype: str) -> str:
    """The shape of a model's heads: "9/3 heads of 64 bfloat16"."""
    return f"{heads}/{kv_heads} heads of {head_dim} {dtype}"
