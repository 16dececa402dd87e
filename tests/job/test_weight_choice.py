"""`--weights auto`: native or dequantized, by the machine's rates of products and by memory; and the same tokens."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planner_cases import constant, cpu_box
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
import batchgen.job.run as run_module
from batchgen.core.dtypes import matmul_key
from batchgen.core.errors import InputError
from batchgen.core.hardware import Rates
from batchgen.core.plan import Plan
from batchgen.core.workload import Workload
from batchgen.job import weight_choice
from batchgen.job.job import resolve_job
from batchgen.job.machine_profile import weight_formats_measured
from batchgen.job.options import JobOptions
from batchgen.job.planning import plan_job, problem_of_job
from batchgen.job.weight_choice import in_format_of_rows, with_faster_weights
from batchgen.job.workload import EstimatedWorkload
from batchgen.models.files import resolve_model
from batchgen.planner.explain import explain

pytestmark = pytest.mark.usefixtures("one_thread")

FP32, PACKED = "float32", matmul_key("q4_0", "float32")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_tiny_tokenizer(directory)
    model = make_tiny_model("llama", directory, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    write_tiny_gguf(model, directory / "model.gguf", tensor_type="Q4_0", tokenizer=tokenizer)
    return directory / "model.gguf"


def machine(packed=True, **changes):
    """A machine on which packed weights are four times as fast with one token, and half as fast with very many."""
    box = cpu_box(**changes)
    tables = {
        name: {FP32: of["float16"]} for name, of in vars(box.cpu).items() if isinstance(of, dict) and "float16" in of
    }
    gemm = {FP32: Rates(("tokens",), ((1, 1e6), (256, 2e8)))}
    gemm |= {PACKED: Rates(("tokens",), ((1, 4e6), (256, 1e8)))} if packed else {}
    tables |= {"gemm_flops_per_s": gemm, "elementwise_bytes_per_s": {FP32: constant(1e12)}}
    return replace(box, cpu=replace(box.cpu, **tables))


def job_of(path, **options):
    options = {"dtype": FP32, "cpu_memory": "4GiB", "max_model_len": 128, "disk_memory": 0} | options
    return resolve_job(JobOptions(str(path), "in.parquet", "out.parquet", **options), resolve_model(str(path)))


def planned(path, rows, hardware=None, **options):
    hardware, workload = hardware or machine(), Workload.uniform(rows, 16, 64)
    job = replace(job_of(path, **options), cpu_memory=hardware.cpu_memory_bytes)
    job = with_faster_weights(job, hardware, workload)
    return plan_job(job, problem_of_job(job, hardware, EstimatedWorkload(workload, True), startup_s=0.0))


def test_few_rows_run_with_native_weights_and_many_with_dequantized_ones(gguf_file):
    few, many = (planned(gguf_file, rows) for rows in (1, 200))
    assert (few.policy.weight_format, many.policy.weight_format) == ("q4_0", FP32)
    for plan in (few, many):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        assert plan.weights_reason in explain(plan)
    assert re.fullmatch(
        r"Weights stay in q4_0: matrix products take .*, and .* dequantized to float32\.", few.weights_reason
    )
    assert re.fullmatch(
        r"Weights are dequantized to float32: matrix products take .*, and .* in q4_0\.", many.weights_reason
    )


def test_the_same_machine_gives_the_same_choice(gguf_file):
    assert len({planned(gguf_file, 30).policy.weight_format for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("options", "hardware", "found"),
    [
        ({"weights": "dequantized"}, {}, FP32),
        ({"weights": "int8"}, {}, "int8"),
        ({}, {"packed": False}, FP32),  # no rates to choose by: expanded ones take little of the memory
    ],
)
@pytest.mark.parametrize("rows", [1, 200])
def test_nothing_is_chosen_where_a_format_is_asked_for_or_rates_are_not_known(
    gguf_file, options, hardware, found, rows
):
    plan = planned(gguf_file, rows, machine(**hardware), **options)
    assert (plan.policy.weight_format, plan.weights_reason) == (found, "")


@pytest.mark.parametrize(("dequantized_rate", "chosen"), [(0.99, "q4_0"), (1.01, "q4_0"), (1.03, "dequantized")])
def test_products_that_are_equal_to_2_percent_leave_weights_native(dequantized_rate, chosen, gguf_file):
    box = machine()
    gemm = box.cpu.gemm_flops_per_s | {FP32: constant(1e9 * dequantized_rate), PACKED: constant(1e9)}
    box = replace(box, cpu=replace(box.cpu, gemm_flops_per_s=gemm))
    assert with_faster_weights(job_of(gguf_file), box, Workload.uniform(100, 16, 64)).options.weights == chosen


def test_weights_stay_native_where_dequantized_ones_have_no_room(gguf_file):
    slow = machine(cpu_memory_bytes=1 << 20)
    job = replace(job_of(gguf_file), cpu_memory=1 << 20)
    job = with_faster_weights(job, slow, Workload.uniform(1000, 16, 64))
    assert job.options.weights == "q4_0"
    assert re.fullmatch(r"Weights stay in q4_0: dequantized to float32 they take .* MiB\.", job.weights_reason)


def test_where_neither_fits_the_one_that_needs_less_is_named(gguf_file):
    with pytest.raises(InputError, match="no plan fits"):
        planned(gguf_file, 1, machine(cpu_memory_bytes=1 << 24))


def test_rates_are_measured_for_what_is_compared(gguf_file):
    job = job_of(gguf_file)
    assert weight_formats_measured(job, may_stream=False) == (("q4_0",), ())
    assert weight_formats_measured(job, may_stream=True) == (("q4_0",), ("q4_0",))
    expanded = job_of(gguf_file, weights="dequantized")
    assert weight_formats_measured(expanded, may_stream=True) == ((), (FP32,))


def test_an_output_matrix_that_is_the_embeddings_too_needs_no_rates_of_its_own(tmp_path):
    model = make_tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=256, tie_word_embeddings=True)
    path = tmp_path / "model.gguf"
    write_tiny_gguf(model, path, tensor_type="Q4_0", tokenizer=make_tiny_tokenizer(tmp_path))
    job = job_of(path)
    assert job.process_config.tied_embeddings
    assert weight_formats_measured(job, may_stream=False) == (("q4_0",), ())


@pytest.fixture
def run(gguf_file, tmp_path, monkeypatch):
    """The format of the weights after some of eight rows on a machine on which those of one format are slow."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"The ferry {i}" for i in range(8)]}), rows)
    for key in (PACKED, FP32):
        box = machine()
        gemm = box.cpu.gemm_flops_per_s
        gemm = gemm | {key: gemm[key].scaled(1e-3)}
        slow = replace(box, cpu=replace(box.cpu, gemm_flops_per_s=gemm))
        (tmp_path / f"{key}.json").write_text(json.dumps(slow.to_json()))

    def go(output, slow, **options):
        job = {"dtype": FP32, "cpu_memory": "4GiB", "max_tokens": 6} | options
        hardware = str(tmp_path / f"{slow}.json")
        report = batchgen.run(str(gguf_file), str(rows), str(tmp_path / output), hardware=hardware, **job)
        return report["policy"]["weight_format"]

    return go


@pytest.mark.parametrize(("slow", "made_in"), [(FP32, "q4_0"), (PACKED, FP32)])
def test_a_job_goes_on_with_the_format_of_its_finished_rows(slow, made_in, run, tmp_path):
    """Though the plan would choose the other one by now; a job without rows has the faster one."""
    other, fast = (PACKED, FP32) if slow == FP32 else (FP32, "q4_0")
    assert run("whole.parquet", slow) == made_in
    assert run("both.parquet", slow, limit=4) == made_in
    assert run("both.parquet", other) == made_in
    assert run("another.parquet", other) == fast
    manifest = json.loads((tmp_path / "both.parquet.batchgen" / "manifest.json").read_text())
    assert manifest["weight_format"] == made_in
    assert pq.read_table(tmp_path / "whole.parquet") == pq.read_table(tmp_path / "both.parquet")


def told(capfd):
    return [
        line
        for line in capfd.readouterr().err.splitlines()
        if "other rows of this output are made with weights" in line
    ]


def test_where_the_format_of_finished_rows_cannot_be_had_the_other_one_is_used_and_told(run, monkeypatch, capfd):
    assert run("both.parquet", PACKED, limit=4) == FP32
    monkeypatch.setattr(weight_choice, "dequantized_fit", lambda *_: False)
    assert run("both.parquet", PACKED, limit=6, progress="plain") == "q4_0"
    (line,) = told(capfd)
    assert line.endswith(
        "other rows of this output are made with weights in float32, this plan has them in q4_0:"
        " rows may round differently"
    )
    monkeypatch.undo()
    assert run("both.parquet", PACKED, progress="plain") == "q4_0", "that of the last rows"
    assert not told(capfd)


def test_where_no_plan_fits_with_the_format_of_finished_rows_the_other_one_is_used_and_told(run, monkeypatch, capfd):
    assert run("both.parquet", FP32, limit=4) == "q4_0"
    plan = run_module.make_plan

    def refuse(job, *args, **options):
        if job.native_format is None:
            raise InputError("no plan fits")
        return plan(job, *args, **options)

    monkeypatch.setattr(run_module, "make_plan", refuse)
    assert run("both.parquet", PACKED, progress="plain") == FP32
    assert len(told(capfd)) == 1


def test_a_format_that_is_asked_for_is_that_of_the_rows_that_are_left(run, capfd):
    assert run("both.parquet", FP32, limit=4) == "q4_0"
    assert run("both.parquet", FP32, weights="dequantized", progress="plain") == FP32
    assert len(told(capfd)) == 1


def test_workers_have_the_format_of_the_first_of_them(run, tmp_path):
    assert run("alone.parquet", FP32, limit=6) == "q4_0"  # rows of a plain run before
    stopped = {"share": True, "max_time": "0.001s"}
    assert run("alone.parquet", PACKED, **stopped) == "q4_0"
    assert run("both.parquet", PACKED, **stopped) == FP32
    assert run("both.parquet", FP32, share=True) == FP32
    manifest = json.loads((tmp_path / "both.parquet.batchgen" / "manifest.json").read_text())
    assert manifest["weight_format"] == FP32


def test_a_worker_whose_plan_is_made_while_another_begins_has_that_ones_format(run, monkeypatch):
    plan, plans = run_module._plan, []

    def slowly(job, state):
        plans.append(plan(job, state))
        state.record_weight_format("q4_0")  # as the other worker does
        return plans[-1]

    monkeypatch.setattr(run_module, "_plan", slowly)
    assert run("both.parquet", PACKED, share=True) == "q4_0"
    assert [p.policy.weight_format for p in plans] == [FP32, "q4_0"]


@pytest.mark.parametrize("intermediate_size", [256, 96])
def test_ranks_go_on_with_the_format_of_finished_rows_where_blocks_are_not_cut(intermediate_size, tmp_path):
    model = make_tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=intermediate_size)
    path = tmp_path / "model.gguf"
    write_tiny_gguf(model, path, tensor_type="Q4_0", tokenizer=make_tiny_tokenizer(tmp_path))
    job = job_of(path, tensor_parallel=2)
    assert job.options.weights == "dequantized" and job.open_format is None
    kept = {name: in_format_of_rows(job, name) for name in ("q4_0", FP32)}
    if intermediate_size == 96:  # 48 of a rank are one and a half blocks
        assert kept == {"q4_0": None, FP32: None}
        return
    assert [kept[name].options.weights for name in ("q4_0", FP32)] == ["q4_0", "dequantized"]
    assert weight_formats_measured(kept["q4_0"], may_stream=True) == (("q4_0",), ("q4_0",))
    assert weight_formats_measured(kept[FP32], may_stream=True) == ((), (FP32,))
