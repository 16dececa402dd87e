"""The page of a plan: `batchgen plan --html`."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan
from batchgen.core.units import format_bytes, format_seconds
from batchgen.job.pages.charts import Bar, Span, bars, line, timeline
from batchgen.job.pages.html_page import (
    COLOURS,
    PREDICTED,
    TIER_COLOURS,
    legend,
    note,
    page,
    purpose_colour,
    section,
    table,
)
from batchgen.models.config import ModelConfig
from batchgen.planner.explain import TIER_NAMES, compare_rows, headline, lane_seconds
from batchgen.planner.explanation import (
    LANE_NAMES,
    Explanation,
    price_lines,
    smaller_states_lines,
    stage_rows,
    total_lines,
)
from batchgen.planner.problem import Problem
from batchgen.planner.search import frontier
from batchgen.planner.simulation import simulate_job
from batchgen.planner.strategy_times import strategy_rows
from batchgen.schedule.step_graph import LANES, Step

_SIMULATED_SWEEPS = 32
_MOST_PRICES = 10
_MOST_BLOCKS = 12  # that are listed


def plan_page(
    plan: Plan,
    explained: Explanation,
    problem: Problem,
    config: ModelConfig,
    hardware: HardwareProfile,
    others: Sequence[tuple[str, Plan]] = (),
) -> str:
    """The HTML page of a plan.

    Args:
        plan: The plan.
        explained: The explanation of the plan.
        problem: The problem that the plan solves.
        config: The model's configuration.
        hardware: The machine's profile.
        others: Further plans that are compared with it, each with its difference as text.

    Raises:
        InputError: The memory budgets are too small for what the plan places.
    """
    sections = [
        section("Stages", *_stages(explained)),
        section(placement_heading(plan), *map(note, explained.sentences), *placement(plan)),
        section("Lanes over the whole job", lanes(plan)),
        section("A steady sweep", *_steady_sweep(plan, config, hardware)),
        section("Latency and throughput", *_frontier(plan, problem)),
        section("What would help", *_prices(explained)),
    ]
    if plan.strategies:
        header, *rows = strategy_rows(plan)
        sections.append(section("Strategies", table(header, rows)))
    if others:
        sections.append(section("Plans side by side", *_side_by_side([("now", plan), *others])))
    title = f"Plan: {plan.model} in {plan.dtype} on {plan.hardware}"
    return page(title, headline(plan), sections)


def _stages(explained: Explanation) -> list[str]:
    header, *rows = stage_rows(explained)
    return [table(header, rows), *map(note, total_lines(explained))]


def placement_heading(plan: Plan) -> str:
    """The heading of what `placement` shows."""
    return f"Where weights, KV{', states' if plan.states else ''} and activations lie"


def placement(plan: Plan) -> list[str]:
    """Charts of each tier's peak memory and budget, and of what is placed in each tier, such as weights and KV."""
    names = sorted({name for parts in plan.prediction.memory_bytes.values() for name in parts})
    used = [
        Bar(
            f"{TIER_NAMES[tier]} memory" if tier != "disk" else "disk",
            tuple((purpose_colour(name), name, size) for name, size in parts.items()),
            plan.budgets.get(tier),
        )
        for tier, parts in plan.prediction.memory_bytes.items()
        if sum(parts.values())
    ]
    tiers = [tier for tier in TIER_NAMES if tier in plan.budgets]
    placed = [
        Bar(kind, tuple((TIER_COLOURS[tier], TIER_NAMES[tier], by_tier.get(tier, 0.0)) for tier in tiers))
        for kind, by_tier in plan.placement_bytes.items()
    ]
    return [
        bars("Memory of each tier at its peak, and its budget", used, format_bytes),
        legend([(purpose_colour(name), name) for name in names]),
        bars("What is placed, by tier", placed, format_bytes),
        legend([(TIER_COLOURS[tier], TIER_NAMES[tier]) for tier in tiers]),
    ]


def lanes(plan: Plan) -> str:
    """A chart of the predicted busy seconds of each lane, the busiest first."""
    busy = sorted(plan.prediction.lane_s.items(), key=lambda item: -item[1])
    rows = [Bar(LANE_NAMES[lane], ((PREDICTED, "busy", seconds),)) for lane, seconds in busy if seconds > 0]
    return bars("Predicted busy time of each lane", rows, _duration)


def _steady_sweep(plan: Plan, config: ModelConfig, hardware: HardwareProfile) -> list[str]:
    """A timeline of the Steps of one simulated sweep: the middle one of the simulated sweeps."""
    steps: dict[int, list[tuple[Step, float, float]]] = {}

    def keep(step: Step, start_s: float, end_s: float) -> None:
        steps.setdefault(step.sweep, []).append((step, start_s, end_s))

    run = simulate_job(plan, config, hardware, max_sweeps=_SIMULATED_SWEEPS, on_step=keep)
    numbers = sorted(steps)
    if not numbers:
        return [note("The job has no sweep.")]
    number = numbers[len(numbers) // 2]
    kinds = sorted({step.kind for step, _, _ in steps[number]})
    rows: dict[str, list[Span]] = {}
    for lane in LANES:
        of_lane = sorted((timed for timed in steps[number] if timed[0].lane == lane), key=lambda timed: timed[1])
        if of_lane:
            rows[LANE_NAMES[lane]] = [
                Span(
                    start, end, kinds.index(step.kind) % COLOURS, f"{step.kind}, layer {step.layer}, batch {step.batch}"
                )
                for step, start, end in of_lane
            ]
    return [
        note(
            f"Sweep {numbers.index(number) + 1:,} of {run.sweeps:,} that were simulated; each colour is a kind of Step."
        ),
        timeline("What each lane does in a sweep", rows, _milliseconds),
        legend([(kinds.index(kind) % COLOURS, kind) for kind in kinds]),
    ]


def _frontier(plan: Plan, problem: Problem) -> list[str]:
    """A chart of latency and throughput of all blocks (FlexGen figure 1), with the plan's block marked."""
    blocks = frontier(problem)
    if not blocks:
        return [note("No block size fits.")]
    rows, chosen = [], []
    for latency_s, rate, candidate in blocks:
        s = candidate.inputs
        busy = lane_seconds(candidate, candidate.counts.placement(s))
        bound = LANE_NAMES[max(busy, key=busy.__getitem__)]
        chosen.append("chosen" if s.max_num_seqs == plan.policy.max_num_seqs else "")
        block = f"{s.num_gpu_batches} x {s.gpu_batch_size}, {s.admission}"
        rows.append([_duration(latency_s), f"{rate:,.1f}", block, f"{s.weight_format}, KV {s.kv_format}", bound])
    verb = plan.workload.made
    dots = [f"{row[2]}: {row[0]}, {row[1]} tokens/s" for row in rows]
    listed = {round(i * (len(rows) - 1) / (_MOST_BLOCKS - 1)) for i in range(_MOST_BLOCKS)}
    points = [(latency_s, rate) for latency_s, rate, _ in blocks]
    predicted, workload = plan.prediction, plan.workload
    own_rate = workload.num_seqs * workload.made_len / max(predicted.total_s - predicted.startup_s, 1e-9)
    of_plan = [point for point, mark in zip(points, chosen, strict=True) if mark]
    ring = of_plan[0] if of_plan else (predicted.block_latency_s, own_rate)
    return [
        note("Blocks that no other one beats in both; the ring is the plan."),
        line(
            "Throughput against block latency", points, "block latency, s", f"{verb} tokens/s", dots=dots,
            ring=ring,
        ),
        table(
            ["block latency", f"{verb} tokens/s", "block", "formats", "bound by", ""],
            [[*row, mark] for i, (row, mark) in enumerate(zip(rows, chosen, strict=True)) if mark or i in listed],
        ),
    ]  # fmt: skip


def _prices(explained: Explanation) -> list[str]:
    """A chart of the seconds that more of each resource would save: to first order, and by planning again."""
    first, *rest = price_lines(explained)
    smaller_states = [note(f"{line}.") for line in smaller_states_lines(explained)]
    if not rest:
        return [note(f"{first[0].upper()}{first[1:]}."), *smaller_states]
    most = explained.prices[:_MOST_PRICES]
    rows = [
        Bar(
            f"{price.what}{words}",
            ((PREDICTED, words.removeprefix(", ") or "at this block size", seconds),),
        )
        for price in most
        for words, seconds in (("", price.saved_s), (", re-planned", price.replanned_s))
        if seconds is not None
    ]
    return [
        note(
            f"Time saved of {format_seconds(explained.total_s)}: to first order at the same block size, and re-planned."
        ),
        bars("Time that more of a resource would save", rows, format_seconds),
        *smaller_states,
    ]


def _side_by_side(plans: Sequence[tuple[str, Plan]]) -> list[str]:
    rows = [Bar(label, ((PREDICTED, "time", plan.prediction.total_s),)) for label, plan in plans]
    header, *cells = compare_rows(list(plans))
    return [bars("Predicted time of each plan", rows, format_seconds), table(header, cells)]


def _duration(seconds: float) -> str:
    """A duration, in milliseconds where it is below a second."""
    return format_seconds(seconds) if seconds >= 1 else _milliseconds(seconds)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms"
