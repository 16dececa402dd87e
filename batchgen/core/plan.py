"""Plans: a policy, what it is for, and the prediction; decided before a job starts, handed over frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.typed_json import read_typed
from batchgen.core.workload import Workload

TIERS = ("gpu", "cpu", "disk")
# Chunks of the vocabulary in which an output matrix that is not on the accelerator comes over, two at a time.
VOCABULARY_CHUNKS = 8
# Tokens of a KV block, unless somebody asks for others.
DEFAULT_KV_BLOCK_SIZE = 16
# Pinned memory of the host through which small arrays come to an accelerator and results come back, allocated with
# the engine.
PINNED_BYTES = 16 << 20
# Memory of the accelerator beside a link, through which rows go that do not lie as they are copied.
PASSING_BYTES = 4 << 20


def passing_bytes(block_bytes: int, staging_blocks: int | None = None) -> int:
    """Bytes of accelerator memory beside one link: at least those of two KV blocks as they are on disk.

    Args:
        block_bytes: Bytes of one layer's KV block as it is on disk.
        staging_blocks: Blocks of a staging buffer, more than which never pass; None: as many as there can be.
    """
    most = max(PASSING_BYTES, 2 * block_bytes)
    return most if staging_blocks is None else min(most, 2 * staging_blocks * block_bytes)


def most_batch_seqs(max_num_seqs: int, equal_parts: int) -> int:
    """The most sequences of one micro-batch, where a sweep is cut into so many equal parts."""
    return -(-max_num_seqs // equal_parts)


def most_batch_tokens(max_num_batched_tokens: int, max_num_seqs: int, equal_parts: int) -> int:
    """The most tokens of one micro-batch: a decode sweep has a token of each sequence, whatever the token budget is."""
    return -(-max(max_num_batched_tokens, max_num_seqs) // equal_parts)


@dataclass(frozen=True)
class Policy:
    """The part of a plan that the engine follows.

    Attributes:
        admission: "continuous" or "static".
        gpu_batch_size: Sequences of a micro-batch (FlexGen 4.2).
        num_gpu_batches: Micro-batches of a block (FlexGen 4.2); times `gpu_batch_size` it is the most sequences in
            flight.
        max_num_batched_tokens: The most tokens of one sweep.
        max_model_len: The longest prompt plus output, in tokens.
        kv_block_size: Tokens of a KV block.
        kv_blocks: KV blocks in the pool of each tier, for all layers together.
        share_prefixes: True where rows take over the KV of a prompt prefix that another row has computed.
        weight_format: Format of the layers' matrices.
        kv_format: Format of KV.
        weight_layers: Number of layers in which each weight matrix lies on (GPU, CPU, disk).
        head_tier: Tier of the output matrix.
        kv_seqs: Sequences of the block in each KV placement.
        activation_batches: Micro-batches whose activations between layers stay on (GPU, CPU).
        batch_order: Order of the micro-batches: "even", with equal tokens; "mixed", equal tokens and each its part of
            every KV placement; "neo", two of which one has the sequences that the CPU attends to (NEO section 3).
        embedding_tier: Tier of the input embeddings, where they are not the output matrix too: "gpu" or "cpu".
        deferred_rows: Sequences that may enter placement "deferred" in one job, where they stay much longer than in
            others; None: as many as there is capacity for.
        kv_layers: Layers in which KV of placement "streamed" stays in GPU memory (Pie section 3.3). Above 0 all
            sequences have this placement.
        on_demand_tokens: The most tokens of a sweep that reads of the experts on disk only those that a token is routed
            to, where the host computes.
        balance_tokens: w of two unequal micro-batches with order "neo", both of which have sequences that the CPU
            attends to (`first_batch_cpu_share`): the constant time of products, in tokens. None: the second batch has
            all of these sequences, and neither has more than half of the block or of the tokens.
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
    balance_tokens: int | None = None

    @property
    def equal_parts(self) -> int:
        """The number of equal parts that a sweep is cut into; 1 where micro-batches have unequal sizes."""
        return 1 if self.balance_tokens is not None else self.num_gpu_batches

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
        """True where nothing moves between tiers in a sweep of one micro-batch."""
        layers = all(not on_cpu and not on_disk for _, on_cpu, on_disk in self.weight_layers.values())
        kv = all(c == KVPlacement.DEVICE for c, count in self.kv_seqs.items() if count)
        return self.num_gpu_batches == 1 and self.head_tier == "gpu" and layers and kv

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"max_num_seqs": self.max_num_seqs}


def first_batch_cpu_share(tokens: float, delegated: float, balance_tokens: float) -> float:
    """The part, from 0 to 1/2, of the sequences that the CPU attends to that goes with the first of two micro-batches.

    The first batch has all else of the sweep. The CPU attends for one batch while the products of the other run (NEO
    section
    3.1), so the parts of attention are as the products of the other batch are: T_ca0 : T_ca1 = T_l1 : T_l0. Products
    take a
    constant time and some for each token, so T_l0 : T_l1 = (n_0 + w) : (n_1 + w), which gives (c + w) / (n + c + 2 w).

    Args:
        tokens: n, tokens of the sweep, those of the delegated sequences included.
        delegated: c, sequences that the CPU attends to, each with one token.
        balance_tokens: w, the constant time of products, in tokens.
    """
    both = tokens + delegated + 2 * balance_tokens
    return (delegated + balance_tokens) / both if both else 0.5


def spread_layers(counts: tuple[int, int, int]) -> Iterator[str]:
    """The tier of each layer, when `counts` layers are to be on (GPU, CPU, disk).

    Tiers are mixed as evenly as can be, so that every layer has about as much to load as the next.
    """
    total = sum(counts)
    placed = [0, 0, 0]
    for layer in range(total):
        # The tier that is furthest behind its part.
        tier = max(range(3), key=lambda t: (counts[t] * (layer + 1) / total - placed[t], counts[t]))
        placed[tier] += 1
        yield TIERS[tier]


def kv_on_device(num_layers: int, kv_layers: int) -> tuple[bool, ...]:
    """True for each layer where KV of placement "streamed" stays on the compute device: `kv_layers` of them.

    The other layers lie as far apart as can be, each after those whose computation hides its transfer (Pie section
    3.3).
    """
    streamed = num_layers - kv_layers
    return tuple((j + 1) * streamed // num_layers == j * streamed // num_layers for j in range(num_layers))


def window_blocks(window: int, kv_block_size: int) -> int:
    """The most KV blocks in which the last `window` tokens of a sequence, one of them new, can lie."""
    return (window + kv_block_size - 2) // kv_block_size + 1


@dataclass(frozen=True)
class MemoryPlan:
    """The use of memory in each tier.

    Attributes:
        budgets: Bytes of each tier.
        parts: Bytes by tier and by what they are for; they add up to at most the budget.
        kv_blocks: KV blocks of each tier's pool. With `Policy.kv_layers` the pool of "cpu" lies in GPU memory in some
            layers.
        staging_blocks: Blocks of each buffer through which KV passes on its way to the compute device.
        batch_tokens: The most tokens of one micro-batch.
        logit_rows: Rows of logits that are made together; None: all of a micro-batch.
        window: Tokens that layers with a sliding window see, where these free blocks that no later token sees; None:
            all layers keep all blocks.
        window_blocks: Blocks, by tier, of the pools of layers with a sliding window; `kv_blocks` are those of the other
            layers. KV on disk has none.
        stream_bytes: Bytes that the work of each accelerator stream may hold at once, beside what is held from
            beginning to end; empty where no part of a sweep waits for the host: there memory may be allocated at any
            time.
    """

    budgets: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]]
    kv_blocks: Mapping[str, int]
    staging_blocks: int
    batch_tokens: int
    logit_rows: int | None = None
    window: int | None = None
    window_blocks: Mapping[str, int] = field(default_factory=dict)
    stream_bytes: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# A block fills with prompts; is kept full with new ones as rows end; decodes when there are none left; empties.
STAGES = ("prefill", "steady", "decode", "tail")


@dataclass(frozen=True)
class Stage:
    """Like sweeps of a job: prompts alone at first, prompts beside decoding, or the last rows.

    Attributes:
        seconds: Seconds of these sweeps.
        tokens: Tokens that go through the layers in them.
        name: One of `STAGES`.
        sweeps: Number of sweeps.
        bottleneck: Lane that binds; "chain" where Steps that wait for one another take longer than any lane.
    """

    seconds: float
    tokens: float
    name: str
    sweeps: float
    bottleneck: str


@dataclass(frozen=True)
class Prediction:
    """The expected course of a job; times in seconds, sizes in bytes.

    Attributes:
        total_s: Seconds of the whole job, from its start to the finished output.
        low_s: Lower end of the range of `total_s`.
        high_s: Upper end of the range of `total_s`.
        startup_s: Seconds until the first sweep.
        sweeps: Number of sweeps.
        bound_s: Seconds of all sweeps that no placement at this block size can beat.
        generated_tokens_per_s: Generated tokens over `total_s`.
        total_tokens_per_s: Prompt and generated tokens over `total_s`.
        block_latency_s: Seconds from a block's first prompt to its last token.
        lane_s: Busy seconds of each lane.
        bottleneck: Lane that binds.
        memory_bytes: Bytes by tier and part.
        memory_price_s: Seconds that one more GiB of a tier would save, to first order, at this block size.
        lane_price_s: Seconds that 10 % more of a lane's rate would save, to first order, at this block size.
        stages: Stages of the time after `startup_s`, in their order.
        disk_written_bytes: Bytes, by what they are for, that the whole job writes to disk beside its output.
        search_gap: Fraction, which is proven, by which the placement may be slower by the cost model than the fastest
            with this block, these micro-batches, sweeps and KV placements.
        break_even_tokens: Tokens of a sweep from which on products take as long as bringing the weights that lie
            elsewhere; 0: always, or never.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StrategyTime:
    """The time of a job under one strategy.

    Attributes:
        name: Name of the strategy, or "chosen".
        description: Half a sentence about the strategy.
        seconds: Seconds of the whole job; None where the strategy does not apply.
        reason: Reason why the strategy does not apply.
    """

    name: str
    description: str
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """A policy, what it is for, and what it is expected to do.

    Attributes:
        model: Name of the model.
        hardware: Name of the machine.
        dtype: The dtype that is computed in.
        workload: Sequences and tokens of the job.
        budgets: Bytes of each tier that the plan was made for.
        policy: The part that the engine follows.
        placement_bytes: Bytes of weights, KV and activations in each tier.
        prediction: The expected course of the job.
        kernels: Kernel of each shape of the model on the CPU.
        strategies: The job's time under each strategy that was compared, and under this plan.
        weights_reason: The sentence that says why the weights are in their format, where that was left to the plan.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"policy": self.policy.to_json()}

    @classmethod
    def from_json(cls, values: Any) -> Plan:
        """Read what `to_json` gives. Raises InputError where `values` is anything else."""
        try:
            values = {**values, "policy": dict(values["policy"])}
            for beside in ("explanation", "devices"):  # which follow from the rest
                values.pop(beside, None)
            max_num_seqs = values["policy"].pop("max_num_seqs")
            plan: Plan = read_typed(cls, values, "the plan")
            check_policy(plan.policy, max_num_seqs)
            if plan.policy.kv_layers and "gpu" not in plan.budgets:
                raise ValueError("kv_layers is for a machine with a GPU")
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a plan ({error}): write one with `batchgen plan -o FILE`") from error
        return plan


def check_policy(policy: Policy, max_num_seqs: int) -> None:
    """Check a policy that came from a file. Raises ValueError for what no planner would have written."""
    for name in ("gpu_batch_size", "num_gpu_batches", "max_num_batched_tokens", "max_model_len", "kv_block_size"):
        if getattr(policy, name) < 1:
            raise ValueError(f"{name} must be above 0, not {getattr(policy, name)}")
    choices: dict[str, tuple[str, ...]] = {
        "admission": ("continuous", "static"), "batch_order": ("even", "mixed", "neo"),
        "head_tier": ("gpu", "cpu"), "embedding_tier": ("gpu", "cpu"),
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
    if policy.on_demand_tokens < 0:
        raise ValueError(f"on_demand_tokens must be 0 or more, not {policy.on_demand_tokens}")
    counts = [*policy.weight_layers.values(), policy.activation_batches]
    if any(count < 0 for group in counts for count in group):
        raise ValueError("weight_layers and activation_batches must be numbers of 0 or more")


def _check_batches(policy: Policy, max_num_seqs: int) -> None:
    if max_num_seqs != policy.max_num_seqs:
        raise ValueError("max_num_seqs is gpu_batch_size times num_gpu_batches, so change those")
    if policy.balance_tokens is not None and (policy.batch_order, policy.num_gpu_batches) != ("neo", 2):
        raise ValueError("balance_tokens is for two micro-batches in batch_order 'neo': make it null")
