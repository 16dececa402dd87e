"""SentencePiece tokenizers in GGUFs: ids and texts are those of the tokenizer that the file was written from."""

import itertools

import pytest
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import SENTENCEPIECE_STYLES, TEXT, make_sentencepiece_tokenizer

from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer

TEXTS = [
    "The ferry left the harbour.",
    "",
    " one space before",
    "  two spaces before, and   three within ",
    "Bytes: é, 漢字 and 🦊.",
    "A line.\n\nAnother one.\n",
    "<|end|>special<tool>, and not<|end|> alone<s>",
    TEXT,
]
MESSAGES = [{"role": "user", "content": "Which day has two sailings?"}, {"role": "assistant", "content": " None."}]
FLAGS = [{}, {"bos": False}, {"eos": True}, {"bos": False, "eos": True}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


def make(tmp_path, family, hf):
    model = make_tiny_model(family, tmp_path / "model")
    return resolve_model(str(write_tiny_gguf(model, tmp_path / "model.gguf", tokenizer=hf)))


def assert_same(ours, hf):
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode_batch([text], add_special_tokens=special)[0]
            assert ids == hf(text, add_special_tokens=special)["input_ids"], text
            for skipped in (True, False):
                assert ours.decode(ids, skipped) == hf.decode(ids, skip_special_tokens=skipped)
    assert ours.encode_chat(MESSAGES) == hf.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert ours.vocab_size == len(hf)
    assert ours.special_ids == frozenset(i for i, token in hf.added_tokens_decoder.items() if token.special)
    assert (ours.bos_token_id, ours.eos_token_ids) == (hf.bos_token_id, (hf.eos_token_id,))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("family", SENTENCEPIECE_STYLES)
def test_ids_and_texts_are_those_of_the_tokenizer(tmp_path, family, flags):
    """Taken out of the file, kept in the cache, and in a store."""
    hf = make_sentencepiece_tokenizer(tmp_path / "hf", SENTENCEPIECE_STYLES[family], **flags)
    files = make(tmp_path, family, hf)
    assert_same(load_tokenizer(files), hf)
    assert_same(load_tokenizer(files), hf)
    store = convert(files, tmp_path / "store", dtype="float32")
    assert_same(load_tokenizer(resolve_model(str(store.path))), hf)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_no_space_before_the_first_word(tmp_path, family):
    """tokenizer.ggml.add_space_prefix."""
    hf = make_sentencepiece_tokenizer(tmp_path / "hf", "no prefix")
    files = make(tmp_path, family, hf)
    assert_same(load_tokenizer(files), hf)


def test_a_mixture_has_the_tokenizer_of_a_llama(tmp_path):
    hf = make_sentencepiece_tokenizer(tmp_path / "hf", SENTENCEPIECE_STYLES["llama"])
    assert_same(load_tokenizer(make(tmp_path, "mixtral", hf)), hf)


def test_ids_are_those_of_the_algorithm(tmp_path):
    """Of any two neighbours the pair with the best score becomes one, the first of equals; bytes are what is left."""
    hf = make_sentencepiece_tokenizer(tmp_path / "hf", SENTENCEPIECE_STYLES["llama"])
    ours, tokens = load_tokenizer(make(tmp_path, "llama", hf)), hf.get_vocab()
    first = tokens["\n\n"] + 1  # of those that are merged

    def encode(text):
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            ids = [tokens.get(a + b, -1) for a, b in itertools.pairwise(parts)]
            ranks = [i if i >= first else len(tokens) for i in ids]
            if not ranks or min(ranks) == len(tokens):
                break
            at = ranks.index(min(ranks))
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        bytes_of = {part: [tokens[f"<0x{byte:02X}>"] for byte in part.encode()] for part in parts}
        return [i for part in parts for i in ([tokens[part]] if part in tokens else bytes_of[part])]

    for text in (*filter(None, TEXT.split("\n")), "Bytes: é, 漢字 and 🦊.", "three   spaces"):
        assert ours.encode_batch([text], add_special_tokens=False)[0] == encode(text), text


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_a_turn_of_a_chat_ends_the_text(tmp_path, family):
    hf = make_sentencepiece_tokenizer(tmp_path / "hf", SENTENCEPIECE_STYLES[family])
    end = hf.convert_tokens_to_ids("<|end|>")
    assert read_config(make(tmp_path, family, hf)).eos_token_ids == (hf.eos_token_id, end)
