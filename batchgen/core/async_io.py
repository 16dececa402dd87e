"""Reads and writes of a file that the kernel carries out at once: Linux's asynchronous I/O (io_submit(2)).

Many small requests of a thread go to the disk in one system call, and one more waits for them. Threads that each wait
for a request of their own have to be woken for every one, on cores that are busy with products. The calls are made by
ctypes, which does not hold the interpreter meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

# Requests of a thread that are under way at a time.
_DEPTH = 64
READ, WRITE = 0, 1  # IOCB_CMD_PREAD and IOCB_CMD_PWRITE of linux/aio_abi.h
# struct iocb: data, key, flags, operation, priority, descriptor, buffer, bytes, offset, reserved, flags, descriptor.
_REQUEST = struct.Struct("=QIIHhIQQqQII")
# struct io_event: data, request, result, second result.
_EVENT = struct.Struct("=QQqq")


class _Calls(NamedTuple):
    """Numbers of the system calls."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_CALLS = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}


class AsyncIO:
    """The requests of one thread. Not to be used by two at a time."""

    def __init__(self) -> None:
        """Ask the kernel for a context of requests. Raises OSError where there is none."""
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._calls, self._context = calls, ctypes.c_ulong(0)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._open()
        self._requests = ctypes.create_string_buffer(_DEPTH * _REQUEST.size)
        self._events = ctypes.create_string_buffer(_DEPTH * _EVENT.size)
        first = ctypes.addressof(self._requests)
        self._pointers = (ctypes.c_uint64 * _DEPTH)(*(first + i * _REQUEST.size for i in range(_DEPTH)))

    def _open(self) -> None:
        self._call(self._calls.setup, ctypes.c_long(_DEPTH), ctypes.byref(self._context))

    def _close(self) -> None:
        """Give the context back. What is under way has ended when this returns."""
        context, self._context = self._context, ctypes.c_ulong(0)
        self._syscall(ctypes.c_long(self._calls.destroy), context)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._close()

    def transfer(self, descriptor: int, operation: int, pieces: Sequence[tuple[int, memoryview]]) -> list[int]:
        """Read or write pieces of a file, and wait until all are done.

        Args:
            descriptor: The file, opened for direct I/O.
            operation: `READ` or `WRITE`.
            pieces: Offsets in the file, in bytes, each with the buffer that is read to or written from.

        Returns:
            The bytes that were moved for each piece.

        Raises:
            OSError: A request failed. None is under way any more.
        """
        moved = []
        try:
            for start in range(0, len(pieces), _DEPTH):
                moved += self._transfer(descriptor, operation, pieces[start : start + _DEPTH])
        except BaseException:  # an interruption, for one: no later call may take what is under way for its own
            self._close()
            self._open()
            raise
        for count in moved:
            if count < 0:
                raise OSError(-count, os.strerror(-count))
        return moved

    def _transfer(self, descriptor: int, operation: int, pieces: Sequence[tuple[int, memoryview]]) -> list[int]:
        """The bytes that were moved for each of at most `_DEPTH` pieces; the negative error where one failed."""
        for i, (offset, buffer) in enumerate(pieces):
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            values = (i, 0, 0, operation, 0, descriptor, address, len(buffer), offset, 0, 0, 0)
            _REQUEST.pack_into(self._requests, i * _REQUEST.size, *values)
        moved, submitted, ended = [0] * len(pieces), 0, 0
        error: OSError | None = None
        while ended < (len(pieces) if error is None else submitted):
            if submitted < len(pieces) and error is None:
                try:
                    submitted += self._submit(submitted, len(pieces))
                except OSError as refused:
                    if refused.errno != errno.EAGAIN or submitted == ended:  # else there is a place when one has ended
                        error = refused
                    if submitted == ended:
                        break
            for number, _, result, _ in self._wait(1 if submitted < len(pieces) else submitted - ended):
                moved[number] = result
                ended += 1
        if error is not None:
            raise error
        return moved

    def _submit(self, first: int, stop: int) -> int:
        """Give requests to the kernel, from the first one on; returns how many it took. Raises OSError."""
        pointers = ctypes.byref(self._pointers, first * ctypes.sizeof(ctypes.c_uint64))
        return self._call(self._calls.submit, self._context, ctypes.c_long(stop - first), pointers)

    def _wait(self, least: int) -> list[tuple[int, int, int, int]]:
        """Wait until at least so many requests have ended; returns an event for each."""
        while True:
            try:
                arguments = (self._context, ctypes.c_long(least), ctypes.c_long(_DEPTH), self._events, None)
                count = self._call(self._calls.getevents, *arguments)
            except InterruptedError:
                continue
            return list(_EVENT.iter_unpack(self._events.raw[: count * _EVENT.size]))

    def _call(self, number: int, *arguments: object) -> int:
        result = self._syscall(ctypes.c_long(number), *arguments)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(result)


_OF_THREAD = threading.local()


def of_this_thread() -> AsyncIO | None:
    """The requests of the thread that calls; None where the kernel has none for it."""
    if not hasattr(_OF_THREAD, "requests"):
        try:
            _OF_THREAD.requests = AsyncIO()
        except OSError:  # no such calls, or not allowed, or the machine's number of requests is used up
            _OF_THREAD.requests = None
    requests: AsyncIO | None = _OF_THREAD.requests
    return requests
