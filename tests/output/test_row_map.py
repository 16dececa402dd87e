"""Facts about rows in arrays: right in any order of rows, and as large as the rows' span, not more."""

import numpy as np
import pytest

from batchgen.output.row_map import RowMap

BLOCK = 10


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
def test_what_is_held_is_right_and_no_larger_than_the_rows(order):
    """Parts are read from the newest on, and the newest has the last rows.

    Once memory grew by half with each of them.
    """
    rows = RowMap(np.int32)
    base = 1000
    for start in blocks(order, 40):
        rows.put(np.arange(base + start, base + start + BLOCK), start + 1)
        assert len(rows._span[1]) <= 2 * (base + 40 * BLOCK)
    found = rows.get(base - 3, 40 * BLOCK + 6)
    expected = np.repeat(BLOCK * np.arange(40) + 1, BLOCK)
    assert found.tolist() == [0, 0, 0, *expected, 0, 0, 0]
    assert rows[base] == 1 and rows[base - 1] == rows[0] == 0
    assert rows.next_zero(base) == base + 40 * BLOCK and rows.next_zero(0) == 0


def test_a_few_rows_far_up_take_their_span_alone():
    rows = RowMap(np.uint8)
    for start in (10**9 + 50, 10**9 + 20, 10**9):
        rows.put(np.arange(start, start + BLOCK), 1)
    assert len(rows._span[1]) < 1000 and rows.count(1) == 3 * BLOCK


def test_numbers_of_rows_in_any_order():
    numbers = RowMap(np.int32)
    assert numbers.at(np.array([5, 0])).tolist() == [0, 0]
    numbers.put(np.arange(10, 20), np.arange(10, 20))
    assert numbers.at(np.array([19, 3, 10, 500, 12])).tolist() == [19, 0, 10, 0, 12]
