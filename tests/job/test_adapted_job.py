"""Whole jobs on an emulated accelerator whose plan was wrong about the machine: they adapt, and write the same rows."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke, planned

WORDS = ("ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate")
DEVICE = ("--device", "emulated:gpu-memory=256MiB")
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = random.Random(3)
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table({"prompt": [" ".join(rng.choices(WORDS, k=rng.randint(2, 20))) for _ in range(40)]}), path)
    return str(path)


@pytest.fixture(scope="module")
def arguments(model, table):
    return ["-m", model, "-i", table, "--max-tokens", MAX_TOKENS, "--dtype", "float32"]


@pytest.fixture(scope="module")
def expected(arguments, tmp_path_factory):
    """The rows of the job on the CPU alone."""
    output = tmp_path_factory.mktemp("plain") / "out.jsonl"
    code, _, said = invoke("run", *arguments, "-o", output, "--progress", "none")
    assert code == 0, said
    return output.read_text()


# Quotas of a policy in which the CPU attends to some sequences, and seconds that say that it is far too late.
LATE = {"batch_s": 1e-6, "token_s": 1e-6, "cpu_seq_s": 10.0}
# Seconds that say that it has time for all.
EARLY = {"batch_s": 10.0, "gpu_seq_s": 1e-3, "cpu_seq_s": 1e-9}


@pytest.mark.parametrize(
    ("quotas", "batches", "costs", "counted"),
    [({"gpu": 6, "cpu": 6}, 2, LATE, ("left_out", "moved")), ({"gpu": 6, "deferred": 6}, 1, EARLY, ())],
)
def test_a_job_adapts_and_writes_what_the_cpu_alone_writes(
    quotas, batches, costs, counted, arguments, expected, tmp_path
):
    plan, output, report = (tmp_path / name for name in ("plan.json", "out.jsonl", "report.json"))
    planned(*arguments, *DEVICE, "--max-num-seqs", 12, "--num-gpu-batches", 1, "-o", plan)
    made = json.loads(plan.read_text())
    made["policy"] |= {
        "admission": "continuous", "gpu_batch_size": 12 // batches, "num_gpu_batches": batches, "max_num_seqs": 12,
        "kv_seqs": quotas, "kv_blocks": {"gpu": 64, "cpu": 64}, "activation_batches": [batches, 0],
        "deferred_rows": None,
    }  # fmt: skip
    made["prediction"]["lane_costs"] |= costs
    plan.write_text(json.dumps(made))
    code, _, said = invoke(
        "run", *arguments, *DEVICE, "--plan", plan, "-o", output, "--report", report, "--progress", "none"
    )
    assert code == 0, said
    assert output.read_text() == expected
    written = json.loads(report.read_text())
    assert written["policy"]["kv_seqs"] == quotas
    assert all(written[what] > 0 for what in counted)
