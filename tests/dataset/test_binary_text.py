"""Columns of bytes in text's place: read as UTF-8, or the row fails; never as Python writes bytes."""

import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.core.request import SamplingParams
from batchgen.dataset import open_dataset
from batchgen.dataset.binary_text import decoded, has_binary
from batchgen.dataset.continuations import ContinuationSpec, compile_continuations
from batchgen.dataset.prompts import PromptSpec, compile_prompts, rows_to_requests, rows_to_score_requests
from batchgen.dataset.sampling_column import RowSampling, compile_row_sampling

TEXTS = ["Zürich", "plain", "東京🙂"]
BAD = b"\xff\xfe\x00"
KINDS = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]


def column_of(kind, values):
    values = [v.encode() if isinstance(v, str) else v for v in values]
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).cast(kind)
    return pa.array(values, kind)


def requests(columns, id_column=None, sampling_column=None, **spec):
    batch = pa.RecordBatch.from_pydict(columns)
    compiled = compile_prompts(PromptSpec(**spec), batch.schema, id_column)
    own = compile_row_sampling(sampling_column, ContinuationSpec(), batch.schema, SamplingParams())
    return list(rows_to_requests(batch, 0, compiled, own, id_column))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "spec", [{"column": "q"}, {"template": "{{ q }}"}, {"template": "{{ row['q'] }}"}, {"column": "q", "chat": True}]
)
def test_bytes_are_read_as_utf8_and_rows_with_others_fail(kind, spec):
    found = requests({"q": column_of(kind, [*TEXTS, BAD, None])}, **spec)
    prompts = [r.prompt[0]["content"] if spec.get("chat") else r.prompt for r in found[:3]]
    assert prompts == TEXTS and all(r.error is None for r in found[:3])
    assert "not UTF-8" in found[3].error and found[4].error is not None


@pytest.mark.parametrize(
    "template",
    [
        "{{ q }}",
        "{{ q ~ '' }}",
        "{{ [q] }}",
        "{{ q | upper }}",
        "{{ [q] | join }}",
        "{{ '%s' % q }}",
        "{{ '{}'.format(q) }}",
        "{{ row }}",
    ],
)
def test_no_template_writes_bytes_that_are_no_text(template):
    (request,) = requests({"q": pa.array([BAD], pa.binary())}, template=template)
    assert request.error is not None


def test_bytes_that_a_template_does_not_print_are_no_error():
    columns = {"q": ["hi"], "image": pa.array([BAD], pa.binary())}
    (request,) = requests(columns, template="{{ row['q'] }} {{ image | length }}")
    assert (request.prompt, request.error) == ("hi 3", None)


def test_bytes_inside_of_lists_and_objects_are_text_too():
    part = pa.struct([("role", pa.binary()), ("content", pa.large_binary())])
    messages = pa.array([[{"role": b"user", "content": b"hi"}], [{"role": b"user", "content": BAD}]], pa.list_(part))
    good, bad = requests({"messages": messages})
    assert good.prompt == [{"role": "user", "content": "hi"}] and bad.error is not None
    text = pa.array([json.dumps([{"role": "user", "content": "hi"}]).encode()], pa.binary())
    assert requests({"messages": text})[0].prompt == good.prompt


def test_ids_sampling_parameters_and_continuations_may_be_bytes():
    columns = {"prompt": ["a", "b"], "id": pa.array([b"one", BAD]), "own": pa.array([b'{"max_tokens": 3}', None])}
    first, second = requests(columns, id_column="id", sampling_column="own")
    assert (first.id, first.sampling.max_tokens) == ("one", 3) and "not UTF-8" in second.error
    for values in ([b"x", BAD], [[b"x", b"y"], [BAD]]):
        batch = pa.RecordBatch.from_pydict({"prompt": ["a", "b"], "next": pa.array(values)})
        compiled = compile_prompts(PromptSpec(), batch.schema)
        continuations = compile_continuations(ContinuationSpec(column="next"), batch.schema)
        good, bad = rows_to_score_requests(batch, 0, compiled, continuations)
        assert good.continuations[0] == "x" and "not UTF-8" in bad.error


def test_a_parquet_file_of_bytes_is_run_as_its_text(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([t.encode() for t in TEXTS], pa.binary())}), tmp_path / "in.parquet")
    dataset = open_dataset(tmp_path / "in.parquet")
    compiled = compile_prompts(PromptSpec(), dataset.schema)
    own = RowSampling(SamplingParams())
    found = [r.prompt for first, b in dataset.batches() for r in rows_to_requests(b, first, compiled, own)]
    assert found == TEXTS


def test_bytes_that_are_no_text_stay_so_in_another_process():
    """Templates may be rendered there."""
    (value,) = pickle.loads(pickle.dumps(decoded([BAD])))
    assert value == BAD
    with pytest.raises(ValueError, match="not UTF-8"):
        f"{value}"


def test_types_that_have_bytes_inside():
    assert has_binary(pa.list_(pa.struct([("a", pa.binary())]))) and has_binary(pa.map_(pa.string(), pa.binary(4)))
    assert not has_binary(pa.list_(pa.struct([("a", pa.string())]))) and not has_binary(pa.int64())
