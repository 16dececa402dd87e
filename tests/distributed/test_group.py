"""Groups of processes.

They find one another, pass tensors, and whichever of them ends, the others say so and end too.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
from listening import watched

from batchgen.core.errors import BatchgenError, InputError
from batchgen.distributed import group as group_module
from batchgen.distributed.authentication import CONTROL, Call
from batchgen.distributed.control import Hub, Line
from batchgen.distributed.group import dismissing, follow, lead
from batchgen.distributed.launch import Rank, core_shares, own_share, rank_of_environment
from batchgen.distributed.listener import Listener, call_rank
from batchgen.ops.instruction_set import follow_affinity, num_threads

SECRET = b"0123456789abcdef" * 2
WORK = "ranks:say_ready"
SUPPORT = str(Path(ranks.__file__).parent)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Processes find what tests share."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_three_ranks_add_up_pass_on_and_end():
    """They listen as long as they come together, as `ss -ltn` shows it, and on loopback alone."""
    before = os.sched_getaffinity(0)
    with watched() as listened:
        group = ranks.start(3, ranks.add_up, 2)
    assert listened and all(address.is_loopback for address, _ in listened)
    with watched() as listened:
        for _ in range(2):
            values = torch.arange(4, dtype=torch.float32)
            group.all_reduce(values)
            assert values.tolist() == [0, 111, 222, 333]
    assert not listened
    group.send(torch.tensor([5.0, 7.0]), 1)
    group.receive(found := torch.zeros(2), 2)
    assert found.tolist() == [8, 10]
    ranks.say(group, {"more": [1, 2]})
    group.ready()
    group.close()
    assert os.sched_getaffinity(0) == before


def test_a_rank_that_is_killed_is_named():
    group = ranks.start(3, ranks.die, int(signal.SIGKILL), 2)
    group.all_reduce(torch.ones(3))
    with pytest.raises(
        BatchgenError, match=r"^rank 2 of 3 was killed by SIGKILL.*; the same command goes on from there$"
    ):
        group.all_reduce(torch.ones(3))
    group.close(done=False)


def test_what_another_rank_refuses_rank_0_says():
    group = ranks.start(2, ranks.refuse)
    with pytest.raises(BatchgenError, match=r"^rank 1 of 2 failed: no such model\\nhere; "):
        group.ready()
    with pytest.raises(BatchgenError, match=r"^rank 1 of 2 failed: no such model\\nhere; "):
        group.broadcast(b"more")
    group.close(done=False)


@pytest.mark.parametrize("program", ["be_killed_as_leader", "be_killed_as_leader_at_the_start"])
def test_ranks_end_when_rank_0_is_killed(program, tmp_path):
    code = f"import ranks; ranks.{program}({str(tmp_path / 'pid')!r})"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": SUPPORT})
    assert done.returncode == -signal.SIGKILL
    pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in (1, 2)]
    deadline = time.monotonic() + 60
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(has_ended, pids))


def in_environment(monkeypatch, rank, size):
    values = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ranks.free_port()}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_what_rank_0_refuses_ends_it_though_others_never_come(monkeypatch):
    in_environment(monkeypatch, 0, 3)
    monkeypatch.setattr(group_module, "_REFUSED_S", 0.2)
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"^no such option$"), dismissing(3):
        raise InputError("no such option")
    assert time.monotonic() - begun < 60, "others are not waited for as long as for a job"


def test_others_end_with_a_line_where_rank_0_refuses(monkeypatch):
    in_environment(monkeypatch, 0, 2)
    monkeypatch.setattr(group_module, "_REFUSED_S", 60)
    place, said = replace(rank_of_environment(), rank=1), []

    def come():
        try:
            follow(place, lambda: None)
        except BatchgenError as error:
            said.append((error.exit_code, str(error)))

    thread = threading.Thread(target=come)
    thread.start()
    with pytest.raises(InputError), dismissing(2):
        raise InputError("no such option")
    thread.join(60)
    assert said == [(2, "rank 1 of 2 ends: rank 0 has refused the job, and says why")]


def test_a_number_of_ranks_that_is_not_the_launchers_is_told_to_all(monkeypatch):
    in_environment(monkeypatch, 0, 4)
    monkeypatch.setattr(group_module, "_REFUSED_S", 0.2)
    with pytest.raises(InputError, match=r"^4, not 2$"), dismissing(2):
        raise InputError("4, not 2")


def test_rank_0_has_the_peaks_of_others_once_it_is_closed():
    group = ranks.start(3, ranks.hold, [100, 200])
    assert group.peaks() == [None, None]
    group.close()
    assert group.peaks() == [{"cpu": 100}, {"cpu": 200}]


def test_kernels_have_the_threads_of_their_share(monkeypatch):
    for name in ("OMP_NUM_THREADS", "BATCHGEN_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = os.sched_getaffinity(0)
    follow_affinity()
    assert num_threads() == len(cores)  # which is kept
    with own_share(2) as shares:
        assert num_threads() == len(shares[0])
    assert num_threads() == len(cores)


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            BatchgenError, match=f"^MASTER_PORT {port} is taken on this host: give all ranks another one$"
        ):
            lead(2, work=None, timeout_s=1)


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    in_environment(monkeypatch, 0, 3)
    with pytest.raises(BatchgenError, match=r"^ranks 1, 2 of 3 did not come within 1 s: start all 3 of them"):
        lead(3, work=None, timeout_s=1)


def test_rank_0_that_does_not_come_is_named():
    place = Rank(1, 2, "127.0.0.1", ranks.free_port(), False, (1, 2))
    with pytest.raises(BatchgenError, match=r"^rank 0 of 2 did not come to 127.0.0.1:\d+ within 1 s"):
        follow(place, lambda: None, timeout_s=1)


def test_a_rank_that_ends_before_it_has_come_is_named(monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BatchgenError, match=r"^rank 1 of 2 ended with exit code 1 before it had begun"):
        lead(2, work=WORK)


def test_what_a_launcher_says_must_fit(monkeypatch):
    in_environment(monkeypatch, 0, 4)
    with pytest.raises(InputError, match="the launcher has started 4 ranks, the job is for 2"):
        lead(2, work=WORK)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError, match="this is rank 1"):
        lead(4, work=WORK)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "whole numbers"),
    ],
)
def test_wrong_environments_are_refused(environment, message):
    with pytest.raises(InputError, match=message):
        rank_of_environment(environment)


def test_a_launcher_of_one_process_is_none():
    assert rank_of_environment({}) is None
    assert rank_of_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("size", "cores", "nodes", "shares"),
    [
        (2, {0, 1, 2, 3}, [{0, 2}, {1, 3}], [{0, 2}, {1, 3}]),  # whole nodes
        (2, {0, 1, 2, 3}, [{0, 1, 2, 3}], [{0, 1}, {2, 3}]),
        (2, {0, 1, 2}, [{0, 1}, {2, 3}], [{0}, {1}]),  # nodes of which one has less left
        (4, {0, 1, 2, 3}, [{0, 1}, {2, 3}], [{0}, {1}, {2}, {3}]),
        (2, set(range(8)), [{0, 1}, {2, 3}, {4, 5}, {6, 7}], [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (3, {4, 5}, [], [{4, 5}] * 3),  # fewer than ranks
    ],
)
def test_ranks_share_the_cores(size, cores, nodes, shares):
    assert core_shares(size, cores, nodes) == shares


def connected(size):
    """Rank 0's hub, the other ranks' ends, and events that say that they have lost rank 0."""
    listener, lost, lines = Listener(0, size, SECRET, ("127.0.0.1", 0)), {}, {}
    for rank in range(1, size):
        lost[rank] = threading.Event()
        connection = call_rank(listener.address, SECRET, Call(rank, 0, size, CONTROL), 60)
        lines[rank] = Line(connection, lost[rank].set)
    hub = Hub(size, listener.wait_for(CONTROL, range(1, size), 60))
    listener.close()
    return hub, lines, lost


def test_when_one_rank_ends_the_others_end_and_the_first_is_named():
    hub, lines, lost = connected(3)
    lines[1].fail(InputError("no memory"))
    assert lost[2].wait(60)
    with pytest.raises(BatchgenError, match=r"^rank 1 of 3 failed: no memory; "):
        hub.raise_ended(60)
    hub.close(done=False)


def test_a_rank_that_has_come_and_says_nothing_is_not_waited_for_for_ever():
    hub, lines, _ = connected(3)
    lines[1].listens(("127.0.0.1", 1))
    with pytest.raises(BatchgenError, match=r"^rank 2 of 3 has come and says nothing"):
        hub.addresses(0.1)
    hub.close(done=False)


def test_what_is_done_ends_all_without_a_loss():
    hub, lines, lost = connected(3)
    hub.broadcast(b"work")
    for line in lines.values():
        assert line.receive_broadcast() == b"work"
        line.end({})
    hub.close(done=True)
    for line in lines.values():
        with pytest.raises(EOFError):
            line.receive_broadcast()
    assert not any(event.is_set() for event in lost.values())


def test_files_beside_the_data_do_not_stand_for_modules(monkeypatch, tmp_path):
    (tmp_path / "queue.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    group = ranks.start(2, ranks.say_ready)
    group.ready()
    group.close()
