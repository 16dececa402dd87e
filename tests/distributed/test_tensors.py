"""Sums are the same on all ranks to the last bit, and messages larger than any buffer pass both ways at once."""

import socket
import threading

import pytest
import torch

from batchgen.distributed.tensors import TensorLinks


def linked(size, timeout_s=60):
    """Links of ranks that are threads of this process."""
    ends = [{} for _ in range(size)]
    for a in range(size):
        for b in range(a):
            with socket.create_server(("127.0.0.1", 0)) as server:
                ends[a][b] = socket.create_connection(server.getsockname())
                ends[b][a], _ = server.accept()
    return [TensorLinks(rank, connections, timeout_s) for rank, connections in enumerate(ends)]


def on_all(links, work):
    """work(rank, links) on all ranks at once; what each gives or raises."""
    found = [None] * len(links)

    def run(rank):
        try:
            found[rank] = work(rank, links[rank])
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 8.0, torch.float16: 1.0, torch.int64: 0.0}
LARGE = 1 << 20  # more than what connections hold


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sums_are_the_same_everywhere(size):
    random = torch.Generator().manual_seed(size)
    links = linked(size)
    for dtype, tolerance in TOLERANCES.items():
        for shape in [(), (0,), (1,), (4,), (3, 1001), (LARGE,) if dtype is torch.float32 and size < 5 else (2,)]:
            tensors = [(torch.randn(shape, generator=random) * 100).to(dtype) for _ in range(size)]
            totals = [tensor.clone() for tensor in tensors]
            assert on_all(links, lambda rank, own, totals=totals: own.all_reduce(totals[rank])) == [None] * size
            for total in totals:
                assert torch.equal(total.view(-1).view(torch.uint8), totals[0].view(-1).view(torch.uint8))
            expected = torch.stack(tensors).double().sum(0)
            torch.testing.assert_close(totals[0].double(), expected, rtol=0, atol=tolerance)
    for own in links:
        own.close()


def test_messages_pass_both_ways_at_once():
    links, many = linked(2), 4 << 20
    got = []
    receiver = threading.Thread(target=lambda: got.append(received(links[0], many, 1)))
    receiver.start()
    other = threading.Thread(target=lambda: links[1].send(torch.arange(many), 0))
    other.start()
    sender = threading.Thread(target=lambda: links[0].send(torch.arange(many) + 1, 1))
    sender.start()
    assert torch.equal(received(links[1], many, 0), torch.arange(many) + 1)
    for thread in (receiver, other, sender):
        thread.join(60)
    assert torch.equal(got[0], torch.arange(many))


def received(links, count, rank):
    tensor = torch.empty(count, dtype=torch.int64)
    links.receive(tensor, rank)
    return tensor


def test_a_rank_that_is_lost_ends_sums_and_messages():
    links = linked(3)
    links[2].close()

    def add_up(rank, own):
        own.all_reduce(torch.ones(1 << 16))

    assert all(isinstance(error, OSError | EOFError) for error in on_all(links, add_up)[:2] if error is not None)
    links = linked(2)
    links[1].close()
    with pytest.raises((OSError, EOFError)):
        received(links[0], 1, 1)


def test_a_rank_that_hangs_is_not_waited_for_for_ever():
    links = linked(2, timeout_s=0.05)
    with pytest.raises(TimeoutError):
        links[0].all_reduce(torch.ones(3))
    with pytest.raises(TimeoutError):
        received(links[0], 1, 1)
