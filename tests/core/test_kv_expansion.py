"""KV by layer whose number of layers on the device changes: which layers these are, and the blocks that remain."""

import itertools

import pytest

from batchgen.core.kv_expansion import KVExpansion, coming_order
from batchgen.core.plan import kv_on_device

PLANNED = kv_on_device(8, 2)


def expansion(num_on_device, device_bytes=2 * 100 * 10, staging_bytes=0):
    there = [layer for layer in range(8) if PLANNED[layer]]
    streamed = [layer for layer in range(8) if not PLANNED[layer]]
    return KVExpansion(
        PLANNED, (*there, *coming_order(streamed)), (10,) * 8, device_bytes, staging_bytes, 100, 30, num_on_device
    )


@pytest.mark.parametrize("count", [0, 1, 2, 5, 32])
def test_the_first_layers_of_the_order_are_spread_over_all(count):
    order = coming_order(range(count))
    assert sorted(order) == list(range(count))
    for first in range(1, count):
        there = sorted(order[:first])
        gaps = [b - a for a, b in itertools.pairwise(there)]
        assert max(gaps, default=0) <= 4 * -(-count // first)


def test_layers_that_the_plan_keeps_on_the_device_stay_there_and_others_come_one_by_one():
    before = set()
    for number in range(2, 9):
        there = {layer for layer, stays in enumerate(expansion(number).on_device) if stays}
        assert len(there) == number and before < there
        before = there
    assert expansion(2).on_device == PLANNED and all(expansion(8).on_device)


def test_more_layers_on_the_device_leave_fewer_blocks_and_without_streaming_there_is_more_memory():
    assert [expansion(n).num_blocks for n in (2, 4, 5, 8)] == [100, 50, 40, 25]
    assert expansion(8, staging_bytes=800).num_blocks == 35
    assert expansion(7, staging_bytes=800).num_blocks == 28


def test_only_numbers_of_layers_with_which_the_longest_row_fits_are_a_choice():
    assert expansion(2).choices == [2, 3, 4, 5, 6]
    assert expansion(2, staging_bytes=800).choices == [2, 3, 4, 5, 6, 8]


def test_the_streamed_part_is_that_of_the_bytes():
    assert [expansion(2).streamed_frac(n) for n in (2, 5, 8)] == [0.75, 0.375, 0.0]
