"""Numbers of rows: right in any order of rows, and held for rows that differ from their neighbours alone."""

import itertools

import numpy as np
import pytest

from batchgen.output import row_map
from batchgen.output.row_map import DoneRows, RowMap

BLOCK = 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(row_map, "_CHUNK_ROWS", 16)


def blocks(order, count):
    starts = [BLOCK * i for i in range(count)]
    if order == "descending":
        starts.reverse()
    elif order == "any":
        np.random.default_rng(0).shuffle(starts)
    elif order == "outwards":
        starts.sort(key=lambda start: abs(start - BLOCK * count // 2))
    return starts


@pytest.mark.parametrize("order", ["ascending", "descending", "any", "outwards"])
def test_numbers_are_right_in_any_order_of_rows(order):
    rows, base = RowMap(np.int32), 1000
    for start in blocks(order, 40):
        rows.put(np.arange(base + start, base + start + BLOCK), start + 1)
    found = rows.at(np.arange(base - 3, base + 40 * BLOCK + 3))
    assert found.tolist() == [0, 0, 0, *np.repeat(BLOCK * np.arange(40) + 1, BLOCK), 0, 0, 0]
    assert rows[base] == 1 and rows[base - 1] == rows[0] == 0
    assert rows.next_zero(base) == base + 40 * BLOCK and rows.next_zero(0) == 0


def test_every_call_agrees_with_a_dict():
    rng = np.random.default_rng(1)
    rows, expected = RowMap(np.uint8), np.zeros(300, np.uint8)
    for _ in range(200):
        some = np.arange(*sorted(rng.integers(0, 300, 2)))
        if rng.random() < 0.5:
            some = rng.permutation(300)[: rng.integers(1, 60)]
        values = rng.integers(0, 3, len(some)) if rng.random() < 0.3 else int(rng.integers(0, 3))
        rows.put(some, values)
        expected[some] = values
        if rng.random() < 0.1:
            rows.replace(2, 0)
            expected[expected == 2] = 0
        assert np.array_equal(rows.at(np.arange(300)), expected) and [rows[i] for i in range(300)] == expected.tolist()
        for value, last_of in itertools.product((1, 2), (1, 3, 7)):
            assert rows.count(value, last_of) == np.count_nonzero(expected[last_of - 1 :: last_of] == value)
        start = int(rng.integers(0, 300))
        assert rows.next_zero(start) == next((i for i in range(start, 300) if not expected[i]), 300)


def test_rows_that_are_done_in_about_their_order_take_the_same_memory_for_any_number_of_them():
    held = []
    for count in (1_000, 10_000):
        done, most = DoneRows(), 0
        order = np.argsort(np.arange(count) + np.random.default_rng(0).integers(0, 40, count), kind="stable")
        for start in range(0, count, BLOCK):
            done.mark(order[start : start + BLOCK], np.zeros(BLOCK, bool))
            most = max(most, done._state.held_bytes)
        assert len(done) == count and done.next_unfinished(0) == count
        held.append(most)
    assert held[1] <= held[0] <= 6 * 16


def test_a_few_rows_far_up_take_their_chunks_alone():
    rows = RowMap(np.uint8)
    for start in (10**9 + 50, 10**9 + 20, 10**9):
        rows.put(np.arange(start, start + BLOCK), 1)
    assert rows.held_bytes <= 5 * 16 and rows.count(1) == 3 * BLOCK


def test_numbers_of_rows_in_any_order():
    numbers = RowMap(np.int32)
    assert numbers.at(np.array([5, 0])).tolist() == [0, 0]
    numbers.put(np.arange(10, 20), np.arange(10, 20))
    assert numbers.at(np.array([19, 3, 10, 500, 12])).tolist() == [19, 0, 10, 0, 12]
