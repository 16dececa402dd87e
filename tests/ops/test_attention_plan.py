"""The tables of a sweep's sequences as arrays, against plain loops over the sequences."""

import numpy as np
import pytest
from attention_cases import laid_out

from batchgen.ops.attention_items import FIRST_KEY, LAST_KEY, TABLE, item_spans
from batchgen.ops.attention_plan import SequenceSlice, SweepTables, plan_attention

BLOCK = 4


def slices_of(seed):
    rng = np.random.default_rng(seed)
    slices = []
    for _ in range(rng.integers(0, 9)):
        queries, cached = int(rng.integers(1, 7)), int(rng.integers(0, 20))
        blocks = -(-(queries + cached) // BLOCK) + int(rng.integers(0, 2))
        slices.append(SequenceSlice(queries, cached, rng.integers(0, 99, blocks).astype(np.int32)))
    return slices


@pytest.mark.parametrize("seed", range(6))
def test_positions_and_slots_are_those_of_each_token_of_each_sequence(seed):
    slices = slices_of(seed)
    tables = SweepTables.of(slices)
    positions = [p for s in slices for p in range(s.num_cached, s.num_keys)]
    slots = [int(s.blocks[p // BLOCK]) * BLOCK + p % BLOCK for s in slices for p in range(s.num_cached, s.num_keys)]
    assert tables.positions.tolist() == positions
    assert tables.slots(BLOCK).tolist() == slots


@pytest.mark.parametrize("seed", range(6))
def test_tables_in_another_order_are_those_of_sequences_in_that_order(seed):
    slices = slices_of(seed)
    order = np.random.default_rng(seed).permutation(len(slices))
    expected, tables = SweepTables.of([slices[i] for i in order]), SweepTables.of(slices).in_order(order)
    for name in ("num_queries", "num_cached", "num_blocks", "blocks", "starts", "tables"):
        assert getattr(tables, name).tolist() == getattr(expected, name).tolist(), name


def what_items_read(plan):
    """The items of a plan, each with the blocks that it reads."""
    spans, table = item_spans(plan, BLOCK)
    items = []
    for span in spans.tolist():
        first, stop = span[FIRST_KEY] // BLOCK, -(-span[LAST_KEY] // BLOCK)
        blocks = table[span[TABLE] + first : span[TABLE] + stop].tolist()
        items.append((span[:TABLE], span[TABLE + 1 :], blocks))
    return sorted(items)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_for_a_gpu_reads_what_one_for_a_cpu_does(seed, window):
    rng = np.random.default_rng(seed)
    sequences = [(int(rng.choice([1, 1, 1, 7])), int(rng.integers(0, 60)), bool(rng.integers(2))) for _ in range(20)]
    slices, groups, _ = laid_out(20, sequences, BLOCK, seed)
    padded, ragged = (
        plan_attention(SweepTables.of(slices), groups, kv_block_size=BLOCK, key_bytes=key_bytes, window=window)
        for key_bytes in (1 << 16, None)
    )
    assert ragged.sequences is not None and not ragged.decode
    assert what_items_read(ragged) == what_items_read(padded)
