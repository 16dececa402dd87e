"""Files with direct I/O: many pieces at a time, by the kernel or by threads, are as if each went by itself."""

import contextlib
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchgen.core import async_io, direct_io
from batchgen.core.direct_io import ALIGNMENT, DirectFile, aligned_buffer

PAGES = 300  # more than are under way at a time


@pytest.fixture(params=["kernel", "threads"])
def kind(request, monkeypatch, tmp_path):
    """The way in which several pieces are moved."""
    if request.param == "threads":
        monkeypatch.setattr(direct_io, "of_this_thread", lambda: None)
    elif async_io.of_this_thread() is None:
        pytest.skip("this kernel takes no asynchronous I/O")
    return request.param


def pieces(buffer, pages):
    view = memoryview(buffer)
    return [(page * ALIGNMENT, view[page * ALIGNMENT : (page + 1) * ALIGNMENT]) for page in pages]


def test_pieces_in_any_order_come_back_as_they_were_written(kind, tmp_path):
    draw = random.Random(0)
    written, read = aligned_buffer(PAGES * ALIGNMENT), aligned_buffer(PAGES * ALIGNMENT)
    written[:] = draw.randbytes(PAGES * ALIGNMENT)
    with contextlib.closing(DirectFile(tmp_path, size_bytes=PAGES * ALIGNMENT)) as file:
        for move, buffer in ((file.write, written), (file.read, read)):
            pages = list(range(PAGES))
            draw.shuffle(pages)
            assert move(pieces(buffer, pages)) == PAGES * ALIGNMENT
    assert read[:] == written[:]


def test_threads_that_move_pieces_of_one_file_do_not_take_each_others(kind, tmp_path):
    buffers = [aligned_buffer(PAGES * ALIGNMENT) for _ in range(4)]
    for number, buffer in enumerate(buffers):
        buffer[:] = random.Random(number).randbytes(PAGES * ALIGNMENT)
    with (
        contextlib.closing(DirectFile(tmp_path, size_bytes=4 * PAGES * ALIGNMENT)) as file,
        ThreadPoolExecutor(4) as threads,
    ):

        def write_and_read(number):
            start, copy = number * PAGES * ALIGNMENT, aligned_buffer(PAGES * ALIGNMENT)
            for move, buffer in ((file.write, buffers[number]), (file.read, copy)):
                move([(start + offset, piece) for offset, piece in pieces(buffer, range(PAGES))])
            return copy[:] == buffers[number][:]

        assert all(threads.map(write_and_read, range(4)))


def test_what_is_beyond_the_end_of_a_file_is_not_read(kind, tmp_path):
    path, buffer = tmp_path / "file", aligned_buffer(3 * ALIGNMENT)
    path.write_bytes(b"x" * (ALIGNMENT + 100))
    with contextlib.closing(DirectFile(path)) as file:
        assert file.read(pieces(buffer, range(3))) == ALIGNMENT + 100
    assert buffer[: ALIGNMENT + 101] == b"x" * (ALIGNMENT + 100) + bytes(1)


def test_a_piece_that_cannot_be_moved_is_an_error(kind, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * ALIGNMENT))
    with contextlib.closing(DirectFile(path)) as file:  # for reading alone
        with pytest.raises(OSError, match=os.strerror(9)):
            file.write(pieces(aligned_buffer(2 * ALIGNMENT), range(2)))
        assert file.read(pieces(aligned_buffer(2 * ALIGNMENT), range(2))) == 2 * ALIGNMENT


def test_one_piece_that_cannot_be_moved_leaves_none_under_way(kind, tmp_path):
    """The kernel refuses a piece that is not aligned; those beside it are done when the error comes."""
    buffer = aligned_buffer(8 * ALIGNMENT)
    with contextlib.closing(DirectFile(tmp_path, size_bytes=8 * ALIGNMENT)) as file:
        good = pieces(buffer, range(8))
        if file._direct:
            with pytest.raises(OSError, match=os.strerror(22)):
                file.write([*good[:4], (1, good[4][1]), *good[5:]])
        assert file.write(good) == file.read(good) == 8 * ALIGNMENT


def test_a_call_after_an_interrupted_one_moves_its_own_pieces(tmp_path, monkeypatch):
    if async_io.of_this_thread() is None:
        pytest.skip("this kernel takes no asynchronous I/O")
    written, read = aligned_buffer(8 * ALIGNMENT), aligned_buffer(8 * ALIGNMENT)
    written[:] = random.Random(0).randbytes(8 * ALIGNMENT)

    def interrupted(self, least):
        raise KeyboardInterrupt

    with contextlib.closing(DirectFile(tmp_path, size_bytes=8 * ALIGNMENT)) as file:
        file.write(pieces(written, range(8)))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(async_io.AsyncIO, "_wait", interrupted)
            file.read(pieces(aligned_buffer(8 * ALIGNMENT), range(4)))
        view = memoryview(read)
        assert file.read([(0, view[: 5 * ALIGNMENT]), (5 * ALIGNMENT, view[5 * ALIGNMENT :])]) == 8 * ALIGNMENT
    assert read[:] == written[:]
