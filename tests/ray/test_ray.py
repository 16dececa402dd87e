"""`batchgen.ray` on a local cluster; skipped where Ray is not installed."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
import batchgen.ray

ray = pytest.importorskip("ray")


def test_a_job_over_two_actors_and_its_rerun(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    table = pa.table({"prompt": ["quay " * (i % 7 + 1) for i in range(64)], "id": range(64)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=16)
    options = {"dtype": "float32", "cpu_memory": "2GiB", "max_num_seqs": 4, "max_tokens": 5, "id_column": "id"}
    batchgen.run(path, tmp_path / "in.parquet", tmp_path / "out.parquet", offload_dir=tmp_path, **options)
    ray.init(num_cpus=4, include_dashboard=False)
    try:

        def job():
            return batchgen.ray.run(
                path, str(tmp_path / "in.parquet"), tmp_path / "out", batch_size=16, concurrency=2, **options
            )

        assert job() == {"rows": 64, "rows_resumed": 0}
        parts = sorted((tmp_path / "out").glob("part-*.parquet"))
        gone = pq.read_metadata(parts[0]).num_rows
        parts[0].unlink()
        assert job() == {"rows": 64, "rows_resumed": 64 - gone}
    finally:
        ray.shutdown()
    made = pa.concat_tables(pq.read_table(part) for part in (tmp_path / "out").glob("part-*.parquet")).sort_by("id")
    expected = pq.read_table(tmp_path / "out.parquet")
    assert made.to_pylist() == expected.to_pylist()
