"""The result of one input row of a job that embeds texts, and its form as an Arrow batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchgen.core.request import Embedded
from batchgen.output.row_result import make_batch

# One row a result; the vector of a failed row is null.
EMBED_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("embedding", pa.list_(pa.float32())),
        ("prompt_tokens", pa.int32()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class EmbedResult:
    """The result of one embedded row: either an error or a vector.

    Attributes:
        vector: The embedding, float32 [dimensions]; None where the row failed.
        prompt_tokens: Number of tokens of the text.
        error: The reason why the row failed; None where it succeeded.
    """

    vector: np.ndarray | None
    prompt_tokens: int
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.error is None) == (self.vector is None):
            raise ValueError(f"a row has a vector or an error, not both or neither: {self!r}")

    @classmethod
    def from_embedded(cls, embedded: Embedded) -> EmbedResult:
        """Convert an `Embedded` of the engine to the result that part files keep."""
        return cls(embedded.vector, embedded.prompt_tokens, embedded.error)

    @property
    def memory_bytes(self) -> int:
        """An estimate of the bytes that the result takes in memory, used to limit buffers."""
        return 500 + 2 * len(self.error or "") + (0 if self.vector is None else self.vector.nbytes)

    @staticmethod
    def to_batch(results: Mapping[int, EmbedResult]) -> pa.RecordBatch:
        """Convert results by row index to an Arrow batch with EMBED_SCHEMA, sorted by row index."""
        rows = sorted(results)
        ordered = [results[row] for row in rows]
        batch = make_batch(
            [rows, [None] * len(rows), [r.prompt_tokens for r in ordered], [r.error for r in ordered]], EMBED_SCHEMA
        )
        return batch.set_column(1, EMBED_SCHEMA.field(1), _vectors([r.vector for r in ordered]))


def _vectors(vectors: list[np.ndarray | None]) -> pa.ListArray:
    """Vectors as one array of lists, without a Python object for each number."""
    present = [vector for vector in vectors if vector is not None]
    values = np.concatenate(present) if present else np.zeros(0, np.float32)
    ends = np.cumsum([0 if vector is None else len(vector) for vector in vectors])
    offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
    failed = pa.array([vector is None for vector in vectors])
    return pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32()), mask=failed)
