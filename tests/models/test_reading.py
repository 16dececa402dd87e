"""Bytes of a tensor, whether the page cache has them or not."""

from __future__ import annotations

import os

import numpy as np
import pytest

from batchgen.core.errors import InputError
from batchgen.models import reading
from batchgen.models.headers import TensorInfo
from batchgen.models.reading import read_by_threads

OFFSET = 4096 + 32  # as GGUFs have it: no page begins there


@pytest.fixture
def tensor(tmp_path, monkeypatch):
    """A tensor of three pieces and a part of one, and its bytes."""
    monkeypatch.setattr(reading, "_PIECE_BYTES", 1 << 16)
    numbers = np.random.default_rng(0).integers(0, 256, OFFSET + 3 * (1 << 16) + 777, dtype=np.uint8)
    path = tmp_path / "model.gguf"
    path.write_bytes(numbers.tobytes())
    return TensorInfo(path, "Q4_0", (1, len(numbers) - OFFSET), OFFSET, len(numbers) - OFFSET), numbers[OFFSET:]


def forget(path):
    """Nothing of the file is in the page cache afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path):
    with path.open("rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1 << 16)], 1 << 17, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError:
            pytest.skip("this file system does not tell what is cached")


@pytest.mark.parametrize("cached", [True, False])
def test_every_byte_is_read(tensor, cached):
    info, expected = tensor
    if not cached:
        forget(info.path)
    found = np.zeros_like(expected)
    read_by_threads("weight", info, memoryview(found))
    assert np.array_equal(found, expected)


def test_what_is_not_cached_does_not_get_there(tensor):
    """It would take the place of what is used again, as the page cache counts against memory limits."""
    info, expected = tensor
    forget(info.path)
    if is_cached(info.path):
        pytest.skip("this file system keeps files in memory")
    forget(info.path)
    read_by_threads("weight", info, memoryview(np.zeros_like(expected)))
    assert not is_cached(info.path)


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_ends_too_soon_is_named(tensor, cached):
    info, expected = tensor
    os.truncate(info.path, OFFSET + len(expected) - 5)
    if not cached:
        forget(info.path)
    with pytest.raises(InputError, match=r"model\.gguf ends within tensor weight: fetch it again"):
        read_by_threads("weight", info, memoryview(np.zeros_like(expected)))


def test_a_file_that_is_gone_is_named(tensor):
    info, expected = tensor
    info.path.unlink()
    with pytest.raises(InputError, match=r"cannot read tensor weight from .*model\.gguf: No such file"):
        read_by_threads("weight", info, memoryview(np.zeros_like(expected)))
