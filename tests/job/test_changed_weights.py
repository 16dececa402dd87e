"""Weights that change before, while or after a job reads them.

Its rows are of one model, and a job that goes on is of the same one.
"""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import make_tiny_model

import batchgen
from batchgen.core.errors import BatchgenError, InputError
from batchgen.job import run as job


@pytest.fixture
def folder(tmp_path):
    make_tiny_model("llama", tmp_path / "model")
    pq.write_table(pa.table({"prompt": ["one", "two", None]}), tmp_path / "rows.parquet")
    return tmp_path


def run(folder, **options):
    how = {"max_tokens": 3, "dtype": "float32", "progress": "none", "hardware": "zen4", **options}
    return batchgen.run(str(folder / "model"), str(folder / "rows.parquet"), str(folder / "out.parquet"), **how)


def texts(folder):
    return pq.read_table(folder / "out.parquet")["text"].to_pylist()


def change(folder) -> None:
    """Turn the signs of one norm's weights, in place; the file's size stays."""
    path = folder / "model" / "model.safetensors"
    data, before = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    values = np.frombuffer(memoryview(data)[-256:], np.float32)
    values *= -1.0
    path.write_bytes(data)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def half_done(folder):
    with pytest.raises(BatchgenError):
        run(folder, on_error="fail", max_num_seqs=1)
    assert (folder / "out.parquet.batchgen").exists()


def test_a_job_does_not_go_on_with_other_weights_of_the_same_size(folder):
    half_done(folder)
    change(folder)
    with pytest.raises(InputError, match=r"model\.weights"):
        run(folder)
    assert not (folder / "out.parquet").exists()
    change(folder)  # back again, by another time of the file
    assert run(folder)["rows_ok"] == 2


def test_a_job_whose_weights_change_before_they_are_loaded_is_refused(folder, monkeypatch):
    """Its identity is noted by then: its rows would be taken for those of the weights before."""
    load = job.load_engine

    def swapped(*args):
        change(folder)
        return load(*args)

    monkeypatch.setattr(job, "load_engine", swapped)
    with pytest.raises(InputError, match=r"model\.safetensors was changed while the model was loaded"):
        run(folder)
    assert not (folder / "out.parquet").exists()


def test_a_job_whose_weights_change_once_they_are_loaded_says_so(folder, monkeypatch):
    run(folder)
    expected = texts(folder)
    rows, said = job._run_rows, []

    def changed(*args):
        change(folder)
        return rows(*args)

    monkeypatch.setattr(job, "_run_rows", changed)
    monkeypatch.setattr(job.Progress, "say", lambda self, line: said.append(line))
    run(folder, overwrite=True)
    assert texts(folder) == expected
    assert any("model.safetensors has changed since the job began" in line for line in said)
