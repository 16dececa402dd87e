"""CUDA's runtime as batchgen uses it, on a card: `test_played_card.py` runs this file on a played one, of whose host's
memory 96 MiB can be pinned."""

import gc
import os

import pytest
import torch

from batchgen.core.errors import BatchgenError
from batchgen.runtime import cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MIB = 1 << 20


@pytest.mark.skipif("PLAYED_CUDA_PINNABLE_MIB" not in os.environ, reason="all memory can be pinned")
def test_a_pin_that_is_refused_does_not_end_a_later_launch():
    memory = cuda.PinnedMemory()
    with pytest.raises(BatchgenError, match=r"cannot pin 200\.0 MiB of host memory \(CUDA error 2\)"):
        memory.zeros((200 * MIB,), torch.uint8)
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_capture_leaves_streams_the_memory_that_they_keep():
    driver = cuda.CudaDriver()
    driver.reserve("compute", 64 * MIB)
    kept = torch.cuda.memory_reserved()
    assert kept >= 64 * MIB
    target = torch.zeros(10, device="cuda")
    replay = driver.capture(lambda: target.add_(torch.ones(10, device="cuda")))
    assert torch.cuda.memory_reserved() >= kept
    with torch.cuda.stream(driver.streams["compute"]):
        replay()
        replay()
    driver.finish()
    assert target.tolist() == [2.0] * 10


def test_graphs_can_be_captured_when_all_earlier_ones_are_gone():
    driver, target = cuda.CudaDriver(), torch.zeros(10, device="cuda")
    for _ in range(3):
        replay = driver.capture(lambda: target.add_(torch.ones(10, device="cuda")))
        replay()
        driver.finish()
        del replay
        gc.collect()
    torch.cuda.synchronize()
    assert target.tolist() == [3.0] * 10


def test_a_capture_for_which_streams_leave_too_little_takes_what_they_keep():
    gc.collect()
    torch.cuda.empty_cache()
    driver = cuda.CudaDriver()
    try:
        cuda.cap_memory(128 * MIB)
        driver.reserve("compute", 96 * MIB)
        made = []
        replay = driver.capture(lambda: made.append(torch.ones(80 * MIB, dtype=torch.uint8, device="cuda")))
        replay()
        driver.finish()
        assert made[-1].min().item() == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_first_product_takes_what_is_left_to_it_and_no_more():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(cuda.CudaDriver().streams["compute"]):
        product = torch.ones(16, 16, device="cuda") @ torch.ones(16, 16, device="cuda")
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated() - before - product.nbytes
    assert MIB <= taken <= cuda._CUBLAS_BYTES
