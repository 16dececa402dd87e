"""`batchgen run --share`, with a model."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import batchgen.job.run as run_module
from batchgen import run
from batchgen.cli.commands import cli
from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.job.checks import check_options
from batchgen.job.options import JobOptions
from batchgen.job.shared import _Reader

ROWS = 40


@pytest.fixture(scope="module")
def job(tiny_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    prompts = [None if i == 7 else " ".join(["quay"] * (i % 9 + 1)) for i in range(ROWS)]
    pq.write_table(pa.table({"prompt": prompts, "i": range(ROWS)}), folder / "in.parquet", row_group_size=7)
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))

    def go(output, input="in.parquet", **options):
        path, _ = tiny_models("llama")
        common = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 8, "max_tokens": 6, "temperature": 0.7}
        return run(path, folder / input, output, offload_dir=folder, **common, **options)

    go.folder = folder
    return go


def test_a_shared_job_makes_the_file_of_a_plain_one(job, tmp_path):
    alone, shared = tmp_path / "alone.parquet", tmp_path / "shared.parquet"
    job(alone)
    stopped = job(shared, share=True, max_time="0.001s")
    assert stopped["state"] == "stopped" and stopped["rows"] == ROWS
    with pytest.raises(InputError, match="add --share"):
        job(shared)
    with pytest.raises(InputError, match=r"sampling\.seed was 0, now 1"):
        job(shared, share=True, seed=1)
    report = job(shared, share=True)
    assert (report["state"], report["rows"], report["rows_failed"]) == ("complete", ROWS, 1)
    assert pq.read_table(shared).equals(pq.read_table(alone))
    assert job(shared, share=True)["state"] == job(shared)["state"] == "already complete"
    assert job(shared, retry_failed=True)["rows_resumed"] == ROWS - 1
    found = CliRunner().invoke(cli, ["status", str(shared), "--json"])
    told = json.loads(found.stdout)
    assert told | {"state": "complete", "rows_ok": ROWS - 1, "rows_failed": 1} == told


@pytest.mark.parametrize("share", [False, True])
def test_an_input_that_is_replaced_meanwhile_is_not_joined_with_results_of_another(share, job, tmp_path, monkeypatch):
    """Of as many rows, so that nothing else tells."""
    was = (job.folder / "in.parquet").read_bytes()
    before, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    before.write_bytes(was)
    make_result = run_module._row_result

    def replace_input(*args):
        pq.write_table(
            pa.table({"prompt": ["other"] * ROWS, "i": range(ROWS)}), tmp_path / "new.parquet", row_group_size=7
        )
        (tmp_path / "new.parquet").replace(before)
        return make_result(*args)

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "_row_result", replace_input)
        with pytest.raises(InputError, match=r"was changed while the job ran: put back what it was"):
            job(output, input=before, share=share)
    assert not output.exists()
    before.write_bytes(was)
    assert job(output, input=before, share=share)["rows_resumed"] == ROWS
    job(tmp_path / "alone.parquet", input=before)
    assert pq.read_table(output).equals(pq.read_table(tmp_path / "alone.parquet"))


def test_rows_of_an_input_that_has_to_be_counted(job, tmp_path):
    report = job(tmp_path / "out.jsonl", input="in.jsonl", share=True)
    assert (report["rows"], report["rows_failed"]) == (ROWS, 1)


def test_ranges_are_read_in_any_order(job):
    reader = _Reader(open_dataset(job.folder / "in.parquet"))
    for start, stop in [(0, 3), (3, 20), (30, 40), (5, 6), (6, 40), (0, 40)]:
        found = [(first, batch["i"].to_pylist()) for first, batch in reader.read(start, stop)]
        assert [i for _, rows in found for i in rows] == list(range(start, stop))
        assert all(rows[0] == first for first, rows in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overwrite": True}, "--overwrite is for one process"),
        ({"retry_failed": True}, "--retry-failed is for one process"),
        ({"report_html": "page.html"}, "--report-html is for one process"),
        ({"input": "-"}, "--share needs an input that all workers see"),
        ({"output": "memory://out.parquet"}, "--share needs an output that all workers see as a file"),
        ({"resume": False}, "--no-resume is for one process"),
        ({"shard": "0/2"}, "leave out --shard"),
        ({"share_lease": "0s"}, "--share-lease must be above 0"),
    ],
)
def test_what_workers_cannot_do_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        check_options(replace(JobOptions("demo", "in.parquet", "out.parquet", share=True), **options))
