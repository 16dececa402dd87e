"""The columns that a job of vectors adds: embeddings as fixed-size lists, or labels with their probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

_TYPES = {"float32": pa.float32(), "float16": pa.float16(), "int8": pa.int8()}
VECTOR_DTYPES = tuple(_TYPES)
# The largest absolute value of a format of vectors that has one: int8 scales each vector.
LARGEST = {"float16": float(np.finfo(np.float16).max)}


@dataclass(frozen=True)
class EmbedColumns:
    """The output columns of a job that embeds texts.

    A number of an int8 vector is that of the embedding divided by the row's scale, which is 1/127 of the largest
    absolute value; cosines need no scale.

    Attributes:
        size: Number of values of a vector.
        dtype: Format of the values: "float32", "float16" or "int8".
    """

    size: int
    dtype: str = "float32"
    results_per_row: ClassVar[int] = 1

    def types(self) -> dict[str, pa.DataType]:
        scale = {"embedding_scale": pa.float32()} if self.dtype == "int8" else {}
        vector = pa.list_(_TYPES[self.dtype], self.size)
        return {"embedding": vector, **scale, "prompt_tokens": pa.int32(), "error": pa.string()}

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        values, failed = _values(results, self.size)
        scales = []
        if self.dtype == "int8":
            scale = np.abs(values).max(axis=1, initial=0.0) / 127
            values = np.rint(values / np.where(scale > 0, scale, 1)[:, None])
            scales = [pa.array(scale, pa.float32(), mask=failed)]
        kind = _TYPES[self.dtype]
        flat = pa.array(values.astype(kind.to_pandas_dtype()).reshape(-1), kind)
        column = pa.FixedSizeListArray.from_arrays(flat, type=self.types()["embedding"], mask=pa.array(failed))
        return [column, *scales, results.column("prompt_tokens"), results.column("error")]

    @property
    def counted(self) -> tuple[str, ...]:
        return ("error",)

    def answers(self, rows: pa.RecordBatch | None, results: pa.RecordBatch) -> pa.Array | None:
        return None


@dataclass(frozen=True)
class LabelColumns:
    """The output columns of a job that classifies texts, or that scores pairs.

    With several labels they are the most likely label, its probability, and the probabilities of all by name; with one
    label its number alone.

    Attributes:
        labels: Names of the labels.
        size: Number of values of a result, of which the last ones are those of the labels; 0: as many.
    """

    labels: tuple[str, ...]
    size: int = 0
    results_per_row: ClassVar[int] = 1

    def types(self) -> dict[str, pa.DataType]:
        several = {} if len(self.labels) == 1 else {"label": pa.string()}
        each = {} if len(self.labels) == 1 else {"probabilities": self._struct}
        return {**several, "score": pa.float32(), **each, "prompt_tokens": pa.int32(), "error": pa.string()}

    @property
    def _struct(self) -> pa.DataType:
        return pa.struct([(label, pa.float32()) for label in self.labels])

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        values, failed = _values(results, self.size or len(self.labels))
        values = values[:, -len(self.labels) :]
        rest = [results.column("prompt_tokens"), results.column("error")]
        if len(self.labels) == 1:
            return [pa.array(values[:, 0], pa.float32(), mask=failed), *rest]
        best, mask = values.argmax(axis=1), pa.array(failed)
        labels = pa.array(np.array(self.labels, object)[best], pa.string(), mask=failed)
        scores = pa.array(values[np.arange(len(values)), best], pa.float32(), mask=failed)
        columns = [pa.array(np.ascontiguousarray(column), pa.float32()) for column in values.T]
        return [labels, scores, pa.StructArray.from_arrays(columns, fields=list(self._struct), mask=mask), *rest]

    @property
    def counted(self) -> tuple[str, ...]:
        return ("embedding", "error")

    def answers(self, rows: pa.RecordBatch | None, results: pa.RecordBatch) -> pa.Array | None:
        if len(self.labels) == 1:
            return None
        values, failed = _values(results, self.size or len(self.labels))
        return pa.array(np.array(self.labels, object)[values.argmax(axis=1)], pa.string(), mask=failed)


def _values(results: pa.RecordBatch, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of results, float32 [rows, size], zero in failed rows; and whether each row has failed."""
    vectors = results.column("embedding")
    failed = vectors.is_null().to_numpy(zero_copy_only=False)
    values = np.zeros((len(vectors), size), np.float32)
    values[~failed] = vectors.flatten().to_numpy().reshape(-1, size)
    return values, failed
