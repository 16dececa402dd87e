"""Tokenizers of GGUFs: ids are those of llama.cpp, recorded or by its algorithm.

What cannot be so is refused by name.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
from gguf_vocabularies import (
    BYTE,
    CONTROL,
    RECORDED,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    of_characters,
    pairs_of,
    sentencepiece,
    write,
)
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from batchgen.core.errors import InputError
from batchgen.models.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS
from batchgen.models.tokenizers.gguf_tokenizer import backend_of, names_of
from batchgen.models.tokenizers.loading import load_tokenizer


@pytest.mark.parametrize("kind", RECORDED["kinds"], ids=lambda kind: kind["names"][0])
def test_ids_of_every_pre_tokenizer_are_those_that_llama_cpp_gave(kind):
    for name in kind["names"]:
        backend = backend_of(byte_level(name))
        for text, ids in zip(RECORDED["texts"], kind["ids"], strict=True):
            assert backend.encode(text).ids == ids, (name, text)


def test_every_pre_tokenizer_is_recorded_and_a_file_without_a_name_has_the_usual_one():
    kinds = [*RECORDED["kinds"], *RECORDED["characters"]["kinds"]]
    assert {name for kind in kinds for name in kind["names"]} == PRE_TOKENIZERS.keys()
    for text in RECORDED["texts"]:
        assert backend_of(byte_level(None)).encode(text).ids == backend_of(byte_level("default")).encode(text).ids


@pytest.mark.parametrize("kind", RECORDED["characters"]["kinds"], ids=lambda kind: kind["names"][0])
def test_ids_of_vocabularies_of_characters_are_those_that_llama_cpp_gave(kind):
    texts = [*RECORDED["texts"], *RECORDED["characters"]["texts"]]
    for name in kind["names"]:
        backend = backend_of(of_characters(name))
        for text, ids in zip(texts, kind["ids"], strict=True):
            assert backend.encode(text).ids == ids, (name, text)
            assert backend.decode(ids, skip_special_tokens=False) == f"<bos>{text}"


# What the tokenizer.json of a family cuts texts with; GGUFs of the family have the name.
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
HF_SPLITS = {
    "qwen2": [rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"],
    "qwen35": [
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
    ],
    "lfm2": [rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"],
    "dbrx": [rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"],
    "seed-coder": [rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"],
    "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "olmo": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
}


def drawn_texts(rng, count):
    """Texts of pieces of the recorded ones; only Unicode's folding of case takes "ſ" for an "s"."""
    texts = [text.replace("ſ", "s") for text in RECORDED["texts"]]
    for _ in range(count):
        pieces = (rng.choice(texts)[rng.randrange(20) :][: rng.randrange(12)] for _ in range(6))
        yield "".join(piece + rng.choice(["", " " * rng.randrange(4), "\n" * rng.randrange(4)]) for piece in pieces)


@pytest.mark.parametrize("name", HF_SPLITS)
def test_ids_of_a_familys_gguf_are_those_of_its_tokenizer_json(name):
    pairs = byte_level(name, add_bos_token=False)
    hf = Tokenizer.from_str(backend_of(pairs).to_str())
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in HF_SPLITS[name]]
    hf.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    for text in drawn_texts(random.Random(name), 200):
        assert hf.encode(text).ids == backend_of(pairs).encode(text).ids, text


def test_ids_of_gemma_4s_gguf_are_those_of_its_tokenizer_json():
    """Its tokenizer.json cuts a text nowhere, since no space is left when it would, and merges all runs of lines."""
    runs = ["\n" * a + " " + "\n" * (total - a) for total in range(2, 6) for a in range(1, total)]
    pairs = of_characters(add_bos_token=False, merges=[*RECORDED["characters"]["merges"], *runs])
    tokens, lines = pairs["tokenizer.ggml.tokens"], pairs["tokenizer.ggml.merges"]
    merges = [tuple(line.split(" ")) for line in lines]
    ids = {token: i for i, token in enumerate(tokens)}
    hf = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    hf.normalizer = normalizers.Replace(" ", "▁")
    hf.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    hf.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ours = backend_of(pairs)
    hf.add_special_tokens(["<|turn>", "<turn|>"])
    for text in ("<|turn>user\nHi there<turn|>\n", *drawn_texts(random.Random(4), 200)):
        assert ours.encode(text).ids == hf.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_runs_of_line_feeds_that_are_tokens_stay_whole_without_merges():
    lines = [line for line in RECORDED["characters"]["merges"] if "\n" not in line]
    tokens = RECORDED["characters"]["tokens"]
    whole, parted = (backend_of(of_characters(name, merges=lines)) for name in ("gemma4", "sarvam-moe"))
    for length in range(1, 6):
        assert whole.encode("\n" * length, add_special_tokens=False).ids == [tokens.index("\n" * length)]
        assert parted.encode("\n" * length, add_special_tokens=False).ids == [tokens.index("\n")] * length
    with pytest.raises(InputError, match="line feeds"):
        kept = [token for token in tokens if token != "\n" * 3]
        backend_of(of_characters(merges=[], tokens=kept, token_type=[1] * len(kept)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "t5"}, "'t5'"),
        ({"model": "bert"}, "'bert'"),
        ({"model": 3}, "tokenizer.ggml.model"),
        ({"model": None}, "none"),
        ({"pre": "whitespace"}, "'whitespace'"),
        ({"pre": "of-next-year"}, "'of-next-year'"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": [*RECORDED["merges"], "hell o!"]}, "'o!'"),
        ({"tokens": [*RECORDED["tokens"], "a"]}, "'a'"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "types of 1"),
        ({"bos_token_id": 10**9, "add_bos_token": True}, "BOS"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"tokens": [*RECORDED["tokens"], "<s><x>"], "token_type": [CONTROL] * 10**4}, "overlap"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, named):
    with pytest.raises(InputError) as caught:
        backend_of(byte_level(**changes))
        names_of(byte_level(**changes))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_flags_and_control_tokens_are_heeded_as_llama_cpp_heeds_them():
    tokens = RECORDED["tokens"]
    plain = backend_of(byte_level()).encode("hello").ids
    bos, eos = tokens.index("<s>"), tokens.index("</s>")
    for name, begins in (("gpt-2", []), ("llama-bpe", [bos]), ("tekken", [bos]), ("qwen2", []), ("chameleon", [bos])):
        assert backend_of(byte_level(name)).encode("").ids == begins
        assert backend_of(byte_level(name, add_bos_token=False, add_eos_token=True)).encode("").ids == [eos]
        assert backend_of(byte_level(name, add_bos_token=True)).encode("").ids == [bos]
    # A token that is known by its text is cut out of texts though the file calls it a word.
    more = [*tokens, "<|im_end|>", "<|channel|>", "<|word|>"]
    backend = backend_of(byte_level(tokens=more, token_type=[1] * len(more)))
    assert backend.encode("hello<|im_end|>").ids == [*plain, len(tokens)]
    assert backend.encode("hello<|channel|>").ids == [*plain, len(tokens) + 1]
    assert len(tokens) + 2 not in backend.encode("hello<|word|>").ids


def test_bytes_that_are_no_tokens_are_left_out_and_part_what_is_around_them():
    tokens = [token for token in RECORDED["tokens"] if "x" not in token]
    merges = [line for line in RECORDED["merges"] if "x" not in line]
    ids = {token: i for i, token in enumerate(tokens)}
    kinds = [1] * len(tokens)
    backend = backend_of(byte_level(tokens=tokens, merges=merges, token_type=kinds, bos_token_id=0, eos_token_id=0))
    h, e = ids["h"], ids["e"]
    assert backend.encode("hxe").ids == [h, e] and backend.encode("he").ids in ([h, e], [ids.get("he")])
    assert backend.encode("xx").ids == []


# SentencePiece


def cut_out(text, special):
    """Parts of a text, and tokens: the longest of these is looked for first."""
    parts = [text]
    for token in sorted(special, key=lambda token: -len(token.encode())):
        cut = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for number, piece in enumerate(part.split(token)):
                cut += ([special[token]] if number else []) + ([piece] if piece else [])
        parts = cut
    return parts


def by_the_algorithm(pairs, text):
    """llama.cpp's algorithm: the pair of neighbours with the best score becomes one; the rest is bytes."""
    get = lambda key, default=None: pairs.get(f"tokenizer.ggml.{key}", default)  # noqa: E731
    tokens, scores, kinds = get("tokens"), get("scores"), get("token_type")
    ids = {token: i for i, token in enumerate(tokens)}
    special = {t: i for t, i in ids.items() if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)}
    found = [1] if get("add_bos_token", True) else []
    for part in cut_out(text, special):
        if isinstance(part, int):
            found.append(part)
            continue
        symbols = list(((" " if get("add_space_prefix", True) else "") + part).replace(" ", "▁"))
        while True:
            merged = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
            if not merged:
                break
            at = -max(merged)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found + ([2] if get("add_eos_token", False) else [])


@pytest.mark.parametrize("seed", range(12))
def test_ids_of_sentencepiece_vocabularies_are_those_of_the_algorithm(seed):
    rng = random.Random(seed)
    characters = rng.choice(["ab", "abc", "abcdefgh", "aé日\n", "a."])
    flags = {name: rng.choice([None, True, False]) for name in ("add_bos_token", "add_eos_token", "add_space_prefix")}
    pairs = sentencepiece(rng, characters, rng.choice([5, 20, 60]), **flags)
    backend = backend_of(pairs)
    pieces = [*characters, *characters, *"  ▁\nx🦊", "<|end|>", "<tool>", "<s>", "</s>", "\n\n"]
    for _ in range(40):
        runs = [rng.choice(characters) * rng.randrange(1, 9), " " * rng.randrange(1, 40)]
        text = "".join(rng.choice([*pieces, *runs]) for _ in range(rng.randrange(20)))
        assert backend.encode(text).ids == by_the_algorithm(pairs, text), text


def test_usual_special_tokens_of_a_sentencepiece_file_that_states_none():
    names = names_of(sentencepiece(random.Random(1), "ab", 5))
    assert names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("tokens", "scores", "named"),
    [
        (["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"], [0, 0, 0, 0, 0, 0, -5, -5], "'ab' and 'bc'"),
        (["<unk>", "<s>", "</s>", "a", "ab"], [0, 0, 0, 0, -1], "'ab' and not 'b'"),
        (["<unk>", "<s>", "</s>", "a"], [0, 0, 0], "score"),
        (["<unk>", "<s>", "</s>", "a"], [0, 0, 0, float("nan")], "score"),
        (["<unk>", "<s>", "</s>", "a"], None, "score"),
    ],
)
def test_scores_that_do_not_say_what_is_merged_first_are_refused(tokens, scores, named):
    with pytest.raises(InputError, match=named) as caught:
        backend_of(pairs_of(model="llama", tokens=tokens, scores=scores))
    assert "\n" not in str(caught.value)


def test_special_tokens_are_text_where_they_are_asked_to_be(tmp_path, monkeypatch):
    """Also one that its parts could be merged to, as CodeLlama's "▁<PRE>" where "▁<" and "PRE>" are tokens."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "<",
        "P",
        ">",
        "▁<",
        "P>",
        "▁<P>",
    ]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, 1, 1, 1, 1, 1, 1, CONTROL]
    scores = [-float(i) for i in range(len(tokens))]
    files = write(tmp_path / "x.gguf", pairs_of(model="llama", tokens=tokens, token_type=kinds, scores=scores))
    parsed, as_text = (
        load_tokenizer(files, mode).encode_batch(["<P></s>"], add_special_tokens=False)[0] for mode in ("parse", "text")
    )
    assert parsed == [tokens.index("▁<P>"), 2]
    assert not {tokens.index("▁<P>"), 2} & set(as_text)
    assert [tokens[i] for i in as_text[:2]] == ["▁<", "P>"]


# Files


def test_a_gguf_has_its_own_tokenizer_whatever_lies_beside_it_or_was_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    files = write(tmp_path / "model.gguf", byte_level() | {"tokenizer.chat_template": "{{ eos_token }}"})
    text = RECORDED["texts"][0]
    [expected] = [kind["ids"][0] for kind in RECORDED["kinds"] if "gpt-2" in kind["names"]]
    backend_of(sentencepiece(random.Random(1), "ab", 5)).save(str(tmp_path / "tokenizer.json"))
    for _ in range(2):  # made, and kept
        ours = load_tokenizer(files)
        assert ours.encode_batch([text]) == [expected]
        assert ours.render_chat([{"role": "user", "content": ""}]) == "</s>" and ours.bos_token_id == ours.token_id(
            "<s>"
        )
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 1
    # A file of the same name and size, and of another vocabulary.
    before = (tmp_path / "model.gguf").stat()
    write(tmp_path / "model.gguf", byte_level("qwen2"))
    os.utime(tmp_path / "model.gguf", ns=(before.st_atime_ns, before.st_mtime_ns))
    [expected] = [kind["ids"][0] for kind in RECORDED["kinds"] if "qwen2" in kind["names"]]
    assert load_tokenizer(files).encode_batch([text]) == [expected]
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 2
