"""The final file: its columns, its formats, and that it depends on the rows alone."""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import tracemalloc
from decimal import Decimal
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_rows import FakeDataset, expected_rows, result_of
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import quick_or

from batchgen.core.errors import BatchgenError, InputError
from batchgen.output import formats, parts, regrouped_results
from batchgen.output.columns import ONE_SAMPLE, SampleColumns, ScoreColumns
from batchgen.output.embed_result import EMBED_SCHEMA
from batchgen.output.formats import check_writable, output_format
from batchgen.output.join import join, join_formatted, output_schema
from batchgen.output.parts import PartIndex, write_part
from batchgen.output.regrouped_results import RegroupedResults
from batchgen.output.row_result import RowResult


def joined(dataset, parts_dir: Path, suffix: str = ".parquet", *, n=1, logprobs=False, prefix="", note="{}"):
    """The bytes of the final file, and its totals."""
    file = io.BytesIO()
    totals, _ = join(dataset, parts_dir, file, suffix, columns=SampleColumns(n, logprobs), prefix=prefix, note=note)
    return file.getvalue(), totals


def rows_of(parquet: bytes) -> list[dict]:
    return pq.read_table(io.BytesIO(parquet)).to_pylist()


# ---- columns


def test_output_columns_follow_the_input_columns():
    schema = output_schema(FakeDataset.schema)
    assert schema.names == [
        "id", "value", "text", "finish_reason", "prompt_tokens", "generated_tokens", "error",
    ]  # fmt: skip
    assert schema.metadata == FakeDataset.schema.metadata
    many = output_schema(FakeDataset.schema, SampleColumns(2, True), prefix="gen_")
    assert many.field("gen_text").type == pa.list_(pa.string())
    assert many.field("gen_generated_tokens").type == pa.list_(pa.int32())
    assert many.field("gen_prompt_tokens").type == pa.int32()
    assert many.names[-1] == "gen_logprobs"


def test_names_that_the_input_has_make_all_output_columns_take_the_first_prefix_that_is_free():
    texts = pa.schema([("text", pa.string()), ("logprobs", pa.string())])
    once = output_schema(texts)
    assert once.names == [
        "text", "logprobs", "gen_text", "gen_finish_reason", "gen_prompt_tokens", "gen_generated_tokens", "gen_error",
    ]  # fmt: skip
    twice = output_schema(once)
    assert twice.names[: len(once)] == once.names and "gen2_text" in twice.names
    assert len(set(twice.names)) == len(twice.names)
    other = output_schema(pa.schema([("perplexity", pa.float64())]), ScoreColumns(whole=True))
    assert "gen_perplexity" in other.names and "gen_logprob" in other.names
    assert "text" in output_schema(pa.schema([("Text", pa.string())])).names


def test_names_that_are_taken_with_the_prefix_of_the_job_are_refused_with_one_that_is_free():
    chained = output_schema(pa.schema([("text", pa.string())]))
    with pytest.raises(InputError, match=r"columns named gen_text, gen_finish_reason.*--output-prefix gen2_, or leave"):
        output_schema(chained, prefix="gen_")
    with pytest.raises(InputError, match=r"a column named x_text already: give --output-prefix gen_, or leave"):
        output_schema(pa.schema([("x_text", pa.string())]), prefix="x_")


def test_unknown_extension_names_the_known_ones():
    with pytest.raises(InputError, match=r"'out.xlsx': --output must end in .parquet, .jsonl, .csv"):
        output_format(Path("out.xlsx"))
    assert output_format(Path("a/OUT.Parquet")) == ".parquet"


def test_column_that_parquet_cannot_hold_is_found_before_the_start():
    schema = pa.schema([("fine", pa.int64()), ("meta", pa.struct([]))])
    with pytest.raises(InputError, match=r"column 'meta' of type struct<> .* \.jsonl"):
        check_writable(Path("out.parquet"), schema)
    check_writable(Path("out.jsonl"), schema)
    check_writable(Path("out.parquet"), output_schema(FakeDataset.schema, SampleColumns(2, True)))


# ---- joining


@settings(max_examples=quick_or(12, 30), deadline=None)
@given(data=st.data())
def test_join_gives_every_row_in_order_however_it_lies_in_parts(data):
    num_rows = data.draw(st.integers(1, 250), "rows")
    n, logprobs = data.draw(st.sampled_from([1, 3]), "n"), data.draw(st.booleans(), "logprobs")
    fail_every = data.draw(st.sampled_from([0, 1, 5]), "fail_every")
    dataset = FakeDataset(
        num_rows, data.draw(st.sampled_from([0, 10**7]), "first"), data.draw(st.integers(1, 70), "batch rows")
    )
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    disorder = data.draw(st.sampled_from([0, 5, 1000]), "disorder")
    rows = sorted(range(dataset.first, dataset.first + num_rows), key=lambda r: r + rng.uniform(0, disorder))

    def result(row: int) -> RowResult:
        return result_of(row, fail_every, n, logprobs)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(formats, "_GROUP_ROWS", 60),
        mock.patch.object(os, "fsync"),  # for speed
    ):
        scattered, plain = Path(folder, "scattered"), Path(folder, "plain")
        scattered.mkdir()
        plain.mkdir()
        stale = rng.sample(rows, rng.randrange(num_rows + 1))  # rows that were tried before, and failed
        number = 0
        if stale:
            write_part(scattered, number, {r: RowResult((), (), 9, (), error="first try") for r in stale})
        while rows:
            number += 1
            size = rng.randint(1, data.draw(st.sampled_from([3, 40, 300]), "part size"))
            with mock.patch.object(parts, "_GROUP_BYTES", rng.choice([100, 2000, 10**6])):
                write_part(scattered, number, {r: result(r) for r in rows[:size]})
            rows = rows[size:]
        write_part(plain, 0, {r: result(r) for r in range(dataset.first, dataset.first + num_rows)})
        with mock.patch.object(parts, "_WINDOW_ROWS", rng.choice([1, 30, 1000])):
            got, totals = joined(dataset, scattered, n=n, logprobs=logprobs)
        undisturbed, _ = joined(dataset, plain, n=n, logprobs=logprobs)
    expected = expected_rows(dataset, result, n, logprobs)
    assert rows_of(got) == expected
    assert got == undisturbed
    failed = sum(r["error"] is not None for r in expected)
    assert totals == {
        "rows": num_rows,
        "rows_ok": num_rows - failed,
        "rows_failed": failed,
        "prompt_tokens": sum(r["prompt_tokens"] for r in expected),
        "generated_tokens": sum(sum(result(int(r["id"][3:])).generated_tokens) for r in expected),
    }


def test_row_groups_are_bounded_in_bytes_and_do_not_depend_on_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_GROUP_BYTES", 20_000)
    dataset = FakeDataset(400, rows_per_batch=16)
    for layout, sizes in {"one": [400], "many": [7] * 58}.items():
        (tmp_path / layout).mkdir()
        rows = list(range(400))
        for number, size in enumerate(sizes):
            write_part(tmp_path / layout, number, {r: result_of(r, 9, words=20) for r in rows[:size]})
            rows = rows[size:]
    with mock.patch.object(parts, "_WINDOW_ROWS", 20):
        got, _ = joined(dataset, tmp_path / "many")
    assert got == joined(dataset, tmp_path / "one")[0]
    metadata = pq.ParquetFile(io.BytesIO(got)).metadata
    assert metadata.num_row_groups > 5
    assert max(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)) < 40_000


def test_parquet_metadata_keeps_the_input_s_and_adds_the_note(tmp_path):
    write_part(tmp_path, 0, {0: result_of(0)})
    got, _ = joined(FakeDataset(1), tmp_path, note='{"seed": 1}')
    metadata = pq.read_schema(io.BytesIO(got)).metadata
    assert metadata[b"batchgen"] == b'{"seed": 1}' and metadata[b"origin"] == b"a test"


def test_missing_rows_are_named(tmp_path):
    write_part(tmp_path, 0, {r: result_of(r) for r in range(10) if r not in (4, 6)})
    with pytest.raises(BatchgenError, match="2 rows from row 4 on have no result yet: run the same command again"):
        joined(FakeDataset(10), tmp_path)


def test_empty_batches_and_gaps_between_batches_are_fine(tmp_path):
    class Gaps(FakeDataset):
        def batches(self, start_row=0, batch_rows=1024):
            for first, batch in super().batches(start_row, 4):
                yield first * 2, batch
                yield first * 2 + 4, batch.slice(0, 0)

    write_part(tmp_path, 0, {r: result_of(r) for r in range(100)})
    got, totals = joined(Gaps(8), tmp_path)
    assert totals["rows"] == 8
    assert [r["text"] for r in rows_of(got)] == [result_of(r).text[0] for r in (0, 1, 2, 3, 8, 9, 10, 11)]


def test_lone_surrogates_become_replacement_characters(tmp_path):
    bad = RowResult((), (), 0, (), error="cannot run 'a\ud800b'")
    good = RowResult(("🙂 \udfff\ud83d\ude42",), ("stop",), 1, (1,))
    write_part(tmp_path, 0, {0: bad, 1: good})
    got = rows_of(joined(FakeDataset(2), tmp_path)[0])
    assert got[0]["error"] == "cannot run 'a\ufffdb'" and got[1]["text"] == "🙂 \ufffd🙂"


# ---- formats


class Messy(FakeDataset):
    """Three rows of every kind of column that an input may bring."""

    columns = {
        "s": pa.array(['a "quoted", \n line', "", None]),
        "i": pa.array([1, None, -5], pa.int8()),
        "f": pa.array([0.1, float("nan"), None]),
        "b": pa.array([True, False, None]),
        "blob": pa.array([b"\x00\xff", b"", None]),
        "list": pa.array([["x", None], [], None]),
        "struct": pa.array([{"k": [1.5]}, {"k": [float("inf")]}, None]),
        "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
        "day": pa.array([datetime.date(2024, 2, 29), None, None]),
        "when": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5, 678), None, None], pa.timestamp("us", tz="UTC")),
        "nanos": pa.array([1, None, None], pa.timestamp("ns")),
        "time": pa.array([datetime.time(1, 2, 3), None, None], pa.time64("us")),
        "span": pa.array([datetime.timedelta(seconds=90), None, None], pa.duration("us")),
        "money": pa.array([Decimal("1.50"), None, None], pa.decimal128(9, 2)),
        "category": pa.array(["x", None, "y"]).dictionary_encode(),
        "nothing": pa.nulls(3),
        "long": pa.array(["l", "", None], pa.large_string()),
    }
    schema = pa.schema([(name, column.type) for name, column in columns.items()])

    def batches(self, start_row=0, batch_rows=1024):
        yield 0, pa.RecordBatch.from_arrays(list(self.columns.values()), schema=self.schema)


@pytest.fixture
def messy(tmp_path):
    write_part(tmp_path, 0, {r: result_of(r, fail_every=2, logprobs=True) for r in (1, 2, 0)})
    return Messy(3), tmp_path


def test_parquet_keeps_every_kind_of_column(messy):
    check_writable(Path("x.parquet"), Messy.schema)
    table = pq.read_table(io.BytesIO(joined(*messy, logprobs=True)[0]))
    for name, column in Messy.columns.items():
        assert table.column(name).type == column.type, name
        assert str(table.column(name).to_pylist()) == str(column.to_pylist()), name
    assert table.column("finish_reason").to_pylist() == ["stop", "error", "stop"]


def test_jsonl_is_json_for_every_kind_of_column(messy):
    lines = joined(*messy, ".jsonl", logprobs=True)[0].decode().splitlines()
    assert len(lines) == 3

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    first = rows[0]
    assert first["s"] == 'a "quoted", \n line' and first["blob"] == "AP8=" and first["money"] == "1.50"
    assert first["when"].startswith("2024-01-02T03:04:05") and first["span"] == 90 and first["day"] == "2024-02-29"
    assert rows[1]["f"] is None and rows[1]["struct"] == {"k": [None]} and rows[1]["error"] == "row 1 is bad"
    assert rows[2]["logprobs"][1]["top"][0]["token"] == "t2"


def test_csv_reads_back(messy):
    rows = list(csv.DictReader(io.StringIO(joined(*messy, ".csv", logprobs=True)[0].decode(), newline="")))
    first = rows[0]
    assert first["s"] == 'a "quoted", \n line' and first["i"] == "1" and first["blob"] == "AP8="
    assert first["money"] == "1.50" and first["time"] == "01:02:03" and first["category"] == "x"
    assert json.loads(first["list"]) == ["x", None] and json.loads(rows[1]["struct"]) == {"k": [None]}
    assert json.loads(rows[2]["logprobs"])[1]["token_id"] == 2
    assert [r["finish_reason"] for r in rows] == ["stop", "error", "stop"]
    assert rows[2]["s"] == "" and rows[1]["text"] == ""


def test_times_are_alike_in_csv_and_json_lines():
    """Of every unit and zone, with and without a part of a second."""
    kinds = [pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Europe/Berlin")]
    values = pa.array([0, 86_400_000, None], pa.int64())
    columns = {str(kind): values.cast(kind) for kind in [*kinds, pa.date64(), pa.time64("us")]}
    batch = pa.RecordBatch.from_pydict(columns)
    written = {}
    for suffix in (".csv", ".jsonl"):
        formats.FORMATS[suffix](file := io.BytesIO(), batch.schema, iter([batch]))
        written[suffix] = file.getvalue().decode()
    of_csv = list(csv.DictReader(io.StringIO(written[".csv"], newline="")))
    of_json = [json.loads(line) for line in written[".jsonl"].splitlines()]
    assert of_csv == [{name: value or "" for name, value in row.items()} for row in of_json]
    assert of_json[1]["timestamp[ms, tz=UTC]"] == "1970-01-02T00:00:00+00:00"


def test_csv_lists_are_json(tmp_path):
    write_part(tmp_path, 0, {r: result_of(r, n=2) for r in range(3)})
    rows = list(csv.DictReader(io.StringIO(joined(FakeDataset(3), tmp_path, ".csv", n=2)[0].decode(), newline="")))
    assert [tuple(json.loads(r["text"])) for r in rows] == [result_of(r, n=2).text for r in range(3)]


def test_formatted_rows_go_to_two_files(tmp_path):
    write_part(tmp_path, 0, {r: result_of(r, fail_every=3, logprobs=True) for r in range(7)})
    seen = []

    def format_row(row, result):
        seen.append(result)
        return ("errors" if result["error"] else "output"), {
            "id": row["id"],
            "text": result["text"],
            "x": float("nan"),
        }

    output, errors = io.BytesIO(), io.BytesIO()
    totals, counts = join_formatted(FakeDataset(7), tmp_path, output, errors, ONE_SAMPLE, format_row)
    assert [json.loads(line)["id"] for line in errors.getvalue().splitlines()] == ["id-2", "id-5"]
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert lines[1] == {"id": "id-1", "text": list(result_of(1).text), "x": None}
    assert totals["rows_failed"] == 2 and len(lines) == 5 and sum(counts.finish_reasons.values()) == 5
    assert [r["row"] for r in seen] == list(range(7)) and seen[1]["logprobs"][0][0]["token_id"] == 1


# ---- size

_JOIN_MANY = """
import sys, time
from pathlib import Path
from fake_rows import FakeDataset, result_of
from batchgen.output.columns import ONE_SAMPLE
from batchgen.output.join import join
from batchgen.output.parts import write_part
import random
parts_dir, num_rows = Path(sys.argv[1]), int(sys.argv[2])
results = [result_of(r, fail_every=13) for r in range(1000)]
rows, part = sorted(range(num_rows), key=lambda r, rng=random.Random(7): r + rng.randrange(5000)), 30000
retried = set(range(5, num_rows, 97))
for number, low in enumerate(range(0, num_rows, part)):
    write_part(parts_dir, number, {r: results[r % 1000] for r in rows[low:low + part] if r not in retried})
write_part(parts_dir, 10**6, {r: results[r % 1000] for r in retried})
started_s = time.process_time()
with open(parts_dir / "out", "wb") as file:
    dataset = FakeDataset(num_rows)
    totals, _ = join(dataset, parts_dir, file, ".parquet", columns=ONE_SAMPLE, prefix="", note="{}")
assert totals["rows"] == num_rows, totals
peak_kib = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak_kib, time.process_time() - started_s)
"""


@pytest.mark.slow
def test_a_million_rows_join_in_flat_memory(tmp_path):
    peaks_mib, row_s = {}, {}
    for num_rows in (10_000, 1_000_000):
        folder = tmp_path / str(num_rows)
        folder.mkdir()
        command = [sys.executable, "-c", _JOIN_MANY, str(folder), str(num_rows)]
        path = f"{Path(__file__).parents[1] / 'support'}:{Path(__file__).parents[2]}"
        done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
        peak_kib, join_s = done.stdout.split()
        peaks_mib[num_rows] = int(peak_kib) / 1024
        row_s[num_rows] = float(join_s) / num_rows
    assert row_s[1_000_000] < 3 * row_s[10_000], "its time grows with the rows, not with their square"
    # The million includes the test's own list of a million row numbers, about 70 MiB.
    assert peaks_mib[1_000_000] - peaks_mib[10_000] < 200, peaks_mib
    assert pq.read_metadata(tmp_path / "1000000" / "out").num_rows == 1_000_000
    sample = pq.read_table(tmp_path / "1000000" / "out", columns=["id", "text", "error"]).slice(777_700, 300)
    for offset, row in enumerate(sample.to_pylist()):
        result = result_of((777_700 + offset) % 1000, fail_every=13)
        expected = {"id": f"id-{777_700 + offset}", "text": result.text[0] if result.text else None}
        assert row == expected | {"error": result.error}


@pytest.mark.parametrize("regroups", [False, True])
def test_a_join_holds_nothing_of_each_row(tmp_path, monkeypatch, regroups):
    """Rows are short, so that a few bytes held of each would be more than all else that grows."""
    monkeypatch.setattr(parts, "_WINDOW_ROWS", 4096)
    peaks = []
    for count in (20_000, 40_000, 400_000):  # the first one warms up
        folder = tmp_path / str(count)
        folder.mkdir()
        order = np.argsort(np.arange(count) + np.random.default_rng(0).integers(0, 3000, count), kind="stable")
        for number, first in enumerate(range(0, count, 20_000)):
            rows = np.sort(order[first : first + 20_000])
            offsets = np.arange(len(rows) + 1, dtype=np.int32)
            vectors = pa.ListArray.from_arrays(offsets, rows.astype(np.float32))
            columns = [pa.array(rows), vectors, pa.array(rows.astype(np.int32)), pa.nulls(len(rows), pa.string())]
            table = pa.Table.from_arrays(columns, schema=EMBED_SCHEMA)
            pq.write_table(table, folder / f"part-{number:06d}.parquet", row_group_size=4096)
        tracemalloc.start()
        index = PartIndex(folder)
        read = RegroupedResults(index, folder, 1 << 20).read if regroups else index.read
        for first in range(0, count, 4096):
            assert read(first, min(4096, count - first)).column("row")[0].as_py() == first
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 360_000, peaks  # a byte a row


# ---- rows that were not run in the order of the input


def write_shuffled_parts(parts_dir, count, rows_of_part=50):
    rows = list(range(count))
    random.Random(0).shuffle(rows)
    rows = rows[: count // 5] + rows  # the first fifth has older results
    for number, first in enumerate(range(0, len(rows), rows_of_part)):
        of_part = {row: result_of(row, fail_every=7) for row in rows[first : first + rows_of_part]}
        write_part(parts_dir, number, of_part)


@pytest.mark.parametrize("has_space", [True, False])
def test_the_output_does_not_depend_on_the_order_in_which_rows_ran(tmp_path, monkeypatch, has_space):
    monkeypatch.setattr(parts, "_WINDOW_ROWS", 64)
    monkeypatch.setattr(regrouped_results, "_RUN_BYTES", 1)
    if not has_space:
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(regrouped_results.tempfile, "TemporaryFile", mock.Mock(side_effect=full))
    count = 1000
    for name in ("in order", "shuffled"):
        (tmp_path / name).mkdir()
    write_part(tmp_path / "in order", 0, {row: result_of(row, fail_every=7) for row in range(count)})
    write_shuffled_parts(tmp_path / "shuffled", count)
    content, totals = joined(FakeDataset(count), tmp_path / "in order")
    assert joined(FakeDataset(count), tmp_path / "shuffled") == (content, totals)
    assert {path.suffix for path in (tmp_path / "shuffled").iterdir()} == {".parquet"}


def test_the_work_of_joining_grows_with_the_rows_whatever_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_WINDOW_ROWS", 64)
    read, decoded = parts._read, []
    monkeypatch.setattr(parts, "_read", lambda *args: [decoded.append(len(table := read(*args))), table][1])
    for count in (1000, 4000):
        decoded.clear()
        folder = tmp_path / str(count)
        folder.mkdir()
        write_shuffled_parts(folder, count)
        joined(FakeDataset(count), folder)
        assert sum(decoded) <= 3 * 1.2 * count  # once for the index, once for the results
