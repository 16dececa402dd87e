"""`--state-dtype`: what it changes of a job, its plan and its report, and what it refuses."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.core.errors import InputError

WIDE = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
PROMPTS = ["quay " * n for n in (1, 5, 30, 90)]


@pytest.fixture
def job(tiny_models, tmp_path):
    """Runs prompts through a model; its output may be gone on with."""
    pq.write_table(pa.table({"prompt": PROMPTS}), tmp_path / "in.parquet")

    def go(family="qwen3_next", output="out.parquet", **options):
        path, _ = tiny_models(family, **({} if family == "llama" else WIDE))
        given = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 12, "offload_dir": tmp_path, "chat": False}
        report = batchgen.run(
            path, tmp_path / "in.parquet", tmp_path / output, prompt_column="prompt", **(given | options)
        )
        return pq.read_table(tmp_path / output).column("text").to_pylist(), report

    return go


def test_states_in_16_bits_are_in_the_report_and_take_about_half(job):
    exact, before = job()
    rounded, after = job(output="rounded.parquet", state_dtype="bfloat16")
    assert before["policy"]["state_dtype"] == "float32" and after["policy"]["state_dtype"] == "bfloat16"
    assert len(exact) == len(rounded) == len(PROMPTS)
    held = [report["memory"]["parts"]["cpu"]["state"] for report in (before, after)]
    assert 0 < held[1] < 0.7 * held[0]


def test_rows_are_not_gone_on_with_in_another_format(job):
    job()
    with pytest.raises(InputError, match="formats"):
        job(state_dtype="bfloat16")


def test_answers_in_another_format_are_not_taken_from_the_cache(job, tmp_path):
    job(cache=tmp_path / "cache")
    assert job(output="again.parquet", cache=tmp_path / "cache")[1]["rows_cached"] == len(PROMPTS)
    assert job(output="rounded.parquet", cache=tmp_path / "cache", state_dtype="bfloat16")[1]["rows_cached"] == 0


def test_a_model_without_recurrent_states_is_refused(job):
    with pytest.raises(InputError, match="--state-dtype bfloat16: no layer of this model keeps a recurrent state"):
        job(family="llama", state_dtype="bfloat16")
    with pytest.raises(InputError, match="no layer of this model keeps a recurrent state"):
        batchgen.Engine("demo", state_dtype="bfloat16")
