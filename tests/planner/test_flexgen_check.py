"""The cost model against FlexGen's published measurements, and the search against their policies."""

import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from thorough import quick_or, some_of

from batchgen.planner.costs import job_seconds
from batchgen.planner.problem import LANES, Allowed
from batchgen.planner.search import search

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import flexgen_check
import flexgen_rows
import papers

CELLS = flexgen_check.read_cells()
CHECKED = [cell for cell in CELLS if cell.checked]


def label(cell):
    return f"table {cell.table} {cell.model} {cell.prompt}+{cell.output}{' 4-bit' if cell.compressed else ''}"


def test_whole_matrices_are_placed_by_midpoint_as_their_code_does():
    """--percent 20 80 puts 8.3 % of the weights on the GPU: the attention output matrix alone."""
    groups = ((1, 1, 1, 1), (4, 4))
    assert flexgen_check.midpoint_shares(20, 80, groups) == pytest.approx((1 / 12, 11 / 12, 0))
    assert flexgen_check.midpoint_shares(10, 90, groups) == pytest.approx((0, 1, 0))
    assert flexgen_check.midpoint_shares(0, 50, groups) == pytest.approx((0, 0.5, 0.5))


def test_predictions_are_close_to_what_was_measured():
    errors = {label(c): flexgen_check.predict(c) / c.tokens_per_s - 1 for c in CHECKED}
    assert len(errors) == 5
    assert statistics.median(abs(e) for e in errors.values()) <= 0.15, errors
    assert max(abs(e) for e in errors.values()) <= 0.30, errors


@pytest.mark.parametrize("cell", quick_or({cell.model: cell for cell in CHECKED}.values(), CHECKED), ids=label)
def test_our_policy_is_predicted_at_least_as_fast_as_the_papers(cell):
    own = flexgen_check.own_plan(cell)
    assert cell.max_num_seqs * cell.output / own.seconds >= flexgen_check.predict(cell) * 0.9999
    hardware = flexgen_check.hardware_of(cell)
    assert own.inputs.budgets == flexgen_check.budgets_of(hardware)


def cell_of(model, prompt=512, table=15):
    return next(c for c in CELLS if (c.table, c.model, c.prompt) == (table, model, prompt) and not c.compressed)


def own_seconds(cell, **changes):
    return search(replace(flexgen_check.problem_of(cell), **changes)).seconds


def test_cpu_attention_matters_for_30b_and_little_for_175b():
    """Table 23: without CPU compute 30B falls from 7.32 to 4.03 tokens/s, 175B from 0.69 to 0.62."""
    without = Allowed(kv_placements=("gpu", "streamed", "disk"))
    thirty, large = cell_of("30B"), next(c for c in CHECKED if c.model == "175B")
    plan = flexgen_check.own_plan(thirty)
    assert plan.counts.kv_seqs["cpu"] > plan.inputs.max_num_seqs / 2
    loss = own_seconds(thirty, allowed=without) / plan.seconds
    assert loss > 1.05
    no_delegation = partial(flexgen_check.FlexGenInputs, attends_disk_kv_on_cpu=False)
    loss_large = own_seconds(large, make_inputs=no_delegation, allowed=without) / own_seconds(large)
    assert 1.0 <= loss_large < loss


@pytest.mark.thorough
def test_disk_matters_for_175b_only():
    """Table 23, "no disk": no change for 30B, out of memory for 175B."""
    thirty, large = cell_of("30B"), cell_of("175B")
    in_memory = Allowed(weight_tiers=("gpu", "cpu"), kv_placements=("gpu", "cpu", "streamed"))
    assert own_seconds(thirty, allowed=in_memory) == pytest.approx(own_seconds(thirty), rel=1e-3)
    assert flexgen_check.own_plan(large).counts.placement(flexgen_check.own_plan(large).inputs).kv_disk > 0.5
    with pytest.raises(Exception, match="no plan fits"):
        own_seconds(large, allowed=in_memory)


def test_compression_takes_175b_off_the_disk():
    """Tables 15 and 23: 4 bits fit 175B into host memory, and are faster than the disk."""
    large = cell_of("175B")
    problem = replace(
        flexgen_check.problem_of(large), weight_formats=("float16", "int4"), kv_formats=("float16", "int4")
    )
    plan = search(problem)
    at = plan.counts.placement(plan.inputs)
    assert plan.inputs.weight_format == "int4" and at.w_disk == 0 and at.kv_disk < 0.5
    assert plan.seconds < own_seconds(large)
    # 6.7B fits the GPU as it is: nothing is compressed for the weights' sake on a roomy machine.
    small = replace(cell_of("6.7B"), compressed=True)
    roomy = flexgen_check.problem_of(small)
    hardware = roomy.hardware.scaled(gpu_memory_bytes=10)
    roomy = replace(roomy, hardware=hardware, budgets=flexgen_check.budgets_of(hardware))
    assert search(roomy).inputs.weight_format == "float16"


def test_overlap_matters_as_in_the_ablation():
    """Table 23: 7.32 to 5.86 tokens/s for 30B, 0.69 to 0.59 for 175B without overlapping."""
    for cell, least, most in ((cell_of("30B"), 1.05, 1.6), (cell_of("175B"), 1.05, 1.6)):
        inputs, phases, placement = flexgen_check.inputs_of(cell)
        alone = job_seconds(replace(inputs, serial=LANES), phases, placement)
        assert least < alone / job_seconds(inputs, phases, placement) < most


def test_serial_lanes_add_up_and_come_before_the_others():
    lanes = {"compute": 3.0, "h2d": 2.0, "d2h": 1.0}
    assert max(flexgen_check.in_series(lanes, ()).values()) == 3.0
    assert max(flexgen_check.in_series(lanes, ("h2d",)).values()) == 5.0
    assert max(flexgen_check.in_series(lanes, tuple(lanes)).values()) == 6.0


def test_a_policy_that_exceeds_the_machine_is_named():
    """512 + 8, 30B: the policy printed needs over ten times the host memory there was."""
    assert "cpu" in flexgen_check.short_of(cell_of("30B", table=18))
    assert flexgen_check.short_of(cell_of("30B")) == ""


@pytest.mark.parametrize("cell", some_of(CELLS, 6, "cells of FlexGen's tables"), ids=label)
def test_the_result_file_has_what_is_predicted_now(cell):
    row = flexgen_rows.cell_row(cell)
    assert row.predicted == pytest.approx(predicted_before(row), rel=1e-3)


@pytest.mark.parametrize("without", ["no overlapping", "no CPU compute", "no disk"])
def test_each_technique_that_is_left_out_costs_what_the_result_file_has(without):
    """Without the disk, 175B does not fit."""
    entry = {"without": without, "30B": 1.0, "175B": 1.0}
    for row in flexgen_rows.ablation_rows(entry):
        before = predicted_before(row)
        assert row.predicted is before if before is None else row.predicted == pytest.approx(before, rel=1e-3)


def predicted_before(row):
    """The prediction of a row's setting in the result file."""
    rows = papers.read_rows()["FlexGen"]
    return next(r.predicted for r in rows if (r.item, r.setting, r.unit) == (row.item, row.setting, row.unit))
