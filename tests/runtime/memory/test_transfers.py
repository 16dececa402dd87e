"""Memory with a budget, and links that keep to their rate."""

import ctypes
import mmap
import threading
import time

import pytest
import torch
from timing import undisturbed

from batchgen.core.errors import BatchgenError
from batchgen.runtime.memory.transfers import Arena, Link, Prefault, as_buffer, untouched

MIB = 1 << 20


def test_an_arena_gives_what_fits_and_no_more():
    arena = Arena("--gpu-memory", 3 * MIB)
    first = arena.empty((MIB // 4,), torch.float32, "the KV pool")
    arena.take(2 * MIB, "the weights")
    assert arena.allocated_bytes == 3 * MIB
    assert first.sum() == 0 and first.data_ptr() % 4096 == 0
    with pytest.raises(BatchgenError) as refused:
        arena.take(1, "activations")
    message = str(refused.value)
    assert "\n" not in message and "--gpu-memory 3.0 MiB does not hold activations" in message
    with pytest.raises(BatchgenError, match=r"KV in transit: 3\.0 MiB are allocated, 1\.0 MiB more are needed"):
        arena.empty((MIB,), torch.uint8, "KV in transit")
    assert arena.allocated_bytes == 3 * MIB, "what was refused is not counted"


def test_an_arena_without_a_budget_only_counts():
    arena = Arena("--cpu-memory")
    arena.take(1 << 50, "the weights")
    assert arena.allocated_bytes == 1 << 50


def test_threads_cannot_overdraw_an_arena():
    arena = Arena("--gpu-memory", 1000)
    given = []

    def take():
        for _ in range(200):
            try:
                arena.take(3, "weights")
                given.append(3)
            except BatchgenError:
                return

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(given) == arena.allocated_bytes == 999


@pytest.mark.parametrize("how", ["copy", "bring", "gather", "scatter"])
@undisturbed
def test_a_throttled_link_keeps_its_rate(how):
    """Within 15 %, for pieces of tens of MiB."""
    link = Link(250e6)
    source, target = torch.rand(1024, 1 << 13), torch.zeros(1024, 1 << 13)  # 32 MiB
    index = torch.arange(1023, -1, -1)
    moves = {
        "copy": lambda: link.copy(target, source),
        "bring": lambda: link.bring(source),
        "gather": lambda: link.gather(target, source, index),
        "scatter": lambda: link.scatter(target, index, source),
    }
    num_bytes = source.numel() * 4
    started = time.perf_counter()
    moves[how]()
    seconds = time.perf_counter() - started
    assert link.moved_bytes == num_bytes
    assert seconds >= 0.99 * num_bytes / 250e6, "faster than the link is"
    assert seconds <= 1.15 * num_bytes / 250e6


def test_what_comes_over_a_link_is_what_was_sent():
    link = Link()
    torch.manual_seed(0)
    source = torch.rand(6, 4, 8)
    strided = source.transpose(0, 1)
    brought = link.bring(strided)
    assert torch.equal(brought, strided) and brought.is_contiguous()
    index = torch.tensor([5, 0, 3])
    gathered = torch.zeros(3, 4, 8)
    link.gather(gathered, source, index)
    assert torch.equal(gathered, source[index])
    host = torch.zeros(6, 4, 8)
    link.scatter(host, index, gathered)
    assert torch.equal(host[index], gathered) and not host[[1, 2, 4]].any()
    assert link.moved_bytes == 4 * (source.numel() + 2 * gathered.numel())


def test_buffers_for_direct_io_are_the_tensor_itself():
    tensor = untouched((2, 4096), torch.float32)
    view = as_buffer(tensor[1])
    assert len(view) == 4 * 4096
    view[:4] = torch.tensor(1.5).numpy().tobytes()
    assert tensor[1, 0] == 1.5


def test_pages_are_provided_before_their_first_use():
    def resident_bytes(tensor):
        pages = -(-tensor.nbytes // mmap.PAGESIZE)
        seen = (ctypes.c_ubyte * pages)()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), seen) == 0
        return sum(byte & 1 for byte in seen) * mmap.PAGESIZE

    pools = [untouched((9 << 20,), torch.uint8) for _ in range(3)]
    pools[1][5 << 20] = 7
    prefault = Prefault(pools, most_bytes=18 << 20)
    prefault._thread.join(timeout=600)
    prefault.close()
    assert [resident_bytes(pool) >= 6 << 20 for pool in pools] == [True] * 3
    assert resident_bytes(pools[0]) <= 8 << 20  # a huge page may reach beyond
    assert pools[1][5 << 20] == 7 and pools[1].count_nonzero() == 1, "what was there stays"


def test_an_end_to_providing_pages():
    pools = [untouched((4 << 30,), torch.uint8)]
    prefault = Prefault(pools, most_bytes=4 << 30)
    prefault.close()
    assert not prefault._thread.is_alive()
