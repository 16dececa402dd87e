"""`batchgen.run` in Python: tables of every kind in, a table or a report out."""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from questions import FEATURES, OPTIONS, QUESTIONS, rows

import batchgen
from batchgen.core.errors import InputError
from batchgen.job import cached_outputs
from batchgen.job.option_table import options_of

ROOT = Path(__file__).parents[1]
KINDS = np.arange(len(QUESTIONS), dtype=np.int64) % 2
COLUMNS = {"q": QUESTIONS, "kind": KINDS.tolist()}
ADDED = ["text", "finish_reason", "prompt_tokens", "generated_tokens", "error"]


class ArrowStream:
    """An object of a library that nobody has heard of."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def in_chunks(column):
    """The column in chunks of several lengths, one of them empty."""
    array = pa.array(column)
    return pa.chunked_array([array[:1], array[1:1], array[1:12], array[12:]])


# Each makes an input of the same rows.
INPUTS = {
    "list of dicts": lambda table: table.to_pylist(),
    "dict of lists": lambda table: table.to_pydict(),
    "dict of arrays": lambda table: {"q": in_chunks(table["q"]), "kind": KINDS},
    "table": lambda table: table,
    "chunked table": lambda table: pa.table({name: in_chunks(table[name]) for name in table.column_names}),
    "slice of a table": lambda table: pa.concat_tables([table[:3], table]).combine_chunks()[3:],
    "record batch": lambda table: table.combine_chunks().to_batches()[0],
    "record batch reader": lambda table: table.to_reader(max_chunksize=5),
    "arrow stream": ArrowStream,
    "pandas": lambda table: pytest.importorskip("pandas").DataFrame(table.to_pydict()),
    "polars": lambda table: pytest.importorskip("polars").from_arrow(table),
    "duckdb": lambda table: pytest.importorskip("duckdb").from_arrow(table),
    "datasets": lambda table: datasets.Dataset.from_dict(table.to_pydict()),
    "datasets stream": lambda table: datasets.Dataset.from_dict(table.to_pydict()).to_iterable_dataset(),
    "large strings": lambda table: table.set_column(0, "q", table["q"].cast(pa.large_string())),
    "string views": lambda table: table.set_column(0, "q", table["q"].cast(pa.string_view())),
    "dictionary": lambda table: table.set_column(0, "q", table["q"].dictionary_encode()),
    "binary": lambda table: table.set_column(0, "q", table["q"].cast(pa.binary())),
}


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture
def table():
    return pa.table(COLUMNS)


@pytest.fixture
def dataset():
    return datasets.Dataset.from_dict(rows(), features=FEATURES, split="test")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def expected(model):
    """What each question is answered, by the engine alone."""
    with batchgen.Engine(model, dtype="float32", cpu_memory="4GiB") as engine:
        asked = [batchgen.Request(q or "", batchgen.SamplingParams(max_tokens=5)) for q in QUESTIONS]
        return [c.text for c in sorted(engine.generate(asked), key=lambda c: c.index)]


def no_model(*args, **kwargs):
    raise AssertionError("the model was loaded")


# ---- every kind of input


@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_input_gives_the_same_rows(model, table, kind, expected):
    answers = batchgen.run(model, INPUTS[kind](table), prompt_column="q", **OPTIONS)
    assert isinstance(answers, datasets.Dataset if kind.startswith("datasets") else pa.Table)
    assert answers.column_names == ["q", "kind", *ADDED]
    columns = answers.to_dict() if isinstance(answers, datasets.Dataset) else answers.to_pydict()
    assert columns["text"] == expected and columns["kind"] == KINDS.tolist()
    assert [q.decode() if isinstance(q, bytes) else q for q in columns["q"]] == QUESTIONS
    assert [e for e in columns["error"] if e] == ["column 'q' is null", "the prompt is empty"] * 4


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "chunked array", "numpy", "pandas", "polars"])
def test_texts_alone_are_the_column_prompt(model, kind, expected):
    make = {
        "list": list,
        "tuple": tuple,
        "array": pa.array,
        "chunked array": in_chunks,
        "numpy": lambda texts: np.array(texts, object),
        "pandas": lambda texts: pytest.importorskip("pandas").Series(texts),
        "polars": lambda texts: pytest.importorskip("polars").Series(texts),
    }
    answers = batchgen.run(model, make[kind](QUESTIONS), **OPTIONS)
    assert answers.column_names == ["prompt", *ADDED]
    assert answers["prompt"].to_pylist() == QUESTIONS and answers["text"].to_pylist() == expected


@pytest.mark.parametrize("kind", ["list of dicts", "table", "string views", "pandas", "polars", "duckdb"])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv", ".arrow"])
def test_an_output_gives_the_report_and_the_file(model, table, kind, suffix, tmp_path, expected):
    output = tmp_path / f"out{suffix}"
    report = batchgen.run(model, INPUTS[kind](table), output, prompt_column="q", **OPTIONS)
    assert report["state"] == "complete" and report["rows"] == len(QUESTIONS) and report["output"] == str(output)
    read = datasets.load_dataset(
        {".jsonl": "json", ".arrow": "arrow"}.get(suffix, suffix[1:]),
        data_files=str(output),
        cache_dir=str(tmp_path / "hf"),
        split="train",
    )
    assert read["text"][:] == expected and read["kind"][:] == KINDS.tolist()


def test_odd_columns_are_kept(model):
    odd = {
        "nothing": pa.nulls(2),
        "when": pa.array([0, 1], pa.timestamp("us")),
        "views": pa.array([["a"], None], pa.list_(pa.string_view())),
        "structs": pa.array([{"x": [1]}, None], pa.struct([("x", pa.list_view(pa.int8()))])),
        "label": pa.array(["a", "b"]).dictionary_encode(),
        "price": pa.array([1, None], pa.decimal128(5, 2)),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
    }
    table = pa.table({"prompt": ["The ferry", "The cook"], **odd})
    answers = batchgen.run(model, table, **OPTIONS)
    assert answers.select(table.column_names).to_pylist() == table.to_pylist()
    assert answers.schema.field("views").type == pa.list_(pa.large_string())
    assert answers.schema.field("label").type == table.schema.field("label").type


@pytest.mark.parametrize(
    "empty",
    [[], {}, {"prompt": []}, pa.table({"prompt": pa.array([], pa.string())}), pa.table({"prompt": pa.nulls(0)})],
    ids=str,
)
def test_an_input_without_rows_gives_a_table_without_rows(model, empty):
    answers = batchgen.run(model, empty, **OPTIONS)
    assert answers.num_rows == 0 and answers.column_names[-5:] == ADDED


def test_the_index_of_a_dataframe_comes_back(model):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["The ferry", "The cook"]}, index=["a", "b"])
    assert list(batchgen.run(model, frame, **OPTIONS).to_pandas().index) == ["a", "b"]


def test_few_rows_of_a_large_table_take_no_longer(model, expected):
    """Its million rows are neither hashed nor rendered: with them one call would take minutes."""
    table = pa.table({"q": pa.array(QUESTIONS * 50_000), "number": np.arange(50_000 * len(QUESTIONS))})
    began = time.process_time()
    answers = batchgen.run(model, table, prompt_column="q", limit=2, **OPTIONS)
    assert answers["text"].to_pylist() == expected[:2] and time.process_time() - began < 60
    reads = []

    def batches():
        for batch in table.to_batches(max_chunksize=1000):
            reads.append(batch.num_rows)
            yield batch

    stream = pa.RecordBatchReader.from_batches(table.schema, batches())
    answers = batchgen.run(model, stream, prompt_column="q", limit=2, **OPTIONS)
    assert answers["text"].to_pylist() == expected[:2] and sum(reads) <= 2000


def stream_that_fails(error):
    def batches():
        yield pa.record_batch({"q": ["a"]})
        raise error

    return pa.RecordBatchReader.from_batches(pa.schema([("q", pa.string())]), batches())


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (3, "^input must be a path, a list of texts or of dicts, .* DuckDB .*, not int$"),
        (np.array([["a"]]), "not ndarray$"),
        (iter(["a"]), "not list_iterator$"),
        (["a", 3], "item 1 of the list given is of type int: a list has texts"),
        ([{"q": "a"}, None], "item 1 of the list given is of type NoneType"),
        ([{}], "rows without columns"),
        ([{1: "a"}], "keys that are no column names"),
        ({"q": "a text"}, "column 'q' of the dict given is one str: give a list"),
        ({"q": 3}, "column 'q' of the dict given is no list"),
        ({"q": ["a", 1]}, "column 'q' of the dict given is no list of values of one type"),
        ({"q": ["a"], "r": [1, 2]}, "no dict of columns of equal lengths"),
        (pa.table([["a"], ["b"]], ["q", "q"]), "more than one column named 'q'"),
        (stream_that_fails(RuntimeError("the query\nfailed")), "cannot be read as an Arrow table: .*the query failed"),
        (stream_that_fails(OSError(5, "no such table")), "cannot be read as an Arrow table: .*no such table"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_inputs_that_are_no_tables_are_refused_in_one_line(model, given, complaint, monkeypatch):
    monkeypatch.setattr("batchgen.job.loading.load_on_ranks", no_model)
    with pytest.raises(InputError, match=complaint) as refused:
        batchgen.run(model, given, prompt_column="q")
    assert "\n" not in str(refused.value)


def test_a_lazy_frame_is_to_be_collected(model):
    polars = pytest.importorskip("polars")
    with pytest.raises(InputError, match=r"not LazyFrame: collect\(\) it first"):
        batchgen.run(model, polars.LazyFrame(COLUMNS), prompt_column="q")


def test_a_split_is_for_datasets(model, table):
    with pytest.raises(InputError, match="--split is for `datasets` datasets, and the Table given is not one"):
        batchgen.run(model, table, split="train")


# ---- the same call again


def test_the_same_rows_are_found_again_however_they_come(model, table, expected, monkeypatch, cache):
    first = batchgen.run(model, table, prompt_column="q", **OPTIONS)
    monkeypatch.setattr("batchgen.job.loading.load_on_ranks", no_model)
    for kind in ("list of dicts", "chunked table", "slice of a table", "record batch reader", "arrow stream"):
        again = batchgen.run(model, INPUTS[kind](table), prompt_column="q", **OPTIONS | {"cpu_memory": "3GiB"})
        assert again.equals(first), kind
    assert len(list(cache.glob("outputs/*.arrow"))) == 1
    for other in (table[:-1], table.set_column(1, "kind", pa.array(KINDS[::-1])), table.rename_columns(["q", "k"])):
        with pytest.raises(AssertionError, match="was loaded"):
            batchgen.run(model, other, prompt_column="q", **OPTIONS)


@pytest.mark.parametrize("kind", ["list of dicts", "table", "record batch reader", "pandas", "polars", "duckdb"])
def test_a_stopped_call_goes_on(model, table, kind, expected):
    with pytest.raises(batchgen.JobStopped, match=r"24 rows left: the same call goes on") as stopped:
        batchgen.run(model, INPUTS[kind](table), prompt_column="q", max_time=0.0001, **OPTIONS)
    assert stopped.value.exit_code == 3
    answers = batchgen.run(model, INPUTS[kind](table), prompt_column="q", **OPTIONS)
    assert answers["text"].to_pylist() == expected


def test_a_stopped_call_with_an_output_says_so_in_its_report(model, table, tmp_path, expected):
    output, options = tmp_path / "out.parquet", {"prompt_column": "q", **OPTIONS}
    assert batchgen.run(model, table, output, max_time=0.0001, **options)["state"] == "stopped"
    assert batchgen.run(model, table, output, limit=10, **options)["rows_ok"] == 7
    report = batchgen.run(model, table, output, **options)
    assert report["rows_resumed"] == 10 and pq.read_table(output)["text"].to_pylist() == expected
    longer = pa.concat_tables([table, table[:2]])
    report = batchgen.run(model, longer, output, **options)
    assert (report["rows_resumed"], report["rows"]) == (24, 26)
    assert pq.read_table(output)["text"].to_pylist() == expected + expected[:2]
    with pytest.raises(InputError, match="input"):
        batchgen.run(model, longer[1:], output, **options)


def test_a_dry_run_gives_its_report(model, table):
    report = batchgen.run(model, table, prompt_column="q", dry_run=True, **OPTIONS)
    assert report["state"] == "dry run" and report["first_prompt"] == QUESTIONS[0]


def test_an_openai_batch_needs_an_output(model, tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "The ferry"}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match=r"answered in JSON lines: give an output that ends in \.jsonl"):
        batchgen.run(model, str(tmp_path / "batch.jsonl"), dtype="float32")


def test_too_many_failed_rows_raise_and_the_output_is_kept(model, cache):
    with pytest.raises(batchgen.TooManyFailed, match=r"\.arrow has them with their errors") as failed:
        batchgen.run(model, ["", None], **OPTIONS)
    assert Path(failed.value.report["output"]).parent == cache / "outputs"


# ---- outputs in the cache


def outputs_in(cache):
    return {path.name.partition(".")[0] for path in (cache / "outputs").iterdir()}


def age(path, seconds):
    for file in (path, *path.parent.glob(f"{path.name}.batchgen/**/*"), Path(f"{path}.batchgen")):
        os.utime(file, (time.time() - seconds,) * 2)


def test_outputs_that_nobody_used_for_a_week_are_deleted(model, cache):
    options = OPTIONS | {"max_tokens": 1}
    tables = [batchgen.run(model, [text], **options) for text in ("The ferry", "The cook", "The storm")]
    names = sorted((cache / "outputs").glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns)
    assert len(names) == 3
    for path in names[:2]:
        age(path, cached_outputs.KEPT_S + 60)
    batchgen.run(model, ["The cook"], **options)  # is used again
    assert outputs_in(cache) == {path.stem for path in names[1:]}
    assert tables[0]["prompt"].to_pylist() == ["The ferry"] and tables[0]["text"].to_pylist()[0] is not None


def test_the_oldest_outputs_are_deleted_where_all_take_too_much(model, cache, monkeypatch):
    options = OPTIONS | {"max_tokens": 1}
    for number, text in enumerate(("The ferry", "The cook", "The storm")):
        batchgen.run(model, [text], **options)
        newest = max((cache / "outputs").glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns)
        age(newest, 3000 - number)
    with pytest.raises(batchgen.JobStopped):
        batchgen.run(model, ["The quay"], max_time=0.0001, **options)
    (unfinished,) = [path for path in (cache / "outputs").glob("*.batchgen") if not path.with_suffix("").exists()]
    for_url = cache / "outputs" / ("0" * 32)
    for_url.mkdir()
    monkeypatch.setattr(cached_outputs, "KEPT_BYTES", 1)
    batchgen.run(model, ["The end"], **options)
    left = outputs_in(cache)
    assert len(left) == 3 and {for_url.name, unfinished.name.partition(".")[0]} < left


def test_an_output_that_a_job_works_on_is_not_deleted(model, cache):
    from batchgen.core.file_lock import lock_file

    with pytest.raises(batchgen.JobStopped):
        batchgen.run(model, ["The ferry"], max_time=0.0001, **OPTIONS)
    (directory,) = (cache / "outputs").glob("*.batchgen")
    for file in (directory, *directory.rglob("*")):
        os.utime(file, (0, 0))
    lock = lock_file(directory / "lock")
    os.utime(directory / "lock", (0, 0))
    batchgen.run(model, ["The cook"], **OPTIONS)
    assert directory.exists()
    os.close(lock)
    batchgen.run(model, ["The cook"], **OPTIONS)
    assert not directory.exists()


# ---- keywords


def test_an_unknown_option_names_the_nearest_one():
    with pytest.raises(TypeError, match=r"^run\(\) has no option 'max_token': did you mean 'max_tokens'\?$"):
        batchgen.run("m", [], max_token=3)
    with pytest.raises(TypeError, match=r"^run\(\) has no option 'xyzzy'$"):
        batchgen.run("m", [], xyzzy=3)
    with pytest.raises(TypeError, match=r"^MapFunction\(\) has no option 'promt_column': did you mean 'prompt_column'"):
        batchgen.MapFunction("m", promt_column="q")


def test_the_signature_has_every_option_with_its_type_and_default():
    parameters = inspect.signature(batchgen.run).parameters
    assert list(parameters)[:3] == ["model", "input", "output"]
    options = {option.name: option for option in options_of("run")}
    assert set(parameters) == {*options, "steps"} == {"model", "input", "output", *batchgen.RunOptions.__annotations__}
    assert parameters["progress"].default == "none"
    assert all(
        parameters[n].default == options[n].default for n in list(parameters)[3:] if n in options and n != "progress"
    )
    assert str(parameters["dtype"].annotation).startswith("Literal['auto', 'bfloat16'")
    assert "prompt_column: Column that holds the prompts" in " ".join(batchgen.run.__doc__.split())


PROGRAM = """\
import batchgen
report = batchgen.run("m", ["a"], "o.parquet", max_tokens=3, stop=["x"], choices=["a"], logit_bias={3: 1.0})
reveal_type(report["state"])
class Person: ...
batchgen.run("m", {"q": ["a"]}, dtype="float32", json_schema=Person, stop="x")
options: batchgen.RunOptions = {"temperature": 0.5}
batchgen.run("m", [], **options)
batchgen.run("m", [], max_token=3)
batchgen.run("m", [], "o", dtype="float31")
batchgen.run("m", [], "o", max_tokens="three")
"""


def test_editors_and_mypy_know_the_options(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    told = [ROOT / "batchgen" / name for name in ("__init__.py", "api.py", "job/run_options.py")]
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path / 'mypy'}"]
    stdout = subprocess.run([*mypy, tmp_path / "program.py", *told], cwd=ROOT, capture_output=True, text=True).stdout
    lines = dict(re.findall(r"program\.py:(\d+): (?:error|note): (.*)", stdout)[::-1])
    assert lines.keys() == {"3", "8", "9", "10"}, stdout
    assert 'Revealed type is "Any"' in lines["3"]


# ---- a dataset in, a dataset out


def test_a_dataset_comes_back_with_its_features_and_the_answers(model, dataset, cache, expected):
    answers = batchgen.run(model, dataset, prompt_column="q", **OPTIONS)
    assert isinstance(answers, datasets.Dataset) and str(answers.split) == "test"
    assert {name: answers.features[name] for name in FEATURES} == FEATURES
    assert list(answers.features)[len(FEATURES) :] == [
        "text", "finish_reason", "prompt_tokens", "generated_tokens", "error",
    ]  # fmt: skip
    assert answers["text"][:] == expected
    assert answers.remove_columns(answers.column_names[5:]).to_list() == dataset.to_list()
    assert [e for e in answers["error"] if e] == ["column 'q' is null", "the prompt is empty"] * 4


def test_the_result_lies_in_a_file_that_is_mapped(model, dataset, cache):
    answers = batchgen.run(model, dataset, prompt_column="q", **OPTIONS)
    (file,) = answers.cache_files
    assert Path(file["filename"]).parent == cache / "outputs"
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert file["filename"] in mapped


def test_the_same_call_finds_its_result_and_another_does_not(model, dataset, cache, monkeypatch):
    first = batchgen.run(model, dataset, prompt_column="q", **OPTIONS)
    other = batchgen.run(model, dataset, prompt_column="q", **OPTIONS | {"max_tokens": 3})
    fewer = batchgen.run(model, dataset.select(range(4)), prompt_column="q", **OPTIONS)
    assert len({d.cache_files[0]["filename"] for d in (first, other, fewer)}) == 3 and len(fewer) == 4

    monkeypatch.setattr("batchgen.job.loading.load_on_ranks", no_model)
    again = batchgen.run(model, dataset, prompt_column="q", **OPTIONS | {"cpu_memory": "3GiB"})
    assert again.to_list() == first.to_list() and again._fingerprint == first._fingerprint
    with pytest.raises(AssertionError, match="was loaded"):
        batchgen.run(model, dataset.shuffle(seed=1), prompt_column="q", **OPTIONS)


def test_a_stream_comes_back_as_a_dataset_too(model, cache, tmp_path, expected, monkeypatch):
    stream = datasets.Dataset.from_dict(rows(), features=FEATURES).to_iterable_dataset()
    answers = batchgen.run(model, stream, prompt_column="q", **OPTIONS)
    assert answers["text"][:] == expected and answers.features["kind"] == FEATURES["kind"]
    output = tmp_path / "out.arrow"
    batchgen.run(model, stream, output, prompt_column="q", **OPTIONS)
    assert datasets.Dataset.from_file(str(output)).to_list() == answers.to_list()
    untyped = datasets.IterableDataset.from_generator(lambda: ({"q": q} for q in QUESTIONS))
    assert batchgen.run(model, untyped, prompt_column="q", **OPTIONS)["text"][:] == expected
    monkeypatch.setattr("batchgen.job.loading.load_on_ranks", no_model)
    assert batchgen.run(model, stream, prompt_column="q", **OPTIONS).to_list() == answers.to_list()
    late = datasets.IterableDataset.from_generator(lambda: ({"q": q} for q in [*QUESTIONS * 20, "The end"]))
    with pytest.raises(AssertionError, match="was loaded"):  # its first rows are those of another
        batchgen.run(model, late, prompt_column="q", **OPTIONS)


def test_indices_splits_and_samples(model, cache, dataset, expected):
    picked = dataset.select([4, 1, 3])
    answers = batchgen.run(model, picked, prompt_column="q", **OPTIONS)
    assert answers["text"][:] == [expected[i] for i in (4, 1, 3)] and answers["kind"][:] == [0, 1, 1]
    both = datasets.DatasetDict(train=dataset.select([0]), test=dataset.select([1, 3]))
    answers = batchgen.run(model, both, split="test", prompt_column="q", n=2, temperature=1.0, logprobs=1, **OPTIONS)
    assert str(answers.split) == "test" and [len(texts) for texts in answers["text"]] == [2, 2]
    assert len(answers[0]["logprobs"][0]) == answers[0]["generated_tokens"][0]


def test_a_dataset_without_rows(model, dataset, cache):
    for empty in (dataset.select([]), datasets.Dataset.from_dict({"q": []})):
        answers = batchgen.run(model, empty, prompt_column="q", **OPTIONS)
        assert len(answers) == 0 and answers.column_names[: len(empty.column_names)] == empty.column_names
        assert "text" in answers.column_names


def test_a_dataset_with_a_column_named_text_keeps_it(model, dataset, cache):
    named = dataset.rename_column("q", "text").select(range(2))
    answers = batchgen.run(model, named, prompt_column="text", **OPTIONS)
    assert answers["text"] == named["text"] and len(answers["gen_text"]) == 2


def test_features_reach_a_parquet_file_as_well(model, dataset, tmp_path):
    batchgen.run(model, dataset, tmp_path / "o.parquet", prompt_column="q", limit=2, **OPTIONS)
    read = datasets.Dataset.from_parquet(str(tmp_path / "o.parquet"), cache_dir=str(tmp_path / "hf"))
    assert read.features["kind"] == FEATURES["kind"] and len(read) == 2
