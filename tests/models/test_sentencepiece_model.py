"""A tokenizer.model without a tokenizer.json: ids and texts are SentencePiece's own, or a line says what is missing."""

from __future__ import annotations

import io
import json
import sys

import pytest
from tiny_tokenizers import TEXT

from batchgen.core.errors import InputError
from batchgen.models.files import ModelFiles
from batchgen.models.tokenizers.loading import load_tokenizer

TEXTS = [
    "The ferry left the harbour.",
    " leading",
    "  two  spaces ",
    "",
    " ",
    "Bytes: é, 漢字 🦊",
    "a\n\n\tb",
    *TEXT.split("\n"),
]
KINDS = {
    "bpe": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe, no prefix": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "bpe, as trained by default": {"model_type": "bpe", "byte_fallback": True},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram, as trained by default": {"model_type": "unigram"},
}


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    """(directory, SentencePiece's processor)."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")), model_writer=made, vocab_size=400, hard_vocab_limit=False,
        minloglevel=2, num_threads=1, **KINDS[request.param],
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(made.getvalue())
    return tmp_path, sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


def load(path, **stated):
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    return load_tokenizer(ModelFiles(path, "hf", "x"))


@pytest.mark.parametrize("legacy", [True, False])
def test_ids_and_texts_are_those_of_sentencepiece(model, legacy):
    path, processor = model
    ours = load(path, tokenizer_class="LlamaTokenizer", legacy=legacy)
    for text in TEXTS:
        ids = processor.encode(text)
        assert ours.encode_batch([text], add_special_tokens=False) == [ids], text
        assert ours.encode_batch([text]) == [[1, *ids]]
        if "⁇" not in processor.decode(ids) and not text.startswith(" "):
            assert ours.decode(ids) == processor.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


def test_special_tokens_are_cut_out_and_others_may_be_added(model):
    path, processor = model
    count = processor.get_piece_size()
    more = {str(count): {"content": "<|user|>", "special": True}}
    for legacy in (True, False):
        ours = load(path, legacy=legacy, add_bos_token=False, add_eos_token=True, added_tokens_decoder=more)
        [ids] = ours.encode_batch(["<|user|>the</s>"])
        words = [i for i in ids if i not in (count, 2)]
        assert ids == [count, *words, 2, 2] and ours.decode(ids).strip() == "the"
        # Without "legacy" nothing but the beginning of a text has a space before it.
        assert words == processor.encode("the") or not legacy
    (path / "added_tokens.json").write_text(json.dumps({"<|late|>": count + 1}))
    with pytest.raises(InputError, match=f"token {count + 1} is to be added to {count}"):
        load(path)


def test_packages_that_are_not_installed_are_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert "pip install 'sentencepiece>=0.2' 'protobuf>=4'" in str(caught.value) and "\n" not in str(caught.value)
    assert "tiktoken" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"IQ== 0\nIg== 1\n", b"\xff" * 40, b"{}"])
def test_other_files_of_that_name_are_refused_truthfully(tmp_path, data):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(
        InputError, match=r"is not of SentencePiece, or damaged: fetch the model's tokenizer\.json"
    ) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_class_that_is_not_known_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match="class OwnTokenizer is not supported"):
        load(tmp_path, tokenizer_class="OwnTokenizer")
