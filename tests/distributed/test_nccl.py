"""Sums on CUDA devices go by NCCL.

There is none here: a stand-in refuses what NCCL would refuse, and notes what it is asked for.
"""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import ranks
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from batchgen.core.errors import BatchgenError
from batchgen.distributed.group import lead
from batchgen.distributed.launch import own_device

WORK = "ranks:say_ready"


class FakeNccl:
    """A stand-in for torch.distributed.ProcessGroupNCCL: contiguous tensors of one CUDA device, alike on all ranks.

    Attributes:
        of_all: all groups that were made.
    """

    class Options:
        _timeout = None

    of_all: list = []

    def __init__(self, store, rank, size, options):
        assert options._timeout is not None, "NCCL's own is half an hour"
        self.rank, self.size, self.sums, self.has_aborted = rank, size, [], threading.Event()
        self.of_all.append(self)
        # As NCCL's ranks find one another: by a store that all of them reach.
        store.set(f"rank {rank}", "here")

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        if not tensor.is_cuda or not tensor.is_contiguous():
            raise RuntimeError(f"NCCL adds up contiguous tensors on CUDA, not one on {tensor.device}")
        self.sums.append((tuple(tensor.shape), tensor.dtype, str(tensor.device)))
        return SimpleNamespace(wait=lambda: True)

    def abort(self):
        self.has_aborted.set()


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(FakeNccl, "of_all", [])
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(ranks.__file__))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return FakeNccl.of_all


def test_the_backend_is_that_of_the_tensors_device(nccl):
    group = lead(1, work=WORK)
    values = torch.arange(3.0)
    group.all_reduce(values)
    assert values.tolist() == [0, 1, 2] and not nccl, "tensors of the host go by the ranks' own connections"
    with FakeTensorMode():
        for rows in (4, 2, 4):
            group.all_reduce(torch.empty(rows, 8, dtype=torch.bfloat16, device="cuda"))
        with pytest.raises(BatchgenError, match="rank 0 of 1 lost the others"):
            group.all_reduce(torch.empty(8, 2, device="cuda").t())
    (made,) = nccl
    assert (made.rank, made.size) == (0, 1)
    assert made.sums == [((rows, 8), torch.bfloat16, "cuda:0") for rows in (4, 2, 4)], "in the order of the calls"
    group.check()
    group.close()
    assert not made.has_aborted.is_set()


def test_a_rank_that_is_lost_ends_sums_on_the_device(nccl):
    """A kernel of NCCL would wait for it for ever."""
    group = ranks.start(2, ranks.die, int(signal.SIGKILL), 1)
    with FakeTensorMode():
        group.all_reduce(torch.empty(4, device="cuda"))
    group.all_reduce(torch.ones(3))
    with pytest.raises(BatchgenError, match="rank 1 of 2 was killed by SIGKILL"):
        group.all_reduce(torch.ones(3))
    with pytest.raises(BatchgenError, match="rank 1 of 2 was killed by SIGKILL"):
        group.check()
    assert nccl[0].has_aborted.wait(60), "in the thread that finds it"
    group.close(done=False)


def test_a_rank_that_is_lost_before_ranks_are_connected_on_the_device_ends_that(nccl):
    group = ranks.start(2, ranks.die, int(signal.SIGKILL), 1)
    group.all_reduce(torch.ones(3))
    with pytest.raises(BatchgenError, match="rank 1 of 2 was killed by SIGKILL"):
        group.all_reduce(torch.ones(3))
    with FakeTensorMode():
        group.all_reduce(torch.empty(4, device="cuda"))
    assert nccl[0].has_aborted.wait(60)
    group.close(done=False)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0", "1", "2"]),
        ("", ["0", "1", "2"]),
        ("4,6,7", ["4", "6", "7"]),
        ("GPU-8932f937,GPU-12,MIG-3", ["GPU-8932f937", "GPU-12", "MIG-3"]),
        ("5", ["5", "5", "5"]),  # a launcher has given each of its own
    ],
)
def test_a_rank_sees_one_device(visible, devices):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [own_device(rank, environment) for rank in range(3)] == devices


def test_processes_have_the_device_of_their_number(nccl, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    group = ranks.start(3, ranks.note_device, str(tmp_path / "device"))
    group.ready()
    group.close()
    assert [(tmp_path / f"device.{rank}").read_text() for rank in (1, 2)] == ["5", "7"]
