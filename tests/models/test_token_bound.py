"""The least number of tokens that a text may have: never more than it has, and near it for what is soon long."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest
from tiny_tokenizers import TEXT, make_tiny_sentencepiece_tokenizer, make_tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from batchgen.models.tokenizers.token_bound import TokenBound, state_of

NFC = normalizers.NFC()
NORMALIZERS = {
    "none": None,
    "NFC": NFC,
    "spaces to ▁": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
LOSING = {
    "strips": normalizers.Strip(),
    "compatibility": normalizers.NFKC(),
    "collapses": normalizers.Replace(Regex(" +"), " "),
    "deletes": normalizers.Replace("a", ""),
    "one of them": normalizers.Sequence([NFC, normalizers.StripAccents()]),
}
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def of_bytes(normalizer=None, *added):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=BYTE_LEVEL.alphabet())
    tokenizer.train_from_iterator([TEXT, "é ế ΐ 한국어 各" * 50], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, rstrip=True) for token in added])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def bound_of(tokenizer):
    bound, of_json = TokenBound(state_of(tokenizer)), TokenBound(json.loads(tokenizer.to_str()))
    assert vars(bound) == vars(of_json)
    return bound


def texts(rng):
    pieces = [
        *TEXT.split(" "),
        " " * 50,
        "\n" * 9,
        "é",
        "e\u0301",
        "\u1fbe\u0308\u0301",
        "\u1112\u1161\u11ab",
        "\u2126",
        "\u212a",
        "漢字",
        "🦊",
        "<|x|>",
        "\u3000" * 9,
        "\x00",
    ]
    for _ in range(60):
        yield "".join(rng.choice(pieces) for _ in range(rng.randrange(30)))
    yield from (piece * 40 for piece in pieces)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_no_text_has_fewer_tokens(normalizer):
    tokenizer = of_bytes(NORMALIZERS[normalizer], "<|x|>")
    bound, encoded = bound_of(tokenizer), []
    for text in texts(random.Random(0)):
        encoded.append((bound.least(text), len(tokenizer.encode(text).ids)))
        assert encoded[-1][0] <= encoded[-1][1], text
    assert bound.least(TEXT) > len(TEXT) // 100 and any(least for least, _ in encoded)


def test_no_text_has_fewer_tokens_of_a_vocabulary_that_falls_back_to_bytes(tmp_path):
    for make in (make_tiny_sentencepiece_tokenizer, make_tiny_tokenizer):
        tokenizer = make(tmp_path).backend_tokenizer
        bound = bound_of(tokenizer)
        for text in texts(random.Random(1)):
            assert bound.least(text) <= len(tokenizer.encode(text).ids), text
        assert bound.least(TEXT) > len(TEXT) // 100


@pytest.mark.parametrize("normalizer", LOSING)
def test_nothing_is_said_where_text_may_vanish(normalizer):
    assert bound_of(of_bytes(LOSING[normalizer])).least(TEXT * 100) == 0


def test_no_text_has_fewer_tokens_of_a_unigram_vocabulary_that_falls_back_to_bytes():
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("a", -1.0), ("abab", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    bound = bound_of(tokenizer)
    for text in ("", "a", "é", "abab" * 9, "漢字" * 3):
        assert bound.least(text) <= len(tokenizer.encode(text).ids), text
    assert bound.least("abab" * 100) > 50


def test_nothing_is_said_of_other_models():
    words = {"a": 0, "[UNK]": 1, "b": 2}
    for model in (
        models.WordLevel(words, unk_token="[UNK]"),
        models.WordPiece(words, unk_token="[UNK]"),
        models.BPE(words, [], unk_token="[UNK]", fuse_unk=True),
        models.BPE(words, []),
        models.Unigram([("a", 0.0), ("b", 0.0)], 0),
    ):
        assert bound_of(Tokenizer(model)).least("a" * 1000) == 0
    some_bytes = Tokenizer(models.BPE(words, []))
    some_bytes.pre_tokenizer = BYTE_LEVEL
    assert bound_of(some_bytes).least("a" * 1000) == 0
    assert (
        bound_of(Tokenizer(models.BPE(words, [], unk_token="[UNK]"))).least("a" * 1000) == 200
    )  # of five bytes, as [UNK] has
    cuts = of_bytes()
    cuts.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])
    assert bound_of(cuts).least(TEXT) == 0


def test_composing_leaves_a_quarter_of_the_bytes_or_more():
    """The longest spelling of each character that something composes to, or stands for."""
    alike: dict[str, str] = {}  # of a character the longest that stands for it
    for code in range(0x110000):
        character, other = chr(code), unicodedata.normalize("NFD", chr(code))
        if (
            character != other
            and len(other) == 1
            and len(character.encode("utf-8", "surrogatepass")) > len(alike.get(other, other).encode())
        ):
            alike[other] = character
    for code in range(0x110000):
        parts = unicodedata.normalize("NFD", chr(code))
        if parts == chr(code) and parts not in alike:
            continue  # it is spelled in one way
        spelled = "".join(alike.get(part, part) for part in parts)
        for form in ("NFC", "NFD"):
            assert len(spelled.encode()) <= 4 * len(unicodedata.normalize(form, parts).encode())
