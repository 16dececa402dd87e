"""The CPU kernel for each tensor shape of a model: measured once, frozen, and recorded with a job's rows."""

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
    """The kernel that was chosen for one shape, and the measurements that led to it.

    Attributes:
        isa: The instruction set of the kernel, or TORCH.
        rates: Measured rates, by candidate instruction set and by what was timed (such as "128 tokens"). The unit is
            FLOP/s for matrix products, and bytes of KV per second for decode attention. Timing of a candidate stops
            early where it is far slower than another.
        refused: The reason, by candidate, why a faster candidate may not be used for this shape.
    """

    isa: str
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelChoice:
    """The CPU kernel of each shape. The number of tokens has no influence, so a row rounds alike in every batch.

    Attributes:
        linear: Kernels of matrix products. Keys are those of `linear_key`; for block-quantized weights those of
            `matmul_key`.
        attention: Kernels of prefill and decode attention. Keys are those of `attention_key`.
        default: The instruction set for all other shapes. "" is the default of the process: BATCHGEN_ISA, or else the
            machine's best.

    Raises:
        ValueError: TORCH is chosen for attention, for block-quantized weights or as the default.
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
        """The instruction set, or TORCH, for a matrix product; "": the default of the process.

        Args:
            columns: Output features of the weights.
            depth: Input features of the weights.
            dtype: The dtype of the weights.
        """
        found = self.linear.get(linear_key(columns, depth, dtype))
        return found.isa if found else self.default

    def blocks_isa(self, weight_format: str, dtype: str) -> str:
        """The instruction set for products with block-quantized weights of any shape; "": the default of the process.

        It is never TORCH. It is chosen apart from that for unquantized weights, since instruction sets multiply
        quantized values in different ways.

        Args:
            weight_format: A key of `BLOCK_FORMATS`.
            dtype: The dtype of the activations.
        """
        found = self.linear.get(matmul_key(weight_format, dtype))
        return found.isa if found else self.default

    def attention_isa(self, heads: int, kv_heads: int, head_dim: int, dtype: str) -> str:
        """The instruction set for attention, never TORCH; "": the default of the process.

        Args:
            heads: Number of query heads.
            kv_heads: Number of KV heads.
            head_dim: Numbers of a head.
            dtype: The dtype of the queries.
        """
        found = self.attention.get(attention_key(heads, kv_heads, head_dim, dtype))
        return found.isa if found else self.default

    def names(self) -> dict[str, str]:
        """The instruction set, or TORCH, of each shape, by the shape's key."""
        return {key: measured.isa for table in (self.linear, self.attention) for key, measured in table.items()}

    def among(self, available: Collection[str], default: str) -> KernelChoice:
        """A copy that keeps only kernels of available instruction sets; all other shapes get the default.

        Args:
            available: Names of the instruction sets that this machine has.
            default: The instruction set of all other shapes.
        """
        known = self.of([key for key, isa in self.names().items() if isa in available])
        return replace(known, default=self.default if self.default in available else default)

    def of(self, keys: Collection[str]) -> KernelChoice:
        """A copy that keeps only the kernels of these keys."""
        linear, attention = ({k: m for k, m in t.items() if k in keys} for t in (self.linear, self.attention))
        return replace(self, linear=linear, attention=attention)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> KernelChoice:
        """Read a kernel choice from the JSON value that `to_json` writes. Raises InputError."""
        try:
            made: KernelChoice = read_typed(cls, values, "kernels")
        except ValueError as error:
            raise InputError(f"not a choice of kernels ({error}): take `kernels` out, or measure anew") from error
        return made


PROCESS_SET = KernelChoice()  # everything on the process's instruction set


def linear_key(columns: int, depth: int, dtype: str) -> str:
    """The key of a weight matrix's shape, as files and messages show it: "3072x576 bfloat16".

    Args:
        columns: Output features of the weights.
        depth: Input features of the weights.
        dtype: The dtype of the weights.
    """
    return f"{columns}x{depth} {dtype}"


def attention_key(heads: int, kv_heads: int, head_dim: int, dtype: str) -> str:
    """The key of an attention's shape, as files and messages show it: "9/3 heads of 64 bfloat16".

    Args:
        heads: Number of query heads.
        kv_heads: Number of KV heads.
        head_dim: Numbers of a head.
        dtype: The dtype of the queries.
    """
    return f"{heads}/{kv_heads} heads of {head_dim} {dtype}"
