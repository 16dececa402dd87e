"""Pipelines whose stages are threads of one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tiered import BUDGETS

from batchgen.core.device import Device
from batchgen.core.errors import BatchgenError
from batchgen.engine.follow import follow_rank_zero
from batchgen.engine.loader import LoadRequest, needs_store
from batchgen.engine.parts import EngineParts
from batchgen.engine.pipeline import Stage, load_pipeline
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.loading import load_tokenizer

_END = object()


class Rendezvous:
    """Tensors and messages that ranks of one process send each other.

    A send returns when it has been received, as one over a connection may.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages = [queue.SimpleQueue() for _ in range(size)]
        self.ready = threading.Semaphore(0)
        self.lost = threading.Event()
        self.failures: list[BaseException] = []
        self._ways: dict[tuple[int, int], tuple[queue.Queue, queue.Queue]] = {
            (a, b): (queue.Queue(), queue.Queue()) for a in range(size) for b in range(size)
        }

    def send(self, source: int, target: int, tensor: torch.Tensor) -> None:
        there, back = self._ways[source, target]
        there.put(tensor)
        self._get(back)

    def receive(self, source: int, target: int, tensor: torch.Tensor) -> None:
        there, back = self._ways[source, target]
        found = self._get(there)
        assert found.shape == tensor.shape and found.dtype == tensor.dtype and found.is_contiguous()
        tensor.copy_(found)
        back.put(None)

    def _get(self, way: queue.Queue):
        while True:
            try:
                return way.get(timeout=0.05)
            except queue.Empty:
                if self.lost.is_set():
                    raise BatchgenError("a stage has ended") from next(iter(self.failures), None)


class ThreadGroup:
    """A group of pipeline stages that are threads of one process, with the methods of `RankGroup`."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self._all = rank, rendezvous.size, rendezvous
        self.threads: list[threading.Thread] = []
        self.found_peaks: dict[int, dict[str, int]] = {}

    def peaks(self) -> list[dict[str, int] | None]:
        return [self.found_peaks.get(rank) for rank in range(1, self.size)]

    def broadcast(self, message) -> None:
        for messages in self._all.messages[1:]:
            messages.put(bytes(message))

    def receive_broadcast(self):
        content = self._all.messages[self.rank].get()
        if content is _END:
            raise EOFError
        return content

    def ready(self) -> None:
        if self.rank:
            self._all.ready.release()
            return
        for _ in range(self.size - 1):
            self._all.ready.acquire()
        if self._all.failures:
            raise self._all.failures[0]

    def send(self, tensor, rank) -> None:
        self._all.send(self.rank, rank, tensor)

    def receive(self, tensor, rank) -> None:
        self._all.receive(rank, self.rank, tensor)

    def close(self, *, done: bool = True) -> None:
        if not done:
            self._all.lost.set()
        for messages in self._all.messages:
            messages.put(_END)
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive(), "a stage hangs"


def start_threads(size: int) -> ThreadGroup:
    """Rank 0 of a group, the others of which wait for what it says."""
    rendezvous = Rendezvous(size)
    first = ThreadGroup(0, rendezvous)

    def serve(group: ThreadGroup) -> None:
        try:
            first.found_peaks[group.rank] = follow_rank_zero(group)
        except EOFError:
            pass
        except BaseException as error:
            rendezvous.failures.append(error)
            rendezvous.lost.set()
            rendezvous.ready.release()

    for rank in range(1, size):
        thread = threading.Thread(target=serve, args=(ThreadGroup(rank, rendezvous),), daemon=True)
        first.threads.append(thread)
        thread.start()
    return first


def make_pipeline(
    model: Path | str,
    device: Device,
    stages: Sequence[Stage],
    offload_dir: Path,
    start: Callable[[int], ThreadGroup] = start_threads,
    **options,
) -> EngineParts:
    """As `tiered.make_parts`, over stages."""
    files = resolve_model(str(model))
    store = None
    if any(needs_store(stage.policy) for stage in stages):
        weight_format = stages[0].policy.weight_format
        store = find_or_convert(
            files, offload_dir, "float32", "dequantized" if weight_format == "float32" else weight_format
        )
    budgets = {tier: size for tier, size in BUDGETS.items() if device.accelerated or tier != "gpu"}
    options = {"budgets": budgets, "min_output_len": 1, "longest_tokens": 128, "most_kv_tokens": 4096} | options
    request = LoadRequest(
        files, read_config(files), stages[0].policy, "float32", device, offload_dir=offload_dir, store=store, **options
    )
    return load_pipeline(request, stages, start(len(stages)), lambda: load_tokenizer(files))
