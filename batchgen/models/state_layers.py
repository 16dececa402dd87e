"""The shapes of state layers: layers that keep a state of fixed size for each sequence, in place of keys and values.

A state layer mixes tokens by a recurrence. What it keeps of a sequence does not grow with the sequence: the last inputs
of a short convolution and, in a Gated DeltaNet layer, a matrix for each value head. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchgen.core.direct_io import aligned
from batchgen.core.dtypes import FORMAT_BYTES
from batchgen.core.errors import InputError
from batchgen.models.stated_numbers import require_positive
from batchgen.ops.state_chunks import chunk_flops_per_token


@dataclass(frozen=True)
class DeltaNet:
    """The shape of a Gated DeltaNet layer (Yang et al. 2024, "Gated Delta Networks").

    Each value head keeps a matrix [key_dim, value_dim]. Several value heads share a key head, as query heads share a
    key and value head in grouped-query attention.

    Attributes:
        key_heads: Number of query heads, and of key heads.
        value_heads: Number of value heads, a multiple of `key_heads`.
        key_dim: Number of values in a head of queries or keys.
        value_dim: Number of values in a value head.
        kernel: Number of tokens that the convolution before the recurrence sees, the current one included.
        out_by_member: Whether columns of the output projection are ordered by the number of a value head within its
            group, then by the key head of the group, as in GGUFs. False: by value head.

    Raises:
        InputError: The numbers cannot describe a layer.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    out_by_member: bool = False

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            require_positive(f"linear attention's {name}", getattr(self, name))
        if self.value_heads % self.key_heads:
            raise InputError(
                f"linear_num_value_heads {self.value_heads} is not a multiple of linear_num_key_heads {self.key_heads}"
            )

    @property
    def key_size(self) -> int:
        """Number of values in the queries of one token, all heads together. Its keys have as many."""
        return self.key_heads * self.key_dim

    @property
    def out_size(self) -> int:
        """Number of values in the result of one token, all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of values of one token that go through the convolution: queries, keys and values."""
        return 2 * self.key_size + self.out_size

    @property
    def projected_size(self) -> int:
        """Number of rows of the fused projection: queries, keys, values and the output gate z."""
        return self.channels + self.out_size

    @property
    def projected_width(self) -> int:
        """Number of values that all projections give for one token: those of the fused one, then the gates b and a."""
        return self.projected_size + 2 * self.value_heads

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state of one sequence: (value heads, key_dim, value_dim)."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def prefill_flops(self) -> int:
        """FLOPs by which one token of a long prompt updates and reads the recurrent state."""
        return chunk_flops_per_token(self.key_heads, self.value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class ShortConv:
    """The shape of a gated short convolution (LFM2): the state is the last inputs of the convolution alone.

    Attributes:
        channels: Number of values of one token that go through the convolution: the hidden size.
        kernel: Number of tokens that the convolution sees, the current one included.
        bias: Whether the projections and the convolution have biases.

    Raises:
        InputError: The numbers cannot describe a layer.
    """

    channels: int
    kernel: int
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("channels", "kernel"):
            require_positive(f"the short convolution's {name}", getattr(self, name))

    @property
    def out_size(self) -> int:
        """Number of values in the result of one token."""
        return self.channels

    @property
    def projected_size(self) -> int:
        """Number of rows of the fused projection: the two gates B and C, and the input x."""
        return 3 * self.channels

    @property
    def projected_width(self) -> int:
        """Number of values that all projections give for one token."""
        return self.projected_size

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state beside the convolution's inputs: there is none."""
        return 0, 0, 0

    @property
    def prefill_flops(self) -> int:
        """FLOPs of a recurrence: there is none."""
        return 0


StateShape = DeltaNet | ShortConv


@dataclass(frozen=True)
class StateRow:
    """The layout of a state row: the bytes that a sequence keeps of one state layer, the matrix first.

    Attributes:
        shape: Shape of the state layer.
        state_dtype: Format of the matrix, one of `core.dtypes.STATE_DTYPES`.
        compute_dtype: Format of the convolution's inputs.
    """

    shape: StateShape
    state_dtype: str
    compute_dtype: str

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrix, which begins the row; 0 where there is none."""
        return math.prod(self.shape.matrix_shape) * int(FORMAT_BYTES[self.state_dtype])

    @property
    def inputs_shape(self) -> tuple[int, int]:
        """Shape of the convolution's inputs, which follow the matrix: (channels, kernel - 1)."""
        return self.shape.channels, self.shape.kernel - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the row in every tier: whole units of direct I/O, so that rows go to disk as they lie."""
        return aligned(self.matrix_bytes + math.prod(self.inputs_shape) * int(FORMAT_BYTES[self.compute_dtype]))
