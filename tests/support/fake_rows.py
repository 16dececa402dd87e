"""An input and the results of its rows, made from row numbers, for tests of the output side."""

from __future__ import annotations

import random

import pyarrow as pa

from batchgen.core.request import PositionLogprobs, TokenLogprob
from batchgen.output.row_result import RowResult


class FakeDataset:
    """What the join reads of a dataset. `first` is above 0 for a shard."""

    schema = pa.schema([("id", pa.string()), ("value", pa.int64())], metadata={b"origin": b"a test"})

    def __init__(self, num_rows: int, first: int = 0, rows_per_batch: int | None = None) -> None:
        self.num_rows, self.first, self._rows_per_batch = num_rows, first, rows_per_batch

    def batches(self, start_row: int = 0, batch_rows: int = 1024):
        step, end = self._rows_per_batch or batch_rows, self.first + self.num_rows
        for low in range(max(self.first, start_row), end, step):
            rows = range(low, min(low + step, end))
            columns = [pa.array([f"id-{r}" for r in rows]), pa.array([r * r for r in rows])]
            yield low, pa.RecordBatch.from_arrays(columns, schema=self.schema)


def result_of(row: int, fail_every: int = 0, n: int = 1, logprobs: bool = False, words: int = 3) -> RowResult:
    """The one right result of a row."""
    if fail_every and row % fail_every == fail_every - 1:
        return RowResult((), (), 0, (), error=f"row {row} is bad")
    rng = random.Random(f"{row}/{n}/{words}")
    words_of = [[rng.choice('aé日 🙂\n",x') + f"{rng.random()}" for _ in range(words)] for _ in range(n)]
    texts = tuple(" ".join(w) for w in words_of)
    chosen = TokenLogprob(row % 99, f"t{row}", -0.5 * (row % 8))
    positions = tuple(PositionLogprobs(chosen, (chosen,) * k) for k in range(row % 3))
    return RowResult(
        text=texts if row % 11 else ("",) * n,
        finish_reason=tuple(("stop", "length")[(row + i) % 2] for i in range(n)),
        prompt_tokens=row % 50,
        generated_tokens=tuple((row + i) % 20 for i in range(n)),
        logprobs=(positions,) * n if logprobs else None,
    )


def expected_rows(dataset: FakeDataset, result=result_of, n: int = 1, logprobs: bool = False) -> list[dict]:
    """The final rows, worked out one by one."""
    rows = []
    for row in range(dataset.first, dataset.first + dataset.num_rows):
        r = result(row)
        positions = None if r.logprobs is None else [[_position(p) for p in sample] for sample in r.logprobs]
        out = {
            "text": list(r.text),
            "finish_reason": list(r.finish_reason) if r.error is None else ["error"],
            "prompt_tokens": r.prompt_tokens,
            "generated_tokens": list(r.generated_tokens),
            "error": r.error,
        }
        if logprobs:
            out["logprobs"] = positions
        if n == 1:
            out |= {k: v[0] if v else None for k, v in out.items() if isinstance(v, list)}
            out["generated_tokens"] = out["generated_tokens"] or 0
        rows.append({"id": f"id-{row}", "value": row * row} | out)
    return rows


def _position(p: PositionLogprobs) -> dict:
    def token(t: TokenLogprob) -> dict:
        return {"token": t.token, "token_id": t.token_id, "logprob": t.logprob}

    return token(p.chosen) | {"top": [token(t) for t in p.top]}
