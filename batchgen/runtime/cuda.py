"""A CUDA GPU under `streams`: its streams and events, its memory, pinned host memory, and copies between them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import sys
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from batchgen.core.direct_io import aligned_buffer
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.plan import PINNED_BYTES
from batchgen.core.units import format_bytes
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import Passage, bytes_of, through
from batchgen.ops.long_steps import LongStep, noted_in
from batchgen.runtime.memory.transfers import Link, tensor_over
from batchgen.runtime.streams import STREAMS, Driver
from batchgen.schedule.step_graph import LANES

_HOST_LANES = tuple(lane for lane in LANES if lane not in STREAMS)
_WAIT_VALUE_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: compares as a difference, so that counters may wrap around


class CudaDriver:
    """A CUDA device's streams and events, as `streams.StreamLanes` drives them."""

    def __init__(self) -> None:
        self.streams = _idle_streams.pop() if _idle_streams else _new_streams()
        # Once nothing can be launched in them any more, they are the next driver's: memory that torch keeps for a
        # stream, and cuBLAS's work space of it, would be nobody's else.
        weakref.finalize(self, _idle_streams.append, self.streams).atexit = False
        self._device = torch.cuda.current_device()
        self._pinned = PinnedMemory()
        self._semaphores = self._pinned.zeros((len(_HOST_LANES),), torch.int32)
        self._wait_value = _stream_wait_value()
        self._check_waits()
        self._num_copies = 0
        # All small arrays go with the stream that computes. It does not refer to the driver, whose end is that of the
        # memory.
        self._passage = Passage(
            self._pinned.zeros((PINNED_BYTES,), torch.uint8),
            partial(_recorded, self.streams["compute"]),
            _synchronize,
        )
        self._graph_pool = torch.cuda.graph_pool_handle()  # one for all graphs: they never run at once
        # torch takes a pool's handle no more once all graphs of the pool are gone.
        self._first_graph: torch.cuda.CUDAGraph | None = None

    def launch(self, lane: str, work: Callable[[], None]) -> int:
        before = self._num_copies + self._passage.num_copies
        step = LongStep(partial(_recorded, self.streams[lane]), _synchronize)
        passage = self._passage if lane == "compute" else None
        # As torch.cuda.stream does, which asks for the current device again and again.
        before_stream = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self.streams[lane])
        try:
            with through(passage), noted_in(step):
                work()
        finally:
            torch.cuda.set_stream(before_stream)
        return self._num_copies + self._passage.num_copies - before + step.most_queued

    def note_copy(self) -> None:
        self._num_copies += 1

    def record(self, lane: str) -> torch.cuda.Event:
        return _recorded(self.streams[lane])

    def wait(self, lane: str, event: torch.cuda.Event) -> None:
        self.streams[lane].wait_event(event)

    def wait_for_host(self, lane: str, host_lane: str, count: int) -> None:
        if error := self._launch_wait(lane, host_lane, count):
            raise BatchgenError(f"the GPU cannot wait for the CPU (cuStreamWaitValue32: CUDA error {error})")

    def _launch_wait(self, lane: str, host_lane: str, count: int) -> int:
        """Have a lane's stream wait until a host lane's semaphore is at least `count`. Returns CUDA's error, or 0."""
        semaphore = self._semaphores[_HOST_LANES.index(host_lane)]
        return self._wait_value(
            ctypes.c_void_p(self.streams[lane].cuda_stream),
            ctypes.c_uint64(semaphore.data_ptr()),
            ctypes.c_uint32(count & 0xFFFFFFFF),
            ctypes.c_uint(_WAIT_VALUE_GEQ),
        )

    def _check_waits(self) -> None:
        """Refuse a driver without stream memory operations, by a wait that is over at once. Raises InputError."""
        if error := self._launch_wait("compute", _HOST_LANES[0], 0):
            raise InputError(
                f"--device cuda: this GPU's driver has no stream memory operations (cuStreamWaitValue32: CUDA error"
                f" {error}); use --device cpu"
            )

    def signal(self, host_lane: str, count: int) -> None:
        # x86 and Arm's release order: what the lane has written is there before the counter.
        self._semaphores[_HOST_LANES.index(host_lane)] = ctypes.c_int32(count & 0xFFFFFFFF).value

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._captured(work)
        except torch.OutOfMemoryError:  # streams keep memory that they do not use now
            torch.cuda.empty_cache()
            return self._captured(work)

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """The replay of a CUDA graph of what work() launches.

        torch.cuda.graph would first wait for the device, and give back all memory that streams keep.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.streams["compute"]), noted_in(None):
            # Other threads may go on with what is theirs meanwhile.
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._first_graph = self._first_graph or graph
        return graph.replay

    def reserve(self, lane: str, num_bytes: int) -> None:
        if lane == "compute":
            num_bytes += _CUBLAS_BYTES
        # What is freed here stays with the stream, and torch cuts up what it has before it asks for more.
        small = min(_SMALL_BYTES, num_bytes // 4) // _SMALL_BLOCK_BYTES
        sizes = [num_bytes - small * _SMALL_BLOCK_BYTES, *([_SMALL_BLOCK_BYTES] * small)]
        with torch.cuda.stream(self.streams[lane]):
            held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        held.clear()

    def upload(self, tensor: Tensor) -> Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
        return self._passage.upload(bytes_of(tensor).numpy(), target)

    def borrow(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

    def synchronize(self, event: torch.cuda.Event) -> None:
        _synchronize(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return start.elapsed_time(stop) / 1e3

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()

    def close(self) -> None:
        self._pinned.close()


# Streams by lane of drivers that have gone.
_idle_streams: list[dict[str, torch.cuda.Stream]] = []


def _new_streams() -> dict[str, torch.cuda.Stream]:
    # Small copies that compute waits for do not queue behind its kernels for capacity on the device.
    return {lane: torch.cuda.Stream(priority=-1 if lane != "compute" else 0) for lane in STREAMS}


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a thread that waits leaves its core to the kernels.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def _synchronize(event: torch.cuda.Event) -> None:
    event.synchronize()


def _stream_wait_value():
    """The function cuStreamWaitValue32 of the driver's own library, which torch does not expose."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWaitValue32"):
        with contextlib.suppress(AttributeError):
            return getattr(library, name)
    raise BatchgenError("this CUDA driver is too old: batchgen needs one of CUDA 11.7 or later")


# What the driver takes of a GPU for itself, its libraries and the kernels that are loaded.
_CONTEXT_BYTES = 600 << 20
# What torch allocates as cuBLAS's work space for a stream at its first product, since compute capability 9.0; a quarter
# of it before.
_CUBLAS_BYTES = 32 << 20
# torch has segments of their own for blocks up to this size; so much of a stream's memory is for these.
_SMALL_BLOCK_BYTES, _SMALL_BYTES = 1 << 20, 8 << 20
# torch gives memory out in blocks of its own sizes.
_MARGIN_FRAC = 0.03


def usable_memory(card_bytes: int | None) -> int:
    """Bytes that tensors may take of a card, beside cuBLAS's work space. Raises InputError.

    Args:
        card_bytes: Size of the card; None: that of the current device.
    """
    gc.collect()  # an engine that nobody has any more is still in the card's memory
    free, total = torch.cuda.mem_get_info()
    usable = free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if card_bytes is not None:
        if card_bytes > total:
            raise InputError(f"--gpu-memory {format_bytes(card_bytes)}: this GPU has {format_bytes(total)}; give less")
        usable = min(usable, card_bytes - _CONTEXT_BYTES)
    return max(1, int(usable * (1 - _MARGIN_FRAC)) - _CUBLAS_BYTES)


def cap_memory(num_bytes: int) -> None:
    """Have torch refuse to take more of the GPU's memory than tensors need beside what it holds, however much there is.

    Args:
        num_bytes: Bytes of the tensors.
    """
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    most = torch.cuda.memory_allocated() + (num_bytes + _CUBLAS_BYTES) / (1 - _MARGIN_FRAC)
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))


class GpuMemory:
    """Memory of the current CUDA device, for an `Arena`."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    def keep(self, tensor: Tensor) -> Tensor:
        return tensor.cuda()

    def close(self) -> None: ...


def _clear_error() -> None:
    """Clear the error that a failed call of the CUDA runtime has left in this thread.

    torch would find it at its next launch, and take it for that launch's own.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


class _PinnedPages(mmap.mmap):
    """Pages that own their registration with CUDA: it ends before they are unmapped, whoever held them last.

    Otherwise memory that is mapped at the same address later could not be registered, or would be taken for these
    pages.
    """

    address: int | None = None  # where they are registered; None: they are not

    def pin(self, address: int) -> None:
        """Register the pages with CUDA. Raises BatchgenError."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if error:
            _clear_error()
            raise BatchgenError(
                f"cannot pin {format_bytes(len(self))} of host memory (CUDA error {error}): give less --cpu-memory"
            )
        self.address = address

    def unpin(self) -> None:
        address, self.address = self.address, None
        if address is not None:
            torch.cuda.cudart().cudaHostUnregister(address)

    def __del__(self) -> None:
        # Before the memory is unmapped: a callback of a weak reference would come after it.
        if not sys.is_finalizing():
            self.unpin()


class PinnedMemory:
    """Memory of the host that the GPU copies from and to by itself, for an `Arena`.

    torch rounds its own pinned memory up to powers of two: a model of 70 GB would take 128 GB.
    """

    def __init__(self) -> None:
        self._pinned: weakref.WeakSet[_PinnedPages] = weakref.WeakSet()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pages = aligned_buffer(math.prod(shape) * dtype.itemsize, _PinnedPages)
        tensor = tensor_over(pages, shape, dtype)
        if tensor.nbytes:
            assert isinstance(pages, _PinnedPages)
            pages.pin(tensor.data_ptr())
            self._pinned.add(pages)
        return tensor

    def keep(self, tensor: Tensor) -> Tensor:
        if tensor.is_pinned():
            return tensor
        return self.zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def close(self) -> None:
        """End the pinning: nothing may be under way. Tensors stay, as memory like any other."""
        for pages in list(self._pinned):
            pages.unpin()


# A copy is cut into pieces: a copy engine takes turns between streams, but finishes what it has begun, and a few KB
# that compute waits for would wait for a whole matrix, up to 50 ms of it. A piece takes 0.6 ms at 25 GB/s, and
# launching it some 4 microseconds; the largest layers there are (3.6 GB) make two hundred, of the thousand that a
# stream's queue takes.
COPY_BYTES = 16 << 20


class CudaLink(Link):
    """Asynchronous copies from one memory to another, on the current stream.

    What is copied must not change until an event recorded later on the stream has come. The link keeps the memory that
    it is given, and that which it returns, until then.
    """

    def __init__(self, driver: Driver, to_gpu: bool) -> None:
        super().__init__()
        self._driver, self._to_gpu = driver, to_gpu

    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        """target[...] = source, both contiguous; the host's side is pinned."""
        self._count(source)
        if source.nbytes <= COPY_BYTES:
            self._copy(target, source)
        else:
            step = max(1, COPY_BYTES // source.element_size())
            for part, piece in zip(target.view(-1).split(step), source.view(-1).split(step), strict=True):
                self._copy(part, piece)
        return target

    def copy_rows(self, target: Tensor, source: Tensor, passing: Tensor) -> None:
        """Copy rows with the gaps between them, by way of `passing`.

        torch would first copy all of the host's side back and forth, and one copy a row would fill the stream's queue.
        """
        self._count(source)
        host, device = (source, target) if self._to_gpu else (target, source)
        width, stride = host.shape[1], host.stride(0)
        whole = host.as_strided((len(host), stride), (stride, 1))
        step = len(passing) // stride
        for rows, own in zip(whole.split(step), device.split(step), strict=True):
            padded = passing[: rows.numel()].view(rows.shape)
            if self._to_gpu:
                self._copy(padded, rows)
                own.copy_(padded[:, :width])
            else:
                padded[:, :width] = own
                self._copy(rows, padded)
            self._driver.note_copy()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self._driver.note_copy()

    def bring(self, source: Tensor) -> Tensor:
        """Copy what the host has, which may change at once, on the stream that computes."""
        self._count(source)
        return self._driver.upload(source)

    def borrow(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor of another stream until work on the current stream, which reads it, is done."""
        self._driver.borrow(tensor)

    def gather(self, target: Tensor, source: Tensor, index: Tensor) -> None:
        """target[i] = source[index[i]], along the first dimension; index on the GPU.

        The host's side must outlive the link: torch does not know that a kernel uses it.
        """
        self._count(target)
        self.borrow(index)
        self._driver.note_copy()
        ops.gather_rows(target, source, index)

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """target[index[i]] = source[i], along the first dimension; index on the GPU.

        The host's side must outlive the link: torch does not know that a kernel uses it.
        """
        self._count(source)
        self.borrow(source)
        self.borrow(index)
        self._driver.note_copy()
        ops.scatter_rows(target, index, source)

    def _count(self, moved: Tensor) -> None:
        self.moved_bytes += moved.numel() * moved.element_size()
