"""A CUDA card that is not there: tensors on it know their device and have no contents (torch's FakeTensorMode), and its
runtime keeps account of pinned memory. What is in host memory is real.

What CUDA refuses is refused: operands on different devices, pinning what is not the host's, registering memory twice;
and what it does not notice: copies behind the host's back from or to memory that is not pinned, memory that is unmapped
while it is registered. Kernels of Triton are not run; their tensors have to be where a card can reach them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from batchgen.ops import dispatch as ops
from batchgen.ops.triton import launch, rows
from batchgen.runtime import cuda, in_memory, sampler
from batchgen.runtime.sampler import Sampled

CARD = torch.device("cuda", 0)
_H200 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, total_memory=139 << 30, shared_memory_per_block_optin=227 << 10
)
T4 = SimpleNamespace(
    major=7, minor=5, multi_processor_count=40, total_memory=15 << 30, shared_memory_per_block_optin=64 << 10
)
_mode = FakeTensorMode(allow_non_fake_inputs=True)  # one for all tests: tensors of two do not mix
_libc = ctypes.CDLL(None, use_errno=True)


def _is_mapped(start: int, num_bytes: int) -> bool:
    seen = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    return _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), seen) == 0


class Runtime:
    """cudaHostRegister and cudaHostUnregister. faults: what a real card would not have survived."""

    ALREADY_REGISTERED, NOT_REGISTERED = 712, 713

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # start -> bytes
        self.faults: list[str] = []
        self.fails_after = None  # so many registrations the next one is refused
        self.last_error = 0  # of a failed call, until somebody asks

    def cudaHostRegister(self, start, num_bytes, flags):
        assert num_bytes > 0 and _is_mapped(start, num_bytes)
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                self.last_error = 2  # cudaErrorMemoryAllocation
                return self.last_error
        self._look()
        for first, size in self.registered.items():
            if start < first + size and first < start + num_bytes:
                self.faults.append(f"{start:#x} is registered again")
                return self.ALREADY_REGISTERED
        self.registered[start] = num_bytes
        return 0

    def cudaHostUnregister(self, start):
        self._look()
        if self.registered.pop(start, None) is None:
            self.faults.append(f"{start:#x} is not registered")
            return self.NOT_REGISTERED
        return 0

    def check_launch(self) -> None:
        """Raise the last error, as torch does after each launch of a kernel, whatever call has left it."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error} of an earlier call")

    def _look(self) -> None:
        for start, size in self.registered.items():
            if not _is_mapped(start, size):
                self.faults.append(f"{start:#x} was unmapped while it was registered")

    def check(self) -> None:
        self._look()
        assert self.faults == []

    def holds(self, start: int, num_bytes: int) -> bool:
        return any(first <= start and start + num_bytes <= first + size for first, size in self.registered.items())


class _Event:
    def __init__(self, **options): ...

    def record(self, stream=None): ...

    def synchronize(self): ...

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _Stream:
    cuda_stream = 0

    def __init__(self, **options): ...

    def wait_event(self, event): ...

    def synchronize(self): ...


class _Graph:
    def capture_begin(self, **options): ...

    def capture_end(self): ...

    def replay(self): ...


class Card(TorchFunctionMode):
    """While it is entered there is a card. copies: (bytes, to the card?) of each copy between it and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Runtime()
        self.wait_error = 0  # of cuStreamWaitValue32
        self.copies: list[tuple[int, bool]] = []
        self.waited_for: list[str] = []  # where copies are made that the host waits for
        self.launched: list[tuple] = []  # Triton's kernels: name, and what each variant of it is compiled for
        self._own_pinned: list[Tensor] = []  # torch's, which are never given back here

    def is_pinned(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        start = tensor.data_ptr()
        own = any(t.data_ptr() <= start < t.data_ptr() + t.nbytes for t in self._own_pinned)
        return own or tensor.numel() == 0 or self.runtime.holds(start, tensor.nbytes)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _METHODS:
            return getattr(self, f"_{func.__name__}")(*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            assert made.device.type == "cpu", "only memory of the host can be pinned"
            return self._pinned(made)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            if func is not torch.empty:
                self.runtime.check_launch()
            with _mode:
                return func(*args, **kwargs | {"device": CARD})
        return func(*args, **kwargs)

    def _pinned(self, tensor: Tensor) -> Tensor:
        self._own_pinned.append(tensor)
        return tensor

    def _to(self, tensor, *args, non_blocking=False, **kwargs):
        wanted = kwargs.get("device", args[0] if args else None)
        if not isinstance(wanted, (str, torch.device)):  # another dtype
            return tensor.to(*args, **kwargs)
        if torch.device(wanted).type == "cpu":
            assert tensor.device.type == "cpu", "the host waits for the card"
            return tensor
        assert len(args) < 2 and torch.device(wanted).index in (None, 0)
        if tensor.device == CARD:
            return tensor
        self._note(tensor, CARD, non_blocking)
        with _mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=CARD)

    def _cuda(self, tensor):
        return self._to(tensor, CARD)

    def _copy_(self, target, source, non_blocking=False):
        if target.device == source.device:
            return target.copy_(source)
        assert target.shape == source.shape and target.dtype == source.dtype
        host = target if target.device.type == "cpu" else source
        self._note(host, target.device, non_blocking)
        return target

    def _note(self, host: Tensor, to: torch.device, non_blocking: bool) -> None:
        assert host.is_contiguous(), "torch would copy it to and fro first"
        assert not non_blocking or self.is_pinned(host), "a copy behind the host's back needs pinned memory"
        self.copies.append((host.nbytes, to == CARD))
        if not non_blocking:
            self.waited_for.append("".join(traceback.format_stack(limit=6)[:-2]))

    def _pin_memory(self, tensor):
        if tensor.device.type != "cpu":
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return tensor if self.is_pinned(tensor) else self._pinned(tensor.clone())

    def _is_pinned(self, tensor):
        return self.is_pinned(tensor)

    def launch(self, made: launch.Launch) -> None:
        """Launch nothing in place of a Triton kernel, whose operands are looked at."""
        self.runtime.check_launch()
        name = made.kernel.fn.__name__
        variant = [(key, _specialised(made.kernel, key, value)) for key, value in made.args.items()]
        self.launched.append((name, made.warps, made.stages, *sorted(made.constants.items()), *variant))
        reaches_host = made.kernel is rows._copy_rows
        for argument, value in made.args.items():
            if isinstance(value, Tensor) and value.numel():
                host = reaches_host and argument != "index" and self.is_pinned(value)
                assert value.device == CARD or host, f"{argument} of {name} is on {value.device}"


_METHODS = {Tensor.to, Tensor.cuda, Tensor.copy_, Tensor.pin_memory, Tensor.is_pinned}


def _record_stream(tensor: Tensor, stream) -> None:
    assert tensor.device == CARD, "a stream holds memory of the card only"


def _specialised(kernel, argument: str, value):
    """The key that Triton compiles for: dtypes, which addresses divide by 16, which numbers are 1 or divide by 16."""
    parameter = next(p for p in kernel.params if p.name == argument)
    if isinstance(value, Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0
        return value.dtype, parameter.do_not_specialize_on_alignment or aligned
    if parameter.do_not_specialize or not isinstance(value, int):
        return type(value)
    return value == 1, value % 16 == 0


def _sample(logits: Tensor, sequences) -> Sampled:
    """Of logits that have no contents."""
    assert logits.device == CARD and logits.shape[0] == len(sequences) and logits.dtype == torch.float32
    on_card, on_host = (torch.full((len(sequences),), 7, dtype=torch.int64, device=device) for device in (CARD, "cpu"))
    return Sampled(on_card, on_host)


def _register_device_guard() -> None:
    """torch built without CUDA has nothing that makes a CUDA device the current one; that of `meta` does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 24).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    of_cuda, of_meta = 1, 14  # c10/core/DeviceType.h
    guards[of_cuda] = guards[of_cuda] or guards[of_meta]


@contextlib.contextmanager
def fake_card(properties=_H200):
    """A Card in place of CUDA, to be entered in the thread that computes, with these properties."""
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    _register_device_guard()
    with pytest.MonkeyPatch.context() as patch, Card() as card:
        for name, value in {
            "Stream": _Stream, "Event": _Event, "CUDAGraph": _Graph, "current_stream": lambda *_: _Stream(),
            "stream": lambda stream: contextlib.nullcontext(), "graph_pool_handle": object,
            "synchronize": lambda *_: None, "cudart": lambda: card.runtime,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, value)

        def wait_value(stream, semaphore, count, flags):
            assert card.runtime.holds(semaphore.value, 4), "a semaphore is not pinned"
            return card.wait_error

        patch.setattr(Tensor, "record_stream", _record_stream)
        for module in (sampler, in_memory):
            patch.setattr(module, "sample", _sample)
        patch.setattr(cuda, "_stream_wait_value", lambda: wait_value)
        patch.setattr(cuda, "cap_memory", lambda num_bytes: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        launch.card.cache_clear()
        patch.setattr(launch.Launch, "__call__", lambda made: card.launch(made))
        yield card
        launch.card.cache_clear()
        ops.rotation.cache_clear()
        gc.collect()
        card.runtime.check()
        assert not card.runtime.registered, "pinned for ever"
