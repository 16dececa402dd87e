"""What the product promises: killed at any moment nothing is lost, and memory does not grow with the rows."""

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
from thorough import only_thorough, quick_or

ROOT = Path(__file__).parents[1]
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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kill_9_at_many_moments(job, tmp_path):
    whole, killed, log = tmp_path / "whole.parquet", tmp_path / "killed.parquet", tmp_path / "log"
    assert batchgen(job(tmp_path / "first.parquet")[1:], log) == 0  # the fork server begins with it
    started = time.monotonic()
    assert batchgen(job(whole)[1:], log) == 0
    seconds = time.monotonic() - started
    rng = random.Random(20)
    safe, kills, wanted = [], 0, quick_or(4, 20)
    while kills < wanted:
        process = start_batchgen(job(killed)[1:], log)
        process.join(timeout=rng.uniform(0.1, 1.0) * seconds * (0.6 if kills < 0.75 * wanted else 1.0))
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
            safe.append(finished(tmp_path / "killed.parquet.batchgen"))
            continue
        assert process.exitcode == 0, log.read_text()
        assert pq.read_table(killed).equals(pq.read_table(whole))
        # Done before its last kill: once more from the start.
        killed.unlink()
        for path in (tmp_path / "killed.parquet.batchgen").rglob("*"):
            if path.is_file():
                path.unlink()
    assert max(safe) > 0, "no kill came after the first part"
    assert batchgen(job(killed)[1:], log) == 0
    assert killed.read_bytes() == whole.read_bytes()


def test_sigterm_saves_what_is_finished(job, tmp_path):
    output = tmp_path / "out.parquet"
    slow = ["--flush-interval", "1h", "--ignore-eos", "--max-tokens", "60", "--max-num-seqs", "8"]
    process = subprocess.Popen([*job(output), *slow], stderr=subprocess.PIPE, text=True)
    manifest = tmp_path / "out.parquet.batchgen" / "manifest.json"
    while not manifest.exists():
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(2.5)
    process.terminate()
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in message and "Traceback" not in message
    assert finished(tmp_path / "out.parquet.batchgen") > 0


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
        found = subprocess.run(job(output), capture_output=True, text=True)
        assert found.returncode == 1, found.stderr
        assert "No space left" in found.stderr and "same command" in found.stderr and found.stderr.count("\n") == 1
        safe = finished(small / "out.parquet.batchgen")
        subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
        report = tmp_path / "report.json"
        subprocess.run([*job(output), "--report", str(report)], check=True)
        assert json.loads(report.read_text())["rows_resumed"] == safe > 0
        whole = tmp_path / "whole.parquet"
        subprocess.run(job(whole), check=True)
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
