"""gpt-oss's answers, with a tokenizer that has its marks."""

import pytest
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.models.tokenizers.harmony import Harmony
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer import NoText, Tokenizer

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    hf = make_tiny_tokenizer(tmp_path_factory.mktemp("harmony"))
    hf.add_special_tokens({"additional_special_tokens": MARKS})
    return Tokenizer(TokenizerParts.of_transformers(hf))


ANALYSIS = "<|channel|>analysis<|message|>Two and two.<|end|>"


@pytest.mark.parametrize(
    ("generated", "answer", "thoughts"),
    [
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Four: 4.<|return|>", "Four: 4.", "Two and two."),
        ("<|channel|>final<|message|>Four", "Four", ""),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", ""),
        (ANALYSIS, "", "Two and two."),
        ("<|channel|>analysis<|message|>Two", "", "Two"),
        ("<|channel|>anal", "", ""),
        (f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=f<|message|>{{}}<|call|>", "", "Two and two.\n{}"),
        # The prompt has begun the first message.
        ("Two.<|end|><|start|>assistant<|channel|>final<|message|>Four", "Four", "Two."),
    ],
)
def test_channels_are_told_apart(tokenizer, generated, answer, thoughts):
    token_ids = tokenizer.encode_batch([generated], add_special_tokens=False)[0]
    assert Harmony.of(tokenizer).read(token_ids) == (answer, thoughts)


def test_text_without_channels_is_left_as_it_is(tokenizer):
    token_ids = tokenizer.encode_batch(["Four<|return|>"], add_special_tokens=False)[0]
    assert Harmony.of(tokenizer).read(token_ids) is None


def test_other_tokenizers_have_no_channels(tmp_path):
    assert Harmony.of(Tokenizer(TokenizerParts.of_transformers(make_tiny_tokenizer(tmp_path)))) is None
    assert Harmony.of(NoText()) is None
