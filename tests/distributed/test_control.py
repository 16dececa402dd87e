"""The connection of every rank to rank 0: what is said over it that nobody should say."""

import socket
import struct
import threading

import pytest

from batchgen.core.errors import BatchgenError
from batchgen.distributed.control import Hub, Line
from batchgen.distributed.frames import send_frame


@pytest.mark.parametrize(
    "message",
    [b"[" * 900_000, b'["listens", {"a": 1}]', b'["listens", ["a", 1e999]]', b"\xff", b"7"],
    ids=["deep", "mapping", "infinite", "no text", "number"],
)
def test_a_rank_that_says_what_is_no_message_is_taken_as_ended(message):
    ours, theirs = socket.socketpair()
    hub = Hub(2, {1: ours})
    send_frame(theirs, message)
    with theirs, pytest.raises(BatchgenError, match="rank 1 of 2"):
        hub.addresses(within_s=5.0)
    hub.close(done=False)


@pytest.mark.parametrize("length", [1 << 63, 1 << 50])
def test_a_message_of_rank_0_that_no_memory_holds_is_its_end(length):
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    line = Line(ours, lost.set)
    theirs.sendall(struct.pack("<Q", length))
    with theirs, ours:
        assert lost.wait(5.0)
        with pytest.raises(EOFError):
            line.receive_broadcast()


def test_a_rank_hears_that_rank_0_is_lost_before_it_could_take_its_work_for_done():
    ours, theirs = socket.socketpair()
    heard, told = [], threading.Event()

    def lost():
        told.wait(0.3)  # as long as the other thread needs to go on
        heard.append("lost")

    line = Line(ours, lost)
    theirs.close()
    with ours, pytest.raises(EOFError):
        line.receive_broadcast()
    assert heard == ["lost"]
