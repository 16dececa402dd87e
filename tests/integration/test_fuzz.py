"""Jobs that meet damaged files (support/fuzz.py): a few cases of every kind.

`python tests/support/fuzz.py` tries as many as asked for.
"""

import fuzz_tokenizers
import pytest
from fuzz import KINDS, prepare, try_case, try_tokenizer
from thorough import SEED, quick_or


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return folder, prepare(folder)


@pytest.mark.parametrize("name", KINDS)
def test_no_traceback_no_hang_no_wrong_row(prepared, tmp_path, name):
    folder, expected = prepared
    for case in range(quick_or(2, 200)):
        seed = SEED * 1000 + case
        code, wrong = try_case(folder, expected, name, seed, tmp_path / "case")
        assert wrong is None, f"{name}, seed {seed}, exit code {code}: {wrong}"


def test_a_whole_file_of_every_kind_is_read(prepared, tmp_path, monkeypatch):
    """Otherwise every case above would pass for the wrong reason."""
    folder, expected = prepared
    monkeypatch.setattr("fuzz.damage", lambda data, kind, rng: data)
    assert len(expected) == 12 and len(set(expected.values())) > 1
    for name in KINDS:
        assert try_case(folder, expected, name, 0, tmp_path / "case") == (0, None), name


def test_a_wrong_row_is_noticed(prepared, tmp_path, monkeypatch):
    folder, expected = prepared
    monkeypatch.setattr("fuzz.damage", lambda data, kind, rng: data)
    wrong = {prompt: text + "?" for prompt, text in expected.items()}
    for name, kind in KINDS.items():
        if kind.checked:
            assert "is continued by" in try_case(folder, wrong, name, 0, tmp_path / "case")[1], name


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    fuzz_tokenizers.prepare(folder)
    return folder


@pytest.mark.parametrize("name", fuzz_tokenizers.KINDS)
def test_damaged_tokenizers_are_read_or_refused_in_a_line(tokenizers, tmp_path, monkeypatch, name):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))  # which a case changes
    for case in range(quick_or(4, 500)):
        outcome, wrong = try_tokenizer(tokenizers, name, SEED * 1000 + case, tmp_path / "case")
        assert wrong is None, f"{name}, seed {SEED * 1000 + case}, {outcome}: {wrong}"


def test_a_whole_tokenizer_of_every_kind_is_read(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
    monkeypatch.setattr("fuzz.damage", lambda data, kind, rng: data)
    monkeypatch.setattr("fuzz_tokenizers._changed", lambda pairs, rng: pairs)
    for name, kind in fuzz_tokenizers.KINDS.items():
        if kind.folder != "model" or (tokenizers / "model" / "tokenizer.model").stat().st_size:
            assert try_tokenizer(tokenizers, name, 0, tmp_path / "case") == ("read", None), name
