"""Tokenizers of GGUFs that another process builds: the same ones, and little memory beside the tokenizer itself."""

import json
import random
from pathlib import Path

import pytest
from gguf_vocabularies import byte_level, sentencepiece, write
from processes import start_in_process

from batchgen.core.errors import InputError
from batchgen.core.machine import give_back_freed_memory, peak_resident_bytes, resident_bytes
from batchgen.models.tokenizers import gguf_process, loading
from batchgen.models.tokenizers.loading import load_tokenizer, save_tokenizer
from batchgen.models.tokenizers.token_bound import _byte_characters

MIB = 1 << 20
TEXTS = ["", "Das ist ein Brief.", "naïve   Übung\n\n漢字 🙂", "<tool> <s>"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("pairs", [byte_level(), sentencepiece(random.Random(3), "abc", 60)], ids=["bytes", "scores"])
def test_another_process_builds_the_same_tokenizer(tmp_path, monkeypatch, pairs):
    files = write(tmp_path / "words.gguf", pairs)
    here = load_tokenizer(files)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "another cache"))
    monkeypatch.setattr(loading, "_LARGE_PAIRS_BYTES", 0)
    apart = load_tokenizer(files)
    assert apart.identity() == here.identity() and apart.encode_batch(TEXTS) == here.encode_batch(TEXTS)


def test_what_is_refused_is_said_in_the_same_words(tmp_path, monkeypatch):
    files, messages = write(tmp_path / "words.gguf", byte_level(pre="unheard-of")), []
    for large in (1 << 30, 0):
        monkeypatch.setattr(loading, "_LARGE_PAIRS_BYTES", large)
        with pytest.raises(InputError, match="'unheard-of' is not supported") as refused:
            load_tokenizer(files)
        messages.append(str(refused.value))
    assert messages[0] == messages[1] and str(files.path) in messages[0]


def test_a_process_that_is_ended_is_said_in_one_line(tmp_path, monkeypatch):
    files = write(tmp_path / "words.gguf", byte_level())
    monkeypatch.setattr(loading, "_LARGE_PAIRS_BYTES", 0)
    monkeypatch.setattr(gguf_process, "python_command", lambda *_: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(InputError, match=r"ended with code -9: .*free memory"):
        load_tokenizer(files)


def test_a_cache_that_cannot_be_written_is_only_slower(tmp_path, monkeypatch):
    files = write(tmp_path / "words.gguf", byte_level())
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "tokenizers").write_text("no folder")
    for large in (1 << 30, 0):
        monkeypatch.setattr(loading, "_LARGE_PAIRS_BYTES", large)
        assert load_tokenizer(files).encode_batch(["a b"])
        store = tmp_path / f"store {large}"
        store.mkdir()
        save_tokenizer(files, store)
        assert (store / "tokenizer" / "tokenizer.json").is_file()


def large_vocabulary():
    """A vocabulary of some 50,000 tokens and 120,000 merges: bytes, pairs of them, and four of them in two pairs."""
    letters = _byte_characters()
    pairs = [left + right for left in letters[:120] for right in letters[:120]]
    fours = [pair + pairs[(7 * i + 1) % len(pairs)] for i, pair in enumerate(pairs)]
    threes = list(dict.fromkeys(four[at : at + 3] for four in fours for at in (0, 1)))
    merges = [(pair[0], pair[1]) for pair in pairs]
    merges += [parts for three in threes for parts in ((three[:2], three[2]), (three[0], three[1:]))]
    merges += [(four[:at], four[at:]) for four in fours for at in (1, 2, 3)]
    tokens = [*letters, *pairs, *threes, *fours]
    return byte_level(
        tokens=tokens, merges=list(map(" ".join, merges)), token_type=[1] * len(tokens), bos_token_id=None,
        eos_token_id=len(tokens) - 1,
    )  # fmt: skip


def measure(files, store: Path) -> None:
    """Prints the bytes that a loaded tokenizer takes, and the most beside it to save it and to bound a text."""
    import batchgen.models.tokenizers.gguf_tokenizer  # noqa: F401

    loading._LARGE_PAIRS_BYTES = 1 << 20
    give_back_freed_memory()
    before = resident_bytes()
    tokenizer = load_tokenizer(files)
    give_back_freed_memory()
    loaded = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    save_tokenizer(files, store)
    saved = peak_resident_bytes() - loaded
    Path("/proc/self/clear_refs").write_text("5")
    now = resident_bytes()
    tokenizer.least_tokens("a" * 70_000)
    print(json.dumps([tokenizer.vocab_size, loaded - before, saved, peak_resident_bytes() - now]))


def test_a_large_vocabulary_takes_no_more_memory_the_first_time(tmp_path):
    """Nothing is left of its building, and neither saving it with a weight store nor a long text loads it once more."""
    files = write(tmp_path / "words.gguf", large_vocabulary())
    taken = []
    for turn in ("first", "later"):
        store = tmp_path / turn
        store.mkdir()
        process = start_in_process(measure, [files, store], tmp_path / "log")
        process.join()
        assert process.exitcode == 0, (tmp_path / "log").read_text()
        tokens, held, saved, bounded = json.loads((tmp_path / "log").read_text())
        assert tokens > 40_000 and saved < 16 * MIB and bounded < 16 * MIB
        taken.append(held)
    assert abs(taken[0] - taken[1]) < 16 * MIB, taken
