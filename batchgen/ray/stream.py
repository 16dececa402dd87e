"""An engine that takes requests at any time: batches overlap in one stream, so it never runs empty between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from batchgen.core.request import Completion, Request
from batchgen.engine.engine import Engine

_Batch = tuple[list[Request], "Future[list[Completion]]"]


class EngineStream:
    """An engine in a thread of its own, in one call of `Engine.generate` that lasts until `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._batches: dict[int, _Pending] = {}  # by the number of each request in the stream
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # between a failure and batches that come after it
        self._thread = threading.Thread(target=self._run, name="batchgen-stream", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Run requests. Returns a future of their completions, in the order of the requests.

        The future raises the engine's exception if the engine fails.
        """
        future: Future[list[Completion]] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
            elif not requests:
                future.set_result([])
            else:
                self._inbox.put((list(requests), future))
        return future

    def close(self) -> None:
        """Run all submitted requests to their end, then end the thread and close the engine."""
        self._inbox.put(None)
        self._thread.join()
        self.engine.close()

    def _requests(self) -> Iterator[Request | None]:
        number = 0
        while (batch := self._inbox.get()) is not None:
            requests, future = batch
            pending = _Pending(number, len(requests), future)
            for request in requests:
                self._batches[number] = pending
                yield replace(request, row=number)
                number += 1
            yield None  # the next batch may take a while

    def _run(self) -> None:
        try:
            for completion in self.engine.generate(self._requests()):
                assert completion.row is not None  # each request has one
                self._batches.pop(completion.row).add(completion)
            failure: BaseException = ValueError("the stream is closed")
        except BaseException as error:  # raised by the futures
            failure = error
        with self._lock:
            self._failure = failure
        waiting = {id(pending): pending.future for pending in self._batches.values()}
        while not self._inbox.empty():
            if (batch := self._inbox.get()) is not None:
                waiting[id(batch)] = batch[1]
        for future in waiting.values():
            if not future.done():
                future.set_exception(failure)


class _Pending:
    """A batch of requests, some of which are not done."""

    def __init__(self, first: int, count: int, future: Future[list[Completion]]) -> None:
        self.future = future
        self._first, self._left = first, count
        self._completions: list[Completion | None] = [None] * count

    def add(self, completion: Completion) -> None:
        assert completion.row is not None
        self._completions[completion.row - self._first] = completion
        self._left -= 1
        if not self._left and not self.future.done():
            self.future.set_result([c for c in self._completions if c is not None])
