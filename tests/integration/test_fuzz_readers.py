"""Readers that meet damaged files (support/fuzz_readers.py): a few cases of each.

`python tests/support/fuzz_readers.py` tries as many as asked for.
"""

import json
import random
import shutil

import pytest
from fuzz_readers import READERS, mutate, try_reader
from thorough import SEED, quick_or


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_told_in_one_line(tmp_path, name):
    whole = tmp_path / "whole"
    whole.mkdir()
    READERS[name].make(whole)
    shutil.copytree(whole, tmp_path / "once")
    READERS[name].read(tmp_path / "once")  # else every case below would pass for the wrong reason
    outcomes = set()
    for case in range(quick_or(READERS[name].quick, 100 * READERS[name].quick)):
        seed = f"{name} {SEED * 10000 + case}"
        outcome, wrong = try_reader(READERS[name], whole, tmp_path / "case", seed)
        assert wrong is None, f"{seed}: {wrong}"
        outcomes.add(outcome)
    assert outcomes != {"read"} or name == "worker"  # what a worker says is said again: it is left out


def test_every_kind_of_damage_is_done():
    text = json.dumps({"a": [1, 2.5, {"b": "text"}], "c": {"d": None}}).encode()
    found = [mutate(text, random.Random(seed)) for seed in range(2000)]
    assert any(b"NaN" in one for one in found) and any(b"1e999" in one for one in found)
    assert any(one.count(b"[") > 2000 for one in found) and any(len(one) < len(text) for one in found)
    assert any(one.count(b'"a"') > 1 for one in found) and any(b"\xff" in one for one in found)
