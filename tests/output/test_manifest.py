"""Outputs and manifests name their job."""

import json

import pyarrow.parquet as pq
from fake_rows import FakeDataset, result_of

from batchgen.output.manifest import without_lists
from batchgen.output.run_directory import open_run


def fingerprint(files):
    of_files = [{"name": f"part-{i:06}.parquet", "size_bytes": i, "sha256": "0" * 64} for i in range(files)]
    return {"input": {"format": "parquet", "files": of_files, "columns": {"prompt": "string"}}, "seed": 0}


def test_an_output_says_which_input_it_is_of_in_a_size_that_does_not_grow_with_the_files(tmp_path):
    notes = []
    for files in (1, 3000):
        output = tmp_path / f"{files}.parquet"
        with open_run(output, fingerprint(files), keep_parts=True) as run:
            with run.writer() as writer:
                writer.add(0, result_of(0))
            run.finish(FakeDataset(1))
        notes.append(pq.read_schema(output).metadata[b"batchgen"])
        manifest = json.loads((tmp_path / f"{files}.parquet.batchgen" / "manifest.json").read_text())
        assert manifest["fingerprint"] == fingerprint(files), "a later run has to know each file"
    assert len(notes[1]) <= len(notes[0]) + 10
    assert json.loads(notes[1])["fingerprint"]["input"]["files"]["count"] == 3000


def test_another_file_anywhere_is_another_digest():
    for i in (0, 7, 9):
        other = fingerprint(10)
        other["input"]["files"][i]["sha256"] = "1" * 64
        assert without_lists(other) != without_lists(fingerprint(10))
    assert without_lists({"seed": 1}) == {"seed": 1}
