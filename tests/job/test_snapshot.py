"""The state of a job for other programs: metrics for Prometheus, and the file in the run directory."""

import os
import re
import socket
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.core.errors import InputError
from batchgen.job.snapshot import STATES, Publisher, Snapshot, metrics

LINE = re.compile(r'batchgen_[a-z_]+\{([a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+\} -?[0-9.e+]+')
OPTIONS = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 2, "max_tokens": 3, "ignore_eos": True}


def values(text):
    """Each metric's value by its name; states by the name of the state."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert LINE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            state = re.search(r'state="(\w+)"', name)
            found[state[1] if state else name.partition("{")[0]] = float(value)
    return found


def test_metrics_have_a_type_each_and_names_are_escaped():
    snapshot = replace(Snapshot.starting('a "name"\\\n'), rows=10, rows_done=4, rows_failed=1, seconds_left=2.5)
    text = metrics(snapshot)
    assert text.endswith("\n") and r'output="a \"name\"\\\n"' in text
    found = values(text)
    assert found["batchgen_rows"] == 10 and found["batchgen_rows_done"] == 4 and found["batchgen_seconds_left"] == 2.5
    assert [state for state in STATES if found[state]] == ["starting"] and found["batchgen_memory_bytes"] > 1e6
    named = re.findall(r"# TYPE (\S+) (gauge|counter)", text)
    assert {name for name, _ in named} == {line.partition("{")[0] for line in text.splitlines() if line[0] != "#"}
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in named)


def test_what_is_not_known_is_left_out():
    text = metrics(Snapshot.starting("out"))
    assert "batchgen_rows{" not in text and "seconds_left" not in text and "None" not in text


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(InputError, match=r"--metrics-file .*none/m\.prom cannot be written"):
        Publisher("out", str(tmp_path / "none" / "m.prom"))


def test_a_job_goes_on_where_its_files_can_no_longer_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    publisher = Publisher("out", str(tmp_path / "folder" / "m.prom"))
    (tmp_path / "folder" / "m.prom").unlink()
    (tmp_path / "folder").rmdir()
    publisher.publish(state="running")
    assert publisher.snapshot.state == "running"


def test_the_state_in_a_run_directory_is_read_back(tmp_path):
    publisher = Publisher("out", None)
    publisher.write_into(tmp_path)
    publisher.publish(state="running", rows=9, rows_done=3)
    snapshot = Snapshot.read(tmp_path)
    assert snapshot == publisher.snapshot and snapshot.process_is_alive
    assert os.listdir(tmp_path) == ["progress.json"]
    (tmp_path / "progress.json").write_text("{")
    assert Snapshot.read(tmp_path) is None


def test_a_process_that_has_ended_is_not_alive_and_one_elsewhere_is_not_known():
    pid = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(pid, 0)
    snapshot = replace(Snapshot.starting("out"), process=pid)
    assert snapshot.host == socket.gethostname() and snapshot.process_is_alive is False
    assert replace(snapshot, host="elsewhere").process_is_alive is None


@pytest.fixture
def run(tiny_models, tmp_path):
    def run(prompts, **options):
        pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string())}), tmp_path / "in.parquet")
        given = OPTIONS | {"metrics_file": str(tmp_path / "m.prom")} | options
        model = str(tiny_models("llama")[0])
        return batchgen.run(model, tmp_path / "in.parquet", tmp_path / "out.parquet", **given)

    return run


def test_a_job_leaves_its_last_state_behind(run, tmp_path):
    report = run(["one", "two", None])
    found = values((tmp_path / "m.prom").read_text())
    assert found["complete"] == 1 and (found["batchgen_rows_done"], found["batchgen_rows_failed"]) == (3, 1)
    assert found["batchgen_generated_tokens_total"] == report["generated_tokens"] == 6
    assert Snapshot.read(tmp_path / "out.parquet.batchgen").state == "complete"


def test_a_dry_run_leaves_the_metrics_of_the_job_alone(run, tmp_path):
    run(["one"])
    before = (tmp_path / "m.prom").read_text()
    run(["one"], dry_run=True)
    assert (tmp_path / "m.prom").read_text() == before


def test_a_job_that_fails_says_why(run, tmp_path):
    with pytest.raises(batchgen.TooManyFailed):
        run(["one", None], max_failed=0)
    snapshot = Snapshot.read(tmp_path / "out.parquet.batchgen")
    assert snapshot.state == "failed" and "--retry-failed" in snapshot.message
    assert values((tmp_path / "m.prom").read_text())["failed"] == 1
