"""Plans of jobs that score: no decoding, logits where they are asked for, and a workload that is the rows'."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from known_plans import plan_problem
from planner_cases import cpu_box, gpu_box, opt

from batchgen.cli import commands
from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.workload import Lengths, Workload
from batchgen.job.options import JobOptions
from batchgen.job.step_source import open_rows
from batchgen.job.workload import measure_workload
from batchgen.models.files import resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.planner.costs import head_lanes
from batchgen.planner.phases import phases_of
from batchgen.planner.problem import problem_of
from batchgen.planner.search import search
from batchgen.planner.simulation import memory_of, simulate_job
from batchgen.planner.sizes import planned_logit_rows

PROMPTS = Lengths(tuple(range(50, 300, 10)))


def scored(num_seqs=400, prompts=PROMPTS, each=30.0, **fields):
    return Workload(num_seqs, prompts, Lengths((1,)), 1, scored_len=each, **fields)


def planned(hardware, model, workload, **changes):
    return plan_problem(problem_of(hardware, model, workload, dtype="float16", max_model_len=2048, **changes))


def test_nothing_decodes_and_every_prompt_is_computed():
    for admission in ("continuous", "static"):
        phases = phases_of(scored(shared_prefix_len=20), admission, 64, 2048)
        assert sum(s.decode_seqs * s.sweeps for s in phases) == 0
        assert sum(s.prefill_tokens * s.sweeps for s in phases) == pytest.approx(400 * (PROMPTS.mean - 20))
        assert sum(s.logits_rows * s.sweeps for s in phases) == pytest.approx(400 * 30)


def test_it_costs_what_a_single_token_would_but_for_the_logits():
    hardware, model = cpu_box(), opt(2048, 24, 32)
    one = Workload(400, PROMPTS, Lengths((1,)), 1)
    predicted = {
        each: planned(hardware, model, scored(each=each), max_num_seqs=64).prediction for each in (1.0, 30.0, 50.0)
    }
    assert predicted[1.0].total_s == pytest.approx(
        planned(hardware, model, one, max_num_seqs=64).prediction.total_s, rel=1e-6
    )
    plan = planned(hardware, model, scored(each=50.0), max_num_seqs=64)
    best = search(problem_of(hardware, model, scored(each=50.0), dtype="float16", max_model_len=2048, max_num_seqs=64))
    at = best.counts.placement(best.inputs)
    logits = sum(s.sweeps * head_lanes(best.inputs, s, at)["compute"] for s in best.phases)
    flops = 2 * model.vocab_size * model.embed_size * 400 * 50
    assert logits == pytest.approx(flops / 1e12 + 400 * 50 * model.vocab_size / 3e9, rel=0.1)
    assert predicted[50.0].bound_s - predicted[1.0].bound_s == pytest.approx(logits * 49 / 50, rel=0.1)
    # The simulator also has the rows in the last layer's MLP.
    assert logits < predicted[50.0].total_s - predicted[1.0].total_s < 2 * logits
    assert plan.prediction.generated_tokens_per_s == 0
    assert plan.prediction.total_tokens_per_s * plan.prediction.total_s == pytest.approx(400 * PROMPTS.mean)


def test_the_simulated_job_takes_as_long_as_the_planner_says():
    hardware, model = cpu_box(), opt(2048, 24, 32)
    plan = planned(hardware, model, scored(each=40.0), admission="continuous")
    run = simulate_job(plan, model, hardware)
    assert run.total_s == pytest.approx(plan.prediction.total_s, rel=0.08)
    assert run.tokens == 400 * PROMPTS.mean
    full = Lengths((2048,))  # all of the context, of which the last token is asked for too
    plan = planned(hardware, model, scored(20, full, 2048.0))
    assert simulate_job(plan, model, hardware).tokens == 20 * 2048


@pytest.mark.parametrize("gpu_memory_gib", [2, 12])
def test_memory_is_planned_for_the_logits_that_are_asked_for(gpu_memory_gib):
    """Rows of logits as for a whole batch of tokens, and never all of the vocabulary for all sequences."""
    hardware, model = gpu_box(gpu_memory_bytes=gpu_memory_gib << 30), opt(2048, 24, 32)
    plan = planned(hardware, model, scored(each=40.0), max_num_seqs=64)
    memory = memory_of(plan, model)
    assert memory.logit_rows == planned_logit_rows(model, 2, memory.batch_tokens, plan.policy.gpu_batch_size, "score")
    assert memory.logit_rows > 100 and "logits" not in memory.parts["gpu"]
    for tier, parts in memory.parts.items():
        assert sum(parts.values()) <= plan.budgets[tier]
    assert plan.policy.max_num_batched_tokens >= 1024
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_workload_that_makes_no_sense():
    for each in (0.0, 1000.0):
        with pytest.raises(InputError, match="scored tokens do not fit"):
            scored(each=each)


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return load_tokenizer(resolve_model(str(tiny_models("llama")[0])))


def measured(table, tokenizer, tmp_path, **options):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(table), path)
    job = JobOptions("tiny", str(path), None, task="score", **options)
    source = open_rows(job)
    return measure_workload(source, tokenizer, job, 512, rows_left=source.dataset.num_rows)


def test_the_workload_is_what_has_to_be_run(tokenizer, tmp_path):
    """Rows of a context of 40 tokens and three continuations, one of them a single token: two sequences each."""
    rng = random.Random(0)

    def tokens(n):
        return [rng.randrange(4, 500) for _ in range(n)]

    rows = 40
    table = {
        "context": [tokens(40) for _ in range(rows)],
        "after": [[tokens(1), tokens(11), tokens(21)] for _ in range(rows)],
        "none": [None] * rows,
    }
    workload, known, *_ = measured(table, tokenizer, tmp_path, prompt_column="context", continuations_column="after")
    assert known and workload.task == "score"
    assert workload.num_seqs == 2 * rows
    assert workload.prompt_len.mean == (50 + 60) / 2
    assert workload.scored_len == pytest.approx((11 + 20) / 2, abs=0.5)  # 11 and 21 places, the first of them shared
    assert workload.shared_prefix_len == pytest.approx(32 / 2, abs=1)  # of every second one, in blocks
    single, *_ = measured(table, tokenizer, tmp_path, prompt_column="context", choices=["A", "B", "C"])
    assert (single.num_seqs, single.scored_len, single.shared_prefix_len) == (rows, 1.0, 0.0)


def test_whole_texts_are_as_many_sequences_as_windows(tokenizer, tmp_path):
    table = {"text": [[5] * n for n in (100, 512, 513, 2000)] * 4}
    workload, *_ = measured(table, tokenizer, tmp_path, prompt_column="text", share_prefixes=False)
    assert workload.num_seqs == 4 * (1 + 1 + 2 + 4)
    assert workload.num_seqs * workload.scored_len == pytest.approx(4 * (100 + 512 + 513 + 2000))
    assert workload.prompt_len.max == 512


def invoke(*args):
    result = CliRunner().invoke(commands.cli, ["plan", *map(str, args), "--progress", "none"])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_the_plan_says_what_is_scored(tiny_models, tmp_path):
    pq.write_table(pa.table({"q": ["The ferry left the harbour"] * 50}), tmp_path / "in.parquet")
    model = tiny_models("llama")[0]
    job = ["-m", model, "-i", tmp_path / "in.parquet", "--prompt-column", "q", "--task", "score", "--hardware", "zen4"]
    job.append("--no-chat")
    said = invoke(*job, "--choices", " a", "--choices", " b", "--explain", "--what-if", "cpu-memory=4GiB")
    assert "50 sequences" in said and "1.0 scored" in said and "generated" not in said
    lengths = ["-m", model, "--num-prompts", "50", "--input-len", "100", "--output-len", "20", "--hardware", "zen4"]
    plan = json.loads(invoke(*lengths, "--task", "score", "--json"))
    assert plan["workload"]["scored_len"] == 20 and plan["workload"]["prompt_len"]["values"] == [119]
    assert "scored tokens/s" in invoke(*lengths, "--task", "score", "--frontier")


def test_whole_prompts_of_any_lengths_can_be_planned(tokenizer, tmp_path):
    """The model's beginning-of-text token stands before them, so that all their tokens are scored."""
    for seed in range(8):
        rng = random.Random(seed)
        table = {"prompt": ["a" * rng.randrange(1, 90) for _ in range(200)]}
        workload, *_ = measured(table, tokenizer, tmp_path)
        assert workload.scored_len == pytest.approx(workload.prompt_len.mean, abs=1)
