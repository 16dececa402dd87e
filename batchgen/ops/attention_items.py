"""The items of an attention plan as rows of one array, which can be cut by tokens and by keys. No torch here."""

from __future__ import annotations

import numpy as np

from batchgen.ops.attention_plan import ALL_KEYS, AttentionPlan, SequenceItems

# Columns of an item. Token i of it sees the keys k of [FIRST_KEY, LAST_KEY) with k <= CAUSAL + i and k > CAUSAL + i -
# WINDOW; CAUSAL of tokens that see every key is ALL_KEYS. Key k lies in block k // kv_block_size after TABLE of the
# block table. PARTIAL: its first partial row, or -1: it is alone.
FIRST_TOKEN, NUM_TOKENS, FIRST_KEY, LAST_KEY, CAUSAL, WINDOW, TABLE, PARTIAL = range(8)
COLUMNS = 8
NO_WINDOW = (1 << 31) - 1


def item_spans(plan: AttentionPlan, kv_block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The uncut items of a plan, int64 [items, COLUMNS], and the block table.

    An item has tokens of one sequence, or the tokens that attend to a shared prefix.
    """
    spans, tables, used = [], [], 0
    if plan.sequences is not None:
        spans.append(_spans_of_sequences(plan.sequences))
        tables.append(plan.sequences.blocks)
        used = len(plan.sequences.blocks)
    for group in plan.decode:
        span = np.empty((group.stop - group.start, COLUMNS), np.int64)
        span[:, FIRST_TOKEN] = np.arange(group.start, group.stop)
        span[:, FIRST_KEY], span[:, LAST_KEY] = group.first_key, np.maximum(group.num_keys, group.first_key)
        span[:, TABLE] = used + np.arange(len(span)) * group.blocks.shape[1]
        span[:, [NUM_TOKENS, CAUSAL, WINDOW, PARTIAL]] = 1, ALL_KEYS, NO_WINDOW, -1
        spans.append(span)
        tables.append(group.blocks.reshape(-1))
        used += group.blocks.size
    rest = []
    for shared in plan.shared:
        keys = len(shared.blocks) * kv_block_size
        rest.append((shared.start, shared.stop - shared.start, 0, keys, ALL_KEYS, NO_WINDOW, used, -1))
        tables.append(shared.blocks)
        used += len(shared.blocks)
    if len(spans) == 1 and not rest:
        return spans[0], tables[0]
    spans.append(np.array(rest, np.int64).reshape(-1, COLUMNS))
    return np.concatenate(spans), np.concatenate(tables) if tables else np.zeros(0, np.int32)


def _spans_of_sequences(items: SequenceItems) -> np.ndarray:
    """The uncut items of sequences, int64 [n, COLUMNS]."""
    spans = np.empty((len(items.start), COLUMNS), np.int64)
    is_one = items.num_tokens == 1
    spans[:, FIRST_TOKEN], spans[:, NUM_TOKENS] = items.start, items.num_tokens
    spans[:, LAST_KEY] = items.query_offset + items.num_tokens
    # `tokens_cut` lets the several tokens of a sequence begin where the window of each does.
    spans[:, FIRST_KEY] = 0 if items.window is None else np.where(is_one, items.first_key, 0)
    spans[:, CAUSAL] = np.where(is_one, ALL_KEYS, np.minimum(ALL_KEYS, items.query_offset + items.ahead))
    spans[:, WINDOW] = NO_WINDOW if items.window is None else np.where(is_one, NO_WINDOW, items.window + items.ahead)
    spans[:, TABLE], spans[:, PARTIAL] = items.places, -1
    return spans


def _repeated(items: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat item i counts[i] times.

    Returns:
        The repeated items; for each, its number among the repetitions of the item.
    """
    if (counts == 1).all():  # as in most sweeps
        return items.copy(), np.zeros(len(items), np.int64)
    return np.repeat(items, counts, axis=0), numbers_within(counts)


def numbers_within(counts: np.ndarray) -> np.ndarray:
    """The numbers 0 to count - 1 for each count, one range after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def tokens_cut(spans: np.ndarray, most_tokens: int) -> np.ndarray:
    """Cut items into items of at most `most_tokens` tokens, with the keys that these tokens attend to."""
    tiles, which = _repeated(spans, -(-spans[:, NUM_TOKENS] // most_tokens))
    first = which * most_tokens
    tiles[:, FIRST_TOKEN] += first
    tiles[:, NUM_TOKENS] = np.minimum(tiles[:, NUM_TOKENS] - first, most_tokens)
    tiles[:, CAUSAL] += np.where(tiles[:, CAUSAL] == ALL_KEYS, 0, first)
    tiles[:, LAST_KEY] = np.minimum(tiles[:, LAST_KEY], tiles[:, CAUSAL] + tiles[:, NUM_TOKENS])
    tiles[:, FIRST_KEY] = np.maximum(tiles[:, FIRST_KEY], tiles[:, CAUSAL] - tiles[:, WINDOW] + 1)
    return tiles


def keys_cut(items: np.ndarray, most_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut items into items of at most `most_keys` keys.

    Returns:
        The parts; for each, its number among the parts of its item.
    """
    keys = items[:, LAST_KEY] - items[:, FIRST_KEY]
    parts, which = _repeated(items, np.maximum(1, -(-keys // most_keys)))
    parts[:, FIRST_KEY] += which * most_keys
    parts[:, LAST_KEY] = np.minimum(parts[:, LAST_KEY], parts[:, FIRST_KEY] + most_keys)
    return parts, which
