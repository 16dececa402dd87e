"""The scripts that start many workers, with stand-ins for `batchgen` and Slurm: signals, exit codes, re-queueing."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes" / "many_workers"
pytestmark = pytest.mark.skipif(shutil.which("taskset") is None, reason="the scripts need taskset")

# Ends with the exit code that $ENDS names; or, asked to stop, with that of a worker that was, after a while in which it
# saves its rows.
WORKER = """#!/bin/sh
trap 'sleep 0.2; echo saved >> log; exit 130' TERM
echo "$@" >> log
while [ "$ENDS" = asked ]; do sleep 0.02; done
exit "$ENDS"
"""
SCONTROL = """#!/bin/sh
echo "$@" >> queued
"""


@pytest.fixture
def start(tmp_path):
    """start(script, exit code or "asked", *arguments) -> the process of a script."""
    for name, text in (("worker", WORKER), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "11", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_MEM_PER_NODE": "1000"}

    def start(script, ends, *arguments):
        environment = {**os.environ, **slurm, "BATCHGEN": "./worker", "ENDS": str(ends)}
        environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.Popen(["sh", RECIPES / script, *arguments], cwd=tmp_path, env=environment)

    return start


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("ends", "queued"), [(0, False), (1, False), (2, False), (3, True), (4, False), (130, True)])
def test_slurm_queues_a_task_again_that_has_stopped(start, tmp_path, ends, queued):
    assert start("slurm.sh", ends, "--model", "M").wait(60) == ends
    assert lines(tmp_path / "queued") == (["requeue 7_3"] if queued else [])
    assert lines(tmp_path / "log") == ["run --share --cpu-memory 900MiB --progress plain --model M"]


@pytest.mark.parametrize(("script", "arguments"), [("slurm.sh", []), ("workers.sh", ["2"])])
def test_a_signal_to_the_script_alone_reaches_its_workers_and_their_rows_are_waited_for(
    start, tmp_path, script, arguments
):
    count = int(*arguments or "1")
    process = start(script, "asked", *arguments)
    while len(lines(tmp_path / "log")) < count:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert lines(tmp_path / "log").count("saved") == count
    assert lines(tmp_path / "queued") == (["requeue 7_3"] if script == "slurm.sh" else [])


@pytest.mark.parametrize("ends", [0, 4])
def test_workers_of_one_machine_end_as_the_output_does(start, tmp_path, ends):
    assert start("workers.sh", ends, "2", "--model", "M").wait(60) == ends
    assert lines(tmp_path / "log") == ["run --share --model M"] * 2
