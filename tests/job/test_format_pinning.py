"""`--quality`: the plan's formats become those of the job, and rows that are left keep to them."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planner_cases import constant, cpu_box
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.errors import InputError
from batchgen.core.quality import KV_LOSSES
from batchgen.job.format_pinning import in_formats, leaves_formats_open, possible_jobs
from batchgen.job.job import resolve_job
from batchgen.job.options import JobOptions
from batchgen.models.files import resolve_model

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = "float32"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_tiny_tokenizer(directory)
    make_tiny_model("llama", directory, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    return directory


def machine(fast_kv):
    """A machine on which only attention takes long, and one KV format is much faster than others."""
    box = cpu_box()
    kv = {name: constant(1e9 if name == fast_kv else 1e4) for name in (FP32, *KV_LOSSES)}
    rates = {
        "gemm_flops_per_s": {FP32: constant(1e12), "int8": constant(1e12)},
        "prefill_attention_flops_per_s": {FP32: constant(1e12)},
        "decode_attention_bytes_per_s": kv,
        "elementwise_bytes_per_s": {FP32: constant(1e12)},
    }
    return replace(box, cpu=replace(box.cpu, **rates))


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Run a job on a machine with one fast KV format; returns its report."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    table = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"row {i} of the table" for i in range(12)]}), table)

    def started(name, fast_kv, **options):
        hardware = tmp_path / f"{fast_kv}.json"
        hardware.write_text(json.dumps(machine(fast_kv).to_json()))
        given = {"dtype": FP32, "max_tokens": 8, "max_model_len": 128, "cpu_memory": "4GiB", "disk_memory": 0}
        return batchgen.run(
            model=str(model), input=str(table), output=str(tmp_path / name), hardware=str(hardware), progress="none",
            **(given | options),
        )  # fmt: skip

    return started


def formats_in(tmp_path, name):
    manifest = json.loads((tmp_path / f"{name}.batchgen" / "manifest.json").read_text())
    assert "quality" not in json.dumps(manifest["fingerprint"])
    return manifest["fingerprint"].get("formats")


def test_exact_takes_no_format_that_loses_anything(run, tmp_path):
    assert run("out.parquet", "int5")["policy"]["kv_format"] == FP32
    assert formats_in(tmp_path, "out.parquet") is None


def test_the_formats_of_the_plan_are_those_of_the_job(run, tmp_path):
    report = run("out.parquet", "int5", quality="small")
    assert report["policy"]["kv_format"] == "int5"
    assert formats_in(tmp_path, "out.parquet") == ["native", "int5", FP32]
    again = run("out.parquet", "int5", kv_cache_dtype="int5")
    assert again["state"] == "already complete", "the same job as one whose options name the format"
    with pytest.raises(InputError, match="formats"):
        run("out.parquet", "int5")


def test_rows_that_are_left_keep_the_format_of_finished_ones(run, tmp_path):
    assert run("out.parquet", "int5", quality="small", limit=4)["policy"]["kv_format"] == "int5"
    report = run("out.parquet", "int8", quality="small")
    assert report["rows_resumed"] == 4 and report["policy"]["kv_format"] == "int5"
    whole = run("alone.parquet", "int5", kv_cache_dtype="int5")
    assert whole["rows"] == report["rows"] == 12
    tables = [pq.read_table(tmp_path / name) for name in ("out.parquet", "alone.parquet")]
    assert tables[0].equals(tables[1])


def test_workers_have_the_formats_of_the_first_of_them(run, tmp_path):
    run("out.parquet", "int5", quality="small", share=True, max_time="0.001s")
    report = run("out.parquet", "int8", quality="small", share=True)
    assert report["state"] == "complete" and formats_in(tmp_path, "out.parquet") == ["native", "int5", FP32]


def test_overwriting_chooses_anew(run):
    assert run("out.parquet", "int5", quality="small")["policy"]["kv_format"] == "int5"
    assert run("out.parquet", "int8", quality="small", overwrite=True)["policy"]["kv_format"] == "int8"


def job(model, **options):
    return resolve_job(
        JobOptions(str(model), "in.parquet", "out.parquet", dtype=FP32, **options), resolve_model(str(model))
    )


def test_what_options_name_is_not_open(model):
    assert not leaves_formats_open(job(model))
    assert not leaves_formats_open(job(model, quality="small", weights="int8", kv_cache_dtype="int8"))
    assert leaves_formats_open(job(model, quality="near", weights="int8"))
    formats = {tuple(possible.deciding_formats[:2]) for possible in possible_jobs(job(model, quality="near"))}
    assert formats == {(weights, kv) for weights in ("native", "int8") for kv in ("auto", "int8")}


def test_a_job_in_formats_that_were_not_open_is_as_it_was(model):
    asked = job(model, quality="small", kv_cache_dtype="int8")
    kept = in_formats(asked, FP32, "int5")
    assert kept.options.kv_cache_dtype == "int8" and kept.options.weights == asked.options.weights
    assert in_formats(asked, "int4", "int8").options.weights == "int4"
