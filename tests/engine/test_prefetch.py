"""Items that another thread makes ahead of time."""

import threading

import pytest

from batchgen.engine.prefetch import Prefetch


def test_items_come_in_their_order_and_few_are_made_early():
    made, ahead = [], 4

    def source():
        for i in range(2000):
            made.append(i)
            yield i

    items = Prefetch(source(), ahead)
    for taken, item in enumerate(items):
        assert item == taken
        assert len(made) <= taken + 1 + ahead + 1
    assert len(made) == 2000 and items.ready and next(items, None) is None


def test_items_that_are_there_are_taken_together():
    items = Prefetch(iter(range(100)), 8)
    taken = []
    while some := items.take(3):
        assert len(some) <= 3
        taken += some
    assert taken == list(range(100))


def test_an_exception_comes_in_the_place_of_its_item():
    def source():
        yield 1
        raise ValueError("broken")

    items = Prefetch(source(), 4)
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken"):
        next(items)
    assert next(items, None) is None


def test_closing_ends_a_thread_that_waits_for_space():
    items = Prefetch(iter(range(10**9)), 2)
    assert next(items) == 0
    items.close()
    assert not any(thread is items._thread for thread in threading.enumerate())
    assert next(items, None) is None
