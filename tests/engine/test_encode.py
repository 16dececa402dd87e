"""Requests are tokenized some at a time, and what cannot fit is not tokenized at all."""

import pytest
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.errors import RowError
from batchgen.core.request import Request, ScoreRequest
from batchgen.engine.encode import LengthLimit, chunks, encode_all, encode_pairs, encode_prompt, encode_texts
from batchgen.models.files import ModelFiles
from batchgen.models.tokenizers import tokenizer as tokenizer_module
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.models.tokenizers.token_bound import TokenBound
from batchgen.models.tokenizers.tokenizer import Tokenizer


def test_requests_that_may_be_the_last_for_a_while_do_not_wait_for_more():
    source = iter(["a", "b", None, None, "c", *"d" * 64])
    made = chunks(source)
    assert next(made) == [(0, "a"), (1, "b")]
    assert next(source) is None  # nothing was read ahead
    rest = list(made)
    assert [len(chunk) for chunk in rest] == [64, 1]
    assert [number for chunk in rest for number, _ in chunk] == list(range(2, 67))


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """With the lengths of the texts that were tokenized, together, in `seen`."""
    make_tiny_tokenizer(tmp_path)
    made = load_tokenizer(ModelFiles(tmp_path, "hf", "x"))
    made.seen = []
    encode = Tokenizer._encode_together
    monkeypatch.setattr(
        Tokenizer, "_encode_together", lambda self, texts,
        special: self.seen.append(list(map(len, texts))) or encode(self, texts, special)
    )  # fmt: skip
    return made


LONG = "The ferry left. " * 5000  # thousands of tokens, whatever they are


def test_texts_that_cannot_fit_are_not_tokenized(tokenizer):
    limit = LengthLimit.of(512, "error")
    requests = [Request("The ferry"), Request(LONG), Request([{"role": "user", "content": LONG}])]
    texts = encode_texts(tokenizer, requests, limit)
    assert encode_prompt(tokenizer, requests[0], limit, texts) == tokenizer.encode_batch(["The ferry"])[0]
    for request in requests[1:]:
        with pytest.raises(RowError, match=r"^the prompt has \d+,\d+ tokens at least, the context holds 512$"):
            encode_prompt(tokenizer, request, limit, texts)
    assert max(length for lengths in tokenizer.seen for length in lengths) < 100
    assert encode_prompt(tokenizer, requests[1])  # as a dry run shows it
    assert encode_prompt(tokenizer, requests[1], LengthLimit.of(10**6, "error"))
    assert encode_prompt(tokenizer, requests[1], LengthLimit.of(512, "truncate-left"))


def test_a_context_that_cannot_fit_is_not_tokenized_and_a_long_continuation_is(tokenizer):
    limit = LengthLimit.of(512, "error")
    requests = [ScoreRequest(LONG, ("yes",)), ScoreRequest("", (LONG,)), ScoreRequest("The ferry", ("yes",))]
    texts = encode_all(tokenizer, requests, limit)
    with pytest.raises(RowError, match=r"the text to score has \d+,\d+ tokens at least, the context holds 512"):
        encode_pairs(tokenizer, requests[0], texts, limit)
    assert (LONG, True) not in texts.tokens
    for request in requests[1:]:
        assert encode_pairs(tokenizer, request, texts, limit) == encode_pairs(
            tokenizer, request, encode_all(tokenizer, [request])
        )


@pytest.mark.parametrize("on_overlong", ["error", "truncate-left"])
def test_no_row_is_worth_the_memory_of_a_job(tokenizer, on_overlong):
    """Where nothing is known of how many tokens a text has, or it is to be cut, its characters are counted."""
    tokenizer._bound = TokenBound({"model": {"type": "WordLevel", "vocab": {}}})
    huge, line = (
        "a" * (1 << 22) + "a",
        "has 4,194,305 characters, and no more than 4,194,304 are tokenized for a context of 512 tokens",
    )
    limit = LengthLimit.of(512, on_overlong)
    for prompt in (huge, [{"role": "user", "content": huge}]):
        with pytest.raises(RowError, match=line if isinstance(prompt, str) else "are tokenized"):
            encode_prompt(tokenizer, Request(prompt), limit)
    request = ScoreRequest("", (huge,))
    with pytest.raises(RowError, match=line):
        encode_pairs(tokenizer, request, encode_all(tokenizer, [request], limit), limit)
    assert tokenizer.seen == []
    LengthLimit.of(1 << 20, on_overlong).check(tokenizer, huge)  # whose context is as long


def test_long_texts_are_tokenized_a_few_at_a_time(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_TOGETHER", 1000)
    texts = ["b " * 100, *["a " * 300] * 3, "c"]
    together = tokenizer.encode_batch(texts)
    assert tokenizer.seen == [[200, 600], [600], [600, 1]]
    assert together == [tokenizer.encode_batch([text])[0] for text in texts]
