"""Tools and their calls, which the chat template of a model writes into the prompt, as transformers has it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer
from transformers import AutoTokenizer

import batchgen
from batchgen.core.errors import InputError

OPTIONS = {"dtype": "float32", "max_tokens": 2, "token_ids": True, "cpu_memory": "4GiB", "max_failed": "100%"}
# In the way of Qwen's, and in that of Llama's, which has one call and its parameters as JSON.
QWEN = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}{% set f = call.function if call.function is defined else call %}"
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>{% endfor %}'
    "{%- if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{# tool #}{% set roles = ['tool'] %}"
)
LLAMA = (
    "{%- if tools is not none %}{{ tools | length }}: {{ tools[0] | tojson(indent=2) }}\n{% endif -%}"
    "{%- for m in messages %}{{ m['role'] }}: {% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name }}"
    "({{ m.tool_calls[0].function.arguments | tojson }}){% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}assistant: "
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% set roles = ['tool'] %}"


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"<{name}> é", "parameters": parameters}}


TOOLS = [tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("weather", city={"type": "string"})]
USER = {"role": "user", "content": "What is 2 and 2?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLED = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4 & more"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")

    def make(name, template):
        make_tiny_model("llama", folder / name)
        make_tiny_tokenizer(folder / name, chat_template=template)
        return folder / name

    return {name: make(name, template) for name, template in (("qwen", QWEN), ("llama", LLAMA), ("plain", PLAIN))}


def as_json_text(messages):
    """Messages as OpenAI has them: arguments are JSON text."""
    calls = [{**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}]
    return [{**message, "tool_calls": calls} if "tool_calls" in message else message for message in messages]


def run(model, table, tmp_path, **options):
    pq.write_table(table, tmp_path / "in.parquet")
    batchgen.run(str(model), tmp_path / "in.parquet", tmp_path / "out.parquet", overwrite=True, **OPTIONS, **options)
    return pq.read_table(tmp_path / "out.parquet").to_pylist()


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_prompts_with_tools_are_those_of_transformers(models, tmp_path, name):
    """From structs of Arrow, which have the fields of all rows, and from JSON; arguments are objects or JSON text."""
    hf = AutoTokenizer.from_pretrained(models[name])
    chats, tools = [[USER], CALLED, CALLED], [TOOLS, TOOLS, None]
    expected = [
        hf.apply_chat_template(chat, tools=some, add_generation_prompt=True, return_dict=False)
        for chat, some in zip(chats, tools, strict=True)
    ]
    forms = {
        "structs": pa.table({"messages": chats, "tools": tools}),
        "JSON": pa.table(
            {"messages": [json.dumps(as_json_text(c)) for c in chats], "tools": [t and json.dumps(t) for t in tools]}
        ),
        "texts": pa.table(
            {
                "messages": [as_json_text(c) for c in chats],
                "tools": [t and [json.dumps(one) for one in t] for t in tools],
            }
        ),
    }
    for form, table in forms.items():
        rows = run(models[name], table, tmp_path, tools_column="tools")
        assert [row["error"] for row in rows] == [None] * 3
        found = [hf.decode(row["prompt_token_ids"]) for row in rows]
        if form == "structs":  # whose fields are in the order of the first row that has them
            found, wanted = ([sorted(text) for text in texts] for texts in (found, map(hf.decode, expected)))
            assert found == list(wanted)
        else:
            assert [row["prompt_token_ids"] for row in rows] == expected, form


def test_a_template_without_tools_is_no_silent_loss(models, tmp_path):
    table = pa.table({"messages": [json.dumps([USER]), json.dumps(CALLED)], "tools": [json.dumps(TOOLS), None]})
    first, second = run(models["plain"], table, tmp_path, tools_column="tools")
    assert "takes no tools" in first["error"] and "leaves out the tool calls of message 2" in second["error"]


def test_an_engine_takes_tools_with_messages(models):
    hf = AutoTokenizer.from_pretrained(models["qwen"])
    chat, sampling = batchgen.ChatOptions(tools=TOOLS), batchgen.SamplingParams(max_tokens=1)
    with batchgen.Engine(str(models["qwen"]), dtype="float32", cpu_memory="4GiB") as engine:
        requests = [batchgen.Request(prompt, sampling, chat=chat) for prompt in (CALLED, "What is 2 and 2?")]
        told, text = sorted(engine.generate(requests), key=lambda completion: completion.index)
    expected = hf.apply_chat_template(CALLED, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert list(told.prompt_token_ids) == expected
    assert "tools are for chat messages" in text.error


def test_a_bad_column_of_tools_is_refused(models, tmp_path):
    table = pa.table({"prompt": ["a", "b"], "number": [1, 2], "tools": ["{", '"x"']})
    rows = run(models["qwen"], table, tmp_path, tools_column="tools", chat=True)
    assert "not valid JSON" in rows[0]["error"] and "must be a list of tools" in rows[1]["error"]
    for options, words in (
        ({"tools_column": "number", "chat": True}, "must be lists of tools"),
        ({"tools_column": "none"}, "none"),
        ({"tools_column": "tools", "chat": False}, "--tools-column is for chat messages"),
    ):
        with pytest.raises(InputError, match=words):
            batchgen.run(str(models["qwen"]), tmp_path / "in.parquet", tmp_path / "other.parquet", **options)


def test_lines_of_an_openai_batch_bring_tools(models, tmp_path):
    hf = AutoTokenizer.from_pretrained(models["qwen"])
    body = {"messages": as_json_text(CALLED), "tools": TOOLS, "tool_choice": "auto", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    batchgen.run(str(models["qwen"]), tmp_path / "in.jsonl", tmp_path / "out.jsonl", **OPTIONS)
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    expected = hf.apply_chat_template(CALLED, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert answer["prompt_token_ids"] == expected
