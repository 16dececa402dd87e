"""Files that are one JSON array: read element by element, wherever a block ends, and refused where broken."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.dataset.bad_lines import bad_lines
from batchgen.dataset.json_array import array_elements

ELEMENTS = [
    {"prompt": 'a "quoted" \\ line\n', "n": [1, 2.5e-3, -7, True, None]},
    {},
    {"é🙂": "\ud83d\ude00"},
    {"x": 12345},
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=some_draws(40), deadline=None)
@given(st.lists(values, max_size=5), st.integers(1, 9), st.sampled_from([None, 0, 2]), st.booleans())
def test_elements_are_those_of_the_array_whatever_the_blocks(elements, block_chars, indent, ascii_only):
    text = f" \n{json.dumps(elements, indent=indent, ensure_ascii=ascii_only)}\r\n "
    assert list(array_elements(io.StringIO(text), block_chars)) == elements


@pytest.mark.parametrize("block_chars", [1, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[{}",
        '[{"a": 1},]',
        "[{} {}]",
        '[{"a"}]',
        '[{"a": tru}]',
        "[{}]{}",
        "[{}] x",
        '[{"a": "\x01"}]',
        "[,{}]",
        '["a',
    ],
)
def test_broken_arrays_are_errors(text, block_chars):
    with pytest.raises(ValueError):
        list(array_elements(io.StringIO(text), block_chars))


def test_an_error_is_found_where_it_is_and_not_at_the_end_of_the_file():
    class Endless(io.TextIOBase):
        """An array that never ends, and is broken at its third element."""

        blocks = 0

        def read(self, size):
            self.blocks += 1
            assert self.blocks < 9, "it is read on, though it is broken"
            return '[{"a": 1}, {"a": 2}, {"a" 3}, ' + '{"a": 4}, ' * size if self.blocks == 1 else '{"a": 4}, ' * size

    with pytest.raises(ValueError, match="delimiter"):
        list(array_elements(Endless(), 10))


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def rows_of(dataset, **options):
    return [row for _, batch in dataset.batches(**options) for row in batch.to_pylist()]


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_that_is_one_array_has_its_objects_as_rows(tmp_path, indent, encoding):
    rows = [{"prompt": f"Zürich {i}", "tags": ["a"] * (i % 3)} for i in range(50)]
    path = write(tmp_path / "in.json", json.dumps(rows, indent=indent, ensure_ascii=False), encoding)
    dataset = open_dataset(path)
    assert dataset.format == "jsonl" and dataset.num_rows == 50
    assert rows_of(dataset, batch_rows=7) == rows
    assert rows_of(dataset, start_row=31)[0]["prompt"] == "Zürich 31"
    assert rows_of(open_dataset(path, limit=3)) == rows[:3]
    assert rows_of(open_dataset(path, shard=(1, 2))) == rows[25:]


def test_an_array_of_an_openai_batch_is_one(tmp_path):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    dataset = open_dataset(write(tmp_path / "batch.json", json.dumps([line, {**line, "custom_id": "b"}])))
    assert dataset.format == "openai" and [row["custom_id"] for row in rows_of(dataset)] == ["a", "b"]


def test_an_empty_array_has_no_rows(tmp_path):
    assert open_dataset(write(tmp_path / "in.json", " [ ]\n")).num_rows == 0


def test_elements_that_are_no_objects_are_rows_that_say_so(tmp_path):
    path = write(tmp_path / "in.json", '[{"a": 1}, 7, {"a": 3}]')
    with pytest.raises(InputError, match=r"element 2 is not a JSON object.*--on-bad-line skip"):
        open_dataset(path)
    dataset = open_dataset(path, on_bad_line="skip")
    ((_, batch),) = dataset.batches()
    assert batch.to_pylist() == [{"a": 1}, {"a": None}, {"a": 3}] and "element 2" in bad_lines(batch)[1]


@pytest.mark.parametrize(
    "text", ['[{"a": 1}, {"a": }]', '[{"a": 1}, {"a": 2}', '[{"a": 1}]\n[{"a": 2}]\n', '[{"a": "\xe9"}]']
)
def test_a_broken_array_is_refused_without_an_advice_that_does_not_help(tmp_path, text):
    path = write(tmp_path / "in.json", text, "latin-1")
    for on_bad_line in ("fail", "skip"):
        with pytest.raises(InputError) as raised:
            open_dataset(path, on_bad_line=on_bad_line)
        assert "in.json" in str(raised.value) and "--on-bad-line" not in str(raised.value)


def test_a_document_with_its_rows_under_a_key_is_told_how_to_be_rows(tmp_path):
    from batchgen.dataset.prompts import PromptSpec, compile_prompts

    document = {"version": 1, "data": [{"prompt": "a"}, {"prompt": "b"}]}
    dataset = open_dataset(write(tmp_path / "in.json", json.dumps(document)))
    for spec in (PromptSpec(), PromptSpec(column="prompt")):
        with pytest.raises(InputError, match=r"jq -c '.\[.data.\]\[\]'"):
            compile_prompts(spec, dataset.schema)
    with pytest.raises(InputError, match="jq -c"):
        open_dataset(write(tmp_path / "in.json", json.dumps(document, indent=1)))
