"""Formats as a choice of the plan: as much as a quality allows, the least lossy of equal ones, and what others give."""

from dataclasses import replace

import pytest
from known_plans import plan_problem
from planner_cases import GIB, constant, cpu_box, gpu_box, llama_8b, opt

from batchgen.core.errors import InputError
from batchgen.core.quality import KV_LOSSES, QUALITIES, WEIGHT_LOSSES, loss_of
from batchgen.core.workload import Workload
from batchgen.planner.explain import explain, headline
from batchgen.planner.format_choice import formats_of, with_quality
from batchgen.planner.format_search import in_best_formats
from batchgen.planner.other_quality import other_quality, quality_line
from batchgen.planner.problem import Loading, problem_of
from batchgen.planner.search import TIE, search
from batchgen.planner.sizes import store_bytes
from batchgen.planner.strategy_times import with_strategies

OPT_30B = opt(7168, 48, 56)


def rates_of_all(box):
    """The box, with rates of every format: KV by its bytes, int8 products as fast as others."""

    def of(rates):
        attention = rates.decode_attention_bytes_per_s | {
            name: rates.decode_attention_bytes_per_s["float16"] for name in KV_LOSSES
        }
        gemm = rates.gemm_flops_per_s
        return replace(
            rates,
            decode_attention_bytes_per_s=attention,
            gemm_flops_per_s=gemm | ({"int8": gemm["float16"]} if gemm else {}),
            expand_bytes_per_s=rates.expand_bytes_per_s or 1e11,
        )

    return replace(box, cpu=of(box.cpu), gpu=of(box.gpu) if box.gpu else None)


def problem(quality="exact", hardware=None, model=OPT_30B, workload=None, **given):
    options = {
        "max_model_len": 2048,
        "open_weights": tuple(WEIGHT_LOSSES),
        "open_kv": tuple(KV_LOSSES),
        "max_num_seqs": 32,
    }
    options |= given
    box = rates_of_all(hardware or gpu_box(cpu_memory_bytes=24 * GIB))
    asked = problem_of(box, model, workload or Workload.uniform(256, 256, 32), dtype="float16", **options)
    return with_quality(asked, quality)


def test_exact_has_no_choice():
    assert list(problem().formats) == [("float16", "float16")]


@pytest.mark.parametrize("quality", QUALITIES)
def test_no_pair_loses_more_than_the_quality_allows(quality):
    pairs = list(problem(quality).formats)
    assert all(loss_of(*pair) <= QUALITIES[quality] for pair in pairs)
    whole = {(w, kv) for w in ("float16", *WEIGHT_LOSSES) for kv in ("float16", *KV_LOSSES)}
    assert set(pairs) == {pair for pair in whole if loss_of(*pair) <= QUALITIES[quality]}


def test_what_was_asked_for_by_name_does_not_count():
    given = problem("near", weights="int4", open_weights=())
    assert list(given.formats) == [("int4", "float16"), ("int4", "int8")]


def test_formats_without_rates_are_left_out():
    unmeasured = replace(problem("small"), hardware=gpu_box())
    kv = {name for _, name in unmeasured.formats}
    assert kv == {"float16"} | (KV_LOSSES.keys() & gpu_box().gpu.decode_attention_bytes_per_s.keys())


def test_a_plan_may_lose_what_it_is_allowed_to_and_is_faster_for_it():
    plans = {quality: plan_problem(problem(quality)) for quality in QUALITIES}
    assert formats_of(plans["exact"].policy) == ("float16", "float16")
    seconds = [plans[quality].prediction.total_s for quality in QUALITIES]
    assert seconds[0] > 1.2 * seconds[1] >= 1.2 * seconds[2] / TIE
    for quality, plan in plans.items():
        assert loss_of(*formats_of(plan.policy)) <= QUALITIES[quality]


def test_of_formats_that_are_about_as_fast_those_that_lose_least_are_taken():
    """Nothing is gained on a GPU that holds everything many times over, whose products bind."""
    everything = gpu_box(gpu_memory_bytes=400 * GIB)
    gemm = {name: constant(1e12) for name in ("float16", "int8")}
    slow = replace(everything, gpu=replace(everything.gpu, gemm_flops_per_s=gemm))
    best = in_best_formats(problem("small", slow, llama_8b()))
    assert (best.weight_formats, best.kv_formats) == (("float16",), ("float16",))


def test_the_coarse_search_in_all_formats_is_no_faster_than_in_those_that_were_chosen():
    asked = problem("small")
    best = in_best_formats(asked)
    coarse = [search(replace(p, coarse=True)).job_s for p in (best, asked)]
    assert coarse[1] <= coarse[0] <= TIE * coarse[1]


def test_nothing_fits_in_any_format():
    with pytest.raises(InputError, match="no plan fits"):
        in_best_formats(problem("small", cpu_box(cpu_memory_bytes=GIB), disk_memory=0))


def test_weights_in_4_bits_pay_for_a_store_of_their_own():
    """A plan that chooses them takes as long before its first sweep as one for which they are asked."""
    size = store_bytes(OPT_30B, "float16", "int4")
    loading = {"int4": Loading(1.0, size), "float16": Loading(1.0), "int8": Loading(1.0)}
    slow = gpu_box(cpu_memory_bytes=24 * GIB, disk_write_bytes_per_s=1e9)
    asked = plan_problem(problem("exact", slow, weights="int4", open_weights=(), open_kv=(), loading=loading))
    chosen = plan_problem(
        replace(problem("small", slow, loading=loading), weight_formats=("int4",), kv_formats=("float16",))
    )
    assert chosen.prediction.startup_s == asked.prediction.startup_s > size / 1e9
    assert chosen.prediction.disk_written_bytes["weight store"] == size


@pytest.fixture(scope="module")
def exact():
    """An exact problem, its plan, and the other choice."""
    asked = problem()
    plan = plan_problem(asked)
    return asked, plan, other_quality(plan, asked)


class TestTheOtherChoice:
    def test_stands_in_one_line_beside_an_exact_plan(self, exact):
        asked, plan, other = exact
        line = quality_line(plan, asked, other)
        assert line.startswith("with --quality small: ") and " instead of " in line and line.endswith(" % higher)")
        assert other.plan.prediction.total_s < plan.prediction.total_s

    def test_is_said_with_and_without_an_explanation(self, exact):
        _, plan, _ = exact
        said = replace(plan, quality_line="with --quality small: no faster")
        for lines in (headline(said), explain(said)):
            assert lines.count(said.quality_line) == 1
        assert not [line for line in explain(plan) if "--quality" in line]

    def test_is_exact_beside_a_plan_that_has_chosen(self):
        asked = problem("small")
        plan = plan_problem(asked)
        line = quality_line(plan, asked, other_quality(plan, asked))
        assert line.startswith("weights in ") and "; with --quality exact: " in line

    def test_is_not_said_where_options_give_the_formats(self, exact):
        asked, (_, plan, _) = problem(open_weights=(), open_kv=()), exact
        assert other_quality(plan, asked) is None and not quality_line(plan, asked, None)

    def test_is_a_row_among_the_strategies_with_a_gpu(self, exact):
        asked, plan, other = exact
        row = with_strategies(plan, asked, other).strategies[-2]
        assert row.name == "quantized" and row.seconds == other.plan.prediction.total_s
        assert "perplexity" in row.description and not row.reason

    def test_is_a_row_among_the_strategies_without_a_gpu(self):
        asked = problem("exact", cpu_box(cpu_memory_bytes=24 * GIB))
        plan = plan_problem(asked)
        other = other_quality(plan, asked)
        row = with_strategies(plan, asked, other).strategies[-2]
        assert row.name == "quantized" and row.seconds == other.plan.prediction.total_s

    def test_of_a_plan_that_needs_more_memory_than_there_is(self):
        """Only quantized weights fit; the other choice has no plan."""
        stores = {"float16": Loading(store_bytes=GIB), "int8": Loading(store_bytes=GIB), "int4": Loading()}
        asked = problem("small", cpu_box(cpu_memory_bytes=24 * GIB), loading=stores, disk_memory=0)
        plan = plan_problem(asked)
        assert quality_line(plan, asked, other_quality(plan, asked)).endswith("with --quality exact: no plan fits")
