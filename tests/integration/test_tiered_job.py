"""Whole jobs with weights and KV on disk: stopped, killed, on a disk that is too small, and within their budgets."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import batchgen, start_in_process
from thorough import quick_or
from tiny_models import make_tiny_model

from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.planner.sizes import workspace_bytes

MIB = 1 << 20
ROWS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiered")


@pytest.fixture(scope="module")
def job(tiny_models, folder):
    """A function of the output: arguments of a job of a second or two, with weights and half of its KV on disk.

    It is in fp32, so that batches change no token.
    """
    model, draw = tiny_models("llama")[0], random.Random(1)
    words = ["ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate"]
    rows = [" ".join(draw.choices(words, k=draw.randrange(1, 30))) for _ in range(ROWS)]
    pq.write_table(pa.table({"prompt": rows}), folder / "in.parquet")
    common = ["-m", model, "-i", folder / "in.parquet", "--max-tokens", 24, "--dtype", "float32", "--progress", "none"]
    plan = folder / "plan.json"
    assert batchgen(["plan", *common, "--max-num-seqs", 16, "-o", plan], folder / "log") == 0, read(folder / "log")
    planned = json.loads(plan.read_text())
    policy = planned["policy"]
    layers = sum(next(iter(policy["weight_layers"].values())))
    policy["weight_layers"] = {group: [0, 1, layers - 1] for group in policy["weight_layers"]}
    policy["kv_seqs"] = {"cpu": 8, "disk": 8}
    plan.write_text(json.dumps(planned))
    find_or_convert(resolve_model(str(model)), folder / "offload", "float32")

    def arguments(output, plan=plan, offload_dir=folder / "offload"):
        held = ["--plan", plan] if plan else []
        own = ["-o", output, *held, "--offload-dir", offload_dir, "--flush-interval", "0.05s", "--cpu-memory", "2GiB"]
        return ["run", *common, *own]

    return arguments


@pytest.fixture(scope="module")
def whole(job, folder):
    """The output with everything in memory."""
    assert batchgen(job(folder / "whole.parquet", plan=None), folder / "log") == 0, read(folder / "log")
    return pq.read_table(folder / "whole.parquet")


def read(path: Path) -> str:
    return path.read_text().strip()


def test_the_job_is_what_it_is_in_memory(job, whole, folder):
    report = folder / "report.json"
    assert batchgen([*job(folder / "same.parquet"), "--report", report], folder / "log") == 0, read(folder / "log")
    assert pq.read_table(folder / "same.parquet").equals(whole)
    moved = json.loads(report.read_text())["bytes_moved"]
    assert moved["disk_read"] > 0 and moved["disk_write"] > 0


def test_a_damaged_store_is_mended_by_what_the_error_says(job, whole, folder, tmp_path):
    """A store that a job has made, and a byte of it that is another, as a bad disk gives it."""
    offload = tmp_path / "offload"
    shutil.copytree(folder / "offload", offload)
    damaged = max(offload.rglob("layer-*.safetensors"))
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size - 100)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    arguments, log = job(tmp_path / "out.parquet", offload_dir=offload), tmp_path / "log"
    assert batchgen(arguments, log) == 1
    said = read(log).splitlines()[-1]
    assert f"{damaged} is damaged" in said
    assert "delete this file" in said and "the command that made the store again" in said
    assert batchgen(arguments, log) == 1  # and it stays so
    damaged.unlink()
    assert batchgen(arguments, log) == 0, read(log)
    assert pq.read_table(tmp_path / "out.parquet").equals(whole)


def test_a_disk_too_small_for_the_weights(job, whole, small_disk, tmp_path):
    """One line that says what to do; on a larger disk the same command completes."""
    disk, output, log = small_disk("size=200k"), tmp_path / "out.parquet", tmp_path / "log"
    assert batchgen(job(output, offload_dir=disk), log) == 1
    assert len(read(log).splitlines()[-1]) > 0 and "Traceback" not in read(log)
    said = read(log).splitlines()[-1]
    assert "free space" in said or "--offload-dir" in said, said
    assert not output.exists()
    small_disk("size=64m")
    assert batchgen(job(output, offload_dir=disk), log) == 0, read(log)
    assert pq.read_table(output).equals(whole)


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """A model of 190 MB, in fp32; of 380 MB in `make test-all`."""
    path = tmp_path_factory.mktemp("heavy")
    make_tiny_model("llama", path, hidden_size=512, intermediate_size=1408, num_hidden_layers=quick_or(16, 32))
    return path


def run_and_tell_the_peak(arguments: list[str]) -> None:
    from batchgen import cli

    sys.argv = ["batchgen", *arguments]
    try:
        cli.main()
    finally:
        print("peak", Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def peak_of(arguments, log: Path) -> int:
    """The most memory that a `batchgen run` in a process of its own takes, in bytes."""
    arguments = ["run", *map(str, arguments), "--progress", "none", "--overwrite"]
    process = start_in_process(run_and_tell_the_peak, [arguments], log)
    process.join()
    assert process.exitcode == 0, read(log)
    return int(read(log).split()[-1]) * 1024


@pytest.mark.slow
def test_the_peak_is_within_the_budget(heavy, job, tiny_models, folder, tmp_path):
    """The peak with budgets for half of the model and for twice as much.

    What a job with next to no model takes on this machine, and its work space, come on top.
    """
    report = tmp_path / "report.json"
    model_bytes = read_config(resolve_model(str(heavy))).weight_bytes(4)
    common = [
        "-i", folder / "in.parquet", "-o", tmp_path / "out.parquet", "--max-tokens", 8, "--limit", 32, "--dtype",
        "float32",
        "--offload-dir", folder / "offload", "--report", report,
    ]  # fmt: skip
    process_bytes = peak_of(["-m", tiny_models("llama")[0], *common], tmp_path / "log")
    for models, streams in quick_or([(0.5, True)], [(0.5, True), (2.0, False)]):
        budget = process_bytes + workspace_bytes(128) + int(models * model_bytes)
        peak = peak_of(["-m", heavy, *common, "--cpu-memory", budget], tmp_path / "log")
        values = json.loads(report.read_text())
        assert peak <= budget
        # What is held of the model really is a part of what was measured.
        held = values["memory"]["parts"]["cpu"]["weights"]
        assert peak > 0.8 * process_bytes + held
        assert (held < 0.6 * model_bytes) == (values["bytes_moved"]["disk_read"] > 0) == streams
