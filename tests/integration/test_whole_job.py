"""What the product promises: stopped nothing is lost, and memory does not grow with the rows."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import batchgen
from thorough import only_thorough

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("batchgen")


@pytest.fixture(scope="module")
def job(tiny_models, tmp_path_factory):
    """A command that takes a few seconds, as (output path) -> arguments; fp32, so that batches change no token."""
    folder = tmp_path_factory.mktemp("job")
    rng = random.Random(0)
    words = ["ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate"]
    rows = [" ".join(rng.choices(words, k=rng.randrange(1, 30))) for _ in range(1500)]
    rows[40] = None
    pq.write_table(pa.table({"prompt": rows, "n": range(1500)}), folder / "in.parquet", row_group_size=200)

    def command(output):
        return [
            str(PROGRAM), "run", "-m", str(tiny_models("llama")[0]), "-i", str(folder / "in.parquet"),
            "-o", str(output), "--max-tokens", "24", "--temperature", "0.8", "--dtype", "float32", "--flush-interval", "0.2s",
            "--max-num-seqs", "32", "--progress", "none", "--cpu-memory", "2GiB",
        ]  # fmt: skip

    return command


def finished(run_directory):
    """Rows that are safe in parts."""
    return sum(pq.read_metadata(p).num_rows for p in (run_directory / "parts").glob("part-*.parquet"))


def test_two_runs_on_one_output(job, tmp_path):
    output = tmp_path / "out.parquet"
    first = subprocess.Popen(job(output))
    while not (tmp_path / "out.parquet.batchgen" / "manifest.json").exists():
        time.sleep(0.05)
        assert first.poll() is None
    first.send_signal(signal.SIGSTOP)  # or it might be done before the second one has started
    second = subprocess.run(job(output), capture_output=True, text=True)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 1 and str(first.pid) in second.stderr and second.stderr.count("\n") == 1
    assert first.wait() == 0
    assert pq.read_metadata(output).num_rows == 1500


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_stops_cleanly_and_the_job_goes_on(job, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", small]).returncode:
        pytest.skip("cannot mount here")
    try:
        output = small / "out.parquet"
        log = tmp_path / "log"
        code, said = batchgen(job(output)[1:], log), log.read_text()
        assert code == 1, said
        assert "No space left" in said and "same command" in said and said.count("\n") == 1
        safe = finished(small / "out.parquet.batchgen")
        subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
        report = tmp_path / "report.json"
        assert batchgen([*job(output)[1:], "--report", str(report)], log) == 0, log.read_text()
        assert json.loads(report.read_text())["rows_resumed"] == safe > 0
        whole = tmp_path / "whole.parquet"
        assert batchgen(job(whole)[1:], log) == 0, log.read_text()
        assert output.read_bytes() == whole.read_bytes()
    finally:
        subprocess.run(["umount", "-l", small])


@pytest.mark.slow
@pytest.mark.timeout(300)
@only_thorough
def test_memory_does_not_grow_with_rows(tiny_models, tmp_path):
    """In small; benchmarks/memory_flat.py does it with a million rows. Both sizes are past the point where queues
    and buffers are full; what is left between two processes is the allocator's noise, up to some 75 MB seen, while a
    kilobyte kept per row would be 160 MB."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "memory_flat.py"), "--model", str(tiny_models("llama")[0])]
    command += ["--rows", "40000", "--rows", "200000", "--output", str(result)]
    subprocess.run(command, check=True)
    assert json.loads(result.read_text())["growth_bytes"] < 120e6
