"""`batchgen.ray` on a local cluster; skipped where Ray is not installed."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
import batchgen.ray
from batchgen.core.errors import InputError

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


def test_a_job_over_two_actors_and_its_rerun(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    table = pa.table({"prompt": ["quay " * (i % 7 + 1) for i in range(64)], "id": range(64)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=16)
    options = {"dtype": "float32", "cpu_memory": "2GiB", "max_num_seqs": 4, "max_tokens": 5, "id_column": "id"}
    batchgen.run(path, tmp_path / "in.parquet", tmp_path / "out.parquet", offload_dir=tmp_path, **options)

    def job(**more):
        out = tmp_path / "out"
        return batchgen.ray.run(
            path, str(tmp_path / "in.parquet"), out, batch_size=16, concurrency=2, **{**options, **more}
        )

    assert job() == {"rows": 64, "rows_resumed": 0}
    parts = sorted((tmp_path / "out").glob("part-*.parquet"))
    gone = pq.read_metadata(parts[0]).num_rows
    parts[0].unlink()
    assert job() == {"rows": 64, "rows_resumed": 64 - gone}
    with pytest.raises(InputError, match="made with other settings"):
        job(max_tokens=6)
    made = pa.concat_tables(pq.read_table(part) for part in (tmp_path / "out").glob("part-*.parquet")).sort_by("id")
    expected = pq.read_table(tmp_path / "out.parquet")
    assert made.to_pylist() == expected.to_pylist()


def test_what_is_refused_in_an_actor_is_one_line(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    pq.write_table(pa.table({"prompt": ["quay"], "id": [1]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="question") as refused:
        batchgen.ray.run(
            path, str(tmp_path / "in.parquet"), tmp_path / "out", id_column="id", prompt_column="question", plan=False
        )
    assert "\n" not in str(refused.value)


def test_a_processor_in_place_of_vllms(tiny_models):
    path, _ = tiny_models("llama")
    config = batchgen.ray.ProcessorConfig(
        str(path), {"dtype": "float32", "cpu_memory": "2GiB"}, batch_size=8, should_continue_on_error=True
    )
    processor = batchgen.ray.build_processor(
        config,
        preprocess=lambda row: {
            "prompt": "quay " * row["id"] if row["id"] else None,
            "sampling_params": {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True},
        },
        postprocess=lambda row: {"id": row["id"], "count": row["num_generated_tokens"]},
    )
    rows = sorted(processor(ray.data.range(20)).take_all(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(20))
    assert all(row["count"] == 3 and row["__inference_error__"] == "" for row in rows[1:])
    assert "neither prompt nor messages" in rows[0]["__inference_error__"]
