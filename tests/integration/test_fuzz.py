"""Jobs that meet damaged files (support/fuzz.py): a few cases of every kind. `python tests/support/fuzz.py` tries as many as asked for."""

import pytest
from fuzz import KINDS, prepare, try_case
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
