"""Thoughts between tags: which models have them, and where an answer begins."""

import pytest
from tiny_models import make_tiny_tokenizer

from batchgen.core.request import SamplingParams
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.thinking import Split, Thinking, ThoughtStops
from batchgen.models.tokenizers.tokenizer import NoText, Tokenizer

PLAIN = SamplingParams()


def make(folder, *tokens, special=False, template=None):
    hf = make_tiny_tokenizer(folder, chat_template=template)
    hf.add_tokens([*tokens], special_tokens=special)
    return Tokenizer(TokenizerParts.of_transformers(hf))


@pytest.fixture(scope="module", params=["tokens", "special tokens", "spelled", "other tags"])
def thinking(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking")
    if request.param == "spelled":  # the chat template has the tags, and no token is one
        return Thinking.of(make(folder, template="{{ messages }}<think>{{ '</think>' }}"))
    tags = ("[THINK]", "[/THINK]") if request.param == "other tags" else ("<think>", "</think>")
    return Thinking.of(make(folder, *tags, special=request.param in ("special tokens", "other tags")))


def tokens_of(thinking, text):
    text = text.replace("<think>", thinking.begin).replace("</think>", thinking.end)
    return thinking.tokenizer.encode_batch([text], add_special_tokens=False)[0]


@pytest.mark.parametrize(
    ("generated", "begun", "expected"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.", False, ("Four.", "Two and two.")),
        ("<think>Two</think>Four. ", False, ("Four. ", "Two")),
        ("\n<think>Two</think>\n\nFour", False, ("Four", "Two")),
        ("<think>\n\n</think>\n\nFour", False, ("Four", "")),
        ("Two.\n</think>\n\nFour", True, ("Four", "Two.")),
        # A prompt that has begun the thoughts, and a model that begins them again.
        ("<think>Two</think>Four", True, ("Four", "Two")),
        # Cut in the middle of them.
        ("<think>\nTwo and", False, ("", "Two and")),
        ("Two and", True, ("", "Two and")),
        ("<think>", False, ("", "")),
        # Only the first thoughts are before the answer.
        ("<think>Two</think>Four <think>x</think>", False, ("Four <think>x</think>", "Two")),
        # Answers about tags.
        ("Four", False, None),
        ("The tag <think> begins, </think> ends.", False, None),
        ("Two.</think>Four", False, None),
        ("", False, None),
    ],
)
def test_thoughts_are_told_from_the_answer(thinking, generated, begun, expected):
    found = thinking.split(tokens_of(thinking, generated), begun)
    if expected is not None:  # tags that are special tokens are no part of a text
        special = thinking.tokenizer.token_id(thinking.begin) in thinking.tokenizer.special_ids
        answer = expected[0].replace("<think>x</think>", "x" if special else "<think>x</think>")
        expected = Split(answer, expected[1])
    assert found == expected


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("Why?<think>\n", True),
        ("Why?<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("What is <think>?", False),
        ("Why?", False),
    ],
)
def test_a_prompt_may_begin_the_thoughts(thinking, prompt, begun):
    assert thinking.begins(tokens_of(thinking, prompt), PLAIN) is begun


def test_a_message_that_is_continued_may_be_in_thoughts(thinking):
    prompt = tokens_of(thinking, "...")
    for content, begun in (
        (f"{thinking.begin}Two and", True),
        (f"{thinking.begin}Two{thinking.end}Fo", False),
        ("Fo", False),
    ):
        assert thinking.begins(prompt, PLAIN, [{"role": "assistant", "content": content}]) is begun


def test_under_a_grammar_without_thoughts_all_is_answer(thinking):
    prompt = tokens_of(thinking, "Why?<think>\n")
    assert not thinking.begins(prompt, SamplingParams(json_schema="{}"))
    assert not thinking.begins(prompt, SamplingParams(regex="Four"))
    assert thinking.begins(prompt, SamplingParams(regex=r"\w+" + thinking.end + "Four"))


def test_models_that_think(tmp_path):
    plain = make(tmp_path, template="{{ messages }}")
    assert Thinking.of(plain) is None and Thinking.of(NoText()) is None
    assert Thinking.of(make(tmp_path, "<think>")) is None, "one tag alone is some text's"
    assert Thinking.of(make(tmp_path, template={"default": "{{ '</think>' }}"})).begin == "<think>"
    for regex in ("<think>x</think>yes", r"\<think\>.*\<\/think\>", "(<think>[a-z]+</think>)?[0-9]"):
        assert Thinking.of(plain, regex).begin == "<think>"
    assert Thinking.of(plain, r"\[THINK\]x\[/THINK\]").begin == "[THINK]"
    for regex in ("yes", "<think>", "</think><think>", ""):
        assert Thinking.of(plain, regex) is None


def stopped_at(thinking, generated, begun, *stop):
    stops = ThoughtStops(thinking, begun, thinking.tokenizer.stop_detector(stop))
    token_ids = tokens_of(thinking, generated)
    return next((i for i, token in enumerate(token_ids) if stops.push(token)), None), stops.text


def test_what_stops_an_answer_may_stand_in_thoughts(thinking):
    at, text = stopped_at(thinking, "<think>Two and</think>Four and", False, " and")
    assert at > len(tokens_of(thinking, "<think>Two and</think>")) and text == "Four"
    assert stopped_at(thinking, "Two and</think>Four and", True, " and")[1] == "Four"
    assert stopped_at(thinking, "<think>Two and", False, " and") == (None, "")
    assert stopped_at(thinking, "Two and", True, " and") == (None, "")


def test_what_does_not_begin_with_thoughts_stops_from_its_first_token(thinking):
    assert stopped_at(thinking, "Four and", False, "F") == (0, "")
    assert stopped_at(thinking, "<four and", False, " and")[1] == "<four"
    assert stopped_at(thinking, "<the", False, "<t")[1] == ""
