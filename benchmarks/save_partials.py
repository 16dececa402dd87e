"""Processor time of saving and reading the tokens of 500 rows in flight, by their length and log-probabilities.

python benchmarks/save_partials.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from batchgen.core.partial import PartialCompletion
from batchgen.core.request import SamplingParams
from batchgen.engine.generation import _partial
from batchgen.output.partials import read_partials, write_partials
from batchgen.runtime.sampler import SampledToken
from batchgen.schedule.sequence import Sequence

ROWS, PROMPT_TOKENS = 500, 200


def sequence_of(row: int, tokens: int, logprobs: int | None) -> Sequence:
    rng = np.random.default_rng(row)
    sampling = SamplingParams(max_tokens=1 << 20, logprobs=logprobs)
    sequence = Sequence(row, row, 0, list(range(PROMPT_TOKENS)), sampling)
    generated = rng.integers(0, 50_000, tokens).tolist()
    sequence.tokens += generated
    if logprobs is not None:
        top = tuple((token, -1.5) for token in range(logprobs))
        sequence.logprobs = [SampledToken(token, float(rng.normal()), top) for token in generated]
    return sequence


def main() -> None:
    print("tokens  logprobs  take ms  write ms  read ms  bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "partials.parquet")
        for logprobs in (None, 0, 5, 20):
            for tokens in (64, 256, 1024):
                sequences = [sequence_of(row, tokens, logprobs) for row in range(ROWS)]
                for _ in range(2):  # the first one warms up
                    times_s = [time.process_time()]
                    partials = [PartialCompletion(s.request_index, b"x" * 16, (_partial(s),)) for s in sequences]
                    times_s.append(time.process_time())
                    write_partials(path, partials, {})
                    times_s.append(time.process_time())
                    assert len(read_partials(path, {})) == ROWS
                    times_s.append(time.process_time())
                took = "  ".join(f"{1e3 * s:7.1f}" for s in np.diff(times_s))
                print(f"{tokens:6}  {'none' if logprobs is None else logprobs:>8}  {took}  {path.stat().st_size:,}")


if __name__ == "__main__":
    main()
