"""Cores that processes on one machine share out among themselves."""

import os
import subprocess
import sys

import pytest

from batchgen.core.cores import take_cores

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(not CORES, reason="the system does not keep threads to cores")

# Takes cores, says which, and waits; threads that are there before, and those that come later, say where they may run.
TAKER = """
import os, sys, threading
from pathlib import Path
from batchgen.core.cores import take_cores
over = threading.Event()
threading.Thread(target=over.wait).start()
taken = take_cores(int(sys.argv[1]), Path(sys.argv[2]))
threading.Thread(target=over.wait).start()
here = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
print(*taken, here == {taken} if taken else here == {tuple(sorted(os.sched_getaffinity(0)))}, flush=True)
sys.stdin.read()
over.set()
"""


@pytest.fixture
def taker(tmp_path):
    """taker(count) -> (process, cores, whether all its threads keep to them)."""
    processes = []

    def start(count):
        command = [sys.executable, "-c", TAKER, str(count), str(tmp_path / "cores")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        *cores, kept = process.stdout.readline().split()
        return process, tuple(map(int, cores)), kept == "True"

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_no_core_is_taken_twice_and_those_of_the_dead_are_free(taker):
    held = [taker(1) for _ in CORES]
    assert sorted(core for _, cores, _ in held for core in cores) == CORES
    assert all(kept for _, _, kept in held)
    _, none, kept = taker(1)
    assert none == () and kept
    held[0][0].kill()
    held[0][0].wait()
    assert taker(1)[1] == held[0][1]


def test_more_than_there_are_changes_nothing(taker):
    _, none, kept = taker(len(CORES) + 1)
    assert none == () and kept
    assert taker(len(CORES))[1] == tuple(CORES)  # what was looked at is free again


def test_a_folder_that_cannot_be_used_is_as_if_none_were_free(tmp_path):
    (tmp_path / "file").write_text("")
    before = os.sched_getaffinity(0)
    assert take_cores(1, tmp_path / "file" / "cores") == ()
    assert os.sched_getaffinity(0) == before
