"""Thoughts between tags: which models have them, and where an answer begins."""

import pytest
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.request import SamplingParams
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.thinking import TAGS, Split, TagGate, Thinking, ThoughtStops
from batchgen.models.tokenizers.tokenizer import NoText, Tokenizer

PLAIN = SamplingParams()


def make(folder, *tokens, special=False, template=None):
    hf = make_tiny_tokenizer(folder, chat_template=template)
    hf.add_tokens([*tokens], special_tokens=special)
    return Tokenizer(TokenizerParts.of_transformers(hf))


@pytest.fixture(
    scope="module",
    params=[(family, kind) for family in TAGS for kind in ("tokens", "special tokens", "spelled")],
    ids=lambda param: " ".join(param),
)
def thinking(request, tmp_path_factory):
    """The tags of each family: as tokens, as special tokens, and in the chat template where no token is one."""
    family, kind = request.param
    folder, tags = tmp_path_factory.mktemp("thinking"), TAGS[family]
    template = f"{{{{ messages }}}}{tags.begin}{{{{ '{tags.end}' }}}}{''.join(tags.answer or ())}"
    words = () if kind == "spelled" else (tags.begin, tags.end)
    if kind != "spelled" and tags.answer is None:
        template = None
    return Thinking.of(make(folder, *words, special=kind == "special tokens", template=template))


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
    found = thinking.split(tokens_of(thinking, generated), begun, PLAIN)
    if expected is not None:  # tags that are special tokens are no part of a text
        special = thinking.tokenizer.token_id(thinking.begin) in thinking.tokenizer.special_ids
        answer = expected[0].replace("<think>x</think>", "x" if special else f"{thinking.begin}x{thinking.end}")
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
    assert thinking.begins(tokens_of(thinking, prompt)) is begun


def test_a_message_that_is_continued_may_be_in_thoughts(thinking):
    prompt = tokens_of(thinking, "...")
    for content, begun in (
        (f"{thinking.begin}Two and", True),
        (f"{thinking.begin}Two{thinking.end}Fo", False),
        ("Fo", False),
    ):
        assert thinking.begins(prompt, [{"role": "assistant", "content": content}]) is begun


def test_a_grammar_begins_after_the_thoughts(thinking):
    """A model whose tags are no tokens may not begin thoughts by itself, since the grammar would forbid the tag."""
    prompt, turn = tokens_of(thinking, "Why?<think>\n"), tokens_of(thinking, "Why?")
    closed = tokens_of(thinking, "Why?<think>\n\n</think>\n\n")
    has_tokens = thinking.end_id is not None
    assert thinking.begins(prompt)
    for sampling in (SamplingParams(json_schema="{}"), SamplingParams(regex="Four")):
        assert thinking.gate(prompt, sampling, True, True) is not None
        assert (thinking.gate(turn, sampling, False, True) is not None) is has_tokens
        assert thinking.gate(turn, sampling, False, False) is None, "no chat, in which the model would think"
        assert thinking.gate(closed, sampling, False, True) is None, "thinking is switched off"
    if "|" not in thinking.end and "[" not in thinking.end:
        allowed = SamplingParams(regex=r"\w+" + thinking.end + "Four")
        assert thinking.gate(prompt, allowed, True, True) is None


@pytest.mark.parametrize("behind", ["", "\n\n", " ", "Fo"])
def test_a_spelled_tag_ends_with_its_last_token_and_the_answer_begins_with_the_next(tmp_path, behind):
    """Where the vocabulary has a token for the tag's end and what follows it, the grammar does not read that token."""
    hf = make_tiny_tokenizer(tmp_path, chat_template="{{ messages }}<think>{{ '</think>' }}")
    hf.add_tokens([f">{behind}"])
    thinking = Thinking.of(Tokenizer(TokenizerParts.of_transformers(hf)))
    sampling = SamplingParams(regex="Four")
    before, answer = tokens_of(thinking, f"Two and </think>{behind}"), tokens_of(thinking, "Four")
    assert thinking.tokenizer.decode(before[-1:]) == f">{behind}"
    gate = thinking.gate(tokens_of(thinking, "Why?<think>"), sampling, True, True)
    assert read_by(gate, [*before, *answer]) == len(before)
    assert thinking.split([*before, *answer], True, sampling) == Split("Four", "Two and")
    free = thinking.split([*before, *answer], True, PLAIN)
    assert free == Split(f"{behind}Four".lstrip(), "Two and")


def named(thinking, text, begun=False):
    return thinking.split(tokens_of(thinking, text), begun, PLAIN)


@pytest.mark.parametrize("special", [True, False])
def test_the_name_of_a_channel_is_no_thought(tmp_path, special):
    """Gemma 4 names the channel of its thoughts, also an empty one."""
    thinking = Thinking.of(make(tmp_path, "<|channel>", "<channel|>", special=special))
    assert thinking.tags is TAGS["Gemma 4"]
    assert named(thinking, "<think>thought\nTwo and two.\n</think>Four.") == Split("Four.", "Two and two.")
    assert named(thinking, "<think>thought\n</think>Four.") == Split("Four.", "")
    assert named(thinking, "<think>thoughtful of two</think>Four.") == Split("Four.", "thoughtful of two")
    assert named(thinking, "<think>thou") == Split("", ""), "cut within the name"
    assert named(thinking, "Four.") is None
    assert thinking.begins(tokens_of(thinking, "Why?<think>thought\n"))
    assert not thinking.begins(tokens_of(thinking, "Why?<think>thought\n</think>"))


def test_tags_around_an_answer_are_no_part_of_it(tmp_path):
    """Granite 3.3 writes them; a template that names none of them is another family's."""
    template = "{{ messages }} between <think></think> and between <response></response>"
    thinking = Thinking.of(make(tmp_path, template=template))
    assert thinking.tags is TAGS["Granite 3.3"]
    assert named(thinking, "<think>Two</think>\n\n<response>\nFour.\n</response>\n") == Split("Four.", "Two")
    assert named(thinking, "<think>Two</think><response>Fo") == Split("Fo", "Two")
    assert named(thinking, "<think>Two</think>Four </response>") == Split("Four </response>", "Two")
    assert Thinking.of(make(tmp_path, template="{{ messages }}</think>")).tags.answer is None


def test_a_budget_of_no_thoughts_begins_them_and_ends_them_at_once(tmp_path):
    """Seed-OSS's prompt ends with two tags then."""
    tags = ("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
    thinking = Thinking.of(make(tmp_path, *tags))
    assert thinking.begins(tokens_of(thinking, "Why?<seed:think><seed:cot_budget_reflect>"))
    assert named(thinking, "None.</seed:cot_budget_reflect>\n</seed:think>Four", begun=True).answer == "Four"


def read_by(gate, token_ids):
    """Number of the first token of the answer; None: it has not begun."""
    answers = ((i, gate.answer_from(token_id)) for i, token_id in enumerate(token_ids))
    return next((i + offset for i, offset in answers if offset is not None), None)


def test_a_gate_opens_at_the_first_token_of_the_answer(thinking):
    if thinking.end_id is None:
        return
    begin = thinking.tokenizer.token_id(thinking.begin)
    thoughts = tokens_of(thinking, "Two and")
    assert read_by(TagGate(None, thinking.end_id), [*thoughts, thinking.end_id, 9]) == len(thoughts) + 1
    assert read_by(TagGate(None, thinking.end_id), [9, 9]) is None
    assert read_by(TagGate(begin, thinking.end_id), [begin, *thoughts, thinking.end_id, 9]) == len(thoughts) + 2
    assert read_by(TagGate(begin, thinking.end_id), [9, 9]) == 0
    assert read_by(TagGate(begin, thinking.end_id), [begin, 9]) is None


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
