"""Ranks of tensor parallelism as threads of the test's process, with queues for messages and memory for sums."""

import queue
import threading

import torch
from tiered import make_request

from batchgen.engine.follow import follow_rank_zero
from batchgen.engine.tensor_parallel import load_parts_on_ranks
from batchgen.models.files import read_config, resolve_model
from batchgen.models.shard import shard_of
from batchgen.models.tokenizers.loading import load_tokenizer

_TIMEOUT_S = 120


class _Shared:
    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.sums = [None] * size
        self.messages = [queue.SimpleQueue() for _ in range(size)]
        self.failures = []
        self.found_peaks = {}
        self.reduced = 0
        self.threads = []


class RankThread:
    """As `distributed.group.Group`."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared

    def all_reduce(self, tensor):
        assert tensor.is_contiguous()
        shared = self.shared
        shared.sums[self.rank] = tensor
        shared.barrier.wait()
        total = torch.stack(shared.sums).sum(0)
        shared.reduced += self.rank == 0
        shared.barrier.wait()
        tensor.copy_(total)

    def check(self):
        assert not self.shared.failures

    def broadcast(self, message):
        for messages in self.shared.messages[1:]:
            messages.put(bytes(message))

    def receive_broadcast(self):
        message = self.shared.messages[self.rank].get(timeout=_TIMEOUT_S)
        if message is None:
            raise EOFError
        return message

    def ready(self):
        self.shared.barrier.wait()

    def close(self, *, done=True):
        if not done:
            self.shared.barrier.abort()
        for messages in self.shared.messages[1:]:
            messages.put(None)
        for thread in self.shared.threads:
            thread.join(_TIMEOUT_S)

    def peaks(self):
        return [self.shared.found_peaks.get(rank) for rank in range(1, self.size)]

    def work(self):
        """As `distributed.serve.serve`."""
        try:
            self.shared.found_peaks[self.rank] = follow_rank_zero(self)
        except EOFError:
            pass
        except BaseException as error:
            self.shared.failures.append(error)
            self.shared.barrier.abort()


def start_ranks(size):
    """Rank 0 of a group whose other ranks wait for work."""
    shared = _Shared(size)
    shared.threads += [threading.Thread(target=RankThread(r, size, shared).work, daemon=True) for r in range(1, size)]
    for thread in shared.threads:
        thread.start()
    return RankThread(0, size, shared)


def make_parts_on_ranks(size, model, device, policy, offload_dir, **options):
    """As `tiered.make_parts`, on so many ranks; and the first of these."""
    shard = shard_of(read_config(resolve_model(str(model))), 0, size)
    request = make_request(model, device, policy, offload_dir, shard=shard, **options)
    ranks = start_ranks(size)
    return load_parts_on_ranks(request, lambda: load_tokenizer(request.files), ranks), ranks
