"""What is measured of the machine beside products and transfers, with a model as small as can be."""

import pytest

from batchgen.profiler import overheads


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(overheads, "_ROWS", 64)
    monkeypatch.setattr(overheads, "_WIDTH", 64)


def test_loading_is_timed_of_both_kinds_of_files(small):
    pytest.importorskip("gguf")
    assert overheads._load_bytes_per_s() > 0
    assert overheads._gguf_load_bytes_per_s() > 0


def test_sweeps_and_rows_are_timed_without_a_tokenizer(monkeypatch):
    monkeypatch.setattr(overheads, "_PASSING_BYTES", 64)
    monkeypatch.setattr(overheads, "_OUTPUT_TOKENS", 4)
    assert overheads._sweep_s("cpu", 1, 2) > 0
