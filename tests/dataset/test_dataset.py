"""Readers: every kind of input, in order, in shards, in flat memory, with errors that name the fix."""

import gzip
import json
import os
import random
import shutil
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws, some_of

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.dataset.bad_lines import bad_lines
from batchgen.dataset.storage import file_system

ROWS = 97


def row(i: int) -> dict:
    """A messy row: unicode, newlines, quotes, nulls, nesting."""
    return {
        "id": i,
        "prompt": None if i % 10 == 3 else f'row {i}: "Zürich", 東京\nsecond line 🙂',
        "score": i / 4 if i % 2 else None,
        "tags": [f"t{k}" for k in range(i % 3)],
        "meta": {"source": "web", "rank": i} if i % 5 else None,
    }


def write_jsonl(path, rows):
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    if str(path).endswith(".zst"):
        path.write_bytes(pa.compress(path.read_bytes(), codec="zstd", asbytes=True))
    return path


def upload(path, url):
    """A file or directory to a URL of fsspec's."""
    system, inner = file_system(url)
    system.put(str(path), inner, recursive=path.is_dir())
    return url


def write_parquet(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def read_rows(dataset, **options) -> list[dict]:
    """All rows, after a check of indices and schemas."""
    rows, expected = [], None
    for first, batch in dataset.batches(**options):
        assert expected in (None, first)
        assert 1 <= batch.num_rows <= options.get("batch_rows", 1024)
        assert batch.schema.equals(dataset.schema)
        expected = first + batch.num_rows
        rows += batch.to_pylist()
    return rows


def read_indices(dataset, **options) -> list[int]:
    return [i for first, b in dataset.batches(**options) for i in range(first, first + b.num_rows)]


def error_of(*args, **kwargs) -> str:
    with pytest.raises(InputError) as raised:
        dataset = open_dataset(*args, **kwargs)
        for _ in dataset.batches():
            pass
    message = str(raised.value)
    assert message and "\n" not in message
    return message


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One input of each kind, all with the same ROWS rows."""
    root = tmp_path_factory.mktemp("sources")
    rows = [row(i) for i in range(ROWS)]
    parts = [rows[:40], rows[40:41], rows[41:]]
    for kind in ("parquet", "jsonl", "csv", "mixed_groups"):
        (root / kind).mkdir()
    for k, part in enumerate(parts):
        write_parquet(root / "parquet" / f"part-{k}.parquet", part, row_group_size=7)
        write_jsonl(root / "jsonl" / f"part-{k}.jsonl", part)
    write_jsonl(root / "all.jsonl.gz", rows)
    half = [write_jsonl(root / "half.zst", half).read_bytes() for half in (rows[:50], rows[50:])]
    (root / "all.jsonl.zst").write_bytes(b"".join(half))  # in two frames, as `cat` and parallel writers make them
    with open(root / "csv" / "a.csv", "w", newline="", encoding="utf-8") as file:
        file.write("id,prompt\r\n")
        file.writelines(f'{r["id"]},"{(r["prompt"] or "").replace(chr(34), chr(34) * 2)}"\r\n' for r in rows)
    features = datasets.Features({"id": datasets.Value("int64"), "prompt": datasets.Value("string")})
    table = datasets.Dataset.from_list([{"id": r["id"], "prompt": r["prompt"]} for r in rows], features=features)
    table.save_to_disk(root / "saved")
    arrow = pa.Table.from_pylist(rows)
    return {
        "list of dicts": rows,
        "arrow table in chunks": pa.concat_tables([arrow[:40], arrow[40:41], arrow[41:]]),
        "parquet file": write_parquet(root / "one.parquet", rows),
        "parquet directory": root / "parquet",
        "parquet glob": str(root / "parquet" / "part-*.parquet"),
        "jsonl directory": root / "jsonl",
        "jsonl.gz": root / "all.jsonl.gz",
        "jsonl.zst": root / "all.jsonl.zst",
        "parquet url": upload(root / "one.parquet", "memory://bucket/one.parquet"),
        "jsonl url directory": upload(root / "jsonl", "memory://bucket/jsonl"),
        "parquet url glob": upload(root / "parquet", "memory://bucket/parquet") + "/part-*.parquet",
        "jsonl.zst url": upload(root / "all.jsonl.zst", "memory://bucket/all.jsonl.zst"),
        "csv": root / "csv" / "a.csv",
        "saved dataset": root / "saved",
        "dataset": table,
        "shuffled dataset": table.select(list(reversed(range(ROWS)))).select(list(reversed(range(ROWS)))),
        "iterable with features": table.to_iterable_dataset(num_shards=3),
        "iterable without": datasets.IterableDataset.from_generator(lambda: iter(rows)),
    }


KINDS = [
    "list of dicts",
    "arrow table in chunks",
    "parquet file",
    "parquet directory",
    "parquet glob",
    "jsonl directory",
    "jsonl.gz",
    "jsonl.zst",
    "parquet url",
    "parquet url glob",
    "jsonl url directory",
    "jsonl.zst url",
    "csv",
    "saved dataset",
    "dataset",
    "shuffled dataset",
    "iterable with features",
    "iterable without",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_all_rows_in_order_again_and_again(sources, kind):
    dataset = open_dataset(sources[kind])
    whole = [row(i) for i in range(ROWS)]
    if dataset.format == "csv":
        expected = [{"id": str(r["id"]), "prompt": r["prompt"] or ""} for r in whole]
    else:
        expected = [{name: r[name] for name in dataset.schema.names} for r in whole]
    assert dataset.schema.names[:2] == ["id", "prompt"]
    assert dataset.num_rows == (None if kind == "iterable with features" else ROWS)
    assert read_rows(dataset, batch_rows=10) == expected
    assert read_rows(dataset) == expected
    assert read_rows(dataset, start_row=41) == expected[41:]
    assert dataset.count_rows() == dataset.num_rows == ROWS
    assert dataset.identity() == open_dataset(sources[kind]).identity()
    json.dumps(dataset.identity())


@settings(max_examples=some_draws(150), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    limit=st.none() | st.integers(1, ROWS + 10),
    shards=st.integers(1, ROWS + 5),
    start_row=st.integers(0, ROWS + 3),
    batch_rows=st.integers(1, 50),
)
def test_shards_partition_the_limited_rows(sources, kind, limit, shards, start_row, batch_rows):
    total = min(ROWS, limit or ROWS)
    dataset = open_dataset(sources[kind], limit=limit)
    assert read_indices(dataset, start_row=start_row, batch_rows=batch_rows) == list(range(start_row, total))
    indices = []
    for shard in sorted({0, shards // 2, shards - 1} if shards > 4 else range(shards)):
        part = open_dataset(sources[kind], limit=limit, shard=(shard, shards))
        expected = range(shard * total // shards, (shard + 1) * total // shards)
        found = read_indices(part, start_row=start_row, batch_rows=batch_rows)
        assert found == [i for i in expected if i >= start_row]
        assert part.num_rows == len(expected)
        indices += expected
    assert shards > 4 or indices == list(range(total))


def test_row_content_follows_the_index_in_a_shard(sources):
    for kind in KINDS:
        part = open_dataset(sources[kind], limit=90, shard=(2, 4))
        assert [int(r["id"]) for r in read_rows(part)] == list(range(45, 67)), kind


# Parquet


def test_parquet_files_with_reordered_and_all_null_columns(tmp_path):
    pq.write_table(pa.table({"a": pa.nulls(2), "b": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": [3], "a": ["x"]}), tmp_path / "2.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.schema == pa.schema([("a", pa.string()), ("b", pa.int64())])
    assert read_rows(dataset) == [{"a": None, "b": 1}, {"a": None, "b": 2}, {"a": "x", "b": 3}]


def test_parquet_keeps_types(tmp_path):
    table = pa.table(
        {
            "category": pa.array(["x", "y", "x"]).dictionary_encode(),
            "when": pa.array([0, 10**18 + 1, None], pa.timestamp("ns", tz="UTC")),
            "vector": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
            "blob": pa.array([b"\xff", b"", None]),
            "large": pa.array(["p", "q", "r"], pa.large_string()),
        }
    ).replace_schema_metadata({"pandas": "{}"})
    pq.write_table(table, tmp_path / "t.parquet")
    dataset = open_dataset(tmp_path / "t.parquet")
    ((_, batch),) = dataset.batches()
    assert pa.Table.from_batches([batch]).equals(table.replace_schema_metadata(None))


def test_parquet_with_other_columns_or_types_is_refused_by_file_name(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [1], "c": [1]}), tmp_path / "2.parquet")
    message = error_of(tmp_path)
    assert "2.parquet" in message and "'b', 'c'" in message
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "2.parquet")
    message = error_of(tmp_path)
    assert "2.parquet" in message and "int64" in message and "string" in message


def test_truncated_parquet(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", [row(i) for i in range(50)])
    path.write_bytes(path.read_bytes()[:-100])
    assert "t.parquet" in error_of(path)
    path.write_bytes(b"")
    assert "t.parquet" in error_of(path)
    path.write_bytes(b"not parquet at all" * 10)
    assert "t.parquet" in error_of(path)


def test_parquet_page_corrupt_in_the_middle(tmp_path):
    rows = [{"text": f"{i:08d}" * 20} for i in range(5000)]
    options = {"compression": "zstd", "row_group_size": 1000, "use_dictionary": False}
    good = write_parquet(tmp_path / "good.parquet", rows, **options)
    data = bytearray(good.read_bytes())
    column = pq.ParquetFile(good).metadata.row_group(3).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 40] = bytes(40)
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(data)
    dataset = open_dataset(bad)  # the footer is sound
    read = []
    with pytest.raises(InputError, match=r"bad\.parquet") as raised:
        for first, batch in dataset.batches():
            read += range(first, first + batch.num_rows)
    assert "\n" not in str(raised.value)
    assert read == list(range(len(read))) and len(read) >= 2000


def test_parquet_checksums_are_verified(tmp_path):
    rows = [{"text": f"{i:08d}" * 20} for i in range(100)]
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    path = write_parquet(tmp_path / "t.parquet", rows, **options)
    data = path.read_bytes()
    assert data.count(b"00000077" * 20) == 1
    path.write_bytes(data.replace(b"00000077" * 20, b"00000078" * 20))
    assert "t.parquet" in error_of(path)


# JSON lines


def test_json_types_hold_for_the_whole_file(tmp_path):
    rows = [{"n": i, "late": None, "meta": {"a": 1}, "list": []} for i in range(3000)]
    rows.append({"n": 0.5, "late": "here", "meta": {"a": 2.5, "b": [1]}, "list": [{"x": True}], "new": 1})
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", rows))
    expected = {
        "n": pa.float64(),
        "late": pa.string(),
        "meta": pa.struct([("a", pa.float64()), ("b", pa.list_(pa.int64()))]),
        "list": pa.list_(pa.struct([("x", pa.bool_())])),
        "new": pa.int64(),
    }
    assert dataset.schema == pa.schema(list(expected.items()))
    found = read_rows(dataset)
    assert found[7] == {"n": 7.0, "late": None, "meta": {"a": 1.0, "b": None}, "list": [], "new": None}
    assert found[-1] == rows[-1]


def test_json_values_without_a_common_type_become_text(tmp_path):
    rows = [
        {"answer": "yes", "big": 2**60, "huge": 1, "content": "hi", "empty": {}},
        {"answer": 3, "big": 0.5, "huge": 2**70, "content": [{"type": "text", "text": "é"}], "empty": None},
        {"answer": True, "big": 1, "huge": -(2**63), "content": None, "empty": {}},
    ]
    found = read_rows(open_dataset(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert [r["answer"] for r in found] == ["yes", "3", "true"]
    assert [r["big"] for r in found] == [str(2**60), "0.5", "1"]
    assert [r["huge"] for r in found] == ["1", str(2**70), str(-(2**63))]
    assert [r["content"] for r in found] == ["hi", '[{"type": "text", "text": "é"}]', None]
    assert [r["empty"] for r in found] == ["{}", None, "{}"]


def test_json_mixed_inside_messages_makes_the_column_json_text(tmp_path):
    messages = [[{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text"}]}]]
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", [{"messages": m} for m in messages]))
    assert dataset.schema.field("messages").type == pa.string()
    assert [json.loads(r["messages"]) for r in read_rows(dataset)] == messages


def test_json_integers_stay_exact_and_strings_stay_strings(tmp_path):
    rows = [
        {"id": 2**62 + 1, "when": "2020-01-01T00:00:00Z", "code": "007"},
        {"id": -5, "when": "x", "code": "1"},
    ]
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", rows))
    assert read_rows(dataset) == rows


def test_json_maps_with_endless_keys_do_not_become_endless_types(tmp_path):
    rows = [{"counts": {f"key{i}": i}} for i in range(3000)]
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", rows))
    assert dataset.schema.field("counts").type == pa.string()
    assert json.loads(read_rows(dataset)[2999]["counts"]) == {"key2999": 2999}


def test_json_deep_nesting_is_text_or_an_error_but_no_crash(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a":' * 300 + "1" + "}" * 300 + "\n")
    assert open_dataset(tmp_path / "a.jsonl").schema.field("a").type == pa.string()
    (tmp_path / "a.jsonl").write_text('{"a":' * 200_000 + "1" + "}" * 200_000 + "\n")
    assert "line 1" in error_of(tmp_path / "a.jsonl")


def test_json_oddities(tmp_path):
    text = '\ufeff{"a": "cut \\ud83d", "n": NaN}\r\n\n   \n{"a": "whole \\ud83d\\ude00 \u2028", "n": 1}'
    (tmp_path / "a.ndjson").write_text(text, encoding="utf-8", newline="")
    found = read_rows(open_dataset(tmp_path / "a.ndjson"))
    assert [r["a"] for r in found] == ["cut \ufffd", "whole 😀 \u2028"]
    assert found[0]["n"] != found[0]["n"] and found[1]["n"] == 1.0


def test_json_errors_name_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    good = '{"a": 1}\n\n'
    for bad, says in (
        ('{"a": 1', "not valid JSON"),
        ('{"a": "\x01"}', "not valid JSON"),
        ("17", "not a JSON object"),
        ('[{"a": 1}]', "is an array"),
    ):
        path.write_text(good + bad + "\n")
        message = error_of(path)
        assert "a.jsonl, line 3 " in message and says in message
    path.write_bytes(b'{"a": "\xff"}\n')
    assert "line 1" in error_of(path) and "utf-8" in error_of(path)


def test_json_files_of_one_input_need_the_same_columns(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", [{"a": 1, "b": None}, {"a": 1.5}])
    write_jsonl(tmp_path / "2.jsonl", [{"a": 2, "b": "x"}])
    assert [r["b"] for r in read_rows(open_dataset(tmp_path))] == [None, None, "x"]
    write_jsonl(tmp_path / "2.jsonl", [{"a": 2, "c": "x"}])
    assert "2.jsonl" in error_of(tmp_path) and "'b', 'c'" in error_of(tmp_path)


def test_limit_reads_no_further(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 5 + "broken\n")
    dataset = open_dataset(tmp_path / "a.jsonl", limit=5)
    assert dataset.num_rows == 5 and len(read_rows(dataset)) == 5
    assert "line 6" in error_of(tmp_path / "a.jsonl", limit=6)


def test_truncated_gzip(tmp_path):
    rows = [{"a": random.Random(i).random()} for i in range(5000)]
    path = write_jsonl(tmp_path / "a.jsonl.gz", rows)
    path.write_bytes(path.read_bytes()[:-2000])
    assert "a.jsonl.gz" in error_of(path)


def test_gzip_is_known_by_its_first_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert read_rows(open_dataset(tmp_path / "a.jsonl")) == [{"a": 1}]


# CSV


def test_csv_text_is_kept_as_written(tmp_path):
    text = '\ufeffcode,price,date,note\n007,2.50,2020-01-01,"two\n""quoted"" lines, ünïcode"\n,NA,,\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert read_rows(open_dataset(tmp_path / "a.csv")) == [
        {"code": "007", "price": "2.50", "date": "2020-01-01", "note": 'two\n"quoted" lines, ünïcode'},
        {"code": "", "price": "NA", "date": "", "note": ""},
    ]


def test_csv_fields_of_many_lines(tmp_path):
    field = "line, with comma\n" * 50_000  # 0.8 MB
    text = "a,b\n" + "".join(f'{i},"{field}"\n' for i in range(30))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode(), 1))
    rows = read_rows(open_dataset(tmp_path / "a.csv.gz"))
    assert [r["a"] for r in rows] == [str(i) for i in range(30)]
    assert all(r["b"] == field for r in rows)


def test_tsv_and_several_csv_files(tmp_path):
    (tmp_path / "a.tsv").write_text("x\ty\n1,5\t2\n")
    assert read_rows(open_dataset(tmp_path / "a.tsv")) == [{"x": "1,5", "y": "2"}]
    (tmp_path / "b.csv").write_text("y,x\n4,3\n")
    assert read_rows(open_dataset(tmp_path)) == [{"x": "1,5", "y": "2"}, {"x": "3", "y": "4"}]
    (tmp_path / "b.csv").write_text("y,z\n4,3\n")
    assert "b.csv" in error_of(tmp_path)


def test_csv_errors(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n"1\n\n",2\n3\n')
    assert "a.csv, line 5: 1 fields, but the header has 2" in error_of(path)
    path.write_text("a,b\n1,2,3\n")
    assert "a.csv, line 2: 3 fields" in error_of(path)
    path.write_text('a,b\n1,"2\n3,4\n')
    assert "a.csv" in error_of(path) and "not valid CSV" in error_of(path)
    path.write_text("a,a\n1,2\n")
    assert "more than one column named 'a'" in error_of(path)
    path.write_bytes(b"a,b\n1,\xff\xfe\n")
    assert "a.csv is not UTF-8" in error_of(path)


# datasets


def test_dataset_dict_needs_a_split(tmp_path):
    part = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    both = datasets.DatasetDict(train=part, test=part.select([1]))
    both.save_to_disk(tmp_path / "both")
    message = error_of(tmp_path / "both")
    assert "--split" in message and "train" in message and "test" in message
    assert "'dev'" in error_of(tmp_path / "both", split="dev")
    assert read_rows(open_dataset(tmp_path / "both", split="test")) == [{"prompt": "b"}]
    assert read_rows(open_dataset(both, split="test")) == [{"prompt": "b"}]
    datasets.DatasetDict(train=part).save_to_disk(tmp_path / "one")
    assert len(read_rows(open_dataset(tmp_path / "one"))) == 2
    assert "--split" in error_of(part, split="test")
    assert "--split" in error_of(write_jsonl(tmp_path / "a.jsonl", [{"a": 1}]), split="test")


def test_damaged_saved_dataset(tmp_path):
    datasets.Dataset.from_dict({"prompt": ["a" * 50] * 500}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:5000])
    assert "saved" in error_of(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{")
    assert "saved" in error_of(tmp_path / "saved")


def test_dataset_formats_do_not_change_what_is_read():
    plain = datasets.Dataset.from_dict({"prompt": ["a", "b"], "x": [1, 2]})
    formatted = plain.with_format("numpy", columns=["x"])
    assert read_rows(open_dataset(formatted)) == plain.to_list()


def test_iterable_dataset_whose_types_show_late():
    def rows():
        for i in range(2500):
            yield {"x": i, "late": None, "array": np.arange(3), "n": np.int32(i)}
        yield {"x": 0.5, "late": "end", "array": np.arange(2), "n": np.int32(0), "new": True}

    dataset = open_dataset(datasets.IterableDataset.from_generator(rows))
    assert dataset.schema == pa.schema(
        [
            ("x", pa.float64()),
            ("late", pa.string()),
            ("array", pa.list_(pa.int64())),
            ("n", pa.int32()),
            ("new", pa.bool_()),
        ]
    )
    assert read_rows(dataset)[-1] == {"x": 0.5, "late": "end", "array": [0, 1], "n": 0, "new": True}


def test_hub_id(monkeypatch):
    stream = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]}).to_iterable_dataset()
    asked = []

    def load_dataset(name, streaming):
        asked.append((name, streaming))
        if name == "org/data":
            return datasets.IterableDatasetDict(train=stream, test=stream.take(1))
        raise ConnectionError("no route to\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read_rows(open_dataset("org/data", split="train"))) == 3
    assert "train, test" in error_of("org/data")
    message = error_of("no-such-dir/data")
    assert "no such file" in message and "no route to the hub" in message
    assert asked == [("org/data", True), ("org/data", True), ("no-such-dir/data", True)]
    error_of("no-such-dir/data.jsonl")
    error_of("/no/such/data")
    assert len(asked) == 3  # names that can only be files are not looked up


# OpenAI batches


def openai_line(custom_id, **changes):
    body = {"model": "m", "messages": [{"role": "user", "content": "é?"}]}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {**line, **changes}


def test_openai_batch_is_recognised(tmp_path):
    lines = [openai_line("a"), openai_line("b"), {"custom_id": 7}, openai_line("a"), openai_line("b")]
    path = write_jsonl(tmp_path / "batch.jsonl", lines)
    dataset = open_dataset(path)
    assert dataset.format == "openai"
    assert dataset.schema == pa.schema([(n, pa.string()) for n in ("custom_id", "method", "url", "body")])
    rows = read_rows(dataset)
    assert json.loads(rows[0]["body"]) == lines[0]["body"] and "é" in rows[0]["body"]
    assert rows[2] == {"custom_id": None, "method": None, "url": None, "body": None}
    assert dataset.duplicate_rows == {3, 4}
    assert open_dataset(path, limit=4).duplicate_rows == {3}
    assert open_dataset(path, input_format="jsonl").format == "jsonl"


def test_openai_batch_can_be_forced(tmp_path):
    path = write_jsonl(tmp_path / "batch.txt", [{"custom_id": "x"}, openai_line("a")])
    assert "--input-format" in error_of(path)
    dataset = open_dataset(path, input_format="openai")
    assert dataset.format == "openai" and dataset.num_rows == 2
    path.write_text("{\n")
    assert "line 1" in error_of(path, input_format="openai")


# Finding files


def test_missing_files_suggest_close_names(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"a": 1}])
    assert "train.jsonl?" in error_of(tmp_path / "trian.jsonl")
    assert "no file matches" in error_of(f"{tmp_path}/*.parquet")
    assert "train.jsonl?" in error_of(f"{tmp_path}/trains*.jsonl")
    assert "there is no directory" in error_of(tmp_path / "nowhere" / "a.csv")
    assert "download" in error_of("https://example.com/a.csv")


def write_partitioned(root, suffix, columns=("a",)):
    """Rows a = 0..3 under year=2023/kind=x%2Fy, year=2024/kind=05 and year=2024/kind=(null)."""
    folders = ["year=2023/kind=x%2Fy", "year=2024/kind=05", "year=2024/kind=__HIVE_DEFAULT_PARTITION__"]
    for i, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        rows = [{name: k for name in columns} for k in ([0], [1, 2], [3])[i]]
        path = root / folder / f"rows{suffix}"
        if suffix == ".parquet":
            write_parquet(path, rows)
        elif suffix == ".csv":
            path.write_text("\n".join([",".join(columns), *(",".join(map(str, r.values())) for r in rows)]) + "\n")
        else:
            write_jsonl(path, rows)
    return root


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".jsonl.zst"])
def test_directories_that_are_partitions_give_columns(tmp_path, suffix):
    root = write_partitioned(tmp_path / "in", suffix)
    for source in (root, upload(root, f"memory://partitions/{suffix}")):
        dataset = open_dataset(source)
        assert dataset.schema.names == ["a", "year", "kind"]
        assert dataset.schema.types[1:] == [pa.int64(), pa.string()]
        found = [(int(r["a"]), r["year"], r["kind"]) for r in read_rows(dataset)]
        assert found == [(0, 2023, "x/y"), (1, 2024, "05"), (2, 2024, "05"), (3, 2024, None)]
        assert [r["year"] for r in read_rows(dataset, start_row=1, batch_rows=2)] == [2024] * 3
    before = dataset.identity()
    assert open_dataset(root).identity() == before
    (root / "year=2024").rename(root / "year=2025")
    assert open_dataset(root).identity() != before
    assert open_dataset(f"{root}/**/rows*").schema.names == ["a"], "a glob names files only"
    shutil.copy(next(root.glob("*/*/rows*")), root)
    assert "partitions of different columns" in error_of(root)
    write_partitioned(tmp_path / "twice", suffix, columns=("a", "kind"))
    assert "'kind'" in error_of(tmp_path / "twice")


def test_urls_that_lead_nowhere():
    assert "no such file" in error_of("memory://bucket/nothing.jsonl")
    assert "no file matches" in error_of("memory://bucket/nothing*.jsonl")
    assert "abc://x/y.jsonl cannot be reached" in error_of("abc://x/y.jsonl")


@pytest.mark.parametrize("damage", [lambda data: data[:-6], lambda data: data[:9] + b"x" * 9 + data[18:]])
def test_damaged_zstandard(tmp_path, damage):
    path = write_jsonl(tmp_path / "a.jsonl.zst", [{"a": f"{i} ferries"} for i in range(50)])
    path.write_bytes(damage(path.read_bytes()))
    assert "a.jsonl.zst" in error_of(path)


def test_unknown_extension_lists_formats(tmp_path):
    path = write_jsonl(tmp_path / "data.txt", [{"a": 1}])
    message = error_of(path)
    assert ".parquet" in message and "--input-format" in message and "openai" in message
    assert read_rows(open_dataset(path, input_format="jsonl")) == [{"a": 1}]
    assert "--input-format" in error_of(path, input_format="xml")


def test_directories(tmp_path):
    assert "no Parquet" in error_of(tmp_path)
    write_jsonl(tmp_path / "_hidden.jsonl", [{"b": 1}])
    (tmp_path / "README.md").write_text("# data")
    write_jsonl(tmp_path / "b.jsonl", [{"a": 2}])
    write_jsonl(tmp_path / "a.jsonl", [{"a": 1}])
    assert read_rows(open_dataset(tmp_path)) == [{"a": 1}, {"a": 2}]
    write_parquet(tmp_path / "c.parquet", [{"a": 3}])
    assert "several formats" in error_of(tmp_path)
    assert read_rows(open_dataset(tmp_path, input_format="parquet")) == [{"a": 3}]
    (tmp_path / "sub").mkdir()
    shutil.move(tmp_path / "c.parquet", tmp_path / "sub")
    assert read_rows(open_dataset(f"{tmp_path}/**/*.parquet")) == [{"a": 3}]
    assert "README.md" in error_of(f"{tmp_path}/*")


def test_empty_inputs(tmp_path):
    """No rows; and the columns, where the format has them beside the rows."""
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("a\n")
    (tmp_path / "none.csv").write_text("")
    (tmp_path / "a.jsonl").write_text("\n \n")
    features = datasets.Features({"a": datasets.Value("string")})
    sources = {
        tmp_path / "a.parquet": ["a"],
        tmp_path / "a.csv": ["a"],
        tmp_path / "none.csv": [],
        tmp_path / "a.jsonl": [],
        datasets.Dataset.from_dict({"a": []}): ["a"],
        datasets.IterableDataset.from_generator(lambda: iter(())): [],
        datasets.IterableDataset.from_generator(lambda: iter(()), features=features): ["a"],
    }
    for source, columns in sources.items():
        dataset = open_dataset(source, limit=3)
        assert (dataset.num_rows, dataset.schema.names, read_rows(dataset)) == (0, columns, [])
        json.dumps(dataset.identity())
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    assert "no columns" in error_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("line", ["{", "[1]", "7", '"\\ud800', "\xe9", '{"a": 1} {}'])
def test_bad_lines_are_rows_that_say_so(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 0}\n\n' + line.encode("latin-1") + b'\n{"a": 2}\n')
    assert "line 3" in (message := error_of(path)) and "--on-bad-line skip" in message
    dataset = open_dataset(path, on_bad_line="skip")
    assert read_rows(dataset, batch_rows=2) == [{"a": 0}, {"a": None}, {"a": 2}]
    assert read_rows(dataset, start_row=1)[0] == {"a": None}
    found = {}
    for _, batch in dataset.batches(batch_rows=2):
        found |= bad_lines(batch)
    assert list(found) == [1]
    assert "line 3" in found[1] and found[1].endswith(line.encode("latin-1").decode(errors="replace"))
    assert "fail or skip" in error_of(path, on_bad_line="stop")


def test_nothing_but_bad_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text("one\ntwo\n")
    assert "no line" in error_of(tmp_path / "a.jsonl", on_bad_line="skip")
    write_jsonl(tmp_path / "b.jsonl", [{"a": 1}])
    assert read_rows(open_dataset(tmp_path, on_bad_line="skip")) == [{"a": None}, {"a": None}, {"a": 1}]


def test_bad_lines_of_an_openai_batch(tmp_path):
    path = write_jsonl(tmp_path / "batch.jsonl", [openai_line("a"), openai_line("b")])
    path.write_text("oops\n" + path.read_text())
    assert "line 1" in error_of(path)
    dataset = open_dataset(path, on_bad_line="skip")
    assert dataset.format == "openai" and [r["custom_id"] for r in read_rows(dataset)] == [None, "a", "b"]


def test_an_empty_part_among_others(tmp_path):
    write_parquet(tmp_path / "1.parquet", [{"a": 1}])
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "2.parquet")
    write_parquet(tmp_path / "3.parquet", [{"a": 3}])
    assert read_rows(open_dataset(tmp_path)) == [{"a": 1}, {"a": 3}]
    assert read_indices(open_dataset(tmp_path), start_row=1) == [1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_unreadable_file(tmp_path, name):
    if os.geteuid() != 0:
        path = tmp_path / name
        path.write_text("{}")
        path.chmod(0)
    else:  # root reads everything, except this
        path = tmp_path / name
        path.symlink_to("/proc/self/mem")
    assert name in error_of(path)


def test_an_input_that_changes_after_it_was_opened(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": i} for i in range(5)])
    dataset = open_dataset(path)
    path.write_text('{"a": 0}\n{"a": 1}\n')
    with pytest.raises(InputError, match="changed"):
        read_rows(dataset)
    path.write_text('{"a": "text"}\n' * 5)
    with pytest.raises(InputError, match="changed"):
        read_rows(dataset)


def test_wrong_arguments():
    assert "--limit" in error_of({"a": 1}, limit=0)
    assert "shard 2/2" in error_of({"a": 1}, shard=(2, 2))
    assert "not set" in error_of({"a", "b"})


# Identity


def test_identity_is_of_content_and_name(tmp_path):
    for k in "abc":
        (tmp_path / k).mkdir()
    first = write_parquet(tmp_path / "a" / "x.parquet", [row(i) for i in range(20)])
    copy = shutil.copy(first, tmp_path / "b" / "x.parquet")
    os.utime(copy, (0, 0))
    other = write_parquet(tmp_path / "c" / "x.parquet", [row(i) for i in range(1, 21)])
    assert open_dataset(first).identity() == open_dataset(copy).identity()
    assert open_dataset(first).identity() != open_dataset(other).identity()
    assert str(tmp_path) not in json.dumps(open_dataset(first).identity())


def test_identity_of_saved_and_streamed_datasets(tmp_path):
    table = datasets.Dataset.from_dict({"a": [1, 2, 3]})
    table.save_to_disk(tmp_path / "x")
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    assert open_dataset(tmp_path / "x").identity() == open_dataset(tmp_path / "y").identity()
    assert open_dataset(table).identity() != open_dataset(table.select([0, 1])).identity()
    stream = open_dataset(table.to_iterable_dataset())
    assert stream.identity() != open_dataset(table.select([2, 1, 0]).to_iterable_dataset()).identity()


# Memory


POOLS = []  # kept to the end: what was allocated from a pool may outlive its use


def peak_bytes(open_it) -> int:
    """Most bytes that Python and Arrow hold at once while everything is read twice, with a warm-up before."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        dataset = open_it()
        for _ in range(2):
            for _first, _batch in dataset.batches(batch_rows=128):
                pass
        dataset.identity()
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


WRITABLE = ["parquet", "jsonl", "jsonl.gz", "csv", "openai", "saved", "iterable", "generator"]


@pytest.mark.parametrize("kind", some_of(WRITABLE, 4, "flat memory"))
def test_memory_does_not_grow_with_the_rows(tmp_path, kind):
    text = "0123456789abcdef" * 256  # 4 KiB

    def make(rows: int):
        path = tmp_path / f"{rows}.{kind}"
        values = ({"id": i, "text": f"{i} {text}"} for i in range(rows))
        if kind == "parquet":  # one row group of plain values: what a careless reader loads whole
            table = pa.table({"text": [v["text"] for v in values]})
            options = {"row_group_size": rows, "compression": "none", "use_dictionary": False}
            pq.write_table(table, path, **options)
        elif kind.startswith("jsonl"):
            write_jsonl(path, values)
        elif kind == "csv":
            with open(path, "w") as file:
                file.write("id,text\n")
                file.writelines(f"{v['id']},{v['text']}\n" for v in values)
        elif kind == "openai":
            path = write_jsonl(path.with_suffix(".jsonl"), (openai_line(str(v["id"]), body=v) for v in values))
        elif kind == "saved":
            datasets.Dataset.from_list(list(values)).save_to_disk(path)
        else:
            features = datasets.Features({"id": datasets.Value("int64"), "text": datasets.Value("string")})
            return datasets.IterableDataset.from_generator(
                lambda: ({"id": i, "text": f"{i} {text}"} for i in range(rows)),
                features=features if kind == "iterable" else None,
            )
        return path

    tiny, small, large = make(300), make(1000), make(4000)  # of which the last two have 4 and 16 MB
    peak_bytes(lambda: open_dataset(tiny))  # imports and caches
    few, many = (peak_bytes(lambda source=s: open_dataset(source)) for s in (small, large))
    assert many < 1.1 * few + (1 << 20)
    assert many < 10 << 20


# ---- inputs that get more rows


def begins(source, was, **options) -> bool:
    return open_dataset(source, **options).begins_with(was)


def test_lines_may_be_appended(tmp_path):
    rows = [row(i) for i in range(9)]
    path = write_jsonl(tmp_path / "in.jsonl", rows[:5])
    was = open_dataset(path).identity()
    assert open_dataset(path).may_grow and begins(path, was)
    assert begins(path, was, limit=2)  # a limit is no part of an input's identity
    write_jsonl(path, rows)
    assert begins(path, was) and not begins(write_jsonl(path, rows[1:]), was)
    assert not begins(write_jsonl(path, rows[:4]), was)
    assert not begins(write_jsonl(tmp_path / "other.jsonl", rows), was)
    text = write_jsonl(path, rows).read_bytes()
    path.write_bytes(text.replace(b"row 1", b"row 7"))  # as long as it was
    assert not begins(path, was)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("a,b\n1,2\n", "3,4\n", True),
        ("a,b\n1,2", "\n3,4\n", True),
        ("a,b\r\n1,2", "\r\n3,4\r\n", True),
        ("a,b\n1,2", "3\n3,4\n", False),  # its last row is another one
        ("a,b\n", "1,2\n", True),
    ],
)
def test_the_last_line_may_not_change(tmp_path, before, after, same):
    path = tmp_path / "in.csv"
    path.write_bytes(before.encode())
    was = open_dataset(path).identity()
    path.write_bytes((before + after).encode())
    assert begins(path, was) is same


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz"])
def test_files_may_be_added_after_those_that_were_there(tmp_path, kind):
    def write(name, rows):
        return (write_parquet if kind == "parquet" else write_jsonl)(tmp_path / f"{name}.{kind}", rows)

    rows = [row(i) for i in range(9)]
    write("b", rows[:4])
    was = open_dataset(tmp_path).identity()
    assert open_dataset(tmp_path).may_grow
    write("c", rows[4:])
    assert begins(tmp_path, was)
    write("a", rows[:1])
    assert not begins(tmp_path, was)
    (tmp_path / f"a.{kind}").unlink()
    write("b", rows)  # text may have more lines, which a compressed file does not show
    assert begins(tmp_path, was) is (kind == "jsonl")
    (tmp_path / f"b.{kind}").unlink()
    assert not begins(tmp_path, was)


def test_directories_may_be_added_after_those_that_were_there(tmp_path):
    for day in (1, 2):
        (tmp_path / "in" / f"day={day}").mkdir(parents=True)
    write_parquet(tmp_path / "in" / "day=1" / "rows.parquet", [row(0)])
    was = open_dataset(tmp_path / "in").identity()
    write_parquet(tmp_path / "in" / "day=2" / "rows.parquet", [row(1)])
    assert begins(tmp_path / "in", was)
    os.rename(tmp_path / "in" / "day=1", tmp_path / "in" / "day=0")
    assert not begins(tmp_path / "in", was)


def test_what_cannot_grow(tmp_path):
    path = write_parquet(tmp_path / "in.parquet", [row(0), row(1)])
    assert not open_dataset(path).may_grow and not open_dataset(tmp_path, shard=(0, 2)).may_grow
    table = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    assert not open_dataset(table).may_grow
    assert open_dataset(path, limit=1).may_grow and open_dataset(table, limit=1).may_grow
    assert begins(table, open_dataset(table, limit=1).identity())


@pytest.mark.parametrize("escaped", ["", "\\u00e9"])
def test_how_deep_a_row_may_be_nested_does_not_depend_on_who_reads_it(tmp_path, escaped):
    depths = [1, 150, 299, 300, 301, 480, 500, 900, *range(940, 1000, 5), 100_000]
    body = '{"custom_id": "r%d", "method": "POST", "url": "/v1/completions", "body": %s}\n'
    path = tmp_path / "a.jsonl"
    lines = [body % (depth, "[" * (depth - 1) + f'"{escaped}"' + "]" * (depth - 1)) for depth in depths]
    path.write_text("".join(lines))
    dataset = open_dataset(path, on_bad_line="skip")

    def bad_rows(frames: int) -> set[int]:
        return bad_rows(frames - 1) if frames else {row for _, batch in dataset.batches() for row in bad_lines(batch)}

    too_deep = {row for row, depth in enumerate(depths) if depth > 300}
    assert bad_rows(0) == bad_rows(150) == too_deep
    (tmp_path / "b.json").write_text('[{"a": ' + "[" * 400 + "]" * 400 + "}]")
    assert "nested too deeply" in error_of(tmp_path / "b.json")
