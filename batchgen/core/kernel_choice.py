"""The choice of kernels for each shape of a model: measured, handed over frozen, and recorded with a job's rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchgen.core.dtypes import BLOCK_FORMATS, matmul_key
from batchgen.core.errors import InputError
from batchgen.core.typed_json import read_typed

TORCH = "torch"  # torch's own linear, a candidate beside the instruction sets


@dataclass(frozen=True)
class Measured:
    """The kernel of one shape, and the rates by which it was chosen.

    Attributes:
        isa: The instruction set, or TORCH.
        rates: Rates by candidate and by what was timed ("128 tokens"): FLOP/s of products, bytes of KV a second of
            decode attention. A candidate that was far slower than another is not timed further.
        refused: Reasons by candidate why it may not run this shape although it is faster.
    """

    isa: str
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of each shape: one for any number of tokens, so that a row rounds alike in every batch.

    Attributes:
        linear: Kernels of matrix products by `linear_key`; those of block-quantized weights by `matmul_key`.
        attention: Kernels of attention by `attention_key`; prefill and decode alike.
        default: The instruction set of all other shapes; "": the process's (BATCHGEN_ISA, or the machine's first).

    Raises:
        ValueError: TORCH is named for attention, for block-quantized weights or as the default; it has none of these.
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
        """The kernel for weights [columns, depth] of a dtype; "": the process's instruction set."""
        found = self.linear.get(linear_key(columns, depth, dtype))
        return found.isa if found else self.default

    def blocks_isa(self, weight_format: str, dtype: str) -> str:
        """The instruction set, never TORCH, for block-quantized weights of any shape; "": the process's.

        It is chosen apart from that for weights of numbers, since instruction sets multiply quantized values in
        different
        ways.

        Args:
            weight_format: A key of `BLOCK_FORMATS`.
            dtype: The dtype of the tokens.
        """
        found = self.linear.get(matmul_key(weight_format, dtype))
        return found.isa if found else self.default

    def attention_isa(self, heads: int, kv_heads: int, head_dim: int, dtype: str) -> str:
        """The instruction set, never TORCH, for attention with queries of a dtype; "": the process's."""
        found = self.attention.get(attention_key(heads, kv_heads, head_dim, dtype))
        return found.isa if found else self.default

    def names(self) -> dict[str, str]:
        """The kernel of each named shape."""
        return {key: measured.isa for table in (self.linear, self.attention) for key, measured in table.items()}

    def among(self, available: Collection[str], default: str) -> KernelChoice:
        """The choice as far as its kernels are available; other shapes are left to the default."""
        known = self.of([key for key, isa in self.names().items() if isa in available])
        return replace(known, default=self.default if self.default in available else default)

    def of(self, keys: Collection[str]) -> KernelChoice:
        """The choice for these shapes alone."""
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
    """The name of a weight's shape in files and messages: "3072x576 bfloat16"."""
    return f"{columns}x{depth} {dtype}"


def attention_key(heads: int, kv_heads: int, head_dim: int, dtype: str) -> str:
    """The name of the shape of a model's heads: "9/3 heads of 64 bfloat16"."""
    return f"{heads}/{kv_heads} heads of {head_dim} {dtype}"
