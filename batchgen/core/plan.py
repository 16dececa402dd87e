"""Plans of a job: the policy, its inputs, and its predicted time and memory; made before the job, then frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchgen.core.attention_budget import ALL, AttentionBudget
from batchgen.core.direct_io import ALIGNMENT, aligned
from batchgen.core.draft_rates import MOST_DRAFTS
from batchgen.core.errors import InputError
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.kv_expansion import KVExpansion
from batchgen.core.kv_placement import TIERS, KVPlacement
from batchgen.core.lane_costs import NOT_KNOWN, LaneCosts
from batchgen.core.typed_json import read_typed
from batchgen.core.workload import Workload

# Chunks of the vocabulary in which an output matrix comes to the compute device's memory, two at a time.
VOCABULARY_CHUNKS = 16
# Tokens of a KV block, unless somebody asks for others.
DEFAULT_KV_BLOCK_SIZE = 16
# `Policy.packed_tokens` where no rates say what is faster: rows that one tile has.
UNPLANNED_PACKED_TOKENS = 64
# `Policy.captured_tokens` where no rates say how long launching takes: that of small models on a large GPU.
UNPLANNED_CAPTURED_TOKENS = 2048
# Pinned memory of the host through which small arrays come to an accelerator and results come back, allocated with
# the engine.
PINNED_BYTES = 16 << 20
# Memory of the accelerator beside a link, through which rows go that do not lie as they are copied.
PASSING_BYTES = 4 << 20


def passing_bytes(block_bytes: int, staging_blocks: int | None = None) -> int:
    """Bytes of accelerator memory for the KV that one link transfers at a time.

    They are `PASSING_BYTES`, or two KV blocks if these are larger; but no more than twice the staging buffer.

    Args:
        block_bytes: Bytes of one layer's KV block in the format that it has on disk.
        staging_blocks: KV blocks that the staging buffer can hold; None: no upper limit.
    """
    most = max(PASSING_BYTES, 2 * block_bytes)
    return most if staging_blocks is None else min(most, 2 * staging_blocks * block_bytes)


def most_batch_seqs(max_num_seqs: int, equal_parts: int) -> int:
    """The most sequences of one micro-batch, where a sweep is split into equal micro-batches.

    Args:
        max_num_seqs: The most sequences in flight.
        equal_parts: Number of micro-batches of a sweep.
    """
    return -(-max_num_seqs // equal_parts)


def most_batch_tokens(max_num_batched_tokens: int, max_num_seqs: int, equal_parts: int) -> int:
    """The most tokens of one micro-batch.

    A decode sweep has one token of every sequence, even where that is more than `max_num_batched_tokens`.

    Args:
        max_num_batched_tokens: The most tokens of a sweep that has prompts.
        max_num_seqs: The most sequences in flight.
        equal_parts: Number of equal micro-batches that a sweep is split into.
    """
    return -(-max(max_num_batched_tokens, max_num_seqs) // equal_parts)


@dataclass(frozen=True)
class Policy:
    """The decisions of a plan that the engine carries out: batch sizes, the place of weights and KV, and formats.

    Attributes:
        admission: "continuous" (a new sequence enters as soon as there is room) or "static" (a whole block enters when
            the block before it is complete).
        gpu_batch_size: Sequences of a micro-batch (FlexGen section 4.2).
        num_gpu_batches: Micro-batches of a block (FlexGen section 4.2). Times `gpu_batch_size` it is the most sequences
            in flight.
        max_num_batched_tokens: The most tokens of one sweep.
        max_model_len: The longest prompt plus output, in tokens.
        kv_block_size: Tokens of a KV block.
        kv_blocks: Number of KV blocks in the pool of each tier ("gpu", "cpu", "disk"). A block has the KV of all
            layers.
        share_prefixes: True where rows reuse the KV of a prompt prefix that another row has computed.
        weight_format: Format of the layers' weight matrices.
        kv_format: Format of the stored KV.
        weight_layers: For each weight matrix of a layer, the number of layers that have it on (GPU, CPU, disk).
        head_tier: Tier of the output matrix (the language model head); "disk" only where the host computes.
        kv_seqs: Number of sequences of a block in each KV placement.
        activation_batches: Number of micro-batches that keep their activations between layers on (GPU, CPU).
        batch_order: The way a sweep is split into micro-batches. "even": equal tokens. "mixed": equal tokens, and equal
            parts of the sequences of every KV placement. "neo": two micro-batches, one of which has the sequences with
            CPU attention (NEO section 3).
        embedding_tier: Tier of the input embeddings, where they are not also the output matrix. From "disk" the rows of
            a sweep's tokens are read.
        deferred_rows: The most sequences of a job that may enter placement "deferred", where a sequence takes much
            longer than elsewhere; None: no limit but capacity.
        kv_layers: Number of layers that keep the KV of placement "streamed" in GPU memory (Pie section 3.3). Above 0,
            all sequences have this placement.
        on_demand_tokens: The most tokens of a sweep that reads only the experts to which a token is routed, where
            experts are on disk and the host computes. Larger sweeps read all experts.
        packed_tokens: The most tokens of a sweep in which a GPU multiplies weights of "int4" as they are stored. In
            larger sweeps it dequantizes each layer first.
        captured_tokens: The most tokens of a sweep that a GPU runs as a CUDA graph, where weights and KV are all in its
            memory. Sweeps of one token for each sequence of a micro-batch may always be one.
        balance_tokens: w of `first_batch_cpu_share`, the constant time of matrix products in tokens, where both
            micro-batches of order "neo" have sequences with CPU attention. None: the second micro-batch has all of
            these sequences, and neither has more than half of the block or of the tokens.
        state_dtype: Format of the matrices of state layers (`core.dtypes.STATE_DTYPES`).
        attention_budget: Tokens that a decoding token attends to, as `--attention-budget` states them
            (`core.attention_budget`).
        draft_states: Whether sequences have state slots for the states after their drafts.
    """

    admission: str
    gpu_batch_size: int
    num_gpu_batches: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_block_size: int
    kv_blocks: Mapping[str, int]
    share_prefixes: bool
    weight_format: str
    kv_format: str
    weight_layers: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    head_tier: str = "cpu"
    kv_seqs: Mapping[str, int] = field(default_factory=dict)
    activation_batches: tuple[int, int] = (0, 1)
    batch_order: str = "even"
    embedding_tier: str = "cpu"
    deferred_rows: int | None = None
    kv_layers: int = 0
    on_demand_tokens: int = 0
    packed_tokens: int = 0
    captured_tokens: int = 0
    balance_tokens: int | None = None
    state_dtype: str = "float32"
    attention_budget: str = ALL
    draft_states: bool = False

    @property
    def equal_parts(self) -> int:
        """The number of equal micro-batches that a sweep is split into; 1 where micro-batches have unequal sizes."""
        return 1 if self.balance_tokens is not None else self.num_gpu_batches

    @property
    def takes_drafts(self) -> bool:
        """True where a sequence may have several tokens in a sweep, drafts among them."""
        return takes_drafts(self.attention_budget)

    def streams(self, compute_tier: str) -> bool:
        """Tell whether weights or KV come from another tier in each sweep.

        Args:
            compute_tier: The tier of the compute device's own memory.
        """
        if self.head_tier != compute_tier:
            return True
        layers = [(tier, n) for counts in self.weight_layers.values() for tier, n in zip(TIERS, counts, strict=True)]
        seqs = [(KVPlacement(name).tier, count) for name, count in self.kv_seqs.items()]
        return any(tier != compute_tier for tier, count in layers + seqs if count)

    def most_drafts(self, asked: int | None, compute_tier: str) -> int:
        """The most drafts of a sequence in a sweep.

        Args:
            asked: The number that somebody asks for; None: the usual one where weights or KV stream.
            compute_tier: The tier of the compute device's own memory.
        """
        if not self.takes_drafts:
            return 0
        return (MOST_DRAFTS if self.streams(compute_tier) else 0) if asked is None else asked

    def summary_tier(self, compute_tier: str) -> str:
        """The tier of the summaries of KV pages that are not in the compute device's own memory.

        They are where pages are chosen: with the compute device, unless the CPU attends to any of these sequences.

        Args:
            compute_tier: The tier of the compute device's own memory.
        """
        on_cpu = self.kv_seqs.get(KVPlacement.CPU, 0) + self.kv_seqs.get(KVPlacement.DEFERRED, 0)
        return "cpu" if on_cpu else compute_tier

    @property
    def batch_seqs(self) -> int:
        """The most sequences of one micro-batch."""
        return most_batch_seqs(self.max_num_seqs, self.equal_parts)

    @property
    def batch_tokens(self) -> int:
        """The most tokens of one micro-batch."""
        return most_batch_tokens(self.max_num_batched_tokens, self.max_num_seqs, self.equal_parts)

    @property
    def max_num_seqs(self) -> int:
        """The most sequences in flight."""
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def all_on_gpu(self) -> bool:
        """True where a sweep is one micro-batch and copies nothing between tiers."""
        layers = all(not on_cpu and not on_disk for _, on_cpu, on_disk in self.weight_layers.values())
        kv = all(name == KVPlacement.DEVICE for name, count in self.kv_seqs.items() if count)
        return self.num_gpu_batches == 1 and self.head_tier == "gpu" and layers and kv

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"max_num_seqs": self.max_num_seqs}


def vocabulary_chunk_rows(vocab_size: int) -> int:
    """Rows of a vocabulary chunk of the output matrix; the last chunks may have fewer.

    Args:
        vocab_size: Rows of the whole matrix.
    """
    return -(-vocab_size // VOCABULARY_CHUNKS)


def vocabulary_chunk_bytes(vocab_size: int, row_bytes: int, *, from_disk: bool) -> int:
    """Bytes of a buffer for one vocabulary chunk of the output matrix; in a file it begins anywhere in a page.

    Args:
        vocab_size: Rows of the whole matrix.
        row_bytes: Stored bytes of a row.
        from_disk: Whether the chunk is read by direct I/O.
    """
    num_bytes = vocabulary_chunk_rows(vocab_size) * row_bytes
    return aligned(num_bytes) + ALIGNMENT if from_disk else num_bytes


def takes_drafts(attention_budget: str) -> bool:
    """Tell whether a sequence may have several tokens in a sweep, drafts among them, which all attend to all pages.

    Args:
        attention_budget: Field of `Policy`.
    """
    return AttentionBudget.of(attention_budget) is None


def takes_forced(compute_tier: str, attention_budget: str) -> bool:
    """Tell whether a token that a grammar allows no other for takes no sweep, in a job without drafts too.

    Where a device runs the sweeps it takes one, as the host would have to wait for the grammar before each.

    Args:
        compute_tier: The tier of the compute device's own memory.
        attention_budget: Field of `Policy`.
    """
    return compute_tier == "cpu" and takes_drafts(attention_budget)


def first_batch_cpu_share(tokens: float, delegated: float, balance_tokens: float) -> float:
    """The fraction, from 0 to 1/2, of sequences with CPU attention that go into the first of two micro-batches.

    All other tokens of the sweep go into the first micro-batch. The CPU attends for one micro-batch while the matrix
    products of the other run (NEO section 3.1). So attention times are split in the ratio of the other micro-batch's
    products: T_ca0 : T_ca1 = T_l1 : T_l0. Products take a constant time and a time per token, so T_l0 : T_l1 = (n_0 +
    w) : (n_1 + w), where n_0 and n_1 are the tokens of the two micro-batches. This gives the fraction (c + w) / (n + c
    + 2 w).

    Args:
        tokens: n, all tokens of the sweep.
        delegated: c, sequences with CPU attention, each with one token of the sweep.
        balance_tokens: w, the constant time of products, in tokens.
    """
    both = tokens + delegated + 2 * balance_tokens
    return (delegated + balance_tokens) / both if both else 0.5


def spread_layers(counts: tuple[int, int, int]) -> Iterator[str]:
    """Yield the tier of each layer in order, with the tiers mixed evenly, so that layers have similar loads.

    Args:
        counts: Number of layers on (GPU, CPU, disk).
    """
    total = sum(counts)
    placed = [0, 0, 0]
    for layer in range(total):
        # The tier that is furthest behind its part.
        tier = max(range(3), key=lambda t: (counts[t] * (layer + 1) / total - placed[t], counts[t]))
        placed[tier] += 1
        yield TIERS[tier]


def kv_on_device(num_layers: int, kv_layers: int) -> tuple[bool, ...]:
    """For each layer, True where the KV of placement "streamed" stays in the compute device's memory.

    The layers whose KV is streamed are evenly spaced: each follows layers whose computation hides its transfer (Pie
    section 3.3).

    Args:
        num_layers: Number of layers.
        kv_layers: Number of layers with KV in the device's memory.
    """
    streamed = num_layers - kv_layers
    return tuple((j + 1) * streamed // num_layers == j * streamed // num_layers for j in range(num_layers))


def window_blocks(window: int, kv_block_size: int) -> int:
    """The most KV blocks that a sliding window of one sequence can touch.

    Args:
        window: Tokens of the window, the new token included.
        kv_block_size: Tokens of a KV block.
    """
    return (window + kv_block_size - 2) // kv_block_size + 1


@dataclass(frozen=True)
class MemoryPlan:
    """The planned use of memory in each tier ("gpu", "cpu", "disk").

    Attributes:
        budgets: Bytes that the job may use in each tier.
        parts: Bytes by tier and by purpose. Those of a tier add up to at most its budget.
        kv_blocks: KV blocks of each tier's pool. With `Policy.kv_layers`, the pool of "cpu" lies in GPU memory for some
            layers.
        staging_blocks: KV blocks of each staging buffer through which KV is copied to the compute device.
        batch_tokens: The most tokens of one micro-batch.
        logit_rows: Rows of logits (one per token that is sampled or scored) that are computed at once; None: all rows
            of a micro-batch.
        held_logit_rows: The most rows of a sweep, where logits are held until all chunks of the vocabulary have come;
            None: none are held.
        window: Tokens of the sliding window, where KV blocks before the window are freed; None: no block is freed
            before its sequence ends.
        window_blocks: KV blocks, by tier, of the pools of layers with a sliding window. `kv_blocks` then counts those
            of the other layers. Tier "disk" has no such pool.
        stream_bytes: The most bytes that the work of each accelerator stream allocates at once, besides memory that is
            allocated for the whole job. Empty where no part of a sweep waits for the host: memory may then be allocated
            at any time.
        state_slots: State rows of each tier's pool, in each state layer: one for each sequence of the tier, and some
            for snapshots. Empty where the model has no state layers.
        staging_states: State rows of each staging buffer through which states come to the compute device.
        expansion: Division of the layers of pool "cpu", with `Policy.kv_layers`, which a running job may change; None:
            it is none, or stays as it is.
    """

    budgets: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]]
    kv_blocks: Mapping[str, int]
    staging_blocks: int
    batch_tokens: int
    logit_rows: int | None = None
    held_logit_rows: int | None = None
    window: int | None = None
    window_blocks: Mapping[str, int] = field(default_factory=dict)
    stream_bytes: Mapping[str, int] = field(default_factory=dict)
    state_slots: Mapping[str, int] = field(default_factory=dict)
    staging_states: int = 0
    expansion: KVExpansion | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# A block fills with prompts; is kept full with new ones as rows end; decodes when there are none left; empties.
STAGES = ("prefill", "steady", "decode", "tail")


@dataclass(frozen=True)
class Stage:
    """A group of similar sweeps of a job: prefill alone, prefill with decoding, or the last rows.

    Attributes:
        seconds: Seconds of the group.
        tokens: Tokens that go through the layers in the group.
        name: One of `STAGES`.
        sweeps: Number of sweeps in the group.
        bottleneck: The lane (a resource such as a link or a processor) that is busy the longest; "chain" where Steps
            that wait for each other take longer than any lane.
        parts: Shares of the seconds by kind of work, as `core.knowledge` names them.
    """

    seconds: float
    tokens: float
    name: str
    sweeps: float
    bottleneck: str
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepTimes:
    """Predicted seconds of one sweep, on a grid of what it may have. Empty where they are not known.

    Attributes:
        prefill_tokens: Prompt tokens of a sweep, ascending, 0 first.
        decode_seqs: Decoding sequences of a sweep, ascending, 0 first.
        contexts: Mean tokens that a decoding sequence attends to, ascending, at least two.
        seconds: Seconds [prefill_tokens][decode_seqs][contexts], for prompts of the workload's lengths.
        prompt_keys: Mean tokens that a prompt token attends to in `seconds`.
        prompt_key_s: Seconds that a prompt token takes for each token that it attends to.
    """

    prefill_tokens: tuple[int, ...] = ()
    decode_seqs: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    seconds: tuple[tuple[tuple[float, ...], ...], ...] = ()
    prompt_keys: float = 0.0
    prompt_key_s: float = 0.0

    def stretched(self, factor: float) -> SweepTimes:
        """The grid with all seconds multiplied by a factor."""
        seconds = tuple(tuple(tuple(factor * s for s in line) for line in plane) for plane in self.seconds)
        return replace(self, seconds=seconds, prompt_key_s=factor * self.prompt_key_s)


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a job; times in seconds, sizes in bytes.

    Attributes:
        total_s: Seconds of the whole job, from its start to the finished output.
        low_s: Lower end of the range of `total_s`.
        high_s: Upper end of the range of `total_s`.
        startup_s: Seconds until the first sweep.
        sweeps: Number of sweeps.
        bound_s: Lower bound on the seconds from where weights begin to load to the end, under any placement with this
            block size.
        generated_tokens_per_s: Generated tokens over `total_s`.
        total_tokens_per_s: Prompt and generated tokens over `total_s`.
        block_latency_s: Seconds from a block's first prompt to its last token.
        lane_s: Busy seconds of each lane (a resource such as a link or a processor).
        bottleneck: The lane that is busy the longest.
        memory_bytes: Bytes by tier and purpose.
        memory_price_s: Seconds that one more GiB of each tier would save, to first order, at this block size.
        lane_price_s: Seconds that a 10 % faster lane would save, for each lane, to first order, at this block size.
        stages: Groups of sweeps after `startup_s`, in order of time.
        disk_written_bytes: Bytes that the whole job writes to disk, by purpose, without its output.
        search_gap: Proven bound on how much slower this placement is than the fastest one of the cost model, as a
            fraction. The block, micro-batches, sweeps and KV placements are the same in both.
        break_even_tokens: Tokens of a sweep above which its matrix products take longer than the transfer of the
            weights that lie in other tiers; 0: always, or never.
        sweep_times: Seconds of sweeps of any size.
        lane_costs: Seconds of a sweep by what it has; all 0 where a GPU has none of its KV in host memory.
        source: Origin of the rates, as it follows "from" in a sentence; "": a given profile.
        table: Name of the table of rates that `factors` belong to; "": none, rates are as given.
        factors: Logarithm of the factor on the seconds of each kind of work that was applied to that table.
        drafts: (decoding sequences, drafts that each may have in a sweep with at most so many), ascending; empty where
            drafts are worth nothing. A run chooses by what it measures.
    """

    total_s: float
    low_s: float
    high_s: float
    startup_s: float
    sweeps: float
    bound_s: float
    generated_tokens_per_s: float
    total_tokens_per_s: float
    block_latency_s: float
    lane_s: Mapping[str, float]
    bottleneck: str
    memory_bytes: Mapping[str, Mapping[str, float]]
    memory_price_s: Mapping[str, float]
    lane_price_s: Mapping[str, float]
    stages: tuple[Stage, ...]
    disk_written_bytes: Mapping[str, float]
    search_gap: float
    break_even_tokens: int
    sweep_times: SweepTimes = SweepTimes()
    lane_costs: LaneCosts = NOT_KNOWN
    source: str = ""
    table: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    drafts: tuple[tuple[int, int], ...] = ()

    def most_drafts(self, decode_seqs: int) -> int:
        """Drafts that each sequence may have in a sweep in which so many decode."""
        return next((drafts for seqs, drafts in self.drafts if decode_seqs <= seqs), 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StrategyTime:
    """The predicted time of a job under one strategy.

    Attributes:
        name: Name of the strategy; "chosen" for the plan itself.
        description: A short description of the strategy.
        seconds: Seconds of the whole job; None where the strategy does not apply.
        reason: The reason why the strategy does not apply.
    """

    name: str
    description: str
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True)
class PlannedStates:
    """The states of a model with state layers, as a plan has them.

    Attributes:
        seq_bytes: Bytes of one sequence's states, in all layers.
        kv_token_bytes: Bytes of one token's KV, in all layers.
        slots: Slots of each tier: one for each sequence, and some for snapshots at forks of prompts.
    """

    seq_bytes: int
    kv_token_bytes: float
    slots: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """A policy, the job and machine for which it was made, and the predicted time.

    Attributes:
        model: Name of the model.
        hardware: Name of the machine.
        dtype: The compute dtype.
        workload: Sequences and tokens of the job.
        budgets: Bytes that the job may use in each tier.
        policy: The decisions that the engine carries out.
        placement_bytes: Bytes of weights, KV, states and activations in each tier.
        prediction: The predicted time and memory of the job.
        kernels: The CPU kernel of each shape of the model.
        strategies: The predicted time under each strategy that was compared, and under this plan.
        weights_reason: A sentence that says why this weight format was chosen, where the planner chose it.
        states: States of the sequences in flight; None: the model keeps none.
    """

    model: str
    hardware: str
    dtype: str
    workload: Workload
    budgets: Mapping[str, int]
    policy: Policy
    placement_bytes: Mapping[str, Mapping[str, float]]
    prediction: Prediction
    kernels: KernelChoice = PROCESS_SET
    strategies: tuple[StrategyTime, ...] = ()
    weights_reason: str = ""
    quality_line: str = ""
    states: PlannedStates | None = None

    @property
    def compute_tier(self) -> str:
        """The tier of the compute device's own memory: "gpu" or "cpu"."""
        return "gpu" if "gpu" in self.budgets else "cpu"

    @property
    def forced_per_step(self) -> float:
        """Tokens that grammars are expected to force for each sampled one, where forced ones take no sweep."""
        rates = self.workload.drafts
        counts = self.prediction.drafts or takes_forced(self.compute_tier, self.policy.attention_budget)
        return rates.forced if rates is not None and counts else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"policy": self.policy.to_json()}

    @classmethod
    def from_json(cls, values: Any) -> Plan:
        """Read a plan from the JSON value that `to_json` writes. Raises InputError for any other value."""
        try:
            values = {**values, "policy": dict(values["policy"])}
            for beside in ("explanation", "devices"):  # which follow from the rest
                values.pop(beside, None)
            max_num_seqs = values["policy"].pop("max_num_seqs")
            plan: Plan = read_typed(cls, values, "the plan")
            check_policy(plan.policy, max_num_seqs)
            if plan.policy.kv_layers and "gpu" not in plan.budgets:
                raise ValueError("kv_layers is for a machine with a GPU")
            if plan.policy.head_tier == "disk" and "gpu" in plan.budgets:
                raise ValueError("head_tier 'disk' is for a machine without a GPU: make it 'cpu'")
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a plan ({error}): write one with `batchgen plan -o FILE`") from error
        return plan


def check_policy(policy: Policy, max_num_seqs: int) -> None:
    """Check a policy that was read from a file. Raises ValueError for values that no planner writes."""
    for name in ("gpu_batch_size", "num_gpu_batches", "max_num_batched_tokens", "max_model_len", "kv_block_size"):
        if getattr(policy, name) < 1:
            raise ValueError(f"{name} must be above 0, not {getattr(policy, name)}")
    choices: dict[str, tuple[str, ...]] = {
        "admission": ("continuous", "static"), "batch_order": ("even", "mixed", "neo"),
        "head_tier": TIERS, "embedding_tier": TIERS,
    }  # fmt: skip
    for name, allowed in choices.items():
        if getattr(policy, name) not in allowed:
            raise ValueError(f"{name} must be {' or '.join(allowed)}, not {getattr(policy, name)!r}")
    for name, allowed in {"kv_blocks": TIERS, "kv_seqs": tuple(KVPlacement)}.items():
        for key, count in getattr(policy, name).items():
            if key not in allowed or count < 0:
                raise ValueError(f"{name} must be numbers of 0 or more for {', '.join(allowed)}, not {key!r}: {count}")
    _check_batches(policy, max_num_seqs)
    for name in ("deferred_rows", "balance_tokens"):
        if (getattr(policy, name) or 0) < 0:
            raise ValueError(f"{name} must be null, or a number of 0 or more, not {getattr(policy, name)}")
    layers = min((sum(counts) for counts in policy.weight_layers.values()), default=0)
    if policy.kv_layers and not 0 < policy.kv_layers < layers:
        raise ValueError(f"kv_layers must be a number of layers, 0 or more and below {layers}, not {policy.kv_layers}")
    if policy.kv_layers and any(
        n for kv_placement, n in policy.kv_seqs.items() if kv_placement != KVPlacement.STREAMED
    ):
        raise ValueError("with kv_layers above 0 all of kv_seqs must be of placement 'streamed'")
    for name in ("on_demand_tokens", "packed_tokens", "captured_tokens"):
        if getattr(policy, name) < 0:
            raise ValueError(f"{name} must be 0 or more, not {getattr(policy, name)}")
    counts = [*policy.weight_layers.values(), policy.activation_batches]
    if any(count < 0 for group in counts for count in group):
        raise ValueError("weight_layers and activation_batches must be numbers of 0 or more")


def _check_batches(policy: Policy, max_num_seqs: int) -> None:
    if max_num_seqs != policy.max_num_seqs:
        raise ValueError("max_num_seqs is gpu_batch_size times num_gpu_batches, so change those")
    if policy.balance_tokens is not None and (policy.batch_order, policy.num_gpu_batches) != ("neo", 2):
        raise ValueError("balance_tokens is for two micro-batches in batch_order 'neo': make it null")
