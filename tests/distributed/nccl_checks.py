"""Sums of ranks with a CUDA device each, by NCCL, and what ends them where a rank is lost.

`test_nccl.py` runs this file on played cards; it runs on real ones as well.
"""

import signal
import time

import pytest
import ranks
import torch

from batchgen.core.errors import BatchgenError

DTYPES = ("float32", "bfloat16", "float16")

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.mark.gpu
def test_sums_are_those_of_all_ranks_and_in_the_order_of_the_calls():
    group = ranks.start(2, ranks.add_up_on_cards, DTYPES, 3)
    for name in DTYPES:
        ranks.check_sums_on_cards(group, name, 3)
    group.ready()
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.ones(8, 2, device="cuda").t())
    group.close()


def until_it_is_known(group):
    """Wait until rank 0 knows that another rank has ended."""
    with pytest.raises(BatchgenError, match="rank 1 of 2 was killed by SIGKILL"):
        for _ in range(600):
            group.check()
            time.sleep(0.1)


@pytest.mark.gpu
def test_a_rank_that_is_lost_ends_sums_on_the_device():
    """A kernel of NCCL would wait for it for ever."""
    group = ranks.start(2, ranks.die_on_cards, int(signal.SIGKILL), 1, 1)
    values = torch.ones(3, device="cuda")
    group.all_reduce(values)
    assert values.tolist() == [2, 2, 2]
    group.all_reduce(torch.ones(3, device="cuda"))
    until_it_is_known(group)
    torch.cuda.synchronize()
    group.close(done=False)


@pytest.mark.gpu
def test_a_rank_that_is_lost_before_ranks_are_connected_on_the_device_ends_that():
    group = ranks.start(2, ranks.die_on_cards, int(signal.SIGKILL), 1, 0)
    with pytest.raises(BatchgenError, match="rank 1 of 2 was killed by SIGKILL"):
        group.all_reduce(torch.ones(3, device="cuda"))
    group.close(done=False)
