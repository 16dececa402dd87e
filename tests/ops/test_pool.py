"""Threads of the kernels: how many there are, on which CPUs, and what becomes of an error in one of them."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from batchgen.ops import _kernels

COUNT = "from batchgen.ops.instruction_set import num_threads; print(num_threads())"


def in_a_process(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture
def four_threads():
    before = _kernels.num_threads()
    _kernels.set_num_threads(4)
    yield
    _kernels.set_num_threads(before)


def draw(columns, rows=64):
    """One token of each row of logits: an item a row, which takes memory for `columns` numbers first."""
    logits, index = np.zeros((rows, 8), np.float32), np.full(rows, -1)
    one, unlimited = np.ones(rows), np.zeros(rows, np.int64)
    _kernels.draw(
        logits.ctypes.data, 8, columns, one.astype(np.float32), unlimited, one, 0 * one, 0 * one, index.ctypes.data
    )
    return index


def test_an_error_in_a_thread_is_an_exception_of_the_call(four_threads):
    for _ in range(20):
        with pytest.raises(MemoryError):
            draw(columns=1 << 50)
        assert (draw(columns=8) == 0).all(), "the threads go on"


NO_NUMBERS = ("0", "-1", "2x", "1.5", " ", "99999999999999999999", "abc")
REFUSED = f"""
import os
from click.testing import CliRunner
from batchgen.cli.commands import cli
from batchgen.core.errors import InputError
from batchgen.ops.instruction_set import num_threads
for value in {NO_NUMBERS}:
    os.environ["BATCHGEN_NUM_THREADS"] = value
    try:
        num_threads()
    except InputError as error:
        print(error)
error = CliRunner().invoke(cli, ["profile", "-o", "-"]).exception
print(error.exit_code, error)
"""


def test_a_number_of_threads_that_is_none_is_bad_input():
    lines = in_a_process(REFUSED).stdout.splitlines()
    says = "BATCHGEN_NUM_THREADS={} is no number of threads: give one from 1 to 8192, or take it out"
    assert lines == [*(says.format(value) for value in NO_NUMBERS), "2 " + says.format("abc")]


@pytest.mark.parametrize(("own", "shared", "count"), [("3", "5", 3), ("", "5", 5), ("", "some", os.cpu_count())])
def test_where_the_number_comes_from(own, shared, count):
    found = int(in_a_process(COUNT, BATCHGEN_NUM_THREADS=own, OMP_NUM_THREADS=shared).stdout)
    assert found == count or (shared == "some" and found == len(os.sched_getaffinity(0)))


MANY_CPUS = """
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <string.h>
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t* set) {
    if (size < 3000 / 8) return errno = EINVAL, -1;
    memset(set, 0, size);
    for (int cpu = 1020; cpu < 1030; cpu++) CPU_SET_S(cpu, size, set);
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_machine_of_more_cpus_than_a_cpu_set_holds(tmp_path):
    (tmp_path / "many.c").write_text(MANY_CPUS)
    library = tmp_path / "many.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "many.c"], check=True)
    code = (
        COUNT
        + """
import numpy as np
from batchgen.ops import _kernels
x, out = np.ones((4096, 64), np.float32), np.empty(4096, np.float32)
index, lse = np.empty(4096, np.int64), np.empty(4096, np.float32)
_kernels.argmax(x.ctypes.data, 64, 4096, 64, index.ctypes.data, out.ctypes.data, lse.ctypes.data)
print(out.sum())
"""
    )
    done = in_a_process(code, LD_PRELOAD=str(library), OMP_NUM_THREADS="", BATCHGEN_NUM_THREADS="")
    assert done.stdout.split() == ["10", "4096.0"], done.stderr
