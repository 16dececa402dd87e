"""Whoever else is on the machine or the network gets nothing of a job: no code of his runs, and he stops none."""

import contextlib
import json
import os
import pickle
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
from listening import listening

from batchgen.core import private_files
from batchgen.core.errors import BatchgenError, InputError
from batchgen.distributed import listener as listener_module
from batchgen.distributed.authentication import (
    CONTROL,
    TENSORS,
    Call,
    NotAuthenticated,
    authenticate_as_caller,
    authenticate_caller,
)
from batchgen.distributed.group import dismissing, follow, lead
from batchgen.distributed.launch import Rank, rank_of_environment
from batchgen.distributed.listener import Listener, call_rank
from batchgen.distributed.meeting import secret_of_user

SECRET = b"0123456789abcdef" * 2
LOOPBACK = "127.0.0.1"
CALL = Call(1, 0, 2, CONTROL)


class WritesAFile:
    """Unpickled, it would write a file as the job's user."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BATCHGEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(ranks.__file__).parent))
    monkeypatch.setattr(private_files.tempfile, "tempdir", str(tmp_path))


def launched(monkeypatch, rank, size=2, **more):
    """As a launcher starts this process."""
    values = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": ranks.free_port()} | more
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    return rank_of_environment()


def in_thread(function):
    """Starts it; gives the thread, and where its result or its failure comes."""
    came = []

    def run():
        try:
            came.append(function())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, came


@contextlib.contextmanager
def answering(answer):
    """A server of the attacker's: answer(connection) for each call. Gives its port, and what it was told."""
    told = []
    with socket.create_server((LOOPBACK, 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(5)
                        told.append(answer(connection))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], told
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("framed", [True, False])
def test_a_rank_takes_no_pickle_of_who_poses_as_rank_0(monkeypatch, tmp_path, framed):
    content = pickle.dumps(WritesAFile(tmp_path / "written"))

    def pose(connection):
        connection.sendall((struct.pack("<Q", len(content)) if framed else b"") + content * 20)
        return connection.recv(4096)

    monkeypatch.setenv("BATCHGEN_SECRET", SECRET.decode())
    with answering(pose) as (port, told):
        place = launched(monkeypatch, 1, MASTER_PORT=port)
        with pytest.raises(BatchgenError, match=r"who answers at 127.0.0.1:\d+ does not share this rank's secret"):
            follow(place, lambda: None, timeout_s=0.5)
    assert not (tmp_path / "written").exists()
    assert all(SECRET not in said for said in told)


def test_an_address_that_a_stranger_writes_into_the_launchers_store_is_not_believed(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCHGEN_SECRET", SECRET.decode())
    store = torch.distributed.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    place = launched(monkeypatch, 0, MASTER_PORT=store.port, TORCHELASTIC_USE_AGENT_STORE=True)
    content = pickle.dumps(WritesAFile(tmp_path / "written"))
    with answering(lambda connection: connection.sendall(content * 20)) as (port, told):
        store.set("batchgen/rank-0", f"{LOOPBACK} {port}")
        thread, came = in_thread(lambda: follow(replace(place, rank=1), lambda: None, timeout_s=60))
        deadline_s = time.monotonic() + 30
        while not told and time.monotonic() < deadline_s:
            time.sleep(0.01)
        group = lead(2, work=None, timeout_s=60)
        thread.join(60)
    assert told and not (tmp_path / "written").exists()
    values = torch.tensor([1.0, 2.0])
    group.send(values, 1)
    came[0].receive(received := torch.zeros(2), 0)
    assert received.tolist() == values.tolist()
    group.close(done=False)


def test_who_poses_as_a_rank_is_turned_away_with_one_line_and_the_rank_still_comes(capfd):
    with contextlib.closing(Listener(0, 2, SECRET, (LOOPBACK, 0))) as listener:
        for _ in range(3):
            with pytest.raises(NotAuthenticated):
                call_rank(listener.address, b"another secret of as many letters", CALL, 5)
        with socket.create_connection(listener.address) as connection:
            connection.sendall(pickle.dumps(WritesAFile("never")))
        own = call_rank(listener.address, SECRET, CALL, 60)
        assert set(listener.wait_for(CONTROL, [1], 60)) == {1}
        own.close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("batchgen: rank 0 of 2 closed a connection from 127.0.0.1: it does not know the secret")


class Recording:
    """A socket that keeps what is said over it."""

    def __init__(self, connection):
        self._connection, self.sent = connection, []

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def sendall(self, content):
        self.sent.append(bytes(content))
        self._connection.sendall(content)


def test_a_recorded_proof_is_good_once():
    listener = Listener(0, 2, SECRET, (LOOPBACK, 0))
    address = listener.address
    with socket.create_connection(address) as connection:
        recording = Recording(connection)
        authenticate_as_caller(recording, SECRET, CALL, 60)
        listener.wait_for(CONTROL, [1], 60)
    listener.close()
    with contextlib.closing(Listener(0, 2, SECRET, address)) as again, socket.create_connection(address) as connection:
        for part in recording.sent:
            connection.sendall(part)
        connection.settimeout(60)
        said = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(4096):
                said += part
        assert len(said) <= 32, "a fresh number, and no proof"
        assert not again.arrived(CONTROL)


def test_a_proof_is_not_good_for_the_one_who_gave_it(monkeypatch):
    """Whoever sends back what he is sent proves nothing, neither as the caller nor as the one who is called."""

    def reflect(connection):
        hello = connection.recv(4096)
        connection.sendall(hello[-32:])
        connection.sendall(connection.recv(4096))

    with answering(reflect) as (port, _), pytest.raises(NotAuthenticated):
        call_rank((LOOPBACK, port), SECRET, CALL, 5)


def test_nobody_stands_between_two_ranks():
    """At another address he can pass on what they say, and they hear that it is another address."""
    with contextlib.closing(Listener(0, 2, SECRET, (LOOPBACK, 0))) as listener:

        def pass_on(connection):
            with socket.create_connection(listener.address) as real:
                real.settimeout(5)
                for source, target in ((connection, real), (real, connection), (connection, real), (real, connection)):
                    target.sendall(source.recv(4096))

        with answering(pass_on) as (port, _), pytest.raises(NotAuthenticated):
            call_rank((LOOPBACK, port), SECRET, CALL, 5)
        assert not listener.arrived(CONTROL)


@pytest.mark.parametrize(
    "call",
    [
        replace(CALL, rank=0),
        replace(CALL, rank=2),
        replace(CALL, called=1),
        replace(CALL, size=3),
        replace(CALL, channel=7),
    ],
)
def test_what_a_proof_is_for_is_a_part_of_it(call):
    ours = socket.create_server((LOOPBACK, 0))
    with ours, socket.create_connection(ours.getsockname()) as theirs:
        connection, _ = ours.accept()
        thread, came = in_thread(lambda: authenticate_caller(connection, SECRET, 0, 2, 5))
        thread2, came2 = in_thread(lambda: authenticate_as_caller(theirs, SECRET, call, 5))
        thread.join(30)
        connection.close()
        thread2.join(30)
    assert isinstance(came[0], NotAuthenticated) and isinstance(came2[0], NotAuthenticated)


@pytest.mark.parametrize("says", [b"", b"batch", b"\0" * 200])
def test_a_crowd_that_stays_does_not_keep_ranks_from_coming(says):
    with contextlib.closing(Listener(0, 3, SECRET, (LOOPBACK, 0))) as listener, contextlib.ExitStack() as crowd:
        for _ in range(3 * listener_module._MOST_STRANGERS):
            connection = crowd.enter_context(socket.create_connection(listener.address))
            with contextlib.suppress(OSError):
                connection.sendall(says)
        for rank in (1, 2):
            crowd.enter_context(call_rank(listener.address, SECRET, Call(rank, 0, 3, TENSORS), 60))
        assert set(listener.wait_for(TENSORS, [1, 2], 60)) == {1, 2}


def test_one_who_says_a_letter_at_a_time_has_no_more_time_than_others(monkeypatch):
    ours = socket.create_server((LOOPBACK, 0))
    with ours, socket.create_connection(ours.getsockname()) as theirs:
        connection, _ = ours.accept()
        thread, came = in_thread(lambda: authenticate_caller(connection, SECRET, 0, 2, 0.3))
        with contextlib.suppress(OSError):
            while thread.is_alive():
                theirs.sendall(b"b")
                thread.join(0.05)
        thread.join(30)
        connection.close()
    assert isinstance(came[0], NotAuthenticated)


def test_a_launcher_on_one_host_needs_no_secret_from_the_user(monkeypatch, tmp_path):
    place = launched(monkeypatch, 0)
    thread, came = in_thread(lambda: follow(replace(place, rank=1), lambda: None, timeout_s=60))
    group = lead(2, work=None, timeout_s=60)
    thread.join(60)
    assert came[0].rank == 1
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir()), "the secret is gone with the start"
    group.close(done=False)


def test_a_folder_of_another_user_holds_no_secret(monkeypatch, tmp_path):
    place = launched(monkeypatch, 0)
    folder = tmp_path / f"batchgen-{os.geteuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(
        BatchgenError, match=r"cannot write .*: every user may write to it: set TMPDIR, or BATCHGEN_SECRET$"
    ):
        lead(2, work=None, timeout_s=1)
    with pytest.raises(BatchgenError, match=r"^rank 0 of 2 did not come"):
        follow(replace(place, rank=1), lambda: None, timeout_s=0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_several_hosts_need_a_secret(monkeypatch, rank):
    place = launched(monkeypatch, rank, LOCAL_WORLD_SIZE=1, MASTER_ADDR="192.0.2.1")
    with pytest.raises(
        InputError,
        match=r"^ranks on several hosts .* need a secret: .*BATCHGEN_SECRET,.*`openssl rand -hex 32` makes one",
    ):
        lead(2, work=None) if rank == 0 else follow(place, lambda: None)


def test_rank_0_of_several_hosts_does_not_hide_on_loopback(monkeypatch):
    monkeypatch.setenv("BATCHGEN_SECRET", SECRET.decode())
    launched(monkeypatch, 0, LOCAL_WORLD_SIZE=1)
    with pytest.raises(InputError, match=r"^MASTER_ADDR 127.0.0.1 is this host's own loopback address"):
        lead(2, work=None)


def test_a_secret_that_others_can_read_or_guess_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o640)
    with pytest.raises(InputError, match=r"is not this user's alone: chown it to yourself, and chmod 600$"):
        secret_of_user({"BATCHGEN_SECRET_FILE": str(path)})
    path.chmod(0o600)
    assert secret_of_user({"BATCHGEN_SECRET_FILE": str(path)}) == SECRET
    with pytest.raises(InputError, match=r"^BATCHGEN_SECRET has fewer than 32 characters"):
        secret_of_user({"BATCHGEN_SECRET": "hunter2"})
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        secret_of_user({"BATCHGEN_SECRET_FILE": str(tmp_path / "none")})
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid != 0:  # root may hand a secret to anybody
        with pytest.raises(InputError, match=r"is not this user's alone"):
            secret_of_user({"BATCHGEN_SECRET_FILE": str(path)})


def test_a_refusal_is_believed_of_rank_0_alone(monkeypatch):
    """A stranger who says that the job is refused ends no rank; rank 0, which says so, does."""
    monkeypatch.setenv("BATCHGEN_SECRET", SECRET.decode())
    content = json.dumps({"refused": 0}).encode()
    with answering(lambda connection: connection.sendall(struct.pack("<Q", len(content)) + content)) as (port, _):
        place = launched(monkeypatch, 1, MASTER_PORT=port)
        with pytest.raises(BatchgenError, match="does not share this rank's secret"):
            follow(place, lambda: None, timeout_s=0.3)
    place = launched(monkeypatch, 0)
    thread, came = in_thread(lambda: follow(replace(place, rank=1), lambda: None, timeout_s=60))
    with pytest.raises(InputError), dismissing(2):
        raise InputError("no such option")
    thread.join(60)
    assert came[0].exit_code == 2


def test_a_rank_is_called_at_the_address_that_is_named(monkeypatch):
    with contextlib.closing(Listener(0, 2, SECRET, ("localhost", 0))) as listener:
        assert all(address.is_loopback for address, port in listening({os.getpid()}) if port == listener.address[1])
    assert Rank(0, 2, "h", 1, False, (0, 2)).on_one_host
