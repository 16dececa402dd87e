"""`--json-columns`: from a JSON schema to the columns of a job's output."""

import enum
import json
from typing import Literal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke

import batchgen
from batchgen.core.errors import InputError
from batchgen.job.json_columns import json_columns

pytest.importorskip("llguidance")
OPTIONS = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 200, "compact_json": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "level": {"type": "integer", "minimum": 1, "maximum": 4},
        "open": {"type": "boolean"},
        "kind": {"enum": ["fish", "meat"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "place": {
            "type": "object",
            "properties": {"x": {"enum": [0.5, 1]}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "text": {"type": "null"},
    },
    "required": ["level", "open", "kind", "tags", "place", "text"],
    "additionalProperties": False,
}
TYPES = {
    "level": pa.int64(),
    "open": pa.bool_(),
    "kind": pa.string(),
    "tags": pa.list_(pa.string()),
    "place": pa.struct([("x", pa.float64())]),
    "json_text": pa.string(),
}


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


def type_of(schema, **more):
    """The Arrow type of a property with a schema."""
    ((_, kind),) = json_columns(json.dumps({"type": "object", "properties": {"p": schema}, **more})).properties
    return kind


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, pa.string()),
        ({"type": "string", "format": "date"}, pa.string()),
        ({"type": "integer"}, pa.int64()),
        ({"type": "number"}, pa.float64()),
        ({"type": "boolean"}, pa.bool_()),
        ({"type": "null"}, pa.string()),
        (True, pa.string()),
        ({}, pa.string()),
        ({"const": 3}, pa.int64()),
        ({"enum": ["a", None]}, pa.string()),
        ({"enum": [1, 2.5]}, pa.float64()),
        ({"enum": [True, False, None]}, pa.bool_()),
        ({"enum": [1, "a"]}, pa.string()),
        ({"type": ["integer", "null"]}, pa.int64()),
        ({"type": ["integer", "string"]}, pa.string()),
        ({"anyOf": [{"type": "number"}, {"type": "integer"}, {"type": "null"}]}, pa.float64()),
        ({"oneOf": [{"type": "boolean"}, {"type": "integer"}]}, pa.string()),
        ({"type": "array"}, pa.string()),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.int64())),
        ({"type": "array", "items": {"type": ["integer", "string"]}}, pa.list_(pa.string())),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "number"}]}, pa.list_(pa.float64())),
        ({"type": "object"}, pa.string()),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, pa.string()),
        ({"properties": {"x": {"type": "integer"}}}, pa.struct([("x", pa.int64())])),
        ({"$ref": "#/$defs/one"}, pa.int64()),
        ({"allOf": [{"$ref": "#/$defs/one"}], "description": "of pydantic"}, pa.int64()),
        ({"$ref": "#/$defs/node"}, pa.struct([("next", pa.string()), ("value", pa.int64())])),
        ({"$ref": "#/$defs/none"}, pa.string()),
        ({"$ref": "elsewhere"}, pa.string()),
    ],
    ids=str,
)
def test_the_type_of_a_column_follows_from_its_schema(schema, kind):
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}}
    assert type_of(schema, **{"$defs": {"one": {"type": "integer"}, "node": node}}) == kind


def test_the_properties_of_a_schema_may_lie_behind_references():
    person = {"type": "object", "properties": {"name": {"type": "string"}}}
    for schema in (
        {"$ref": "#/$defs/P", "$defs": {"P": person}},
        {"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": person}},
        {"name": "person", "schema": person},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": person}},
    ):
        assert json_columns(json.dumps(schema)).properties == (("name", pa.string()),)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv", ".arrow"])
def test_every_format_has_the_columns(model, tmp_path, suffix):
    output = tmp_path / f"out{suffix}"
    rows = ["The ferry", "", "The cook"]
    report = batchgen.run(model, rows, output, json_schema=SCHEMA, json_columns=True, **OPTIONS)
    assert report["output_columns"] == [
        "text", *TYPES, "finish_reason", "prompt_tokens", "generated_tokens", "error",
    ]  # fmt: skip
    table = batchgen.run(model, rows, json_schema=SCHEMA, json_columns=True, **OPTIONS)
    assert {name: table.schema.field(name).type for name in TYPES} == TYPES
    for row in table.to_pylist():
        answer = json.loads(row["text"]) if row["text"] is not None else dict.fromkeys(SCHEMA["properties"])
        assert {name: row[f"json_{name}" if name == "text" else name] for name in answer} == answer
    assert table["error"].to_pylist() == [None, "the prompt is empty", None]
    if suffix == ".parquet":
        assert pq.read_table(output).equals(table.replace_schema_metadata())
    elif suffix == ".jsonl":
        assert [json.loads(line) for line in output.read_text().splitlines()] == table.to_pylist()
    elif suffix == ".arrow":
        assert pa.ipc.open_stream(output.read_bytes()).read_all().equals(table)
    else:
        read = datasets.Dataset.from_csv(str(output), cache_dir=str(tmp_path / "hf")).to_list()
        assert [row["place"] and json.loads(row["place"]) for row in read] == table["place"].to_pylist()
        assert [row["level"] for row in read] == table["level"].to_pylist()


def test_an_answer_that_was_cut_gives_nulls_and_says_why(model):
    options = OPTIONS | {"max_tokens": 5}
    table = batchgen.run(model, ["The ferry"], json_schema=SCHEMA, json_columns=True, **options)
    (row,) = table.to_pylist()
    assert row["text"] and row["finish_reason"] == "length" and all(row[name] is None for name in TYPES)


def test_several_samples_give_lists(model):
    sampled = {"n": 3, "temperature": 1.0, "json_schema": SCHEMA, "json_columns": True}
    table = batchgen.run(model, ["The ferry", ""], **sampled, **OPTIONS)
    first, failed = table.to_pylist()
    assert first["level"] == [json.loads(text)["level"] for text in first["text"]]
    assert failed["level"] == [] and table.schema.field("place").type == pa.list_(TYPES["place"])


def test_columns_that_the_input_has_give_all_new_ones_a_prefix(model):
    rows = [{"prompt": "The ferry", "level": 7}]
    table = batchgen.run(model, rows, json_schema=SCHEMA, json_columns=True, **OPTIONS)
    assert table["level"].to_pylist() == [7] and 1 <= table["gen_level"][0].as_py() <= 4
    assert "gen_text" in table.column_names and "text" not in table.column_names


def test_steps_have_columns_of_their_own(model):
    steps = [
        {"name": "read", "json_schema": SCHEMA, "prompt_column": "prompt"},
        {"name": "low", "filter": "read_level <= 4 and read_place.x > 0"},
        {"name": "say", "prompt_template": "{{ read_kind }} of level {{ read_level }}", "max_tokens": 2},
    ]
    table = batchgen.run(model, ["The ferry"], steps=steps, json_columns=True, **OPTIONS)
    (row,) = table.to_pylist()
    assert row["low"] is True and row["read_level"] == json.loads(row["read_text"])["level"] and row["say_text"]


def test_a_class_of_pydantic_is_a_schema(model):
    pydantic = pytest.importorskip("pydantic")

    class Size(enum.Enum):
        SMALL = "small"
        LARGE = "large"

    class Place(pydantic.BaseModel, extra="forbid"):
        city: Literal["Rome", "Oslo"]

    class Listing(pydantic.BaseModel, extra="forbid"):
        size: Size
        place: Place | None
        stars: int | None = pydantic.Field(ge=0, le=5)

    table = batchgen.run(model, ["The ferry"], json_schema=Listing, json_columns=True, **OPTIONS)
    (row,) = table.to_pylist()
    listing = Listing.model_validate_json(row["text"])
    assert (row["size"], row["stars"]) == (listing.size.value, listing.stars)
    assert table.schema.field("place").type == pa.struct([("city", pa.string())])
    assert table.schema.field("stars").type == pa.int64()
    assert batchgen.SamplingParams(json_schema=Listing).json_schema == json.dumps(Listing.model_json_schema())
    with batchgen.MapFunction(model, json_schema=Listing, prompt_column="q", **OPTIONS) as answer:
        Listing.model_validate_json(answer({"q": ["The ferry"]})["text"][0])
    with pytest.raises(InputError, match="json_schema must be a JSON schema or a class of pydantic"):
        batchgen.SamplingParams(json_schema=Size)


def test_the_command_line_has_the_option(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": ["The ferry"]}), "in.parquet")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    flags = ["--json-schema", "schema.json", "--json-columns", "--compact-json", "--max-tokens", "200"]
    flags += ["--dtype", "float32"]
    code, _, said = invoke("run", "-m", model, "-i", "in.parquet", "-o", "out.parquet", *flags)
    assert code == 0, said
    assert 1 <= pq.read_table("out.parquet")["level"][0].as_py() <= 4
    code, _, said = invoke("run", "-m", model, "-i", "in.parquet", "-o", "out.parquet", *flags[:2], *flags[3:])
    assert code == 2 and "json_columns was true" in said


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "--json-columns needs --json-schema"),
        ({"regex": "a"}, "--json-columns needs --json-schema"),
        ({"json_schema": {"type": "array", "items": {"type": "integer"}}}, "needs a schema of an object"),
        ({"json_schema": {"type": "object"}}, "needs a schema of an object"),
        ({"steps": [{"name": "a", "regex": "a", "prompt_column": "prompt"}]}, "--json-columns needs --json-schema"),
    ],
    ids=str,
)
def test_columns_without_a_schema_of_an_object_are_refused(model, options, complaint):
    with pytest.raises(InputError, match=complaint):
        batchgen.run(model, ["The ferry"], json_columns=True, **options)


def test_an_openai_batch_has_no_columns(model, tmp_path):
    body = {"model": "m", "prompt": "The ferry"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match="has no meaning for an OpenAI batch"):
        batchgen.run(model, str(tmp_path / "batch.jsonl"), json_columns=True, json_schema=SCHEMA)
