"""From logits to scores: the log-probabilities of given tokens, whether each is the argmax, and the top-k.

The vocabulary may come in chunks, so that logits of thousands of tokens never have to be held: of each row a maximum
and its position, the log of the sum of exponentials and the logits asked for are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sized

import numpy as np
import torch
from torch import Tensor

from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import download, upload
from batchgen.schedule.sequence import NOT_FINITE, LogitsRow, ScoredPosition


class Scorer:
    """The scores of one sweep.

    Invariant: rows that come in several chunks come as the same list each time, with the chunks in order.
    """

    needs_host = False  # what runs next does not depend on scores

    def __init__(self) -> None:
        self._groups: dict[LogitsRow, _Group] = {}  # by the first row

    @torch.inference_mode()
    def take(self, rows: Sized[LogitsRow], logits: Tensor, start: int) -> None:
        """Take logits of rows.

        Args:
            rows: Rows of logits.
            logits: Their logits, fp32 [rows, columns].
            start: Token of the first column.
        """
        group = self._groups.get(rows[0])
        if group is None:
            group = self._groups[rows[0]] = _Group(rows, logits.device)
        group.take(logits, start)

    def results(self) -> Iterator[tuple[LogitsRow, ScoredPosition]]:
        """Yield every row with its scores, those of a sequence in order, once all chunks have come."""
        for group in self._groups.values():
            yield from group.results()


class _Group:
    """Rows of logits that are made together."""

    def __init__(self, rows: Sized[LogitsRow], device: torch.device) -> None:
        self._logits_rows = rows
        self._targets = [sequence.targets[position - sequence.scored_from] for sequence, position in rows]
        self._row_of_target = np.repeat(np.arange(len(rows)), [len(targets) for targets in self._targets])
        self._rows = upload(self._row_of_target, device)
        self._tokens = upload(
            np.array([token for targets in self._targets for token in targets], dtype=np.int64), device
        )
        self._chosen = torch.zeros(len(self._tokens), device=device)
        self._num_top = max(sequence.sampling.logprobs or 0 for sequence, _ in rows)
        self._best: tuple[Tensor, Tensor, Tensor] | None = None  # token, logit, lse
        self._finite = torch.ones(len(rows), dtype=torch.bool, device=device)
        self._top: tuple[Tensor, Tensor] | None = None  # logits and tokens [rows, num_top]
        self._on_host: list[Tensor] = []  # token, lse, chosen, finite, and top if there is any

    def take(self, logits: Tensor, start: int) -> None:
        columns = logits.shape[1]
        self._finite &= ops.all_finite(logits)
        token, value, lse = ops.argmax_with_lse(logits)
        token += start
        if self._best is not None:
            before, largest, sum_before = self._best
            better = value > largest  # of equal ones the first stays
            token, value = torch.where(better, token, before), torch.where(better, value, largest)
            lse = torch.logaddexp(sum_before, lse)
        self._best = token, value, lse
        positions = self._tokens - start
        here = (positions >= 0) & (positions < columns)
        found = logits[self._rows, positions.clamp(0, columns - 1)]
        self._chosen = torch.where(here, found, self._chosen)
        if self._num_top:
            values, tokens = logits.topk(min(self._num_top, columns))
            tokens += start
            if self._top is not None:
                values, tokens = torch.cat((self._top[0], values), 1), torch.cat((self._top[1], tokens), 1)
                values, order = values.topk(min(self._num_top, values.shape[1]))
                tokens = tokens.gather(1, order)
            self._top = values, tokens
        # Here and not by `results`: by then the next sweep may be under way, and a copy outside of the streams, or new
        # memory, might wait for all that the device has to do.
        self._on_host = [download(t) for t in (token, lse, self._chosen, self._finite, *(self._top or ()))]

    def results(self) -> Iterator[tuple[LogitsRow, ScoredPosition]]:
        assert self._on_host, "no chunk has come"
        best, lse, logits, finite, *top_rows = self._on_host
        chosen = (logits - lse[torch.from_numpy(self._row_of_target)]).tolist()
        argmax = best.where(finite, NOT_FINITE).tolist()
        if top_rows:
            values, tokens = (top_rows[0] - lse[:, None]).tolist(), top_rows[1].tolist()
        first = 0
        for i, (row, targets) in enumerate(zip(self._logits_rows, self._targets, strict=True)):
            top: tuple[tuple[int, float], ...] = ()
            count = row[0].sampling.logprobs
            if count:
                top = tuple(zip(tokens[i][:count], values[i][:count], strict=True))
            yield row, ScoredPosition(tuple(chosen[first : first + len(targets)]), argmax[i], top)
            first += len(targets)
