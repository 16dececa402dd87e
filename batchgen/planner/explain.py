"""A plan as a value and as text: what goes where, which resource binds, and what more of each would buy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from batchgen.core.attention_budget import ALL
from batchgen.core.draft_rates import NO_RATES
from batchgen.core.dtypes import BLOCK_FORMATS, matmul_key
from batchgen.core.hardware import known
from batchgen.core.kernel_choice import KernelChoice
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import Plan, PlannedStates, Policy, Prediction, Stage
from batchgen.core.units import GIB, format_bytes, format_seconds
from batchgen.core.workload import Lengths, Workload
from batchgen.planner.cost_parts import cost_parts, mean_parts
from batchgen.planner.costs import head_lanes, job_seconds, layer_lanes, moved_bytes, sweep_overhead_s
from batchgen.planner.drafts import drafted_phases, drafts_by_seqs, why_no_drafts
from batchgen.planner.experts import break_even_tokens
from batchgen.planner.explanation import (
    LANE_NAMES,
    Explanation,
    explanation_of,
    price_lines,
    smaller_states_lines,
    stage_rows,
    total_lines,
)
from batchgen.planner.linear import number
from batchgen.planner.memory import memory_parts, placement_bytes, policy_state_slots
from batchgen.planner.phases import Phase, phases_of
from batchgen.planner.placement import Counts, Placement
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.search import TIE, Candidate, block_latency_s, frontier

TIER_NAMES = {"gpu": "GPU", "cpu": "CPU", "disk": "disk"}
# How far measured rates move from one day to the next on a shared machine.
_RATE_SPREAD = 0.15  # of a given profile
_LOADING_SPREAD = 1.5  # of loading the weights, which may or may not be in the page cache
# Where outputs may end early and nothing is known of their length, they may be this short.
_SHORTEST_OUTPUT = 0.25


def _shared(workload: Workload) -> str:
    """The end of a line: what sequences share."""
    if not workload.shared_prefix_len:
        return ""
    groups = "" if workload.prefix_seqs is None else f" in groups of {workload.prefix_seqs:,.1f}"
    return f", {workload.shared_prefix_len:,.0f} tokens of prefix shared{groups}"


def make_plan(
    problem: Problem,
    candidate: Candidate,
    *,
    startup_s: float,
    simulated_s: float | None = None,
) -> Plan:
    """The candidate as a plan.

    Args:
        startup_s: time before the first sweep.
        simulated_s: simulated seconds of all sweeps; None: the cost model's are taken.
    """
    s, counts = candidate.inputs, candidate.counts
    at = counts.placement(s)
    store_bytes = int(number(at.needs_store)) * s.loading.store_bytes
    kv_blocks: dict[str, int] = {}
    for kv_placement, count in counts.kv_seqs.items():
        tier = KVPlacement(kv_placement).tier
        kv_blocks[tier] = kv_blocks.get(tier, 0) + int(count) * (s.disk_seq_blocks if tier == "disk" else s.seq_blocks)
    policy = Policy(
        admission=s.admission,
        gpu_batch_size=s.gpu_batch_size,
        num_gpu_batches=s.num_gpu_batches,
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_model_len=problem.max_model_len or s.workload.max_seq_len,
        kv_block_size=s.kv_block_size,
        kv_blocks={tier: count for tier, count in kv_blocks.items() if count},
        share_prefixes=problem.share_prefixes,
        weight_format=s.weight_format,
        kv_format=s.kv_format,
        weight_layers={group: (int(a), int(b), int(c)) for group, (a, b, c) in counts.weight_layers.items()},
        head_tier=_tier(counts.head_on_gpu, counts.head_on_disk),
        embedding_tier=_tier(counts.embeddings_on_gpu, counts.embeddings_on_disk),
        kv_seqs={name: int(count) for name, count in counts.kv_seqs.items() if count},
        activation_batches=(int(counts.activation_batches[0]), int(counts.activation_batches[1])),
        batch_order=_batch_order(s, counts),
        deferred_rows=s.deferral.rows if s.deferral else None,
        kv_layers=int(counts.kv_layers),
        on_demand_tokens=s.on_demand_tokens,
        packed_tokens=s.packed_tokens,
        captured_tokens=s.captured_tokens,
        balance_tokens=s.balance.tokens if s.balance and counts.kv_seqs.get("cpu") else None,
        state_dtype=s.state_dtype,
        attention_budget=s.attention_budget,
        draft_states=s.draft_state_share > 0,
    )
    return Plan(
        model=problem.model_name,
        hardware=s.hardware.name,
        dtype=s.compute_format,
        workload=s.workload,
        budgets={**s.budgets, "disk": s.budgets["disk"] - store_bytes},
        policy=policy,
        placement_bytes=placement_bytes(s, at),
        prediction=replace(
            _predict(problem, candidate, at, startup_s, simulated_s or candidate.seconds),
            disk_written_bytes={
                "KV and states" if s.model.state else "KV": _kv_written_bytes(candidate, at),
                "weight store": store_bytes,
            },
        ),
        kernels=s.hardware.kernels.of(_kernel_keys(s)),
        states=_planned_states(s, policy),
    )


def _tier(on_gpu: float, on_disk: float) -> str:
    """The tier of a tensor that is in host memory unless it is elsewhere."""
    return "gpu" if on_gpu else "disk" if on_disk else "cpu"


def _planned_states(s: CostInputs, policy: Policy) -> PlannedStates | None:
    slots = policy_state_slots(s, policy)
    kv_token_bytes = s.kv_token_bytes * s.model.num_layers
    return PlannedStates(s.seq_state_bytes, kv_token_bytes, slots) if slots else None


def _kernel_keys(s: CostInputs) -> list[str]:
    """Names of the plan's products and attention in a `KernelChoice`."""
    formats = {s.main_format, s.output_format} & BLOCK_FORMATS.keys()
    return [*s.model.kernel_keys(s.compute_format), *(matmul_key(name, s.compute_format) for name in sorted(formats))]


def _batch_order(s: CostInputs, counts: Counts) -> str:
    """NEO's two batches, if costed and the CPU attends to any sequence; mixed ones for two kinds of sequences."""
    if s.balance is not None:
        return "neo" if counts.kv_seqs.get("cpu") else "even"
    return s.batch_order if sum(count > 0 for count in counts.kv_seqs.values()) > 1 else "even"


def _predict(problem: Problem, candidate: Candidate, at: Placement, startup_s: float, sweeps_s: float) -> Prediction:
    s, workload = candidate.inputs, candidate.inputs.workload
    # Where the simulator is faster than the cost model, no lane is busy for longer than that.
    faster = min(1.0, sweeps_s / candidate.seconds)
    lane_s = {lane: seconds * faster for lane, seconds in lane_seconds(candidate, at).items()}
    rows_s = workload.num_seqs * s.hardware.row_overhead_s
    total_s, loading_s = startup_s + sweeps_s + rows_s, startup_s - problem.startup_s
    shortest = 1.0 if problem.output_len_known else _shorter(candidate, at)
    generated = workload.num_seqs * workload.output_len.mean if workload.task == "generate" else 0.0
    tokens = generated + workload.num_seqs * workload.prompt_len.mean
    stages, known = _stages(candidate, at, sweeps_s + rows_s), s.hardware.knowledge
    parts = mean_parts([(stage.seconds, stage.parts) for stage in stages])
    least, most = known.interval(parts) if known else (1 - _RATE_SPREAD, 1 + _RATE_SPREAD)
    return Prediction(
        total_s=total_s,
        low_s=problem.startup_s + loading_s / _LOADING_SPREAD + (sweeps_s * shortest + rows_s) * least,
        high_s=problem.startup_s + loading_s * _LOADING_SPREAD + (sweeps_s + rows_s) * most,
        startup_s=startup_s,
        sweeps=sum(phase.sweeps for phase in candidate.phases),
        bound_s=candidate.relaxed.job_s,
        search_gap=max(0.0, candidate.job_s / candidate.relaxed.job_s - 1),
        generated_tokens_per_s=generated / total_s,
        total_tokens_per_s=tokens / total_s,
        block_latency_s=block_latency_s(candidate) * sweeps_s / candidate.seconds,
        lane_s=lane_s,
        bottleneck=max(lane_s, key=lane_s.__getitem__),
        memory_bytes=memory_parts(s, at),
        memory_price_s=candidate.relaxed.memory_price_s,
        lane_price_s={k: v for k, v in candidate.relaxed.lane_price_s.items() if k in lane_s},
        stages=stages,
        disk_written_bytes={},
        break_even_tokens=break_even_tokens(s, _weights_s(s, at), number(at.w_streamed if s.on_gpu else at.w_disk)),
        source=known.source if known else f"the profile {s.hardware.name}",
        table=known.table if known else "",
        factors=dict(known.means) if known else {},
        drafts=drafts_by_seqs(candidate.phases),
    )


def _weights_s(s: CostInputs, at: Placement) -> float:
    """Seconds in which the weights of one layer that are elsewhere come to the compute device."""
    from_disk = number(at.w_disk) * s.layer_bytes / s.hardware.disk_read_bytes_per_s
    return (
        max(from_disk, number(at.w_streamed) * s.layer_bytes / known(s.hardware.h2d_bytes_per_s))
        if s.on_gpu
        else from_disk
    )


def _stages(candidate: Candidate, at: Placement, total_s: float) -> tuple[Stage, ...]:
    """The phases of a job, stretched to the seconds that its sweeps and rows take in all."""
    s = candidate.inputs
    own_s = [job_seconds(s, (phase,), at) for phase in candidate.phases]
    longer = total_s / sum(own_s)
    lanes = [_binding(s, phase, at) for phase in candidate.phases]
    return tuple(
        Stage(
            seconds * longer,
            phase.sweeps * phase.tokens,
            _stage_name(s, phase),
            phase.sweeps,
            lane,
            cost_parts(s, phase, lane),
        )
        for seconds, phase, lane in zip(own_s, candidate.phases, lanes, strict=True)
    )


def _stage_name(s: CostInputs, phase: Phase) -> str:
    full = 3 * phase.decode_seqs >= 2 * min(s.swept_seqs, s.workload.num_seqs)
    if phase.prefill_tokens:
        return "steady" if full else "prefill"
    return "decode" if full else "tail"


def _binding(s: CostInputs, phase: Phase, at: Placement) -> str:
    """The lane that takes longest in a phase's layers; "chain" for what waits for one another within a layer."""
    lanes = {name: number(seconds) for name, seconds in layer_lanes(s, phase, at).items()}
    name = max(lanes, key=lanes.__getitem__)
    return name if name in LANE_NAMES else "chain"


def _kv_written_bytes(candidate: Candidate, at: Placement) -> float:
    """To the disk, in the whole job."""
    s = candidate.inputs
    return s.model.num_layers * sum(
        phase.sweeps * number(moved_bytes(s, phase, at)["disk_write"]) for phase in candidate.phases
    )


def _shorter(candidate: Candidate, at: Placement) -> float:
    """The job's time if outputs end as early as they might, as part of the time at full length."""
    s = candidate.inputs
    outputs = tuple(max(1, round(n * _SHORTEST_OUTPUT)) for n in s.workload.output_len.values)
    workload = replace(s.workload, output_len=Lengths(outputs))
    phases = phases_of(workload, s.admission, s.swept_seqs, s.max_num_batched_tokens, s.deferral)
    phases = drafted_phases(s, phases, at)
    return min(1.0, job_seconds(replace(s, workload=workload), phases, at) / candidate.seconds)


def lane_seconds(candidate: Candidate, at: Placement) -> dict[str, float]:
    """Busy seconds of every lane over the whole job, without bounds of no lane; fixed overheads count as compute."""
    s = candidate.inputs
    busy: dict[str, float] = {}
    for phase in candidate.phases:
        for times, lanes in ((s.model.num_layers, layer_lanes(s, phase, at)), (1, head_lanes(s, phase, at))):
            for lane, seconds in lanes.items():
                busy[lane] = busy.get(lane, 0.0) + phase.sweeps * times * number(seconds)
        busy["compute"] += phase.sweeps * sweep_overhead_s(s, phase)
    return {lane: seconds for lane, seconds in busy.items() if lane in LANE_NAMES}


def headline(plan: Plan) -> list[str]:
    """The plan in a line or two, before a job starts."""
    policy, predicted, workload = plan.policy, plan.prediction, plan.workload
    between = f"{format_seconds(predicted.low_s)} to {format_seconds(predicted.high_s)}, from {predicted.source}"
    return [
        f"plan: {workload.num_seqs:,} sequences of {_lengths(workload)} tokens,"
        f" {min(policy.max_num_seqs, workload.num_seqs):,} in flight,"
        f" up to {policy.max_num_batched_tokens:,} tokens a sweep",
        f"predicted: {format_seconds(predicted.total_s)} ({between}), bound by {LANE_NAMES[predicted.bottleneck]}",
        *([plan.quality_line] if plan.quality_line else []),
    ]


def runs_lines(predicted: Prediction, most_s: float) -> list[str]:
    """The number of runs of a job, in a line, where a run may be too short for it; no line where one is enough.

    Args:
        predicted: The job's prediction.
        most_s: The most seconds of a run.
    """
    if predicted.total_s <= most_s:
        return []
    stops = f"--max-time stops this run after {format_seconds(most_s)}"
    if most_s <= predicted.startup_s:
        return [f"{stops}, before it has finished a row: give it more time"]
    runs = math.ceil((predicted.total_s - predicted.startup_s) / (most_s - predicted.startup_s))
    return [f"{stops}: the job takes at least {runs:,} such runs, as each reads the prompts of begun rows again"]


def _lengths(workload: Workload) -> str:
    if workload.task == "generate":
        return f"{workload.prompt_len.mean:,.0f} + {workload.output_len.mean:,.0f}"
    return f"{workload.prompt_len.mean:,.0f} ({workload.made_len:,.1f} {workload.made})"


def explain(plan: Plan, explained: Explanation | None = None) -> list[str]:
    """The plan for a person. explained: explanation of the plan; None: one without cost and re-planned prices."""
    explained = explained or explanation_of(plan)
    policy, predicted, workload = plan.policy, plan.prediction, plan.workload
    lines = [
        f"{plan.model} in {plan.dtype} on {plan.hardware}",
        f"{workload.num_seqs:,} sequences, prompts of {workload.prompt_len.mean:,.0f} tokens"
        f" ({workload.prompt_len.quantile(0.05):,} to {workload.prompt_len.quantile(0.95):,}), "
        + (
            f"outputs of {workload.made_len:,.0f}"
            if workload.task == "generate"
            else f"{workload.made_len:,.1f} {workload.made}"
        )
        + _shared(workload),
        "",
        f"block of {policy.max_num_seqs:,} sequences = {_batches(policy)}, {policy.admission} admission, up to"
        f" {policy.max_num_batched_tokens:,} tokens a sweep, {_formats(plan)}",
        *_draft_lines(plan),
        "",
        *_placement_lines(plan),
        *explained.sentences,
        "",
        *aligned(stage_rows(explained)),
        "",
        *_lane_lines(plan),
        "",
        *_memory_lines(plan),
        "",
        *kernel_lines(plan.kernels),
        "",
        f"predicted: {format_seconds(predicted.total_s)} ({format_seconds(predicted.low_s)} to"
        f" {format_seconds(predicted.high_s)}, from {predicted.source});"
        f" a block takes {format_seconds(predicted.block_latency_s)}",
        *([plan.quality_line] if plan.quality_line else []),
        *total_lines(explained),
        *price_lines(explained),
        *smaller_states_lines(explained),
    ]
    return lines


def _draft_lines(plan: Plan) -> list[str]:
    """The forced tokens and drafts that sequences are expected to have; no line where there are none of a kind."""
    lines = []
    if forced := plan.forced_per_step:
        lines.append(f"forced tokens, which take no sweep: {forced:.2f} for each other one")
    return lines + _lines_of_drafts(plan)


def _lines_of_drafts(plan: Plan) -> list[str]:
    """The drafts that sequences are expected to have; no line where nothing may be drafted."""
    rates, drafts = plan.workload.drafts, plan.prediction.drafts
    streams = plan.policy.streams(plan.compute_tier)
    if rates is None or not rates.most or (rates.only_while_streaming and not streams):
        return []
    if reason := why_no_drafts(plan):
        return [f"no drafts: {reason}"]
    if rates == replace(NO_RATES, most=rates.most, forced=rates.forced):
        return ["drafts are not counted, as no job with these prompts has measured any"]
    expected = f"proposed in {rates.proposed:.0%} of the steps, each accepted with a chance of {rates.accepted:.0%}"
    if not drafts:
        return [f"no drafts, as they would save no time ({expected})"]
    counts = ", ".join(f"{count} for up to {seqs:,} decoding sequences" for seqs, count in drafts)
    return [f"drafts in a sweep: {counts} ({expected})"]


def _formats(plan: Plan) -> str:
    states = f", states {plan.policy.state_dtype}" if plan.states else ""
    budget = plan.policy.attention_budget
    attended = "" if budget == ALL else f", attention budget {budget}"
    return f"weights {plan.policy.weight_format}, KV {plan.policy.kv_format}{states}{attended}"


def _block(policy: Policy) -> str:
    """For a column of a table."""
    if policy.balance_tokens is not None:
        return f"{policy.max_num_seqs} in 2 unequal"
    return f"{policy.num_gpu_batches} x {policy.gpu_batch_size}"


def _batches(policy: Policy) -> str:
    if policy.balance_tokens is not None:
        return f"{policy.num_gpu_batches} micro-batches of unequal size"
    plural = "es" if policy.num_gpu_batches > 1 else ""
    return f"{policy.num_gpu_batches} micro-batch{plural} of {policy.gpu_batch_size:,}"


def _placement_lines(plan: Plan) -> list[str]:
    tiers = [t for t in TIER_NAMES if t in plan.budgets]
    rows = [["", *(TIER_NAMES[t] for t in tiers)]]
    for name, by_tier in plan.placement_bytes.items():
        total = sum(by_tier.values()) or 1.0
        rows.append([name, *(f"{by_tier[t] / GIB:,.2f} GiB {by_tier[t] / total:4.0%}" for t in tiers)])
    return aligned(rows)


def _lane_lines(plan: Plan) -> list[str]:
    predicted = plan.prediction
    working = predicted.total_s - predicted.startup_s
    rows = [["lane", "busy", "of the time", ""]]
    for lane, seconds in sorted(predicted.lane_s.items(), key=lambda item: -item[1]):
        if seconds > 0:
            mark = "<- binding" if lane == predicted.bottleneck else ""
            rows.append([LANE_NAMES[lane], format_seconds(seconds), f"{seconds / working:.0%}", mark])
    return aligned(rows)


def _memory_lines(plan: Plan) -> list[str]:
    rows = [["memory", "peak", "budget", ""]]
    for tier, parts in plan.prediction.memory_bytes.items():
        peak = sum(parts.values())
        if peak:
            listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
            rows.append([TIER_NAMES[tier], format_bytes(peak), format_bytes(plan.budgets[tier]), listed])
    return aligned(rows)


def kernel_headline(kernels: KernelChoice) -> str:
    """The instruction sets that a job's shapes run on, in a line."""
    names = kernels.names()
    if not names:
        return f"kernels: {kernels.default}"
    sets = list(names.values())
    most = max(sorted(set(sets)), key=sets.count)
    others = [f"{key} on {isa}" for key, isa in names.items() if isa != most]
    return f"kernels: {most}" + (f", but {', '.join(others)}" if others else "")


def kernel_lines(kernels: KernelChoice) -> list[str]:
    """The kernel of each shape, its rates, and kernels that are faster and not used."""
    chosen = {**kernels.linear, **kernels.attention}
    if not chosen:
        return [f"kernels: {kernels.default or 'what the machine that runs it takes first, as none were measured'}"]
    rows = [["kernels", "run on", "GFLOP/s, of decode attention GB/s", "faster, but not used"]]
    for key, measured in chosen.items():
        rates = ", ".join(f"{point} {rate / 1e9:,.1f}" for point, rate in measured.rates.get(measured.isa, {}).items())
        refused = "; ".join(f"{name}: {reason}" for name, reason in measured.refused.items())
        rows.append([key, measured.isa, rates, refused])
    return aligned(rows)


def compare(plans: list[tuple[str, Plan]]) -> list[str]:
    """Plans side by side, the first one the current."""
    return aligned(compare_rows(plans))


def compare_rows(plans: list[tuple[str, Plan]]) -> list[list[str]]:
    """A row of cells for what is compared, of which the first names it; the first row names the plans."""
    base = plans[0][1].prediction.total_s

    def speedup(plan: Plan) -> str:
        """The speed-up, called a tie where the planner takes the times for equal and chooses by other criteria."""
        ratio = base / plan.prediction.total_s
        tie = plan is not plans[0][1] and 1 / TIE <= ratio <= TIE
        return f"{ratio:.2f}x" + " (a tie)" * tie

    def rows_of(label: str, value: Callable[[Plan], str]) -> list[str]:
        return [label, *(value(plan) for _, plan in plans)]

    def placed(kind: str) -> Callable[[Plan], str]:
        def fractions(plan: Plan) -> str:
            by_tier = plan.placement_bytes[kind]
            total = sum(by_tier.values()) or 1.0
            return " ".join(f"{TIER_NAMES[t]} {by_tier[t] / total:.0%}" for t in TIER_NAMES if by_tier[t])

        return fractions

    return [
        ["", *(label for label, _ in plans)],
        rows_of("hardware", lambda p: p.hardware),
        rows_of("time", lambda p: format_seconds(p.prediction.total_s)),
        rows_of("speed-up", speedup),
        rows_of("generated tokens/s", lambda p: f"{p.prediction.generated_tokens_per_s:,.4g}")
        if plans[0][1].workload.task == "generate"
        else rows_of("tokens/s", lambda p: f"{p.prediction.total_tokens_per_s:,.4g}"),
        rows_of("bottleneck", lambda p: LANE_NAMES[p.prediction.bottleneck]),
        rows_of("block", lambda p: f"{_block(p.policy)}, {p.policy.admission}"),
        rows_of("formats", lambda p: f"{p.policy.weight_format}, KV {p.policy.kv_format}"),
        rows_of("weights", placed("weights")),
        rows_of("KV", placed("KV")),
    ]


def frontier_lines(problem: Problem) -> list[str]:
    """FlexGen figure 1 for this job."""
    kind = problem.workload.made
    rows = [["block latency", f"{kind} tokens/s", "block", "bottleneck"]]
    for latency_s, rate, candidate in frontier(problem):
        s = candidate.inputs
        lanes = lane_seconds(candidate, candidate.counts.placement(s))
        block = f"{s.num_gpu_batches} x {s.gpu_batch_size}"
        rows.append([format_seconds(latency_s), f"{rate:,.4g}", block, LANE_NAMES[max(lanes, key=lanes.__getitem__)]])
    return aligned(rows)


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines, columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
