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
from processes import batchgen, start_batchgen

ROOT = Path(__file__).parents[2]
ROWS = 500


@pytest.fixture(scope="module")
def job(tiny_models, tmp_path_factory):
    """A job of a second or two, as (output path) -> arguments; fp32, so that batches change no token."""
    folder = tmp_path_factory.mktemp("job")
    rng = random.Random(0)
    words = ["ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate"]
    rows = [" ".join(rng.choices(words, k=rng.randrange(1, 30))) for _ in range(ROWS)]
    rows[40] = None
    pq.write_table(pa.table({"prompt": rows, "n": range(ROWS)}), folder / "in.parquet", row_group_size=200)

    def command(output):
        return [
            "run", "-m", str(tiny_models("llama")[0]), "-i", str(folder / "in.parquet"),
            "-o", str(output), "--max-tokens", "24", "--temperature", "0.8", "--dtype", "float32", "--flush-interval",
            "0.2s",
            "--max-num-seqs", "32", "--progress", "none", "--cpu-memory", "4GiB",
        ]  # fmt: skip

    return command


def finished(run_directory):
    """Rows that are safe in parts."""
    return sum(pq.read_metadata(p).num_rows for p in (run_directory / "parts").glob("part-*.parquet"))


def test_two_runs_on_one_output(job, tmp_path):
    output, log = tmp_path / "out.parquet", tmp_path / "log"
    first = start_batchgen(job(output), tmp_path / "first")
    while not (tmp_path / "out.parquet.batchgen" / "manifest.json").exists():
        time.sleep(0.01)
        assert first.is_alive()
    os.kill(first.pid, signal.SIGSTOP)  # or it might be done before the second one has started
    code, said = batchgen(job(output), log), log.read_text()
    os.kill(first.pid, signal.SIGCONT)
    assert code == 1 and str(first.pid) in said and said.count("\n") == 1
    first.join()
    assert first.exitcode == 0
    assert pq.read_metadata(output).num_rows == ROWS


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_stops_cleanly_and_the_job_goes_on(job, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", small]).returncode:
        pytest.skip("cannot mount here")
    try:
        output = small / "out.parquet"
        log = tmp_path / "log"
        code, said = batchgen(job(output), log), log.read_text()
        assert code == 1, said
        assert "No space left" in said and "same command" in said and said.count("\n") == 1
        safe = finished(small / "out.parquet.batchgen")
        subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
        report = tmp_path / "report.json"
        assert batchgen([*job(output), "--report", str(report)], log) == 0, log.read_text()
        assert json.loads(report.read_text())["rows_resumed"] == safe > 0
        whole = tmp_path / "whole.parquet"
        assert batchgen(job(whole), log) == 0, log.read_text()
        assert output.read_bytes() == whole.read_bytes()
    finally:
        subprocess.run(["umount", "-l", small])


@pytest.mark.slow
@pytest.mark.thorough
def test_memory_does_not_grow_with_rows(tiny_models, tmp_path):
    """In small; benchmarks/memory_flat.py does it with a million rows. Both sizes are past the point where queues
    and buffers are full; what is left between two processes is the allocator's noise, up to some 75 MB seen, while a
    kilobyte kept per row would be 160 MB."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "memory_flat.py"), "--model", str(tiny_models("llama")[0])]
    command += ["--rows", "40000", "--rows", "200000", "--output", str(result)]
    subprocess.run(command, check=True)
    assert json.loads(result.read_text())["growth_bytes"] < 120e6
