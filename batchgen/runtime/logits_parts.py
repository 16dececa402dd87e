"""The two parts of a sweep's logits: rows to sample the next token from, and rows whose given tokens are scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from batchgen.ops.host_copy import upload
from batchgen.schedule.sequence import LogitsRow


class LogitsParts(NamedTuple):
    """Indices of rows of logits, split by what they are for.

    Attributes:
        sampled: Rows whose next token is sampled.
        scored: Rows whose given next tokens are scored.
    """

    sampled: list[int]
    scored: list[int]

    @classmethod
    def of(cls, rows: Sequence[LogitsRow]) -> LogitsParts:
        """The parts of some rows."""
        scored = [i for i, (sequence, _) in enumerate(rows) if sequence.targets]
        if not scored:
            return cls(list(range(len(rows))), scored)
        return cls([i for i, (sequence, _) in enumerate(rows) if not sequence.targets], scored)


def take(values: Any, indices: list[int]) -> Any:
    """Some rows of logits, or of a list of what the last stage of a pipeline has made of logits.

    Args:
        values: Logits [rows, columns], or a list with an item for each row.
        indices: The rows, in ascending order. All rows are taken without a copy.
    """
    if len(indices) == len(values):
        return values
    if isinstance(values, Tensor):
        return values.index_select(0, upload(np.array(indices), values.device))
    return [values[i] for i in indices]


def spread(token_ids: Tensor | None, indices: list[int], count: int) -> Tensor | None:
    """Sampled tokens at their rows among others, which get token 0; None: no device of this process has them.

    Args:
        token_ids: Sampled tokens, int64 [indices].
        indices: Their rows.
        count: Number of all rows.
    """
    if token_ids is None or len(indices) == count:
        return token_ids
    spread_ids = token_ids.new_zeros(count)
    return spread_ids.index_copy_(0, upload(np.array(indices), token_ids.device), token_ids)
