"""Rows into requests: columns, templates, messages; a wrong spec stops the job, a wrong row only itself."""

import json
from datetime import date

import pyarrow as pa
import pytest

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import Request, SamplingParams
from batchgen.dataset.messages import normalize_messages
from batchgen.dataset.prompts import PromptSpec, compile_prompts, rows_to_requests
from batchgen.dataset.sampling_column import RowSampling

SAMPLING = SamplingParams(max_tokens=7)


def requests_of(columns: dict, id_column=None, first_row=0, **spec) -> list[Request]:
    batch = pa.RecordBatch.from_pydict(columns)
    compiled = compile_prompts(PromptSpec(**spec), batch.schema, id_column)
    requests = list(rows_to_requests(batch, first_row, compiled, RowSampling(SAMPLING), id_column))
    assert len(requests) == batch.num_rows
    for request in requests:
        assert request.sampling == SAMPLING
        assert request.error is None or (request.prompt == "" and "\n" not in request.error)
    return requests


def prompts_of(columns: dict, **spec) -> list:
    return [r.prompt if r.error is None else RowError for r in requests_of(columns, **spec)]


def error_of(columns: dict, id_column=None, **spec) -> str:
    with pytest.raises(InputError) as raised:
        requests_of(columns, id_column=id_column, **spec)
    message = str(raised.value)
    assert "\n" not in message
    return message


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


# Columns


def test_column():
    columns = {"q": ["a\nb ", None, "", " 東京"], "x": [1, 2, 3, 4]}
    found = requests_of(columns, column="q", first_row=100)
    assert [r.prompt for r in found] == ["a\nb ", "", "", " 東京"]
    assert [r.id for r in found] == [100, 101, 102, 103]
    assert found[0].error is None and found[3].error is None
    assert "'q' is null" in found[1].error and "empty" in found[2].error


def test_default_columns():
    assert prompts_of({"prompt": ["p"], "messages": [[user("m")]]}) == [[user("m")]]
    assert prompts_of({"text": ["t"], "prompt": ["p"], "messages": [1]}) == ["p"]
    assert prompts_of({"title": ["a"], "text": ["t"], "body": ["b"]}) == ["t"]
    assert prompts_of({"number": [1], "body": ["b"], "image": [b"x"]}) == ["b"]
    assert prompts_of({"messages": [[user("m")]], "x": ["p"]}) == [[user("m")]]
    assert prompts_of({"prompt": [[user("conversational")]]}) == [[user("conversational")]]
    message = error_of({"question": ["p"], "answer": ["a"]})
    assert r"--prompt-template '{{ question }}\n{{ answer }}'" in message and "question, answer hold text" in message
    assert """'{{ row["a b"] }}'""" in error_of({"a b": [1]})
    assert "--messages-column talk" in error_of({"talk": [[user("m")]], "x": ["p"]})
    assert "a, b, c and 2 more" in error_of({name: ["p"] for name in "abcde"})


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_types(kind):
    assert prompts_of({"prompt": pa.array(["a", "b", None], pa.string()).cast(kind)}) == ["a", "b", RowError]


def test_wrong_columns():
    message = error_of({"question": ["p"], "answer": ["a"]}, column="questoin")
    assert "did you mean 'question'" in message and "question, answer" in message
    assert "--prompt-template" in error_of({"n": [1]}, column="n")
    assert "--messages-column" in error_of({"m": [[user("x")]]}, column="m")
    assert "only nulls" in error_of({"prompt": pa.nulls(2)})
    assert "role, content" in error_of({"m": [["x"]]}, messages_column="m")
    assert "role, content" in error_of({"m": [[{"from": "x"}]]}, messages_column="m")
    assert "no such column" in error_of({"m": [1]}, messages_column="x")


def test_sources_exclude_each_other():
    with pytest.raises(InputError, match="--prompt-column and --messages-column"):
        PromptSpec(column="a", messages_column="b")
    with pytest.raises(InputError, match="--prompt-column and --prompt-template"):
        PromptSpec(column="a", template="b")


def test_invalid_utf8_in_one_row_is_that_rows_error():
    data = pa.py_buffer(b"good\xff\xfebad!")
    offsets = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 4, 6, 10)))
    texts = pa.StringArray.from_buffers(3, offsets, data)
    found = requests_of({"prompt": texts})
    assert found[0].prompt == "good" and found[2].prompt == "bad!"
    assert "'prompt'" in found[1].error and "utf-8" in found[1].error


# Ids


def test_ids():
    assert [r.id for r in requests_of({"prompt": ["a", "b"], "k": ["x", None]}, id_column="k", first_row=5)] == ["x", 6]
    assert [r.id for r in requests_of({"prompt": ["a", None], "k": [7, 9]}, id_column="k")] == [7, 9]
    assert "did you mean 'key'" in error_of({"prompt": ["a"], "key": [1]}, id_column="kei")
    assert "double" in error_of({"prompt": ["a"], "key": [1.5]}, id_column="key")


# Templates


def test_a_row_that_takes_too_much_fails_alone():
    """Before anything of its size is made; `tests/core/test_templates.py` has more that takes too much."""
    columns = {"q": ["a", "b", "c"], "n": [2, 10**10, 3]}
    for template in ("{{ q * n }}", "{{ q | center(n) }}"):
        found = requests_of(columns, template=template)
        assert [r.error is None for r in found] == [True, False, True]
        assert found[1].error == "prompt template: the row takes more than 1,024 MiB to render: shorten its values"


def test_limits_change_nothing_else():
    template = (
        "{{ q ~ '-' ~ n }} {{ q + '+' }} {{ n * 2 }} {{ n + 1 }} {{ '{:>5}|{:d}'.format('a', n) }} {{ '%05d' % n }} "
        "{% for c in q %}{{ loop.index }}{{ c }}{% endfor %} {% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(q) | upper }} "
        "{{ [q, none] | tojson }} {{ q | center(9) }}. {{ [1, 2] | map('string') | join(',') }} {{ none }}{{ 2 ** 10 }}"
    )
    (prompt,) = prompts_of({"q": ["abc"], "n": [12345678901]}, template=template)
    assert prompt == (
        "abc-12345678901 abc+ 24691357802 12345678902     a|12345678901 12345678901 1a2b3c [ABC] "
        '["abc", null]    abc   . 1,2 1024'
    )


def test_template():
    columns = {
        "name": ["Ann", None, "Zoë"],
        "tags": [["a", "b"], [], None],
        "meta": [{"city": "Bern"}, {"city": None}, None],
        "day": [date(2020, 1, 2), None, None],
    }
    template = "{{ name }} <{{ day }}>{% for t in tags or [] %} #{{ t }}{% endfor %} {{ meta.city }}\n"
    found = requests_of(columns, template=template)
    assert found[0].prompt == "Ann <2020-01-02> #a #b Bern"
    assert found[1].prompt == " <> "
    assert "city" in found[2].error  # null has no city: an error of this row only


def test_template_keeps_its_newlines_but_the_last():
    assert prompts_of({"a": ["x"]}, template="{{ a }}\n\n") == ["x\n"]
    assert prompts_of({"a": ["x\n"]}, template="  {{ a }}") == ["  x\n"]


def test_template_row_json_and_builtins():
    columns = {"Zip Code": ["01234"], "n": [3], "tags": [["<é>"]]}
    assert prompts_of(columns, template='{{ row["Zip Code"] }}') == ["01234"]
    assert prompts_of(columns, template="{% for i in range(n) %}{{ i }}{% endfor %}") == ["012"]
    assert prompts_of(columns, template="{{ tags | tojson }}") == ['["<é>"]']


@pytest.mark.parametrize(
    "name", ["row", "range", "loop", "dict", "namespace", "caller", "super", "meta.text", "my text", "Ünï"]
)
def test_a_column_of_any_name_is_reached_through_the_row(name):
    columns = {name: ["own"], "other": ["else"]}
    assert prompts_of(columns, template=f"{{{{ row[{name!r}] }}}} {{{{ row.other }}}}") == ["own else"]
    if name.isidentifier() and name != "row":
        assert prompts_of(columns, template=f"{{{{ {name} }}}}") == ["own"]


def test_a_column_named_row_does_not_hide_the_row_and_that_is_said():
    schema = pa.schema([("row", pa.string()), ("meta.text", pa.string())])
    (notice,) = compile_prompts(PromptSpec(template='{{ row["meta.text"] }}'), schema).notices
    assert 'row["row"]' in notice and "whole row" in notice
    assert not any("whole row" in notice for notice in compile_prompts(PromptSpec(template="{{ 1 }}"), schema).notices)
    assert compile_prompts(PromptSpec(template="{{ row.a }}"), pa.schema([("a", pa.string())])).notices == ()


def test_a_column_that_jinja_has_a_word_for_is_refused_with_the_way_to_it():
    assert 'row["self"]' in error_of({"self": ["own"]}, template="{{ self }}")
    assert prompts_of({"self": ["own"]}, template="{{ row.self }}") == ["own"]


def test_template_without_variables_is_the_same_for_every_row():
    assert prompts_of({"a": ["x", "y"]}, template="Hello") == ["Hello", "Hello"]


def test_a_template_that_names_no_column_is_told_of_and_refused_where_braces_are_single():
    schema = pa.schema([("text", pa.string())])
    (notice,) = compile_prompts(PromptSpec(template="Say it"), schema).notices
    assert "every row has the same prompt" in notice
    assert compile_prompts(PromptSpec(template="Say {{ text }}"), schema).notices == ()
    assert "{{ text }}, not {text}" in error_of({"text": ["a"]}, template="Say {text}")
    assert prompts_of({"text": ["a"]}, template="{text}: {{ text }}") == ["{text}: a"]


def test_template_row_errors():
    template = "{{ 10 // n }}{{ row[key] }}{{ text }}"
    columns = {"n": [5, 0, 5, 5], "key": ["n", "n", "nope", "n"], "text": ["", "", "", None]}
    found = requests_of(columns, template=template)
    assert [r.prompt for r in found] == ["25", "", "", "25"]
    assert "ZeroDivisionError" in found[1].error and "UndefinedError" in found[2].error
    assert "empty" in requests_of({"a": [""]}, template="{{ a }}")[0].error
    assert "SecurityError" in requests_of({"a": ["x"]}, template="{{ a.__class__.__mro__ }}")[0].error


def test_template_errors():
    columns = {"question": ["p"], "answer": ["a"]}
    message = error_of(columns, template="{{ questoin }}")
    assert "'questoin'" in message and "did you mean 'question'" in message and "question, answer" in message
    assert "line 3" in error_of(columns, template="a\nb\n{% for x in question %}{{ x }")
    assert "line 2" in error_of(columns, template="a\n{{ question | no_such_filter }}")
    assert "include" in error_of(columns, template="{% include 'x' %}")


def test_template_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("\ufeffQ: {{ a }} é\n", encoding="utf-8")
    spec = PromptSpec(template=f"@{path}")
    assert spec.identity() == PromptSpec(template="Q: {{ a }} é\n").identity()
    assert str(tmp_path) not in json.dumps(spec.identity())
    assert prompts_of({"a": ["x"]}, template=f"@{path}") == ["Q: x é"]
    path.write_bytes(b"\xff")
    for name in (path, tmp_path / "missing.txt"):
        with pytest.raises(InputError, match=name.name):
            PromptSpec(template=f"@{name}")


def test_identity_tells_specs_apart():
    specs = [
        PromptSpec(),
        PromptSpec(column="a"),
        PromptSpec(template="a"),
        PromptSpec(messages_column="a"),
        PromptSpec(column="a", chat=True),
        PromptSpec(column="a", system_prompt="s"),
        PromptSpec(column="a", chat=True, chat_template_kwargs={"enable_thinking": False}),
        PromptSpec(column="a", chat=True, chat_template_kwargs={"enable_thinking": True}),
        PromptSpec(column="a", chat=True, continue_final=True),
    ]
    assert len({json.dumps(s.identity(), sort_keys=True) for s in specs}) == len(specs)


def test_the_identity_of_plain_prompts_is_that_of_versions_without_chat_options():
    assert set(PromptSpec().identity()) == {"column", "template", "messages_column", "system_prompt", "chat"}


# Messages


def test_chat_and_system_prompt_make_messages_of_text():
    assert prompts_of({"prompt": ["hi", None]}, chat=True) == [[user("hi")], RowError]
    assert prompts_of({"prompt": ["hi"]}, system_prompt="Be brief.") == [[system("Be brief."), user("hi")]]
    assert prompts_of({"a": ["hi"]}, template="<{{ a }}>", chat=True) == [[user("<hi>")]]


def test_messages_column_of_structs_and_of_json():
    rows = [
        [system("own"), user("a")],
        [user("b"), {"role": "assistant", "content": "c"}, user("d")],
        None,
        [],
        [{"role": "user", "content": None}],
        [{"role": None, "content": "x"}],
    ]
    expected = [rows[0], rows[1], RowError, RowError, RowError, RowError]
    for column in (rows, [None if r is None else json.dumps(r) for r in rows]):
        assert prompts_of({"m": column}, messages_column="m") == expected
    found = prompts_of({"m": rows}, messages_column="m", system_prompt="given")
    assert found[:2] == [rows[0], [system("given"), *rows[1]]]
    developer = [{"role": "developer", "content": "own"}, user("a")]
    assert prompts_of({"m": [developer]}, messages_column="m", system_prompt="given") == [developer]


SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "a"},
    {"from": "gpt", "value": "b"},
    {"from": "Human", "value": "c"},
    {"from": "observation", "value": "d"},
]


@pytest.mark.parametrize("name", ["conversations", "messages", "m"])
@pytest.mark.parametrize("as_json", [False, True])
def test_sharegpt_is_read_as_roles_and_that_is_said(name, as_json):
    said = [system("s"), user("a"), {"role": "assistant", "content": "b"}, user("c"), {"role": "tool", "content": "d"}]
    columns = {name: [json.dumps(SHAREGPT) if as_json else SHAREGPT]}
    spec = {"messages_column": name} if name == "m" or as_json else {}
    assert prompts_of(columns, **spec) == [said]
    notices = compile_prompts(PromptSpec(**spec), pa.RecordBatch.from_pydict(columns).schema).notices
    assert as_json or (len(notices) == 1 and name in notices[0] and "ShareGPT" in notices[0])


def test_who_is_unknown_in_sharegpt_fails_the_row():
    for message in ({"from": "narrator", "value": "x"}, {"from": 3, "value": "x"}, {"from": "human", "value": None}):
        with pytest.raises(RowError, match="message 1"):
            normalize_messages([message])


def test_the_column_that_holds_messages_is_named_in_the_advice():
    assert "--messages-column talk" in error_of({"talk": [SHAREGPT]})
    assert "--messages-column talk" in error_of({"talk": [[user("x")]], "conversations": ["text"]})


def test_malformed_messages_as_json():
    texts = ["{not json", '"text"', "17", '{"role": "user", "content": "x"}', '["x"]', "[" * 100_000]
    assert prompts_of({"m": texts}, messages_column="m") == [RowError] * len(texts)


def test_message_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([{"role": "user", "content": parts}]) == [user("a\nb")]
    with pytest.raises(RowError, match="image_url"):
        normalize_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(RowError, match="message 2"):
        normalize_messages([user("x"), {"role": "user", "content": [None]}])
    with pytest.raises(RowError, match="tool_calls"):
        normalize_messages([{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}])
    padded_call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    expected = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert normalize_messages([user("x"), padded_call, {"role": "tool", "content": "4", "tool_call_id": "a"}]) == [
        user("x"), expected, {"role": "tool", "content": "4", "tool_call_id": "a"},
    ]  # fmt: skip
    padded = {
        "role": "user",
        "content": "x",
        "tool_calls": None,
        "weight": 1,
    }  # as one Arrow type for all has it
    assert normalize_messages([padded]) == [user("x")]


def test_long_error_texts_are_cut():
    (request,) = requests_of({"a": ["x" * 5000]}, template="{{ row[a] }}")
    assert "UndefinedError" in request.error and len(request.error) < 400
