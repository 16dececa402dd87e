"""Jobs of chats: variables of the chat template, messages that are continued, thoughts apart from answers."""

import json

import pytest
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.errors import InputError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}NO{% endif %}"
    "{{ reasoning_effort | default('') }}{% endif %}"
)
THINKS = r"<think>one, two</think>\n\nyes, it is"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", folder)
    make_tiny_tokenizer(folder, chat_template=TEMPLATE)
    return str(folder)


@pytest.fixture
def job(model, tmp_path, capfd):
    """job(rows, **options) -> (rows of the output, or the report of a dry run; what was said)."""

    def run(rows, **options):
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {
            "max_tokens": 60,
            "dtype": "float32",
            "cpu_memory": "4GiB",
            "offload_dir": tmp_path,
            "progress": "plain",
        }
        report = batchgen.run(model, source, output, **{**given, **options})
        said = capfd.readouterr().err
        if options.get("dry_run"):
            return report, said
        return [json.loads(line) for line in output.read_text().splitlines()], said

    return run


def messages(*texts):
    """Messages of the user and the assistant by turns."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def chat_line(number, text="a", **body):
    fields = {"max_tokens": 60, "temperature": 0, **messages(text), **body}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": fields}


def test_variables_reach_the_chat_template_and_decide_the_job(job):
    rows = [messages("Why?")]
    assert job(rows, dry_run=True)[0]["first_prompt"] == "<user>Why?<assistant>"
    job(rows, chat_template_kwargs={"enable_thinking": False}, max_tokens=1)
    same = job(rows, chat_template_kwargs='{"enable_thinking": false}', max_tokens=1, dry_run=True)[0]
    assert same["first_prompt"] == "<user>Why?<assistant>NO"
    job(rows, chat_template_kwargs='{"enable_thinking": false}', max_tokens=1)  # the job that is there
    for other in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        with pytest.raises(InputError, match="prompt"):
            job(rows, max_tokens=1, **other)


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        (messages("Why?"), {"chat_template_kwargs": {"enable_thinkin": False}}, "no variable 'enable_thinkin': it has"),
        (messages("Why?"), {"chat_template_kwargs": {"messages": []}}, "'messages'"),
        (messages("Why?"), {"chat_template_kwargs": "enable_thinking=false"}, "no JSON object"),
        (
            {"prompt": "a"},
            {"chat_template_kwargs": {"enable_thinking": False}, "chat": False},
            "--chat-template-kwargs is for chat messages",
        ),
        ({"prompt": "a"}, {"continue_final": True}, "--continue-final is for chat messages"),
        ({"prompt": [1, 2]}, {"continue_final": True}, "--continue-final is for chat messages"),
        (chat_line(0), {"continue_final": True}, "--continue-final has no meaning for an OpenAI batch"),
        (chat_line(0), {"chat_template_kwargs": {"other": 1}}, "no variable 'other'"),
    ],
)
def test_what_would_change_nothing_is_refused(job, row, options, words):
    with pytest.raises(InputError) as raised:
        job([row], **options)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_message_of_the_assistants_is_continued_or_the_run_says_what_it_does(job):
    rows = [messages("Why?", "Because "), messages("How?", "So")]
    report, said = job(rows, dry_run=True)
    assert report["first_prompt"] == "<user>Why?<assistant>Because <assistant>"
    assert said.count("--continue-final") == 1 and "row 0 ends with the assistant's message" in said
    report, said = job(rows, dry_run=True, continue_final=True)
    assert report["first_prompt"] == "<user>Why?<assistant>Because " and "--continue-final" not in said
    _, said = job(rows, max_tokens=1)
    assert said.count("--continue-final") == 1


def test_thoughts_that_a_regex_asks_for_are_a_column(job):
    rows, _ = job([{"prompt": "a"}, {"prompt": "b"}], regex=THINKS)
    assert [(row["text"], row["reasoning"], row["finish_reason"]) for row in rows] == [
        ("yes, it is", "one, two", "stop")
    ] * 2
    (row,), _ = job([{"prompt": "a", "reasoning": "b"}], regex=THINKS, overwrite=True)
    assert (row["reasoning"], row["gen_reasoning"], row["gen_text"]) == ("b", "one, two", "yes, it is")


def test_what_stops_an_answer_and_what_is_cut(job):
    (row,), _ = job([{"prompt": "a"}], regex=THINKS, stop=[","])
    assert (row["text"], row["reasoning"], row["finish_reason"]) == ("yes", "one, two", "stop")
    (row,), _ = job([{"prompt": "a"}], regex=THINKS, max_tokens=8, overwrite=True)
    assert row["text"] == "" and row["reasoning"] and "one, two".startswith(row["reasoning"])
    assert row["finish_reason"] == "length"


def test_thoughts_stay_in_the_text_where_the_output_has_no_column_for_them(job):
    rows, _ = job(
        [{"prompt": "a", "own": {"regex": THINKS}}, {"prompt": "a", "own": None}], sampling_column="own", regex="no"
    )
    assert [row["text"] for row in rows] == ["<think>one, two</think>\n\nyes, it is", "no"]
    assert "reasoning" not in rows[0]


def test_an_openai_batch_has_variables_thoughts_and_messages_that_are_continued(job):
    grammar = {"structured_outputs": {"regex": THINKS}}
    completion = {
        "custom_id": "c", "method": "POST", "url": "/v1/completions",
        "body": {"prompt": "a", "max_tokens": 60, "temperature": 0, **grammar},
    }  # fmt: skip
    continued = {"messages": messages("a", "b")["messages"], "continue_final_message": True}
    lines = [
        chat_line(0, **grammar),
        chat_line(1, chat_template_kwargs={"enable_thinking": False}, **grammar),
        chat_line(2, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}, **grammar),
        chat_line(3, **continued, add_generation_prompt=False, **grammar),
        chat_line(4, chat_template_kwargs={"other": 1}),
        completion,
    ]
    answers, said = job(lines)
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    assert set(bodies) == {"0", "1", "2", "3", "c"} and "no variable 'other'" in said
    found = [bodies[str(i)]["choices"][0]["message"] for i in range(4)]
    assert {(m["content"], m["reasoning_content"]) for m in found} == {("yes, it is", "one, two")}
    assert bodies["c"]["choices"][0]["text"] == "<think>one, two</think>\n\nyes, it is"
    base, no_thinking, effort, continues = (bodies[str(i)]["usage"]["prompt_tokens"] for i in range(4))
    assert base < no_thinking < effort and continues < base + 2


def test_maps_and_engines_take_the_same_options(model, tmp_path):
    options = {"max_tokens": 60, "dtype": "float32", "cpu_memory": "4GiB"}
    chats = {"messages": [messages("Why?", "Because")["messages"]]}
    lengths = []
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"continue_final": True}):
        with batchgen.MapFunction(model, regex=THINKS, **options, **more) as function:
            found = function(chats)
            assert (found["text"], found["reasoning"]) == (["yes, it is"], ["one, two"])
            lengths += found["prompt_tokens"]
            engine = function._engine_here()
            chat = batchgen.ChatOptions(more.get("chat_template_kwargs", {}), more.get("continue_final", False))
            (completion,) = engine.generate([batchgen.Request(chats["messages"][0], chat=chat)])
            assert completion.prompt_tokens == found["prompt_tokens"][0]
            assert (completion.samples[0].text, completion.samples[0].reasoning) == ("yes, it is", "one, two")
    assert lengths[2] < lengths[0] < lengths[1]


def test_thoughts_may_stay_in_the_text(job):
    (row,), _ = job([{"prompt": "a"}], regex=THINKS, reasoning_column=False)
    assert row["text"] == "<think>one, two</think>\n\nyes, it is" and "reasoning" not in row
    with pytest.raises(InputError, match="reasoning"):  # another job
        job([{"prompt": "a"}], regex=THINKS)


def test_a_template_that_reads_no_messages_is_told(job, model, monkeypatch):
    from batchgen.models.tokenizers.chat_template import ChatTemplate

    monkeypatch.setattr(ChatTemplate, "of", classmethod(lambda cls, *given: cls("the same", {})))
    report, said = job([messages("Why?")], dry_run=True)
    assert report["first_prompt"] == "the same" and "every row gets the same prompt" in said
