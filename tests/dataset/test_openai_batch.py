"""OpenAI batch lines: every parameter honoured or refused by name; responses and errors in OpenAI's shape."""

import json
from unittest import mock

import pyarrow as pa
import pytest

from batchgen.core.errors import RowError
from batchgen.core.request import ChatOptions, SamplingParams
from batchgen.dataset import open_dataset, openai_response
from batchgen.dataset.openai_batch import (
    CHAT_URL,
    COLUMNS,
    COMPLETIONS_URL,
    forced_function,
    line_to_row,
    parse_body,
    parse_row,
    rows_to_requests,
)
from batchgen.dataset.openai_response import format_error, format_response
from batchgen.dataset.readers import json as json_reader

JOB = SamplingParams(max_tokens=33, seed=5, temperature=0.3, top_p=0.5, logprobs=3)
MESSAGES = [{"role": "user", "content": "Hi é"}]


def chat(**fields):
    (prompt,), sampling = parse_body(CHAT_URL, {"model": "m", "messages": MESSAGES, **fields}, JOB)
    return prompt, sampling


def completion(**fields):
    (prompt,), sampling = parse_body(COMPLETIONS_URL, {"model": "m", "prompt": "Hi", **fields}, JOB)
    return prompt, sampling


def refusal(make, **fields) -> str:
    with pytest.raises(RowError) as raised:
        make(**fields)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_defaults_are_openais_but_for_max_tokens_and_seed():
    expected = SamplingParams(max_tokens=33, seed=5, temperature=1.0)
    assert chat() == (MESSAGES, expected)
    assert completion() == ("Hi", expected)
    nulls = dict.fromkeys(("temperature", "stop", "max_tokens", "logprobs", "tools", "response_format", "n"))
    assert chat(**nulls) == (MESSAGES, expected)


def test_every_parameter_is_taken():
    both = {
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["a", "b"],
        "seed": 11,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "logit_bias": {"50256": -100, "7": 1.5},
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
    }
    expected = SamplingParams(**both, max_tokens=9, logprobs=2)
    assert chat(**both, max_completion_tokens=9, logprobs=True, top_logprobs=2)[1] == expected
    assert completion(**both, max_tokens=9, logprobs=2, best_of=2)[1] == expected
    assert chat(max_tokens=8)[1].max_tokens == 8
    assert chat(max_tokens=8, max_completion_tokens=9)[1].max_tokens == 9
    assert chat(stop="end")[1].stop == ("end",)
    assert chat(logprobs=True)[1].logprobs == 0
    assert completion(logprobs=0)[1].logprobs == 0
    assert chat(logprobs=False)[1].logprobs is None
    assert chat(top_k=-1)[1].top_k == 0


def test_grammars_are_openais_or_vllms():
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for make in (chat, completion):
        for fields in ({"response_format": wanted}, {"structured_outputs": {"json": schema}}):
            assert make(**fields)[1].json_schema == json.dumps(schema)  # the order of properties matters
        assert make(response_format={"type": "json_object"})[1].json_schema == '{"type": "object"}'
        assert make(structured_outputs={"regex": "a|b"})[1].regex == "a|b"
        assert "exclude" in refusal(make, response_format=wanted, structured_outputs={"regex": "a"})
        assert "exclude" in refusal(make, guided_json=schema, structured_outputs={"regex": "a"})
        assert make(structured_outputs={"choice": ["a", "b"]})[1].choice == ("a", "b")
        assert make(structured_outputs={"grammar": "start: A"})[1].grammar == "start: A"
        assert make(guided_json=schema)[1].json_schema == json.dumps(schema)
        assert make(guided_choice=["a"])[1].choice == ("a",)
        assert "choice" in refusal(make, guided_choice="a")


def test_prompts():
    assert completion(prompt=[5, 6, 7])[0] == [5, 6, 7]
    assert completion(prompt=["only"])[0] == "only"
    assert completion(prompt=[[1, 2]])[0] == [1, 2]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}])[0] == [{"role": "user", "content": "a\nb"}]
    for several in (["a", "b"], [[1, 2], [3]], ["a", [3]]):
        body = {"model": "m", "prompt": several}
        assert parse_body(COMPLETIONS_URL, body, JOB)[0] == several
    for prompt in ("", [], ["a", ""], ["a", 3], [1, -2], [True], 7, {"x": 1}, [""], [[]]):
        assert "prompt" in refusal(completion, prompt=prompt)
    for messages in (
        [],
        "text",
        [{"role": "user"}],
        [{"content": "x"}],
        ["x"],
        [{"role": 1, "content": "x"}],
    ):
        assert "message" in refusal(chat, messages=messages)
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert "image_url" in refusal(chat, messages=[{"role": "user", "content": [image]}])
    assert "messages" in refusal(completion, messages=MESSAGES)
    assert "prompt" in refusal(chat, prompt="x")
    assert "messages is missing" in refusal(chat, messages=None)
    assert "prompt is missing" in refusal(completion, prompt=None)


@pytest.mark.parametrize(
    ("name", "neutral", "active"),
    [
        ("tool_choice", "none", "required"),
        ("tool_choice", "auto", {"type": "function", "function": {"name": "none such"}}),
        ("functions", [], [{"name": "f"}]),
        ("response_format", {"type": "text"}, {"type": "grammar"}),
        ("response_format", None, {"type": "json_schema", "json_schema": {"name": "no schema"}}),
        ("structured_outputs", None, {"structural_tag": "a"}),
        ("stream", False, True),
        ("suffix", "", "end"),
        ("modalities", ["text"], ["text", "audio"]),
        ("best_of", 1, 3),
        ("min_tokens", 0, 4),
        ("guided_decoding_backend", None, "xgrammar"),
        ("temprature", None, 0.5),
    ],
)
def test_unsupported_parameters_are_refused_by_name_where_they_ask_for_something(name, neutral, active):
    for make in (chat, completion):
        assert make(**{name: neutral})[1] == make()[1]
        assert name in refusal(make, **{name: active})


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}


def test_tools_of_a_chat_are_for_its_template():
    def tools(**fields):
        return parse_row(line_to_row(line(body={"messages": MESSAGES, **fields})), JOB, ChatOptions())[2].tools

    assert tools(tools=[TOOL], tool_choice="auto") == [TOOL]
    for nothing in ({}, {"tools": []}, {"tools": None}):
        assert tools(**nothing) is None
    assert "tools" in refusal(completion, tools=[TOOL])
    with pytest.raises(RowError, match="tools must be a list of tools"):
        tools(tools=[5])


def test_calls_of_tools_in_an_answer_are_openais():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call>'

    def message(text, **body):
        row = ROW | {"samples": [{"text": text, "finish_reason": "stop", "logprobs": None}]}
        choice = format_response("id-1", {"messages": MESSAGES, **body}, row, "demo", 3)["response"]["body"]["choices"][
            0
        ]
        return choice["message"], choice["finish_reason"]

    answer, reason = message(f"Let me see.\n{call}\n{call}", tools=[TOOL])
    assert (answer["content"], reason) == ("Let me see.", "tool_calls")
    assert [made["id"] for made in answer["tool_calls"]] == ["call_0_0", "call_0_1"]
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": "é"}'}
    assert message(call, tools=[TOOL])[0]["content"] is None
    for text, body in ((call, {}), ("<tool_call>add</tool_call>", {"tools": [TOOL]}), ("4", {"tools": [TOOL]})):
        answer, reason = message(text, **body)
        assert (answer["content"], reason) == (text, "stop") and "tool_calls" not in answer


NAMED = {"type": "function", "function": {"name": "add"}}


def test_a_function_that_has_to_be_called_gets_arguments_of_its_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    add, other = ({"type": "function", "function": {"name": name, "parameters": schema}} for name in ("add", "other"))
    for fields in ({"tools": [other, add], "tool_choice": NAMED}, {"tools": [add], "tool_choice": "required"}):
        assert json.loads(chat(**fields)[1].json_schema) == schema
        row = ROW | {"samples": [{"text": '{"a": 2}', "finish_reason": "stop", "logprobs": None}] * 3}
        with mock.patch.object(openai_response, "forced_function", wraps=forced_function) as looked_up:
            body = format_response("id-1", {"messages": MESSAGES, **fields}, row, "demo", 3)["response"]["body"]
        assert looked_up.call_count == 1, "once, however many choices there are"
        assert [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]] == [
            "call_0_0", "call_1_0", "call_2_0",
        ]  # fmt: skip
        choice = body["choices"][0]
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
        assert choice["finish_reason"] == ("stop" if fields["tool_choice"] == NAMED else "tool_calls")
    assert "name one" in refusal(chat, tools=[add, other], tool_choice="required")
    assert "name of a function" in refusal(chat, tools=[other], tool_choice=NAMED)
    assert "JSON schema" in refusal(chat, tools=[{"function": {"name": "add", "parameters": 5}}], tool_choice=NAMED)
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert "exclude each other" in refusal(chat, tools=[add], tool_choice=NAMED, response_format=given)
    assert "tool_choice" in refusal(completion, tool_choice=NAMED)


def test_what_does_not_change_the_answer_is_accepted():
    fields = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("n", 0),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_tokens", "10"),
        ("stop", 5),
        ("stop", [1]),
        ("stop", ""),
        ("seed", "x"),
        ("top_k", -5),
        ("stop_token_ids", "7"),
        ("ignore_eos", "yes"),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "no"),
        ("logit_bias", {"the": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [5]),
    ],
)
def test_wrong_values_are_refused_by_name(name, bad):
    assert name in refusal(chat, **{name: bad})
    assert name in refusal(completion, **{name: bad})


def test_an_echo_asks_for_log_probabilities_of_the_prompt_too():
    assert completion(echo=True)[1].prompt_logprobs is None
    assert completion(echo=True, logprobs=3)[1].prompt_logprobs == 3
    assert completion(echo=True, prompt=[5, 6])[1].prompt_logprobs == 0  # for the texts of these tokens
    assert completion(echo=True, max_tokens=0)[1].max_tokens == 1
    assert "max_tokens" in refusal(completion, max_tokens=0)
    assert "echo" in refusal(chat, echo=True) and chat(echo=False) == chat()
    for make in (chat, completion):
        assert make(prompt_logprobs=2)[1].prompt_logprobs == 2


def test_wrong_combinations():
    assert "top_logprobs" in refusal(chat, top_logprobs=2)
    assert "logprobs" in refusal(chat, logprobs=3)
    assert "logprobs" in refusal(completion, logprobs=True)
    message = refusal(chat, n=2, temperature=0)
    assert "n > 1" in message and "temperature" in message


def line(custom_id="a", **changes):
    body = {"model": "m", "messages": MESSAGES, "temperature": 0}
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body, **changes}
    return {name: value for name, value in whole.items() if value is not ...}


def test_bad_lines_fail_alone(tmp_path):
    lines = [
        line("ok"),
        line(custom_id=...),
        line(custom_id=17),
        line("ok"),
        line("m", method="GET"),
        line("u", url="/v1/embeddings"),
        line("b", body=...),
        line("t", body="text"),
        line("n", body={**line()["body"], "n": 2}),
        line("c", url=COMPLETIONS_URL, body={"prompt": "x", "max_tokens": 4}),
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in lines), encoding="utf-8")
    dataset = open_dataset(path)
    requests = []
    for first, batch in dataset.batches(start_row=0, batch_rows=3):
        requests += rows_to_requests(batch, first, JOB, dataset.duplicate_rows)
    assert [r.id for r in requests] == ["ok", 1, 2, "ok", "m", "u", "b", "t", "n", "c"]
    errors = [r.error for r in requests]
    assert errors[0] is None and errors[9] is None
    for error, word in zip(
        errors[1:9],
        ["custom_id", "custom_id", "earlier", "POST", "batchgen run --task embed is for it", "body", "body", "n > 1"],
        strict=True,
    ):
        assert word in error and "\n" not in error
    assert requests[0].prompt == MESSAGES and requests[0].sampling.temperature == 0
    assert requests[9].prompt == "x" and requests[9].sampling.max_tokens == 4
    # A later start finds the same duplicate.
    ((first, batch),) = dataset.batches(start_row=3, batch_rows=1000)
    assert next(rows_to_requests(batch, first, JOB, dataset.duplicate_rows)).error == errors[3]


@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_duplicates_are_found_however_few_ids_are_compared_at_once(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(json_reader, "_DIGESTS_AT_ONCE", at_once)
    ids = [f"id {i * 7 % 13}" if i % 5 < 4 else ... for i in range(60)]
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(line(custom_id)) + "\n" for custom_id in ids), encoding="utf-8")
    expected = {i for i, custom_id in enumerate(ids) if custom_id is not ... and custom_id in ids[:i]}
    assert open_dataset(path).duplicate_rows == expected


def test_line_to_row_is_text_throughout():
    assert line_to_row({"custom_id": 1, "url": ["x"], "body": {"é": 1}}) == {
        "custom_id": None,
        "method": None,
        "url": None,
        "body": '{"é": 1}',
    }
    pa.RecordBatch.from_pylist([line_to_row(line())], pa.schema([(name, pa.string()) for name in COLUMNS]))


def token(text, token_id, logprob, top=None):
    found = {"token": text, "token_id": token_id, "logprob": logprob}
    return found if top is None else {**found, "top": top}


ROW = {
    "samples": [
        {
            "text": "é!",
            "finish_reason": "stop",
            "logprobs": [
                token("é", 5, -0.5, [token("é", 5, -0.5), token("e", 6, -1.5)]),
                token("!", 7, -3.0, [token(".", 8, -0.1), token("\ufffd", 9, float("-inf"))]),
            ],
        },
        {"text": "zz", "finish_reason": "length", "logprobs": None},
    ],
    "prompts": [{"logprobs": None}],
    "prompt_tokens": 4,
    "generated_tokens": [2, 6],
    "error": None,
}


def test_chat_response():
    found = format_response("id-1", json.dumps({"messages": MESSAGES}), ROW, "demo", 3)
    assert found["custom_id"] == "id-1" and found["error"] is None
    assert found["response"]["status_code"] == 200
    body = found["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "demo" and body["created"] == 0
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
    first, second = body["choices"]
    assert first["index"] == 0 and first["finish_reason"] == "stop"
    assert first["message"]["role"] == "assistant" and first["message"]["content"] == "é!"
    assert second["index"] == 1 and second["finish_reason"] == "length" and second["logprobs"] is None
    assert first["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "e", "logprob": -1.5, "bytes": [101]},
            ],
        },
        {
            "token": "!",
            "logprob": -3.0,
            "bytes": [33],
            "top_logprobs": [
                {"token": ".", "logprob": -0.1, "bytes": [46]},
                {"token": "\ufffd", "logprob": -9999.0, "bytes": None},
            ],
        },
    ]
    json.dumps(found, allow_nan=False)


def test_completion_response():
    found = format_response("id-1", {"prompt": "x"}, ROW, "demo", 3)
    body = found["response"]["body"]
    assert body["object"] == "text_completion"
    assert [c["text"] for c in body["choices"]] == ["é!", "zz"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["é", "!"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"é": -0.5, "e": -1.5}, {".": -0.1, "\ufffd": -9999.0, "!": -3.0}],
        "text_offset": [0, 1],
    }
    assert body["choices"][1]["logprobs"] is None
    json.dumps(found, allow_nan=False)


PROMPT = [token("x", 3, None, []), token(" y", 4, -2.0, [token(" z", 11, -1.0), token(" y", 4, -2.0)])]


def test_an_echo_begins_with_the_prompt():
    row = ROW | {"prompts": [{"logprobs": PROMPT}]}
    body = {"prompt": "x y", "echo": True, "logprobs": 2}
    first, second = format_response("id-1", body, row, "demo", 3)["response"]["body"]["choices"]
    assert (first["text"], second["text"], second["logprobs"]) == ("x yé!", "x yzz", None)
    logprobs = first["logprobs"]
    assert logprobs["tokens"] == ["x", " y", "é", "!"] and logprobs["text_offset"] == [0, 1, 3, 4]
    assert logprobs["token_logprobs"] == [None, -2.0, -0.5, -3.0]
    assert logprobs["top_logprobs"][:2] == [None, {" z": -1.0, " y": -2.0}]
    alone = format_response("id-1", body | {"max_tokens": 0, "prompt": [3, 4]}, row, "demo", 3)["response"]["body"]
    assert [choice["text"] for choice in alone["choices"]] == ["x y", "x y"]
    assert alone["choices"][0]["logprobs"]["tokens"] == ["x", " y"] and alone["usage"]["completion_tokens"] == 0
    several = format_response("id-1", body | {"prompt": ["a", "b"]}, ROW, "demo", 3)["response"]["body"]
    assert [choice["text"] for choice in several["choices"]] == ["aé!", "bzz"]


def test_prompt_logprobs_and_token_ids_are_where_vllm_has_them():
    samples = [sample | {"token_ids": [i]} for i, sample in enumerate(ROW["samples"])]
    row = ROW | {"samples": samples, "prompts": [{"logprobs": PROMPT, "token_ids": [3, 4]}]}
    expected = [
        None,
        {
            "4": {"logprob": -2.0, "rank": 2, "decoded_token": " y"},
            "11": {"logprob": -1.0, "rank": 1, "decoded_token": " z"},
        },
    ]
    chat_body = {"messages": MESSAGES, "prompt_logprobs": 2}
    body = format_response("id-1", chat_body, row, "demo", 3)["response"]["body"]
    assert body["prompt_logprobs"] == expected and body["prompt_token_ids"] == [3, 4]
    assert [choice["token_ids"] for choice in body["choices"]] == [[0], [1]]
    body = format_response("id-1", {"prompt": "x y", "prompt_logprobs": 2}, row, "demo", 3)["response"]["body"]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected] * 2
    assert (
        "prompt_logprobs" not in body
        and "prompt_logprobs"
        not in format_response("id-1", {"prompt": "x y"}, row, "demo", 3)["response"]["body"]["choices"][0]
    )


def test_error_line():
    found = format_error("id-1", "tools is not supported", 3)
    assert found["custom_id"] == "id-1"
    assert found["error"]["message"] == "tools is not supported" and found["error"]["code"]
    assert found["response"]["status_code"] == 400
    assert found["response"]["body"]["error"]["message"] == "tools is not supported"


def test_ids_are_repeatable_and_differ_by_row():
    def ids(custom_id, row):
        found = format_response(custom_id, {"prompt": "x"}, ROW, "demo", row)
        return found["id"], found["response"]["request_id"], found["response"]["body"]["id"]

    assert ids("a", 0) == ids("a", 0)
    several = [ids("a", 0), ids("a", 1), ids("b", 0), ids(None, 0)]
    assert len({i for found in several for i in found}) == 12


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 10**8}, "n must be between"),
        ({"n": 10**8, "best_of": 10**8}, "n must be between"),
        ({"prompt": ["a"] * 200, "n": 100, "temperature": 1}, "more than 16384 samples"),
        ({"logprobs": 10**8}, "logprobs must be"),
        ({"top_k": 10**30}, "top_k must be"),
        ({"temperature": 10**400}, "temperature is too large"),
        ({"stop": ["x"] * 10**5}, "stop must be"),
        ({"stop_token_ids": list(range(10**5))}, "stop_token_ids must be"),
        ({"logit_bias": {"7": 10**400}}, "logit_bias must"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_that_asks_for_more_than_a_machine_has_fails_by_name_and_others_run(fields, named):
    def line(name, body):
        return line_to_row(
            {"custom_id": name, "method": "POST", "url": COMPLETIONS_URL, "body": {"prompt": "Hi", **body}}
        )

    batch = pa.RecordBatch.from_pylist([line("bad", fields), line("good", {})])
    bad, good = rows_to_requests(batch, 0, JOB)
    assert named in bad.error and len(bad.error) <= 400 and good.error is None
