"""The chunks in which the gated delta rule takes a sequence's tokens, and their FLOPs. No torch here."""

from __future__ import annotations

# Tokens that are computed together as matrix products.
CHUNK = 64


def chunk_flops_per_token(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """FLOPs of one token in a whole chunk: its share of the chunk's matrix products.

    Keys and queries are multiplied with the state, and what the chunk adds to the state is a product too. Products of
    the chunk's tokens with one another are triangles, and count by half: keys with keys and queries with keys for each
    key head, and two with values for each value head.
    """
    of_states = 3 * 2 * key_dim * value_dim * value_heads
    of_triangles = 2 * key_dim * key_heads + 2 * value_dim * value_heads
    return of_states + CHUNK * of_triangles


def prepared_bytes(value_heads: int, dtype_bytes: int) -> int:
    """Bytes that a GPU has for one token while its chunk is computed: rows of two matrices, four factors in fp32."""
    return value_heads * (2 * CHUNK * dtype_bytes + 4 * 4)
