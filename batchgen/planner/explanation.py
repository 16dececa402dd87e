"""A plan explained for text, JSON and pages: stages, tokens, rates, cost, and sentences that say what lies where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.errors import InputError
from batchgen.core.plan import STAGES, Plan, PlannedStates, Prediction, Stage, first_batch_cpu_share
from batchgen.core.units import format_bytes, format_seconds

LANE_NAMES = {
    "compute": "compute",
    "cpu_attention": "CPU attention",
    "cores": "CPU cores",
    "launch": "launching",
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "disk_read": "disk read",
    "disk_write": "disk write",
    "receive": "receiving",
    "send": "sending",
    "disk": "disk",
    "dram": "host memory",
}
_TIER_NAMES = {"gpu": "GPU memory", "cpu": "CPU memory", "disk": "disk space"}
_BOUND_BY = LANE_NAMES | {
    "chain": "Steps that wait for one another",
    "": "loading weights, and memory used for the first time",
}
# With a GPU; without one there are two.
_KV_SENTENCES = {
    "gpu": "keep their KV in GPU memory, where it is attended to",
    "cpu": "keep their KV in host memory, and the CPU attends to it beside the GPU's products",
    "streamed": "keep their KV in host memory, from where it comes to the GPU in every sweep",
    "disk": "keep their KV on disk, from where it comes to the GPU in every sweep",
    "deferred": "keep their KV in host memory; the CPU attends to it, and each token takes more than one sweep",
}
_STREAMED_LAYERS = "in the others in host memory, from where it comes to the GPU in every sweep"
_KV_SENTENCES_CPU = {
    "cpu": "keep their KV in memory",
    "disk": "keep their KV on disk, from where it is read in every sweep",
}
_WEIGHT_SENTENCES = {
    "gpu": "of weights stay in GPU memory",
    "cpu": "of weights stay in host memory, and come to the GPU in every sweep",
    "disk": "of weights stay on disk, and are read in every sweep",
}
_WEIGHT_SENTENCES_CPU = {"cpu": "of weights stay in memory", "disk": _WEIGHT_SENTENCES["disk"]}


@dataclass(frozen=True)
class Rate:
    """Tokens per second: with the start-up, and of the time after it."""

    whole: float
    after_startup: float


class Resource(NamedTuple):
    """A tier of which there may be 1 GiB more, or a lane that may be 10 % faster.

    Attributes:
        name: Name of the tier or the lane; the disk is both.
        is_tier: Whether it is a tier.
    """

    name: str
    is_tier: bool

    @property
    def more(self) -> str:
        """The resource, and how much more of it a price is for."""
        if not self.is_tier:
            return f"10 % more {LANE_NAMES[self.name]}"
        return f"1 GiB more {_TIER_NAMES[self.name]}"


def prices_of(predicted: Prediction) -> dict[Resource, float]:
    """Seconds that more of each resource would save, to first order at the same block size."""
    tiers = {Resource(tier, True): seconds for tier, seconds in predicted.memory_price_s.items()}
    return tiers | {Resource(lane, False): seconds for lane, seconds in predicted.lane_price_s.items()}


@dataclass(frozen=True)
class Price:
    """Time that more of a resource would save.

    Attributes:
        what: the resource, and how much more of it.
        saved_s: to first order, at the same block size.
        replanned_s: seconds saved if the job is re-planned, the block size too; None where that was not looked for.
    """

    what: str
    saved_s: float
    replanned_s: float | None = None


@dataclass(frozen=True)
class Explanation:
    """A plan in figures and sentences.

    Attributes:
        total_s: seconds of the whole job.
        stages: stages that the whole job has, the start-up first, then in the order of plan.STAGES.
        prompt_tokens, generated_tokens: tokens of the whole job; a shared prefix counts as often as it is in a prompt.
        all_rate: rate of prompt and generated tokens.
        generated_rate: rate of generated tokens.
        disk_written_bytes: purpose -> bytes.
        sentences: descriptions of the places of weights, KV and activations, one for each kind.
        prices: prices of resources, the highest first.
        search_gap: `Prediction.search_gap`.
        cost: cost of the whole job, in the currency of the price that was given.
        energy_kwh: energy of the whole job, with the power that was given.
        smaller_states_s: seconds saved if states are kept in 16 bits and the job is re-planned; None where that was not
            looked for.
    """

    total_s: float
    stages: tuple[Stage, ...]
    prompt_tokens: float
    generated_tokens: float
    all_rate: Rate
    generated_rate: Rate
    disk_written_bytes: Mapping[str, float]
    sentences: tuple[str, ...]
    prices: tuple[Price, ...]
    search_gap: float
    cost: float | None = None
    energy_kwh: float | None = None
    smaller_states_s: float | None = None


def explanation_of(
    plan: Plan,
    *,
    price_per_hour: float | None = None,
    watts: float | None = None,
    replanned_s: Mapping[Resource, float] | None = None,
    smaller_states_s: float | None = None,
) -> Explanation:
    """Explain a plan.

    Args:
        plan: The plan.
        price_per_hour: The machine's price, in any currency.
        watts: Power that the machine takes.
        replanned_s: resource -> seconds that more of it saves if the job is re-planned.
        smaller_states_s: Seconds saved with states in 16 bits if the job is re-planned.

    Raises:
        InputError: A price or a power is not above 0.
    """
    for flag, value in (("--price-per-hour", price_per_hour), ("--watts", watts)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{flag} must be above 0, not {value:g}")
    predicted, workload = plan.prediction, plan.workload
    prompts = workload.num_seqs * workload.prompt_len.mean
    generated = workload.num_seqs * workload.output_len.mean if workload.task == "generate" else 0.0
    hours = predicted.total_s / 3600

    def rate(tokens: float) -> Rate:
        return Rate(tokens / predicted.total_s, tokens / max(predicted.total_s - predicted.startup_s, 1e-9))

    return Explanation(
        total_s=predicted.total_s,
        stages=_stages(plan),
        prompt_tokens=prompts,
        generated_tokens=generated,
        all_rate=rate(prompts + generated),
        generated_rate=rate(generated),
        disk_written_bytes=dict(predicted.disk_written_bytes),
        sentences=(
            *([plan.weights_reason] if plan.weights_reason else []),
            *_weight_sentences(plan),
            *_kv_sentences(plan),
            *_budget_sentences(plan),
            *_state_sentences(plan),
            *_batch_sentences(plan),
            *_activation_sentences(plan),
        ),
        prices=_prices(plan, replanned_s or {}),
        search_gap=predicted.search_gap,
        cost=None if price_per_hour is None else price_per_hour * hours,
        energy_kwh=None if watts is None else watts / 1000 * hours,
        smaller_states_s=smaller_states_s,
    )


def _stages(plan: Plan) -> tuple[Stage, ...]:
    """The plan's stages, those of one name as one, bound by what binds the longest of them."""
    stages = [Stage(plan.prediction.startup_s, 0.0, "start-up", 0.0, "")]
    for name in STAGES:
        of_name = [stage for stage in plan.prediction.stages if stage.name == name]
        if of_name:
            longest = max(of_name, key=lambda stage: stage.seconds)
            seconds, tokens, sweeps = (sum(getattr(s, f) for s in of_name) for f in ("seconds", "tokens", "sweeps"))
            stages.append(Stage(seconds, tokens, name, sweeps, longest.bottleneck))
    return tuple(stages)


def _weight_sentences(plan: Plan) -> list[str]:
    words = _WEIGHT_SENTENCES if "gpu" in plan.budgets else _WEIGHT_SENTENCES_CPU
    by_tier = plan.placement_bytes["weights"]
    stored = plan.policy.weight_format
    sentences = [f"{format_bytes(by_tier[tier])} {words[tier]} ({stored})." for tier in words if by_tier.get(tier)]
    if tokens := plan.prediction.break_even_tokens:
        sentences.append(f"From {tokens:,} tokens a sweep on, products take as long as bringing these weights.")
    if tokens := plan.policy.on_demand_tokens:
        sentences.append(
            f"In sweeps of {tokens:,} tokens or fewer, only those experts are read that a token is routed to."
        )
    if tokens := plan.policy.packed_tokens:
        sentences.append(f"In sweeps of {tokens:,} tokens or fewer, weights are multiplied as they are stored.")
    return sentences


def _kv_sentences(plan: Plan) -> list[str]:
    words = _KV_SENTENCES if "gpu" in plan.budgets else _KV_SENTENCES_CPU
    counts, stay = plan.policy.kv_seqs, plan.policy.kv_layers
    if stay:
        layers = sum(next(iter(plan.policy.weight_layers.values())))
        words = words | {
            "streamed": f"keep their KV in GPU memory in {stay} of {layers} layers, and {_STREAMED_LAYERS}"
        }
    if plan.states:
        words = {name: _with_states(text) for name, text in words.items()}
    described = [(counts[c], words[c]) for c in words if counts.get(c)]
    return [
        f"1 sequence {text.replace('keep their', 'keeps its')}." if n == 1 else f"{n:,} sequences {text}."
        for n, text in described
    ]


def _budget_sentences(plan: Plan) -> list[str]:
    """A sentence on the attention budget: the KV blocks that the last token of a mean row attends to."""
    policy, workload = plan.policy, plan.workload
    budget = AttentionBudget.of(policy.attention_budget)
    if budget is None or workload.task != "generate":
        return []
    pages = math.ceil((workload.prompt_len.mean + workload.output_len.mean) / policy.kv_block_size)
    chosen = budget.pages(pages, policy.kv_block_size)
    if chosen == pages:
        return ["Rows are so short that each token attends to all tokens before it, whatever the attention budget."]
    passing = [name for name in ("streamed", "disk") if policy.kv_seqs.get(name)]
    copied = ", though all of it comes there" if passing else ""
    return [f"The last token of a mean row attends to {chosen:,} of its {pages:,} KV blocks in most layers{copied}."]


def _with_states(text: str) -> str:
    """A sentence on the KV of sequences, made one on their KV and states."""
    for kv, both in (
        ("keep their KV", "keep their KV and states"),
        ("it comes", "they come"),
        ("it is read", "they are read and written back"),
        ("it is attended to", "they are used"),
        ("attends to it", "attends to them"),
    ):
        text = text.replace(kv, both)
    return text


def _state_sentences(plan: Plan) -> list[str]:
    """A sentence on states: what a sequence's take, and how many there are."""
    if plan.states is None:
        return []
    states, tiers = plan.states, {"gpu": "in GPU memory", "cpu": "in host memory", "disk": "on disk"}
    as_kv = f", as much as the KV of {tokens:,.0f} tokens" if (tokens := _as_kv_tokens(states)) else ""
    slots = " and ".join(f"{count:,} {tiers[tier]}" for tier, count in states.slots.items())
    seqs = sum(plan.policy.kv_seqs.values())
    snapshots = sum(states.slots.values()) - seqs
    forks = f", {snapshots:,} for snapshots of prefixes that rows share" if snapshots else ""
    return [
        "Some layers keep a state of fixed size for each sequence, in place of KV.",
        f"The states of a sequence take {format_bytes(states.seq_bytes)} ({plan.policy.state_dtype}){as_kv}.",
        f"There are slots for {slots}: {seqs:,} for sequences{forks}.",
    ]


def _as_kv_tokens(states: PlannedStates) -> float:
    return states.seq_bytes / states.kv_token_bytes if states.kv_token_bytes else 0.0


def _batch_sentences(plan: Plan) -> list[str]:
    """A sentence on unequal micro-batches: what each has while most of the job's tokens are decoded."""
    policy, delegated = plan.policy, plan.policy.kv_seqs.get("cpu", 0)
    stages = [stage for stage in plan.prediction.stages if stage.sweeps]
    if policy.balance_tokens is None or not delegated or not stages:
        return []
    longest = max(stages, key=lambda stage: stage.seconds)
    tokens = longest.tokens / longest.sweeps
    share = first_batch_cpu_share(tokens, min(delegated, tokens), policy.balance_tokens)
    return [
        f"The micro-batches are of unequal size: about {share:.0%} of the sequences that the CPU attends to go with all"
        " else, and the others by themselves."
    ]


def _activation_sentences(plan: Plan) -> list[str]:
    """A sentence on activations that wait in host memory; none where they stay where they are computed."""
    on_gpu, on_host = plan.policy.activation_batches
    if "gpu" not in plan.budgets or not on_host:
        return []
    return [f"Activations of {on_host} of {on_gpu + on_host} micro-batches wait in host memory between layers."]


def _prices(plan: Plan, replanned_s: Mapping[Resource, float]) -> tuple[Price, ...]:
    """Prices worth a thousandth of the time, to first order or re-planned."""
    predicted = plan.prediction
    # Of first order: a whole GiB where there is little may promise more than all there is.
    most = predicted.total_s - predicted.startup_s
    saved = prices_of(predicted)
    prices = [Price(resource.more, min(s, most), replanned_s.get(resource)) for resource, s in saved.items()]
    worth = 0.001 * predicted.total_s
    useful = [price for price in prices if max(price.saved_s, price.replanned_s or 0.0) > worth]
    return tuple(sorted(useful, key=lambda price: (-price.saved_s, price.what)))


def stage_rows(explained: Explanation) -> list[list[str]]:
    """The stages as cells of a table, under their names."""
    rows = [["stage", "time", "of the time", "sweeps", "tokens", "bound by"]]
    for stage in explained.stages:
        part = f"{stage.seconds / explained.total_s:.0%}"
        counts = ("", "") if stage.name == "start-up" else (f"{stage.sweeps:,.0f}", f"{stage.tokens:,.0f}")
        rows.append([stage.name, format_seconds(stage.seconds), part, *counts, _BOUND_BY[stage.bottleneck]])
    return rows


def total_lines(explained: Explanation) -> list[str]:
    """Lines with tokens, rates, bytes written to the disk, cost, energy and the search's gap, where there are any."""
    prompts, generated = explained.prompt_tokens, explained.generated_tokens
    generated_words = f" and {generated:,.0f} generated ones" if generated else ""
    every, output = explained.all_rate, explained.generated_rate
    rates = f"{every.whole:,.4g} tokens/s in all, {every.after_startup:,.4g} after the start-up"
    if generated:
        rates += f"; {output.whole:,.4g} generated tokens/s, {output.after_startup:,.4g} after the start-up"
    lines = [f"{prompts:,.0f} prompt tokens{generated_words}: {rates}"]
    if any(explained.disk_written_bytes.values()):
        parts = [f"{format_bytes(size)} of {what}" for what, size in explained.disk_written_bytes.items() if size]
        lines.append(f"written to the disk: {', '.join(parts)}")
    millions = (prompts + generated) / 1e6
    if explained.cost is not None:
        lines.append(f"cost: {explained.cost:,.3g}, {explained.cost / millions:,.3g} for a million tokens")
    if explained.energy_kwh is not None:
        wh = explained.energy_kwh * 1000
        lines.append(f"energy: {explained.energy_kwh:,.3g} kWh, {wh / millions:,.3g} Wh for a million tokens")
    lines.append(
        f"by the cost model the placement takes at most {explained.search_gap:.2%} longer than"
        " the best for these blocks, micro-batches, sweeps and KV placements"
    )
    return lines


def price_lines(explained: Explanation) -> list[str]:
    """Lines that say how much time more of each resource would save."""
    if not explained.prices:
        return ["at this block size, no single resource would save a thousandth of the time"]
    anew = any(price.replanned_s is not None for price in explained.prices)
    also = "; and re-planned" if anew else ""
    return [f"would save (first order, same block size{also}):"] + [
        f"  {price.what}: {_saved(price.saved_s, explained)}"
        + ("" if price.replanned_s is None else f", re-planned {_saved(price.replanned_s, explained)}")
        for price in explained.prices
    ]


def smaller_states_lines(explained: Explanation) -> list[str]:
    """A line that says what states in 16 bits would save; none where that was not looked for, or is nothing."""
    saved_s = explained.smaller_states_s
    if not saved_s or saved_s < 0.001 * explained.total_s:
        return []
    return [f"--state-dtype bfloat16 would save {_saved(saved_s, explained)}, and rounds states after every token"]


def _saved(seconds: float, explained: Explanation) -> str:
    return f"{format_seconds(seconds)} ({seconds / explained.total_s:.1%})"
