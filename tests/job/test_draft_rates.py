"""The rates of drafts that a job measures are in the plan of the next job with the same model, prompts and grammar."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.core.draft_rates import MOST_DRAFTS, NO_RATES, UNKNOWN_RATES, DraftRates
from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.job.draft_rates import expected_drafts, keep_drafts
from batchgen.job.job import resolve_job
from batchgen.job.options import JobOptions
from batchgen.models.files import resolve_model


@pytest.fixture
def job_of(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    path, _ = tiny_models("llama")

    def get(source="in.parquet", **options):
        return resolve_job(JobOptions(str(path), source, "out.parquet", **options), resolve_model(str(path)))

    return get


def test_rates_are_kept_for_jobs_that_are_alike(job_of):
    measured = DraftRates(0.5, 0.75)
    job, unknown = job_of(prompt_template="Extract: {{ text }}", drafts=4), replace(UNKNOWN_RATES, most=4)
    assert expected_drafts(job) == unknown
    keep_drafts(job, None, None)
    assert expected_drafts(job) == unknown, "too little was judged"
    keep_drafts(job, measured, None)
    assert expected_drafts(job) == replace(measured, most=4)
    assert expected_drafts(job_of(prompt_template="Classify: {{ text }}", drafts=4)) == unknown
    by_column = {"prompt_column": "text", "drafts": 4}
    keep_drafts(job_of(**by_column), measured, None)
    assert expected_drafts(job_of(**by_column)) == replace(measured, most=4)
    assert expected_drafts(job_of(source="other.parquet", **by_column)) == unknown, "its texts may be of any kind"
    schema = SamplingParams(json_schema={"type": "object"})
    assert expected_drafts(job_of(prompt_template="Extract: {{ text }}", sampling=schema, drafts=4)) == unknown


def test_the_option_says_how_many_drafts_are_expected(job_of):
    assert expected_drafts(job_of()) == NO_RATES
    assert expected_drafts(job_of(drafts=0)) is None
    assert expected_drafts(job_of(drafts=3)) == replace(UNKNOWN_RATES, most=3)
    assert expected_drafts(job_of(task="score")) is None
    keep_drafts(job_of(), DraftRates(0.5, 0.75), None)
    assert expected_drafts(job_of()) == DraftRates(0.5, 0.75, only_while_streaming=True)


def test_forced_tokens_are_expected_with_any_number_of_drafts(job_of):
    keep_drafts(job_of(), None, 0.75)
    assert expected_drafts(job_of()) == replace(NO_RATES, forced=0.75)
    assert expected_drafts(job_of(drafts=0)) == replace(NO_RATES, most=0, forced=0.75)
    assert expected_drafts(job_of(drafts=3)) == replace(UNKNOWN_RATES, most=3, forced=0.75)
    assert expected_drafts(job_of(task="score")) is None


def test_the_next_job_under_a_schema_is_planned_with_the_tokens_that_it_forces(tiny_models, tmp_path, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    path, _ = tiny_models("llama")
    schema = {"enum": ["The first of two long texts", "Whatever is in the other one"]}
    given = {"dtype": "float32", "max_tokens": 60, "chat": False, "drafts": 0, "json_schema": schema}
    rows = [f"{row}: one two three" for row in range(40)]
    reports = [batchgen.run(path, rows, tmp_path / f"{run}.jsonl", **given) for run in range(2)]
    sweeps = [report["predicted"]["sweeps"] for report in reports]
    assert reports[1]["sweeps"] <= sweeps[1] < 0.5 * sweeps[0]


def test_a_job_measures_its_drafts_and_reports_them(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    path, _ = tiny_models("llama")
    rows = [f"{row}: one two three one two three one two" for row in range(12)]
    pq.write_table(pa.table({"prompt": rows}), tmp_path / "in.parquet")
    given = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 48, "ignore_eos": True, "chat": False}
    given |= {"offload_dir": tmp_path, "prompt_column": "prompt"}
    reports = {}
    for drafts in (0, 8, None):
        output = tmp_path / f"{drafts}.parquet"
        reports[drafts] = batchgen.run(path, tmp_path / "in.parquet", output, drafts=drafts, **given)
    for drafts in (0, None):  # nothing streams
        assert reports[drafts]["drafted_tokens"] == 0 and not reports[drafts]["predicted"]["drafts"]
    texts = [pq.read_table(tmp_path / f"{drafts}.parquet")["text"].to_pylist() for drafts in (0, 8)]
    assert texts[0] == texts[1]
    assert reports[8]["accepted_tokens"] <= reports[8]["drafted_tokens"]


def test_more_drafts_than_a_sweep_checks_are_refused(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    for drafts in (-1, MOST_DRAFTS + 1):
        with pytest.raises(InputError, match=f"--drafts must be 0 to {MOST_DRAFTS}, not {drafts}"):
            batchgen.run(path, ["a"], drafts=drafts)
