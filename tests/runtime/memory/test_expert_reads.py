"""Which pages of a layer's file are read for which experts."""

import random
from pathlib import Path

import pytest

from batchgen.core.direct_io import ALIGNMENT
from batchgen.models.layouts import Stored
from batchgen.models.store.layout import lay_out
from batchgen.runtime.memory.expert_reads import ExpertReads, Stretch


def stretches_of(num_experts, hidden, inner, on_disk):
    groups = {
        "qkv": {"qkv.weight": (3 * hidden, hidden), "input_norm.weight": (hidden,)},
        "out": {"out.weight": (hidden, hidden)},
        "up": {"gate_up.weight": (num_experts * 2 * inner, hidden), "router.weight": (num_experts, hidden)},
        "down": {"down.weight": (num_experts * hidden, inner), "shared_down.weight": (hidden, 7)},
    }
    stored = {g: {name: Stored(shape, "bfloat16") for name, shape in own.items()} for g, own in groups.items()}
    file = lay_out(Path("layer"), stored, "bfloat16")[0]
    found = []
    for together in on_disk:
        found.append(Stretch(file, together, found[-1].stop if found else 0))
    return found


def pages_of(stretches, wanted):
    """Numbers of the file's pages with any byte of what is wanted: (tensor, first byte, bytes)."""
    found = set()
    for tensor, first, size in wanted:
        start = tensor.offset + first
        found |= set(range(start // ALIGNMENT, (start + size - 1) // ALIGNMENT + 1))
    return found


def pages_read(pieces, stretches):
    found = []
    for offset, start, stop in pieces:
        assert offset % ALIGNMENT == start % ALIGNMENT == stop % ALIGNMENT == 0
        (home,) = (s for s in stretches if s.start <= start and stop <= s.stop)
        assert home.place_of(offset) == start, "the buffer is laid out like the file"
        found += range(offset // ALIGNMENT, (offset + stop - start) // ALIGNMENT)
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize(
    "on_disk", [[("qkv", "out", "up", "down")], [("up",)], [("qkv",), ("up", "down")], [("qkv",), ("down",)]]
)
@pytest.mark.parametrize(("num_experts", "hidden", "inner"), [(4, 64, 24), (64, 40, 104), (8, 1000, 300), (3, 33, 1)])
def test_every_page_is_read_once_and_none_that_nobody_wants(num_experts, hidden, inner, on_disk):
    stretches, rng = stretches_of(num_experts, hidden, inner, on_disk), random.Random(num_experts)
    tensors = [tensor for stretch in stretches for tensor in stretch.tensors]
    of_experts = [t for t in tensors if t.name in ("gate_up.weight", "down.weight")]
    reads = ExpertReads(stretches, num_experts)
    held = pages_read(reads.dense(), stretches)
    assert held == pages_of(stretches, [(t, 0, t.num_bytes) for t in tensors if t not in of_experts])
    for _ in range(5):
        chosen = rng.sample(range(num_experts), rng.randint(0, num_experts))
        wanted = pages_of(
            stretches,
            [(t, e * t.num_bytes // num_experts, t.num_bytes // num_experts) for t in of_experts for e in chosen],
        )
        assert pages_read(reads.experts(chosen), stretches) == wanted - held
        held |= wanted
