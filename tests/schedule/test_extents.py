"""Runs of blocks on disk: never twice in use, never lost, whole again in the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.schedule.extents import ExtentManager, runs_of

OPS = st.lists(
    st.tuples(st.sampled_from(["enter", "grow", "leave"]), st.integers(0, 30), st.integers(1, 12)), max_size=60
)


def free_runs(extents):
    """(first block, number of blocks) of each free run, in ascending order."""
    return list(extents._free.runs())


def free_blocks(extents):
    return {b for start, length in free_runs(extents) for b in range(start, start + length)}


@settings(max_examples=some_draws(300), deadline=None)
@given(st.integers(1, 40), OPS)
def test_blocks_are_in_one_place_at_any_time(num_blocks, operations):
    extents = ExtentManager(num_blocks, 16)
    tables = []
    for name, which, count in operations:
        longest = max((length for _, length in free_runs(extents)), default=0)
        if name == "enter":
            allocation = extents.admit([1, 2, 3], count, 0)
            assert (allocation is not None) == (count <= longest), "refused though it fits, or the other way round"
            if allocation is not None:
                assert allocation.num_matched == 0
                assert list(runs_of(allocation.blocks)) == [(allocation.blocks[0], count)], "not in one run"
                tables.append(allocation.blocks)
        elif name == "grow" and tables and extents.num_available:
            table = tables[which % len(tables)]
            free = free_blocks(extents)
            block = extents.allocate(table[-1])
            assert block in free
            if table[-1] + 1 in free:
                assert block == table[-1] + 1, "the next block was free"
            else:
                assert (block, longest) in runs_of(sorted(free)), "not at the start of the longest run"
            table.append(block)
        elif name == "leave" and tables:
            extents.release(tables.pop(which % len(tables)))
        used = [b for table in tables for b in table]
        assert len(used) == len(set(used)), "two sequences in one place"
        assert free_blocks(extents) == set(range(num_blocks)) - set(used)
        assert extents.num_available == num_blocks - len(used) and extents.num_used == len(used)
        assert free_runs(extents) == list(runs_of(sorted(free_blocks(extents)))), "free runs that touch are one"
    for table in tables:
        extents.release(table)
    assert free_runs(extents) == [(0, num_blocks)]


def test_the_first_run_that_is_long_enough_is_taken():
    extents = ExtentManager(20, 16)
    first, second, third = (extents.admit([], n, 0).blocks for n in (3, 6, 4))
    extents.release(first)
    extents.release(third)  # free: 0 to 2, 9 to 19
    assert extents.admit([], 4, 0).blocks == [9, 10, 11, 12]
    assert extents.admit([], 2, 0).blocks == [0, 1]
    extents.release(second)
    assert free_runs(extents) == [(2, 7), (13, 7)]


def test_what_outgrows_its_extent_goes_on_where_it_can_grow_longest():
    extents = ExtentManager(30, 16)
    tables = [extents.admit([], n, 0).blocks for n in (4, 2, 5, 3, 9, 7)]
    for i in (1, 3, 4):
        extents.release(tables[i])  # free: 4 and 5, 11 to 22
    grown = [extents.allocate(tables[0][-1])]
    for _ in range(3):
        grown.append(extents.allocate(grown[-1]))
    assert grown == [4, 5, 11, 12]
    extents.release(extents.admit([], 5, 0).blocks[:2])  # free: 13 and 14, 18 to 22
    assert extents.allocate(10) == 18, "the next run is free too, but shorter"
    assert extents.allocate(29) == 19


def test_blocks_promised_to_others_stay():
    extents = ExtentManager(10, 16)
    assert extents.admit([], 6, 5) is None
    assert extents.admit([], 6, 4).blocks == [0, 1, 2, 3, 4, 5]


def filled(extents, tokens, num_blocks):
    """A sequence whose prompt has run, with its blocks in the trie."""
    allocation = extents.admit(tokens, num_blocks, 0)
    node = extents.node(allocation.blocks[allocation.num_matched - 1]) if allocation.num_matched else 0
    for block in range(allocation.num_matched, len(tokens) // 16):
        node = extents.insert(node, tokens[block * 16 : (block + 1) * 16], allocation.blocks[block])
    return allocation


def test_a_prefix_that_another_has_computed_is_taken_over_and_a_run_follows():
    extents = ExtentManager(20, 16)
    prefix = list(range(40))
    first = filled(extents, [*prefix, *range(100, 110)], 4)
    second = filled(extents, [*prefix, *range(200, 210)], 6)
    assert first.blocks == [0, 1, 2, 3]
    assert second.num_matched == 2 and second.blocks == [0, 1, 4, 5, 6, 7]
    extents.release(first.blocks)
    assert extents.num_used == 6
    extents.release(second.blocks)
    assert extents.num_available == 20
    assert filled(extents, [*prefix, 7], 3).blocks[:2] == [0, 1]


def test_prefixes_without_users_give_way_to_a_run_the_oldest_first():
    extents = ExtentManager(8, 16)
    old, new = ([subject] * 32 for subject in (1, 2))
    for tokens in (old, new):
        extents.release(filled(extents, [*tokens, 0], 3).blocks)
    assert extents.num_available == 8 and len(extents._free) == 4
    assert extents.admit([3] * 20, 5, 0).blocks == [3, 4, 5, 6, 7]
    assert not extents.known([*old, 0]) and extents.known([*new, 0]) == [2]
    assert extents.admit([4] * 20, 4, 0) is None


def test_a_prefix_between_free_blocks_is_computed_again_where_no_run_behind_it_is_long_enough():
    extents = ExtentManager(8, 16)
    before, prefix = extents.admit([], 3, 0), [1] * 32
    extents.release(filled(extents, [*prefix, 0], 3).blocks)
    extents.release(before.blocks)
    assert extents.known([*prefix, 0]) == [3, 4] and extents.num_available == 8
    behind = extents.admit([*prefix, 0], 5, 0)
    assert behind.blocks == [3, 4, 0, 1, 2]
    extents.release(behind.blocks)
    whole = extents.admit([*prefix, 0], 8, 0)
    assert (whole.blocks, whole.num_matched) == (list(range(8)), 0)


def test_a_block_released_twice_is_caught():
    extents = ExtentManager(10, 16)
    extents.admit([], 2, 0)
    table = extents.admit([], 4, 0).blocks
    extents.release(table)
    for again in (table, table[1:2], table[-1:]):
        with pytest.raises(AssertionError, match="twice"):
            extents.release(again)
    with pytest.raises(AssertionError, match="twice"):
        extents.release([9])


def test_runs_of_a_table():
    assert list(runs_of([])) == []
    assert list(runs_of([4, 5, 6, 2, 3, 9, 8])) == [(4, 3), (2, 2), (9, 1), (8, 1)]
