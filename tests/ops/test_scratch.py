"""Memory that is used again, and never by two at a time."""

import threading

import torch

from batchgen.ops.scratch import scratch


def test_memory_is_used_again_by_one_name_of_one_thread():
    first = scratch("a", (4, 8), torch.float32)
    assert first.shape == (4, 8) and first.dtype == torch.float32 and first.is_contiguous()
    assert scratch("a", (3, 5), torch.bfloat16).data_ptr() == first.data_ptr(), "no more than there is"
    assert scratch("b", (4, 8), torch.float32).data_ptr() != first.data_ptr()
    found = []
    thread = threading.Thread(target=lambda: found.append(scratch("a", (4, 8), torch.float32).data_ptr()))
    thread.start()
    thread.join()
    assert found != [first.data_ptr()]


def test_more_memory_than_there_was():
    scratch("c", (2, 2), torch.int8).fill_(1)
    larger = scratch("c", (1000, 1000), torch.float16)
    assert larger.shape == (1000, 1000) and larger.fill_(2).sum(dtype=torch.float32) == 2e6
    assert scratch("c", (0, 7), torch.float32).shape == (0, 7)
