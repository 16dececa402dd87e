"""Samples of a model whose answers have channels: what is said in them, and where a stop string ends it."""

from types import SimpleNamespace

import pytest
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.request import SamplingParams
from batchgen.engine.generation import Generation, _Finish
from batchgen.models.tokenizers.harmony import AnswerStops, Harmony
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer import Tokenizer

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
THOUGHTS = "<|channel|>analysis<|message|>Two; and two.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>Four: 4."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    hf = make_tiny_tokenizer(tmp_path_factory.mktemp("harmony"))
    hf.add_special_tokens({"additional_special_tokens": MARKS})
    return Tokenizer(TokenizerParts.of_transformers(hf))


@pytest.fixture(autouse=True)
def without_memory(monkeypatch):
    """Handlers of requests without a memory plan, from which they would read the longest sequence."""
    monkeypatch.setattr("batchgen.engine.generation.longest_sequence", lambda policy, memory, tier: None)


def parts_of(tokenizer, *, has_channels):
    config = SimpleNamespace(has_channels=has_channels, vocab_size=512)
    policy = SimpleNamespace(max_model_len=256)
    return SimpleNamespace(tokenizer=tokenizer, config=config, policy=policy, memory=None, compute_tier="cpu")


@pytest.mark.parametrize(
    ("family", "generated", "stop", "text", "reasoning"),
    [
        ("gpt_oss", f"{THOUGHTS}{ANSWER}<|return|>", None, "Four: 4.", "Two; and two."),
        ("gpt_oss", f"{THOUGHTS}{ANSWER}", ":", "Four", "Two; and two."),
        ("gpt_oss", "Four: 4.", None, "Four: 4.", None),
        ("llama", ANSWER, None, "finalFour: 4.", None),
    ],
)
def test_the_text_is_that_of_the_final_channel(tokenizer, family, generated, stop, text, reasoning):
    parts = parts_of(tokenizer, has_channels=family == "gpt_oss")
    token_ids = tokenizer.encode_batch([generated], add_special_tokens=False)[0]
    sequence = SimpleNamespace(generated=token_ids, sampling=SamplingParams())
    finish = _Finish("stop", stop, ends_with_stop_token=generated.endswith("<|return|>"))
    sample = Generation(parts, SamplingParams(), "error")._sample(sequence, finish, None)
    assert (sample.text, sample.reasoning, sample.token_ids) == (text, reasoning, tuple(token_ids))


def test_what_stops_an_answer_may_stand_in_thoughts(tokenizer):
    """And in names of channels; where no channel is named it stops what there is."""
    harmony = Harmony.of(tokenizer)

    def stopped_at(generated, *stop):
        stops = AnswerStops(harmony, tokenizer.stop_detector(stop))
        token_ids = tokenizer.encode_batch([generated], add_special_tokens=False)[0]
        return next((i for i, token in enumerate(token_ids) if stops.push(token)), None), stops.text

    thoughts = len(tokenizer.encode_batch([THOUGHTS], add_special_tokens=False)[0])
    at, text = stopped_at(f"{THOUGHTS}{ANSWER}", "o", "final")
    assert at > thoughts and text == "F"
    assert stopped_at(THOUGHTS, "Two", "assistant") == (None, "")
    assert stopped_at("Four: 4.", "o")[1] == "F"


def test_a_grammar_begins_with_the_message_of_the_final_channel(tokenizer):
    harmony = Harmony.of(tokenizer)

    def encode(text):
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]

    assert harmony.gate(encode("Hi")) is None
    gate = harmony.gate(encode("<|start|>user<|message|>Hi<|end|><|start|>assistant"))
    assert gate.must_begin and gate.first == tokenizer.token_id("<|channel|>")
    thoughts, head = encode(THOUGHTS), encode("<|channel|>final<|message|>")
    assert [gate.answer_from(token) for token in (*thoughts, *head)] == [None] * (len(thoughts) + len(head) - 1) + [1]


def test_a_stop_token_is_no_part_of_the_answer(tokenizer):
    parts = parts_of(tokenizer, has_channels=True)
    token_ids = tokenizer.encode_batch([f"{THOUGHTS}{ANSWER}"], add_special_tokens=False)[0]
    sequence = SimpleNamespace(generated=token_ids, sampling=SamplingParams())
    finish = _Finish("stop", token_ids[-1], ends_with_stop_token=True)
    sample = Generation(parts, SamplingParams(), "error")._sample(sequence, finish, None)
    assert sample.text == tokenizer.decode(token_ids[:-1]).rpartition("final")[2]
