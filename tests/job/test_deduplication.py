"""Identical greedy requests are computed once, and nobody can tell from the rows."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.core.request import Completion, Request, Sample, SamplingParams, ScoreRequest
from batchgen.job import deduplication as module
from batchgen.job.deduplication import Deduplication

GREEDY = SamplingParams(max_tokens=4)


def completed(request, error=None):
    if error is not None:
        return Completion(request.row, f"id{request.row}", 3, error=error, row=request.row)
    sample = Sample(f"text of {request.prompt}", (1, 2), "stop", None, None)
    return Completion(request.row, f"id{request.row}", 3, (sample,), row=request.row)


def run(requests, ahead, error=None):
    """(rows computed, results by row, the Deduplication) of an engine that reads `ahead` requests before it answers."""
    repeats, computed = Deduplication(GREEDY), []

    def engine():
        source, under_way = repeats.unique(requests), []
        for request in source:
            computed.append(request.row)
            under_way.append(request)
            if len(under_way) > ahead:
                yield completed(under_way.pop(0), error)
        yield from (completed(request, error) for request in under_way)

    results = {}
    for result in repeats.with_duplicates(engine()):
        assert result.row not in results
        results[result.row] = result
    return computed, results, repeats


@pytest.mark.parametrize("ahead", [0, 3, 1000])
def test_each_prompt_is_computed_once_in_flight_and_later(ahead):
    draw = random.Random(0)
    requests = [Request(f"prompt {draw.randrange(7)}", row=row) for row in range(200)]
    computed, results, repeats = run(requests, ahead)
    assert len(computed) == 7 and repeats.count == 193
    assert sorted(results) == list(range(200))
    for request in requests:
        assert results[request.row].samples == completed(request).samples


def test_errors_are_shared_too():
    computed, results, _ = run([Request("a", row=row) for row in range(5)], 2, error="too long")
    assert computed == [0] and [results[row].error for row in range(5)] == ["too long"] * 5


@pytest.mark.parametrize(
    "other",
    [
        Request("b", row=1),
        Request([1, 2], row=1),
        Request([{"role": "user", "content": "a"}], row=1),
        Request("a", more_prompts=("b",), row=1),
        Request("a", SamplingParams(max_tokens=5), row=1),
        Request("a", SamplingParams(max_tokens=4, stop="x"), row=1),
        Request("a", SamplingParams(max_tokens=4, logprobs=1), row=1),
        Request("a", error="no prompt", row=1),
        Request("a"),
        ScoreRequest("a", ("b",), row=1),
    ],
)
def test_what_differs_is_computed(other):
    repeats = Deduplication(GREEDY)
    assert len(list(repeats.unique([Request("a", row=0), other]))) == 2


def test_draws_are_computed_each():
    repeats = Deduplication(SamplingParams(temperature=0.5))
    assert len(list(repeats.unique([Request("a", row=row) for row in range(3)]))) == 3


def test_parameters_of_the_job_are_those_of_requests_without_any():
    computed, _, _ = run([Request("a", row=0), Request("a", GREEDY, row=1)], 1)
    assert computed == [0]


def test_memory_is_bounded(monkeypatch):
    """Results used longest ago go, and rows beyond those that may wait are computed."""
    monkeypatch.setattr(module, "_MOST_RESULT_BYTES", 5000)
    distinct = [Request(f"prompt {row}", row=row) for row in range(100)]
    computed, results, repeats = run([*distinct, Request("prompt 99", row=100), Request("prompt 0", row=101)], 0)
    assert len(computed) == 101 and 101 in computed and len(results) == 102
    assert len(repeats._firsts) < 10
    monkeypatch.setattr(module, "_MOST_WAITING", 8)
    computed, results, _ = run([Request("a", row=row) for row in range(50)], 1000)
    assert len(results) == 50 and len(computed) == 42


def test_a_job_gives_the_rows_of_one_without_repeats(tiny_models, tmp_path, monkeypatch):
    path, _ = tiny_models("llama")
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 60) for _ in range(12)] for _ in range(5)]
    rows = [prompts[draw.randrange(5)] for _ in range(40)]
    pq.write_table(pa.table({"prompt": pa.array(rows, pa.list_(pa.int32()))}), tmp_path / "in.parquet")
    options = {"max_tokens": 6, "dtype": "float32", "cpu_memory": "4GiB"}
    once = batchgen.run(str(path), str(tmp_path / "in.parquet"), tmp_path / "once.parquet", **options)
    assert once["rows_ok"] == 40 and once["rows_repeated"] == 35
    monkeypatch.setattr(Deduplication, "_key", lambda self, request: None)
    each = batchgen.run(str(path), str(tmp_path / "in.parquet"), tmp_path / "each.parquet", **options)
    assert each["rows_repeated"] == 0 and each["generated_tokens"] > 4 * once["generated_tokens"]
    assert pq.read_table(tmp_path / "once.parquet").equals(pq.read_table(tmp_path / "each.parquet"))
