"""Bytes of a tensor, whether the page cache has them or not."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from batchgen.core.errors import InputError
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import read_by_threads

OFFSET = 4096 + 32  # as GGUFs have it: no page begins there


@pytest.fixture
def tensor(tmp_path, monkeypatch):
    """A tensor of three pieces and a part of one, and its bytes."""
    monkeypatch.setattr(reading, "_PIECE_BYTES", 1 << 16)
    numbers = np.random.default_rng(0).integers(0, 256, OFFSET + 3 * (1 << 16) + 777, dtype=np.uint8)
    path = tmp_path / "model.gguf"
    path.write_bytes(numbers.tobytes())
    return TensorInfo(path, "Q4_0", (1, len(numbers) - OFFSET), OFFSET, len(numbers) - OFFSET), numbers[OFFSET:]


def assert_read(info, expected):
    found = np.zeros_like(expected)
    read_by_threads("weight", info, memoryview(found))
    assert np.array_equal(found, expected)


def forget(path):
    """Nothing of the file is in the page cache afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path, piece=2):
    """Whether the middle of a piece is in the page cache."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        try:
            return os.preadv(file.fileno(), [bytearray(1)], OFFSET + piece * (1 << 16) + (1 << 15), os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError:
            pytest.skip("this file system does not tell what is cached")


@pytest.mark.parametrize("cached", [True, False])
def test_every_byte_is_read(tensor, cached):
    info, expected = tensor
    if not cached:
        forget(info.path)
    assert_read(info, expected)


@pytest.mark.parametrize("loads", [1, 2])
def test_what_is_not_cached_does_not_get_there(tensor, loads):
    """It would take the place of what is used again, as the page cache counts against memory limits."""
    info, expected = tensor
    forget(info.path)
    if any(is_cached(info.path, piece) for piece in range(3)):
        pytest.skip("this file system keeps files in memory")
    for _ in range(loads):
        read_by_threads("weight", info, memoryview(np.zeros_like(expected)))
    assert not any(is_cached(info.path, piece) for piece in range(3))


def test_what_is_cached_is_not_read_from_the_disk(tensor, monkeypatch):
    info, expected = tensor
    info.path.read_bytes()
    if not is_cached(info.path):
        pytest.skip("this file system does not keep files in memory")
    monkeypatch.setattr(reading.DirectFile, "read", lambda *_: pytest.fail("the disk is read"))
    assert_read(info, expected)


def test_where_the_cache_cannot_be_asked_files_are_read_as_usual(tensor, monkeypatch):
    """As on tmpfs, NFS and FUSE: what they keep in memory is not read from a network."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    info, expected = tensor
    monkeypatch.setattr(reading.os, "preadv", refuse)
    monkeypatch.setattr(reading.DirectFile, "read", lambda *_: pytest.fail("the disk is read"))
    assert_read(info, expected)


@pytest.mark.parametrize("refusal", ["EINVAL", "short"])
def test_where_direct_reads_fail_files_are_read_as_usual(tensor, monkeypatch, refusal):
    """Some file systems let a file be opened for direct I/O, and then refuse it or give less than was asked for."""

    def read(*_):
        if refusal == "EINVAL":
            raise OSError(errno.EINVAL, "Invalid argument")
        return 16

    info, expected = tensor
    forget(info.path)
    monkeypatch.setattr(reading.DirectFile, "read", read)
    assert_read(info, expected)


def test_a_disk_that_fails_is_named(tensor, monkeypatch):
    def read(*_):
        raise OSError(errno.EIO, "Input/output error")

    info, expected = tensor
    forget(info.path)
    if is_cached(info.path):
        pytest.skip("this file system keeps files in memory")
    forget(info.path)
    monkeypatch.setattr(reading.DirectFile, "read", read)
    with pytest.raises(InputError, match=r"cannot read tensor weight from .*model\.gguf: Input/output error"):
        read_by_threads("weight", info, memoryview(np.zeros_like(expected)))


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
