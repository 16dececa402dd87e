"""torch's operations on a played card: each is launched as on a real one, which does nothing, and carried out on its
stream by torch's operation for the CPU.

So shapes, allocations, copies, checks and calls of libraries are those of torch's CUDA build; numbers are those of the
CPU. New memory has no contents: every byte is 0xff, up to 64 MiB of a tensor, since what is touched takes memory.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_library = ctypes.CDLL("libcuda.so.1")
_library.played_behind.restype = ctypes.c_void_p
_library.played_behind.argtypes = [ctypes.c_void_p]
_library.played_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
_library.played_fill.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]

# Those that compute nothing: views, allocations, the allocator's account, copies to one number of the host.
_AS_THEY_ARE = (
    "_assert_async", "_efficientzerotensor", "_local_scalar_dense", "_pin_memory", "_reshape_alias", "alias",
    "as_strided", "is_pinned", "is_set_to", "record_stream", "resize_", "resize_as_sparse_", "set_", "storage_resize_",
    "unfold", "view", "view_as_complex", "view_as_real",
)  # fmt: skip
_NEW_MEMORY = ("aten::empty.memory_format", "aten::empty_strided")
_MOST_FILLED = 64 << 20  # bytes
# The shape or the value of the result depends on numbers: the host waits for them.
_AWAITED = ("nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "unique_dim", "bincount")


class Place(NamedTuple):
    """A tensor as those who play the card find it.

    Attributes:
        address: Address of its first number, as they reach it; None: it has no numbers.
        span: Numbers from the first one to the last.
    """

    address: int | None
    span: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        shape, stride = tuple(tensor.shape), tensor.stride()
        if tensor.numel() == 0:
            return cls(None, 0, shape, stride, tensor.dtype)
        span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        return cls(_library.played_behind(tensor.data_ptr()), span, shape, stride, tensor.dtype)

    def tensor(self) -> Tensor:
        if self.address is None:
            return torch.empty(self.shape, dtype=self.dtype)
        numbers = (ctypes.c_char * (self.span * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(numbers, dtype=self.dtype, count=self.span).as_strided(self.shape, self.stride)


# Jobs on streams.

_jobs: dict[int, Callable[[], None]] = {}
_captured: set[int] = set()  # which a graph may run again
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def _run(number: int) -> None:
    try:
        with torch.inference_mode():
            (_jobs[number] if number in _captured else _jobs.pop(number))()
    except BaseException as error:
        on_failure(error)


def end_process(error: BaseException) -> None:
    """End the process for an operation that failed, as a card has no further use for one; says which it was."""
    traceback.print_exception(error)
    print("played CUDA: an operation failed", file=sys.stderr, flush=True)
    if report := os.environ.get("PLAYED_CUDA_REPORT"):  # what is printed may be pytest's
        where = traceback.extract_tb(error.__traceback__)[-1]
        with open(report, "a") as file:
            print(f"FAULT 1 an operation failed: {error!r} in {where.name}, line {where.lineno}", file=file)
    os._exit(70)


# Called with the error of an operation that fails on a stream.
on_failure: Callable[[BaseException], object] = end_process


def current_stream() -> int:
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def enqueue(job: Callable[[], None]) -> None:
    """Has a job done on the current stream."""
    number = next(_numbers)
    _jobs[number] = job
    if _library.played_enqueue(current_stream(), _run, number):
        _captured.add(number)


# Operations.


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested lists and tuples, with every tensor and place changed."""
    if isinstance(value, Tensor | Place):
        return change(value)
    return type(value)(_mapped(v, change) for v in value) if type(value) in (tuple, list) else value


def _as_launched(value: Tensor) -> Any:
    """A place on the card; of the host, the numbers that it has when something is launched."""
    return Place.of(value) if value.is_cuda else value.clone()


def _found(value: Any) -> Any:
    return value.tensor() if isinstance(value, Place) else value


def _operands(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    named = {name: value for name, value in kwargs.items() if name != "generator"}
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    return _mapped(args, _as_launched), {name: _mapped(value, _as_launched) for name, value in named.items()}


def _play(operation, args: tuple, kwargs: dict[str, Any], made: Any) -> None:
    """Carry an operation out on the current stream, into the tensors that its launch has made."""
    (args, kwargs), targets = _operands(args, kwargs), []
    if not operation._schema.is_mutable:
        targets = [Place.of(t) for t in (made if isinstance(made, tuple | list) else [made])]

    def job() -> None:
        found = compute(*_mapped(args, _found), **{name: _mapped(value, _found) for name, value in kwargs.items()})
        for target, value in zip(targets, found if isinstance(found, tuple | list) else [found], strict=bool(targets)):
            target.tensor().copy_(value)

    compute = _ON_THE_CPU.get(operation.name(), operation)
    enqueue(job)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(a.to(dtype), b.to(dtype))


# Operations that torch has for CUDA alone.
_ON_THE_CPU = {"aten::mm.dtype": _wide_product}


def _awaited(operation, args: tuple, kwargs: dict[str, Any]) -> Any:
    torch.cuda.current_stream().synchronize()
    args, kwargs = _operands(args, kwargs)
    found = operation(*_mapped(args, _found), **{name: _mapped(value, _found) for name, value in kwargs.items()})
    return _mapped(found, lambda tensor: tensor.cuda())


def _playing(name: str):
    """The function that stands for torch's kernel of an operation on CUDA; None: its own kernel stays."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    if operation.is_view or base in _AS_THEY_ARE:
        return None
    launch = torch.library.get_kernel(operation, "CUDA").call_boxed
    tensors = [i for i, a in enumerate(operation._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]

    def played(keys, *args, **kwargs):
        args = _with_tensors(args, tensors)
        if base in _AWAITED:
            return _awaited(operation, args, kwargs)
        _library.played_in_torch(1)
        try:
            made = launch(keys, *args, **kwargs)
        finally:
            _library.played_in_torch(-1)
        if name in _NEW_MEMORY:
            if made.numel():
                num_bytes = min(made.untyped_storage().nbytes(), _MOST_FILLED)
                _library.played_fill(made.data_ptr(), 0xFF, num_bytes, current_stream())
        # A copy from or to the host is the runtime's, or made of others.
        elif base != "copy_" or (args[0].is_cuda and args[1].is_cuda):
            _play(operation, args, kwargs, made)
        return made

    return played


def _with_tensors(args: tuple, places: list[int]) -> tuple:
    """Operands with tensors in place of numbers where an operation takes tensors."""
    if not any(isinstance(args[i], int | float) for i in places if i < len(args)):
        return args
    return tuple(torch.tensor(a) if i in places and isinstance(a, int | float) else a for i, a in enumerate(args))


def install() -> None:
    """Has all of torch's operations on CUDA played, for the rest of the process."""
    names = {n for n in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if n.startswith("aten::")}
    _keeps.append(library := torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(names | {"aten::copy_"}):
            if function := _playing(name):
                library.impl(name.removeprefix("aten::"), function, "CUDA", with_keyset=True)
    stats = torch._C._cuda_memoryStats

    def memory_stats(device: int) -> Any:
        # It is called with the interpreter's lock, and takes the allocator's, which a thread that waits may hold.
        while _library.played_waiting():
            time.sleep(1e-4)
        return stats(device)

    torch._C._cuda_memoryStats = memory_stats
    sys.setswitchinterval(1e-4)  # the thread that carries out and those that launch take turns
    atexit.register(_library.played_stop)


_keeps: list[Any] = []
