"""Memory of a played device.

Each block belongs to a stream, or to the host. It is given out again as soon as nobody in Python holds it, whatever
other streams still have to do with it.

What is launched reads and writes blocks behind Python's back, so a tensor whose last reference has gone is poisoned
where its own stream then is: who still uses it on another stream, and has not said so (`borrow`), finds poison, or
another tensor's content.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

HOST = "host"
_POISON = 255  # NaN in every float format, -1 in every index
_LEAST_BYTES = 64


class Block:
    """users: streams that its memory must not be given out before. held: bytes of it that were asked for."""

    def __init__(self, size: int, owner: str) -> None:
        self.memory = torch.full((size,), _POISON, dtype=torch.uint8)
        self.owner, self.users = owner, set()
        self.held = 0

    def poison(self) -> None:
        self.memory.fill_(_POISON)


class FakeMemory:
    """Blocks in powers of two; and what is the device's from beginning to end."""

    def __init__(self, put: Callable[[str, Callable[[], None]], None], on_new: Callable[[str, str], None]) -> None:
        """Makes the memory.

        Args:
            put: (stream, act) has act called when the stream has done what was launched there so far.
            on_new: (kind, what) is called when more is needed than there was before: of a stream's memory in all, as
                torch cuts up what it has; of the host's in that size.
        """
        self._put, self._on_new = put, on_new
        self._blocks: dict[int, Block] = {}  # by address
        self._free: dict[tuple[str, int], list[Block]] = defaultdict(list)
        self._held: dict[str, int] = defaultdict(int)  # bytes of each owner, now and at most
        self.most_held: dict[str, int] = defaultdict(int)
        self._reserved: dict[str, int] = defaultdict(int)
        self._given_up: deque[Block] = deque()  # nobody holds these any more
        self._permanent: set[int] = set()

    def keep(self, tensors) -> None:
        """These are the device's, and stay."""
        self._permanent |= {t.untyped_storage().data_ptr() for t in tensors}

    def reserve(self, owner: str, num_bytes: int) -> None:
        """So much of a stream's is nothing new."""
        self._reserved[owner] += num_bytes

    def empty(self, shape, dtype: torch.dtype, owner: str, stride=None) -> Tensor:
        shape = tuple(shape)
        if stride is None:
            stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
        with torch._C._DisableTorchDispatch():
            self.reclaim()
            block = self._take(owner, max(_LEAST_BYTES, count * dtype.itemsize))
            window = block.memory.numpy()
            weakref.finalize(window, self._given_up.append, block).atexit = False
            return torch.from_numpy(window)[: count * dtype.itemsize].view(dtype).as_strided(shape, stride)

    def block_of(self, tensor: Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def is_on_device(self, tensor: Tensor) -> bool:
        block = self.block_of(tensor)
        return block.owner != HOST if block else tensor.untyped_storage().data_ptr() in self._permanent

    def is_pinned(self, tensor: Tensor) -> bool:
        """Of what `empty` has made."""
        block = self.block_of(tensor)
        return block is not None and block.owner == HOST

    def unheld(self, tensor: Tensor) -> Tensor:
        """The same place, without being a reference to it."""
        block = self.block_of(tensor)
        if block is None:
            return tensor
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(block.memory.untyped_storage(), *place)

    def borrow(self, tensor: Tensor, stream: str) -> None:
        block = self.block_of(tensor)
        if block is not None and block.owner != stream:
            block.users.add(stream)

    def reclaim(self) -> None:
        """Gives out again what nobody holds: once the streams that it was lent to have come to where they are now."""
        while self._given_up:
            block = self._given_up.popleft()
            waiting, block.users = block.users, set()
            if not waiting:
                self._give_out(block)
            for stream in tuple(waiting):
                self._put(
                    stream, lambda stream=stream, waiting=waiting, block=block: self._arrive(stream, waiting, block)
                )

    def _arrive(self, stream: str, waiting: set[str], block: Block) -> None:
        waiting.discard(stream)
        if not waiting:
            self._give_out(block)

    def _give_out(self, block: Block) -> None:
        if block.owner == HOST:
            block.poison()
        else:
            self._put(block.owner, block.poison)
        self._held[block.owner] -= block.held
        self._free[block.owner, len(block.memory)].append(block)

    def _take(self, owner: str, num_bytes: int) -> Block:
        size = 1 << (num_bytes - 1).bit_length()
        self._held[owner] += num_bytes
        is_more = self._held[owner] > max(self.most_held[owner], self._reserved[owner])
        self.most_held[owner] = max(self._held[owner], self.most_held[owner])
        free = self._free[owner, size]
        if is_more or (owner == HOST and not free):
            self._on_new("pinned memory" if owner == HOST else "memory", f"{num_bytes} bytes for {owner}")
        block = free.pop() if free else Block(size, owner)
        self._blocks[block.memory.data_ptr()] = block
        block.held = num_bytes
        return block
