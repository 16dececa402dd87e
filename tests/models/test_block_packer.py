"""Rows of blocks that are packed while they are read are those of the whole matrix, packed at once."""

import errno
import os
import threading

import numpy as np
import pytest
import torch
from gguf_blocks import random_rows

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.core.errors import InputError
from batchgen.models.tensor_files import block_packer
from batchgen.models.tensor_files.block_packer import BlockPacker
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import SharedFile
from batchgen.models.tensor_files.rows_in_file import FilePart, RowsInFile
from batchgen.ops import cpp as kernels

OFFSET = 4096 + 32  # as GGUFs have it: no page begins there
ALL_SETS = [*kernels.instruction_sets(), *kernels.plain_twins()]


def make(path, weight_format, rows, depth, head_dims=(), apart=32):
    """A file of so many rows in each part, and the same rows in order; head_dims: of parts with interleaved heads."""
    kind = weight_format.upper()
    row_bytes = depth // BLOCK_FORMATS[weight_format][0] * BLOCK_FORMATS[weight_format][1]
    parts, data, ordered = [], bytearray(OFFSET), []
    for i, (count, head_dim) in enumerate(zip(rows, head_dims or [None] * len(rows), strict=True)):
        stored = random_rows(kind, count, depth, seed=i)
        info = TensorInfo(path, kind, (count, depth), len(data), count * row_bytes)
        order = (*range(0, head_dim, 2), *range(1, head_dim, 2)) if head_dim else None
        parts.append(FilePart(f"part{i}", info, count, order))
        data += stored.tobytes() + bytes(apart)
        if head_dim:
            stored = stored.reshape(-1, head_dim // 2, 2, row_bytes).swapaxes(1, 2).reshape(count, row_bytes)
        ordered.append(stored)
    path.write_bytes(data[:-apart])
    return RowsInFile(tuple(parts), row_bytes), torch.from_numpy(np.concatenate(ordered))


def forget(path):
    """Nothing of the file is in the page cache afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def assert_packed(rows, ordered, weight_format="q4_1", dtype=torch.float32, gated=False, isa=""):
    """Bit for bit, what fills up the last panel too."""
    with BlockPacker(dtype) as packer:
        found = packer.pack(kernels.BlockWeight(rows, weight_format, isa), gated=gated)
    expected = kernels.pack_blocks(kernels.BlockWeight(ordered, weight_format, isa), dtype, gated=gated)
    assert (found.shape, found.dtype, found.gated, found.isa) == (expected.shape, dtype, gated, expected.isa)
    assert torch.equal(found.data, expected.data)


@pytest.fixture
def small_pieces(monkeypatch):
    """So that a small matrix is many of them."""
    monkeypatch.setattr(block_packer, "_PIECE_BYTES", 1 << 15)


@pytest.mark.parametrize("isa", ALL_SETS)
@pytest.mark.parametrize("weight_format", BLOCK_FORMATS)
def test_panels_packed_from_a_file_are_those_of_the_whole_matrix(tmp_path, small_pieces, weight_format, isa):
    """Of parts that begin in the middle of a page and of a panel."""
    for gated in (False, True):
        rows, ordered = make(tmp_path / "model.gguf", weight_format, (150, 37, 113), 512)
        assert_packed(rows, ordered, weight_format, torch.bfloat16, gated, isa)


@pytest.mark.parametrize("piece_bytes", [1, 1 << 15, 50_000, 1 << 20])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("rows", [(1,), (31,), (64,), (200, 200), (7, 500, 5)])
def test_any_size_of_pieces(tmp_path, monkeypatch, rows, cached, piece_bytes):
    monkeypatch.setattr(block_packer, "_PIECE_BYTES", piece_bytes)
    file, ordered = make(tmp_path / "model.gguf", "q4_1", rows, 256)
    for gated in {False, len(ordered) % 2 == 0}:
        if not cached:
            forget(tmp_path / "model.gguf")
        assert_packed(file, ordered, gated=gated)


@pytest.mark.parametrize("head_dim", [4, 12, 80, 96, 128])
def test_interleaved_rows_are_put_in_order(tmp_path, small_pieces, head_dim):
    """Queries and keys of several heads, and values, whose rows are in order; heads that no panel has whole."""
    rows, ordered = make(
        tmp_path / "model.gguf", "q4_1", (5 * head_dim, 2 * head_dim, 77), 256, (head_dim, head_dim, None)
    )
    assert_packed(rows, ordered)


def test_experts_are_packed_one_by_one(tmp_path, small_pieces):
    rows, ordered = make(tmp_path / "model.gguf", "q4_1", (48,) * 6, 256)
    assert (rows.shape, len(rows), rows.nbytes) == (ordered.shape, len(ordered), ordered.nbytes)
    for own, expected in zip(rows.chunk(3), ordered.chunk(3), strict=True):
        assert_packed(own, expected, gated=True)


def test_many_matrices_at_once(tmp_path, small_pieces, monkeypatch):
    """Of several files, in memory that is asked for once for some of them."""
    monkeypatch.setattr(block_packer, "_MEMORY_BYTES", 1 << 17)
    files = [make(tmp_path / f"{i}.gguf", "q4_1", (20 + 31 * i,), 256) for i in range(12)]
    with BlockPacker(torch.float32) as packer:
        found = [packer.pack(kernels.BlockWeight(rows, "q4_1")) for rows, _ in files]
    for panels, (_, ordered) in zip(found, files, strict=True):
        assert torch.equal(panels.data, kernels.pack_blocks(kernels.BlockWeight(ordered, "q4_1"), torch.float32).data)
        assert panels.data.data_ptr() % 64 == 0


def test_little_memory_is_used_to_read(tmp_path, small_pieces, monkeypatch):
    """As much for each thread, however much is read."""
    rows, ordered = make(tmp_path / "model.gguf", "q4_1", (4000,), 256)
    sizes, real = [], block_packer.OfThread.buffer

    def buffer(self, num_bytes):
        sizes.append((threading.get_ident(), len(found := real(self, num_bytes))))
        return found

    monkeypatch.setattr(block_packer.OfThread, "buffer", buffer)
    assert_packed(rows, ordered)
    assert len(sizes) > 10 and max(size for _, size in sizes) <= (1 << 15) + 2 * 4096
    assert threading.get_ident() not in {thread for thread, _ in sizes}


@pytest.mark.parametrize("refusal", ["no cache", "EINVAL", "short"])
def test_where_direct_reads_fail_files_are_read_as_usual(tmp_path, small_pieces, monkeypatch, refusal):
    rows, ordered = make(tmp_path / "model.gguf", "q4_1", (150, 150), 256)
    forget(tmp_path / "model.gguf")

    def read(*_):
        if refusal == "EINVAL":
            raise OSError(errno.EINVAL, "Invalid argument")
        return 16

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("batchgen.models.tensor_files.reading.DirectFile.read", read)
    if refusal == "no cache":
        monkeypatch.setattr("batchgen.models.tensor_files.reading.os.preadv", refuse)
    assert_packed(rows, ordered)


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_ends_too_soon_is_named(tmp_path, small_pieces, cached):
    rows, ordered = make(tmp_path / "model.gguf", "q4_1", (150, 150), 256)
    last = rows.parts[1].info
    os.truncate(last.path, last.offset + last.num_bytes - 5)
    if not cached:
        forget(last.path)
    with pytest.raises(InputError, match=r"model\.gguf ends within tensor part1: fetch it again"):
        assert_packed(rows, ordered)


def test_a_disk_that_fails_is_named(tmp_path, small_pieces, monkeypatch):
    rows, ordered = make(tmp_path / "model.gguf", "q4_1", (150,), 256)

    def fetch(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SharedFile, "fetch", fetch)
    with pytest.raises(InputError, match=r"cannot read tensor part0 from .*model\.gguf: Input/output error"):
        assert_packed(rows, ordered)


def test_a_file_that_is_gone_is_named(tmp_path):
    rows, ordered = make(tmp_path / "model.gguf", "q4_1", (150,), 256)
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(InputError, match=r"cannot read tensor part0 from .*model\.gguf: No such file"):
        assert_packed(rows, ordered)


def test_an_interrupt_leaves_out_what_has_not_begun(tmp_path, small_pieces, monkeypatch):
    """No thread is at work afterwards.

    The only thread is in its first piece until the others are called off, or are not.
    """
    rows, _ = make(tmp_path / "model.gguf", "q4_1", (2000,), 256)
    packed, begun, released, real = [], threading.Event(), threading.Event(), kernels.fill_panels

    def fill(panels, first, data):
        begun.set()
        assert released.wait(60)
        real(panels, first, data)
        packed.append(first)

    monkeypatch.setattr(kernels, "fill_panels", fill)
    monkeypatch.setattr(block_packer, "_MOST_THREADS", 1)
    with pytest.raises(KeyboardInterrupt), BlockPacker(torch.float32) as packer:
        packer.pack(kernels.BlockWeight(rows, "q4_1"))
        assert begun.wait(60)
        shutdown = packer._threads.shutdown

        def shut_down(wait=True, **how):
            shutdown(wait=False, **how)
            released.set()
            shutdown(wait=wait)

        monkeypatch.setattr(packer._threads, "shutdown", shut_down)
        raise KeyboardInterrupt
    assert packed == [0] and len(packer._pending) > 1
    assert packer._threads._shutdown and all(f.done() for f in packer._pending)
