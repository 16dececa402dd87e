"""The columns of a job with several steps, each of which has a result for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.output.columns import Columns
from batchgen.output.row_result import SKIPPED

_TRUE = "true"


@dataclass(frozen=True)
class FilterColumns:
    """The columns of a step that filters: true where a row goes on, null where it did not come so far; its error."""

    results_per_row: ClassVar[int] = 1

    def types(self) -> dict[str, pa.DataType]:
        return {"": pa.bool_(), "error": pa.string()}

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        texts = results.column("text")
        keeps = pa.array([None if not text else text[0] == _TRUE for text in texts.to_pylist()], pa.bool_())
        return [keeps, results.column("error")]

    @property
    def counted(self) -> tuple[str, ...]:
        return ()

    def answers(self, rows: pa.RecordBatch | None, results: pa.RecordBatch) -> pa.Array | None:
        return None


def filter_text(keeps: bool) -> str:
    """The text of a filter's result, from which `FilterColumns` makes its column."""
    return _TRUE if keeps else "false"


@dataclass(frozen=True)
class StepColumns:
    """The output columns of a job with several steps, named after the steps.

    The result of step k for row r has the number `r * results_per_row + k` in the run directory.

    Attributes:
        steps: The name and the columns of each step.
    """

    steps: tuple[tuple[str, Columns], ...]

    @property
    def results_per_row(self) -> int:
        return len(self.steps)

    def types(self) -> dict[str, pa.DataType]:
        return {
            f"{name}_{column}" if column else name: kind
            for name, columns in self.steps
            for column, kind in columns.types().items()
        }

    def arrays(self, rows: pa.RecordBatch, results: pa.RecordBatch) -> list[pa.Array]:
        arrays: list[pa.Array] = []
        for number, (_, columns) in enumerate(self.steps):
            taken = results.take(pa.array(np.arange(number, len(results), len(self.steps))))
            arrays += step_arrays(columns, rows, taken)
        return arrays

    @property
    def _last(self) -> int:
        """Number of the last step that generates, whose answers are counted."""
        return max(k for k, (_, columns) in enumerate(self.steps) if columns.counted)

    @property
    def counted(self) -> tuple[str, ...]:
        return self.steps[self._last][1].counted

    def answers(self, rows: pa.RecordBatch | None, results: pa.RecordBatch) -> pa.Array | None:
        numbers = results.column("row").to_numpy() % len(self.steps)
        came = [not reasons or reasons[0] != SKIPPED for reasons in results.column("finish_reason").to_pylist()]
        of_step = results.filter(pa.array((numbers == self._last) & np.array(came, bool)))
        return self.steps[self._last][1].answers(None, of_step)


def step_arrays(columns: Columns, rows: pa.RecordBatch, results: pa.RecordBatch) -> Sequence[pa.Array]:
    """The values of one step's columns, null for rows that did not come to the step.

    Args:
        columns: The columns of the step.
        rows: The rows of the input, with the columns of earlier steps.
        results: The results of the step for these rows, in the same order.
    """
    skipped = pa.array([bool(reasons) and reasons[0] == SKIPPED for reasons in results["finish_reason"].to_pylist()])
    arrays = columns.arrays(rows, results)
    if not pc.any(skipped).as_py():
        return arrays
    return [pc.if_else(skipped, pa.scalar(None, array.type), array) for array in arrays]
