"""The finished rows for the page of a run: a count of their lengths, and a sample of their texts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.core.request import Request, ScoreRequest
from batchgen.job.options import OF_VECTORS
from batchgen.job.source import RequestSource
from batchgen.output.parts import DamagedPart, part_columns, part_paths
from batchgen.output.row_map import RowMap

SAMPLE_ROWS = 20
_FROM_FIRST = 10_000  # rows that the sample is spread over; the input is read no further for it
_SHOWN_CHARS = 1000
_MADE = {
    "generate": ("text", "generated_tokens"),
    "score": ("logprobs", "num_tokens"),
    **dict.fromkeys(OF_VECTORS, ("embedding", None)),
}  # column of results, and column of their lengths


@dataclass(frozen=True)
class SampleRow:
    """A finished row, as text for a person.

    Attributes:
        row: Number of the row in the input.
        prompt: The prompt.
        result: The result.
        error: Reason why the row failed; None: it has not failed.
    """

    row: int
    prompt: str
    result: str
    error: str | None


@dataclass(frozen=True)
class FinishedRows:
    """Statistics and a sample of all finished rows of a run.

    Attributes:
        prompt_lens: Number of prompts of each length in tokens.
        output_lens: Number of outputs of each length in tokens.
        sample: Some of the rows.
    """

    prompt_lens: Mapping[int, int] = field(default_factory=dict)
    output_lens: Mapping[int, int] = field(default_factory=dict)
    sample: tuple[SampleRow, ...] = ()


def finished_rows(parts_dir: Path, source: RequestSource, task: str) -> FinishedRows:
    """Statistics and a sample of the finished rows in a run directory. Damaged parts are left out.

    Of a row with several results the newest counts.

    Args:
        parts_dir: Directory of the parts.
        source: Input of the rows.
        task: A task of `job.options.TASKS`.
    """
    prompts: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    seen, candidates = RowMap(np.uint8), dict[int, Path]()  # row -> its part
    shown = _FROM_FIRST + next(source.batches(0, 1), (0, None))[0]  # a shard begins later
    results_column, lengths_column = _MADE[task]
    counted = ["prompt_tokens", "error", *([] if lengths_column is None else [lengths_column])]
    for path in reversed(part_paths(parts_dir)):
        with contextlib.suppress(DamagedPart):
            rows = part_columns(path, ["row"]).column(0).to_numpy()
            newest = seen.at(rows) == 0
            seen.put(rows, 1)
            lengths = part_columns(path, counted).filter(newest)
            fine = lengths.filter(lengths.column("error").is_null())
            prompts.update(fine.column("prompt_tokens").to_pylist())
            if lengths_column is not None:
                outputs.update(fine.column(lengths_column).combine_chunks().flatten().to_pylist())
            candidates |= dict.fromkeys(rows[newest & (rows < shown)].tolist(), path)
    ordered = sorted(candidates)
    chosen = {ordered[i * len(ordered) // SAMPLE_ROWS] for i in range(SAMPLE_ROWS)} if ordered else set()
    results = _results({row: candidates[row] for row in chosen}, results_column)
    texts = _prompts(source, results.keys())
    sample = tuple(SampleRow(row, texts.get(row, ""), *results[row]) for row in sorted(results))
    return FinishedRows(prompts, outputs, sample)


def _results(parts: Mapping[int, Path], made: str) -> dict[int, tuple[str, str | None]]:
    """(result, error) of rows. parts: the part of each row."""
    results: dict[int, tuple[str, str | None]] = {}
    for path in set(parts.values()):
        with contextlib.suppress(DamagedPart):
            table = part_columns(path, ["row", "error", made])
            numbers = table.column("row").to_numpy()
            for i in np.flatnonzero(np.isin(numbers, [row for row, part in parts.items() if part == path])):
                values = table.column(made)[int(i)].as_py() or []
                shown = [value if isinstance(value, str) else f"{value:.4g}" for value in values]
                text = (" " if made == "embedding" else "\n---\n").join(shown)
                results[int(numbers[i])] = _cut(text), table.column("error")[int(i)].as_py()
    return results


def _prompts(source: RequestSource, rows: Set[int]) -> dict[int, str]:
    """The prompts of rows, as text."""
    prompts: dict[int, str] = {}
    last = max(rows, default=-1)
    for first, batch in source.batches(0):
        if first > last:
            break
        for row, request in enumerate(source.requests_of(batch, first), first):
            if row in rows:
                prompts[row] = _cut(_shown(request))
    return prompts


def _shown(request: Request | ScoreRequest) -> str:
    prompt = request.context if isinstance(request, ScoreRequest) else request.prompt
    if isinstance(prompt, str):
        return prompt
    parts: list[Any] = list(prompt or ())
    if parts and isinstance(parts[0], dict):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in parts)
    return " ".join(map(str, parts))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " …"
