"""The plan and the refusals of `batchgen run --pipeline`, and a whole job in processes, one of which is killed."""

import os
import queue
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planner_cases import cpu_box, opt
from processes import batchgen, start_in_process
from ranks import check_memory_of_two, free_port
from simulated import planned_stage, stages_of

from batchgen.core.errors import InputError
from batchgen.core.workload import Lengths, Workload
from batchgen.engine.pipeline import _Answering
from batchgen.job.checks import check_options
from batchgen.job.job import resolve_job
from batchgen.job.options import JobOptions
from batchgen.models.files import read_config, resolve_model
from batchgen.planner.parallel import Link, check_stages, stage_policy
from batchgen.planner.pipeline import simulate_pipeline
from batchgen.planner.simulation import simulate_job

ROWS = 24


@pytest.fixture(scope="module")
def job(tiny_models, tmp_path_factory):
    """(output, more options) -> arguments."""
    folder = tmp_path_factory.mktemp("job")
    pq.write_table(pa.table({"prompt": [f"Row {i}." for i in range(ROWS)]}), folder / "in.parquet")

    def arguments(output, *more):
        return [
            "run", "-m", tiny_models("llama")[0], "-i", folder / "in.parquet", "-o", output, "--max-tokens", 4,
            "--dtype", "float32",
            "--max-num-seqs", 4, "--progress", "none", "--cpu-memory", "4GiB", "--offload-dir", folder, *more,
        ]  # fmt: skip

    return arguments


def killing(sweep: int, arguments: list[str]) -> None:
    """The command, in this process; the other stage is killed when a sweep begins."""
    from batchgen.cli.commands import run_cli
    from batchgen.engine.pipeline import PipelineRunner

    run, begun = PipelineRunner.run, []

    def run_and_kill(self, *args, **options):
        begun.append(None)
        if len(begun) == sweep:
            for process in self._group._processes._running.values():
                process.kill()
                process.wait()
        return run(self, *args, **options)

    PipelineRunner.run = run_and_kill
    sys.argv = ["batchgen", *arguments]
    sys.exit(run_cli())


WORKLOAD = Workload(240, Lengths(tuple(range(50, 300, 10))), Lengths(tuple(range(4, 65, 4))), 64)


def test_two_stages_take_little_more_than_half_of_the_time():
    """The gain of two stages in memory is short of two by the bubble and the output matrix."""
    hardware, config = cpu_box(), opt(2048, 24, 32)
    seen = []
    one = simulate_job(planned_stage(hardware, config, WORKLOAD, 1, max_num_seqs=64), config, hardware).total_s
    plan = planned_stage(hardware, config, WORKLOAD, 2, max_num_seqs=128)
    two = simulate_pipeline(plan, config, hardware, stages_of(plan, config, 2), lambda *step: seen.append(step))
    assert 0.5 * one < two < 0.65 * one
    ends = {(step.sweep, step.batch): end for stage, step, _, end in seen if (stage, step.kind) == (0, "send")}
    for stage, step, _, end in seen:
        if step.kind == "receive":
            assert stage == 1 and end >= ends[step.sweep, step.batch]
    assert {step.kind for stage, step, *_ in seen if stage == 0} == {"embed", "pre", "attention", "post", "send"}
    assert {step.kind for stage, step, *_ in seen if stage == 1} == {"receive", "pre", "attention", "post", "head"}


def test_one_row_is_in_one_stage_at_a_time():
    """A single row gains nothing: its tokens come one after the other through all layers."""
    hardware, config = cpu_box(), opt(2048, 24, 32)
    workload = Workload.uniform(1, 100, 40)
    one = simulate_job(planned_stage(hardware, config, workload, 1), config, hardware).total_s
    for count in (2, 4):
        plan = planned_stage(hardware, config, workload, count)
        assert simulate_pipeline(plan, config, hardware, stages_of(plan, config, count)) >= one


def test_sending_takes_the_links_time():
    """So long for each token's activations, and for each message; a slower link makes no job faster."""
    hardware, config, seen = cpu_box(), opt(2048, 24, 32), []
    workload = Workload.uniform(32, 64, 8)
    plan = planned_stage(hardware, config, workload, 2, max_num_seqs=16)

    def seconds(link):
        seen.clear()
        return simulate_pipeline(
            plan, config, hardware, stages_of(plan, config, 2), lambda *s: seen.append(s), link=link
        )

    taken_s = []
    for link in (Link(1e12, 0.0), Link(1e7, 3e-3)):
        taken_s.append(seconds(link))
        sent = [end - start for _, step, start, end in seen if step.kind == "send"]
        tokens = 32 * (64 + 8 - 1)
        assert sum(sent) == pytest.approx(len(sent) * link.overhead_s + tokens * 2048 * 2 / link.bytes_per_s)
    assert taken_s[1] > taken_s[0]


def test_a_stage_is_as_evenly_mixed_as_the_largest():
    plan = planned_stage(cpu_box(), opt(2048, 24, 32), WORKLOAD, 2)
    policy = replace(plan.policy, weight_layers=dict.fromkeys(plan.policy.weight_layers, (0, 6, 6)))
    assert stage_policy(policy, 8).weight_layers == dict.fromkeys(policy.weight_layers, (0, 4, 4))
    assert stage_policy(policy, 12) == policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": 0}, "--pipeline must be at least 1, not 0"),
        ({"pipeline": 2, "plan": "plan.json"}, "--pipeline does not go with --plan: leave one of them out"),
        ({"pipeline": 2, "share": True}, "--pipeline does not go with --share: leave one of them out"),
        (
            {"pipeline": 2, "tensor_parallel": 2},
            "--tensor-parallel does not go with --pipeline: leave one of them out",
        ),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        check_options(JobOptions("demo", "in.jsonl", "out.jsonl", **options))


@pytest.mark.parametrize(("family", "count", "message"), [
    ("llama", 4, "--pipeline 4 is more than the model's 3 layers: give fewer stages"),
    ("gemma4", 2, "--pipeline cannot cut a model whose layers reuse the KV of earlier ones: use "
     "--tensor-parallel, or leave it out"),
])  # fmt: skip
def test_what_cannot_be_staged_is_refused(family, count, message, tiny_models):
    config = read_config(resolve_model(str(tiny_models(family)[0])))
    with pytest.raises(InputError, match=f"^{message}$"):
        check_stages(config, count)


@pytest.mark.parametrize("device", ["cpu", "emulated:gpu-memory=512MiB"])
def test_stages_share_the_budgets_of_their_host(device, tiny_models, monkeypatch, tmp_path):
    options = JobOptions(
        str(tiny_models("llama")[0]), "in.jsonl", "out.jsonl", cpu_memory="4GiB", device=device, disk_memory="1GiB",
        offload_dir=tmp_path,
    )  # fmt: skip
    files = resolve_model(options.model)
    whole, stage = resolve_job(options, files), resolve_job(replace(options, pipeline=2), files)
    assert stage.budgets == whole.budgets | {"cpu": 2 << 30, "disk": whole.budgets["disk"] // 2}
    assert stage.process_config.num_layers == 2
    for name, value in {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
    }.items():
        monkeypatch.setenv(name, str(value))  # the other stage is on another host
    assert resolve_job(replace(options, pipeline=2), files).budgets == whole.budgets


def test_a_stage_that_is_killed_is_named_and_the_job_goes_on_and_reports_the_memory_of_every_process(job, tmp_path):
    one, output, log = tmp_path / "one.jsonl", tmp_path / "out.jsonl", tmp_path / "log"
    assert batchgen(job(one), log) == 0, log.read_text()
    arguments = [str(a) for a in job(output, "--pipeline", 2)]
    process = start_in_process(killing, [14, arguments], log)
    process.join()
    said = log.read_text()
    assert process.exitcode == 1, said
    assert "batchgen: rank 1 of 2 was killed by SIGKILL" in said and "the same command goes on from there" in said
    parts = Path(f"{output}.batchgen") / "parts"
    kept = sum(pq.read_metadata(path).num_rows for path in parts.glob("part-*.parquet"))
    assert 0 < kept < ROWS
    assert batchgen(job(output, "--pipeline", 2, "--report", tmp_path / "report.json"), log) == 0, log.read_text()
    assert output.read_text() == one.read_text()
    check_memory_of_two(tmp_path / "report.json", log)


def launched(rank, port, arguments):
    """As a program: the command, as a launcher starts a rank of two."""
    from batchgen import cli

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["batchgen", *arguments]
    cli.main()


@pytest.mark.parametrize("flag", ["--tensor-parallel", "--pipeline"])
def test_ranks_of_a_launcher_end_where_rank_0_does_not_need_them(flag, tiny_models, tmp_path):
    """The output is complete; then the job is refused at once, and later."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    output, logs = tmp_path / "out.jsonl", [tmp_path / "log.0", tmp_path / "log.1"]
    arguments = [
        "run", "-m", tiny_models("llama")[0], "-i", tmp_path / "in.jsonl", "-o", output, "--max-tokens", 1, "--dtype",
        "float32",
        "--progress", "none", "--cpu-memory", "4GiB", "--offload-dir", tmp_path,
    ]  # fmt: skip
    assert batchgen(arguments, logs[0]) == 0, logs[0].read_text()
    for more, codes, said, other in (
        ([], [0, 0], "already complete", ""),
        (
            ["--report", tmp_path / "none" / "report"],
            [2, 2],
            "--report",
            "rank 1 of 2 ends: rank 0 has refused the job, and says why",
        ),
        (["-m", tmp_path / "no model"], [2, 1], "no model", "rank 1 of 2 ends: rank 0 has ended before it was done"),
    ):
        port = free_port()
        words = [str(a) for a in [*arguments, flag, 2, *more]]
        processes = [start_in_process(launched, [rank, port, words], logs[rank]) for rank in (0, 1)]
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == codes, [log.read_text() for log in logs]
        assert said in logs[0].read_text() and logs[1].read_text() == (f"batchgen: {other}\n" if other else "")


def test_an_answer_that_cannot_be_sent_is_told():
    """Whatever the error is: rank 0 waits for the answer."""

    class Broken:
        def send(self, tensor, rank):
            raise ValueError("no room")

        def fail(self, error):
            told.put(str(error))

    told = queue.SimpleQueue()
    _Answering(Broken()).send([])
    assert told.get(timeout=60) == "no room"
