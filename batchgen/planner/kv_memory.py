"""Sizes of the KV pools: the rest of the budgets, divided between layers with and without a sliding window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.direct_io import aligned
from batchgen.core.dtypes import KVFormat
from batchgen.core.errors import InputError
from batchgen.core.kv_expansion import KVExpansion, coming_order
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import Policy, kv_on_device, window_blocks
from batchgen.core.units import format_at_least, format_bytes
from batchgen.models.config import ModelConfig

# Bytes at whose multiples the buffers of one allocation begin.
_ALIGNMENT = 256
# Options that set the budgets of the tiers.
TIER_FLAGS = {"gpu": "--gpu-memory", "cpu": "--cpu-memory", "disk": "--disk-memory"}


@dataclass(frozen=True)
class Demand:
    """Memory requirements of a job's rows.

    Attributes:
        min_tokens: tokens of the smallest row that must fit, prompt and output.
        longest_tokens: tokens of the longest row that staging buffers must hold.
        most_kv_tokens: tokens of KV that the job is expected to use at most; None: nothing is known of them.
        task: "generate", "score", or None for either.
    """

    min_tokens: int
    longest_tokens: int
    most_kv_tokens: int | None = None
    task: str | None = "generate"


@dataclass(frozen=True)
class KVPools:
    """Blocks of each pool, under the names of `MemoryPlan`, and the bytes that all pools take of each tier."""

    blocks: dict[str, int]
    window: int | None
    window_blocks: dict[str, int]
    tier_bytes: dict[str, int]
    expansion: KVExpansion | None = None


@lru_cache(maxsize=64)
def kv_block_bytes(config: ModelConfig, kv_block_size: int, kv_format: str) -> tuple[int, ...]:
    """Stored bytes of one KV block in each layer: 0 in layers without keys and values of their own."""
    sizes = [0] * config.num_layers
    for layer in config.kv_layers:
        shape = config.attention_of(layer)
        sizes[layer] = 2 * shape.num_kv_heads * kv_block_size * KVFormat.of(kv_format).row_bytes(shape.head_dim)
    return tuple(sizes)


@lru_cache(maxsize=64)
def summary_bytes(config: ModelConfig, kv_format: str, attention_budget: str) -> tuple[int, ...]:
    """Bytes of the summary of one KV block in each layer: 0 where no pages are chosen, or KV of another is attended to.

    Args:
        config: The model's configuration.
        kv_format: Format of KV.
        attention_budget: Tokens that a decoding token attends to, as `--attention-budget` states them.
    """
    sizes, choosing = [0] * config.num_layers, config.choosing_layers(attention_budget)
    for layer in config.kv_layers if choosing else ():
        if choosing[layer]:
            shape = config.attention_of(layer)
            sizes[layer] = shape.num_kv_heads * KVFormat.of(kv_format).summary_bytes(shape.head_dim)
    return tuple(sizes)


@dataclass(frozen=True)
class _Summaries:
    """The summaries of KV blocks under a policy.

    Attributes:
        block_bytes: bytes of those of one block, in all layers; 0 where all tokens attend to all before them.
        passing_tier: tier of those of blocks that are not in the compute device's own memory.
        kv_bytes: bytes of a block itself, in all layers.
    """

    block_bytes: int
    passing_tier: str
    kv_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, policy: Policy, compute_tier: str) -> _Summaries:
        size = sum(summary_bytes(config, policy.kv_format, policy.attention_budget))
        kv_bytes = sum(kv_block_bytes(config, policy.kv_block_size, policy.kv_format))
        return cls(size, policy.summary_tier(compute_tier), kv_bytes)

    def _tier(self, pool: str) -> str:
        """The tier of the summaries of a pool's blocks."""
        return "gpu" if pool == "gpu" else self.passing_tier

    def beside(self, pool: str) -> int:
        """Bytes of the summaries of a block that are in its own tier."""
        return self.block_bytes if self._tier(pool) == pool else 0

    def fitting(self, pool: str, most: int, least: int, capacity: Mapping[str, int]) -> int:
        """The most blocks of a pool, of at least so many, whose summaries fit where they lie in another tier."""
        if not self.block_bytes or self._tier(pool) == pool:
            return most
        return max(least, min(most, capacity[self._tier(pool)] // self.block_bytes))

    def take(self, pool: str, blocks: int, taken: dict[str, int], capacity: dict[str, int]) -> None:
        """Count the summaries of a pool's blocks where they lie in another tier."""
        if (tier := self._tier(pool)) != pool:
            taken[tier] += blocks * self.block_bytes
            capacity[tier] -= blocks * self.block_bytes

    def most_blocks(self, useful: Mapping[str, int], least: int, capacity: int) -> dict[str, int]:
        """The most blocks of each pool, so that summaries leave the GPU's own pool its part of the memory.

        Args:
            useful: Blocks of each pool that are of use.
            least: Blocks of a row that must fit.
            capacity: Bytes of the GPU's memory for KV and summaries.
        """
        wanted = self.block_bytes * sum(count for pool, count in useful.items() if pool != "gpu")
        if self.passing_tier != "gpu" or not wanted:
            return dict(useful)
        others = useful.get("gpu", 0) * (self.kv_bytes + self.block_bytes)
        part = min(1.0, max(0, capacity) / (wanted + others))
        return {pool: count if pool == "gpu" else max(least, int(count * part)) for pool, count in useful.items()}


def _useful_blocks(policy: Policy, demand: Demand, count: int) -> int:
    """Blocks of a pool that are of use to its sequences.

    More than every sequence at full length is never used; the demand may know better, but any row must fit.

    Args:
        policy: The policy.
        demand: Memory requirements of the rows.
        count: Sequences of the pool.
    """
    longest = -(-policy.max_model_len // policy.kv_block_size)
    if demand.most_kv_tokens is None:
        return count * longest
    expected = -(-demand.most_kv_tokens * count // policy.max_num_seqs)
    return min(count * longest, max(-(-expected // policy.kv_block_size), longest))


def window_bytes(config: ModelConfig, sizes: Sequence[int]) -> int:
    """Bytes, of those that each layer has, which are in layers with a sliding window."""
    return sum(size for size, window in zip(sizes, config.windows, strict=True) if window is not None)


def giving_window(config: ModelConfig, kv_block_size: int, longest_tokens: int) -> int | None:
    """Tokens that layers with a sliding window see, if they free blocks; None: no sequence gets longer."""
    windows = [window for window in config.windows if window is not None]
    if (
        not windows
        or not config.causal
        or window_blocks(max(windows), kv_block_size) >= -(-longest_tokens // kv_block_size)
    ):
        return None
    return max(windows)


def kv_pools(
    config: ModelConfig,
    policy: Policy,
    parts: Mapping[str, Mapping[str, int]],
    budgets: Mapping[str, int],
    demand: Demand,
    staging_bytes: int = 0,
) -> KVPools:
    """The pools of the KV placements: what is left of the budgets, but no more than their sequences can make use of.

    Args:
        config: The model's configuration.
        policy: Numbers of sequences, and the placement of their KV.
        parts: Bytes of everything else, by tier and purpose.
        budgets: Bytes of each tier.
        demand: Memory requirements of the rows.
        staging_bytes: Bytes of all staging buffers for KV, which are among `parts`.

    Raises:
        InputError: a budget does not hold one row.
    """
    kv_block_size = policy.kv_block_size
    # With `kv_layers`, KV of a layer lies in one of two tiers: there all layers have one table.
    window = None if policy.kv_layers else giving_window(config, kv_block_size, policy.max_model_len)
    seqs: dict[str, int] = {}
    for kv_placement, count in policy.kv_seqs.items():
        if count:
            tier: str = KVPlacement(kv_placement).tier
            seqs[tier] = seqs.get(tier, 0) + count
    least = -(-demand.min_tokens // kv_block_size)
    capacity = {tier: budgets[tier] - sum(fixed.values()) for tier, fixed in parts.items()}
    blocks, of_windows, taken, short = {}, {}, dict.fromkeys(parts, 0), {}
    summaries = _Summaries.of(config, policy, "gpu" if "gpu" in budgets else "cpu")
    most = summaries.most_blocks(
        {pool: _useful_blocks(policy, demand, count) for pool, count in seqs.items()}, least, capacity.get("gpu", 0)
    )
    # Summaries may lie in another tier than their blocks: the pool of that tier gets the rest.
    for pool, count in sorted(seqs.items(), key=lambda item: ("disk", "cpu", "gpu").index(item[0])):
        useful = summaries.fitting(pool, most[pool], least, capacity)
        if window is not None and pool != "disk":
            split = _Split.of(config, policy, window, count, summaries.beside(pool))
            if capacity[pool] < split.bytes_of(least, split.least(least)):
                short[pool] = split.bytes_of(least, split.least(least)) - capacity[pool]
                continue
            blocks[pool], of_windows[pool] = split.shared_out(capacity[pool], least, useful)
            taken[pool] += split.bytes_of(blocks[pool], of_windows[pool])
            summaries.take(pool, blocks[pool], taken, capacity)
            continue
        sizes = _pool_block_bytes(config, policy, pool)
        sizes[pool] += summaries.beside(pool)
        for tier, size in sizes.items():
            if capacity[tier] < least * size:
                short[tier] = least * size - capacity[tier]
        blocks[pool] = max(0, min([useful, *(capacity[tier] // size for tier, size in sizes.items() if size)]))
        for tier, size in sizes.items():
            taken[tier] += blocks[pool] * size
        summaries.take(pool, blocks[pool], taken, capacity)
    for tier, size in capacity.items():
        if size < 0:
            short.setdefault(tier, -size)
    if short:
        raise InputError(_too_small(short, parts, budgets, demand.min_tokens))
    expansion = None
    if _may_expand(policy, budgets) and window is None:
        spare = capacity["gpu"] if policy.kv_layers else 0
        expansion = _expansion(config, policy, blocks["cpu"], spare, staging_bytes)
        if policy.kv_layers:
            taken["gpu"] = expansion.device_bytes
    return KVPools(blocks, window if of_windows else None, of_windows, taken, expansion)


def _may_expand(policy: Policy, budgets: Mapping[str, int]) -> bool:
    """Tell whether the number of layers whose KV streams may be changed while a job runs.

    Sequences on disk pass through the staging buffers too, and the CPU may be at the KV of deferred ones at any time.
    Summaries of pages stay where they are, so blocks under an attention budget keep their numbers.
    """
    if AttentionBudget.of(policy.attention_budget) is not None:
        return False
    others = (KVPlacement.DISK, KVPlacement.DEFERRED)
    streams = policy.kv_seqs.get(KVPlacement.STREAMED, 0) and not any(map(policy.kv_seqs.get, others))
    return bool(policy.kv_layers or (streams and "gpu" in budgets and policy.admission == "continuous"))


def _expansion(config: ModelConfig, policy: Policy, blocks: int, capacity: int, staging_bytes: int) -> KVExpansion:
    """The division of layers that a policy begins with, and what others would find.

    The device's pool takes all its memory that is of use with any number of layers there.

    Args:
        config: The model's configuration.
        policy: The policy, with KV by layer.
        blocks: Blocks of the pool.
        capacity: Bytes of the device's memory for the pool, beside the staging buffers.
        staging_bytes: Bytes of all staging buffers for KV.
    """
    sizes = kv_block_bytes(config, policy.kv_block_size, policy.kv_format)
    planned = kv_on_device(config.num_layers, policy.kv_layers)
    # Without KV by layer the device keeps none to begin with, and what it has beside is in its own pool.
    there = [layer for layer in config.kv_layers if planned[layer]]
    streamed = [layer for layer in config.kv_layers if not planned[layer]]
    most = min(capacity, blocks * sum(sizes)) // _ALIGNMENT * _ALIGNMENT
    return KVExpansion(
        planned=planned,
        order=(*there, *coming_order(streamed)),
        block_bytes=sizes,
        device_bytes=max(blocks * sum(sizes[layer] for layer in there), most),
        staging_bytes=staging_bytes,
        most_blocks=blocks,
        least_blocks=min(blocks, -(-policy.max_model_len // policy.kv_block_size)),
        num_on_device=len(there),
    )


def chunk_blocks(tokens: int, kv_block_size: int) -> int:
    """Blocks that prompts have beyond a window, in the sweep that computes so many tokens of them."""
    return -(-tokens // kv_block_size)


@dataclass(frozen=True)
class _Split:
    """One pool's division between layers that keep all KV and layers with a sliding window.

    Attributes:
        block_bytes: bytes of a block of all layers of the former kind, with its summaries if they lie there.
        window_block_bytes: bytes of a block of all layers with a sliding window.
        of_window: blocks that a decoding sequence holds in the latter.
        most: blocks of the latter that are of use to all sequences.
    """

    block_bytes: int
    window_block_bytes: int
    of_window: int
    most: int

    @classmethod
    def of(cls, config: ModelConfig, policy: Policy, window: int, count: int, summary: int) -> _Split:
        """The division for so many sequences. summary: bytes of a block's summaries that lie in the same tier."""
        sizes = kv_block_bytes(config, policy.kv_block_size, policy.kv_format)
        windowed, of_window = window_bytes(config, sizes), window_blocks(window, policy.kv_block_size)
        chunks = -(-policy.max_num_batched_tokens * count // policy.max_num_seqs)
        most = count * of_window + chunk_blocks(chunks, policy.kv_block_size)
        return cls(sum(sizes) - windowed + summary, windowed, of_window, most)

    def least(self, blocks: int) -> int:
        """Window blocks of a row with so many blocks, chunk by chunk."""
        return min(blocks, self.of_window)

    def bytes_of(self, blocks: int, of_windows: int) -> int:
        return blocks * self.block_bytes + of_windows * self.window_block_bytes

    def shared_out(self, capacity: int, least: int, useful: int) -> tuple[int, int]:
        """Blocks of both kinds in so many bytes.

        As many window blocks as sequences hold at once, but never more than blocks of the other layers: rows within the
        window need as many of both. least: blocks of a row that must fit. useful: blocks of the other layers that are
        of use.
        """
        each, window_each = self.block_bytes, self.window_block_bytes
        of_windows = min(self.most, useful, capacity // (each + window_each), (capacity - least * each) // window_each)
        of_windows = max(of_windows, self.least(least))
        # Where all layers have windows the others' blocks take no memory: they are how prefixes are found.
        return useful if not each else min(useful, (capacity - of_windows * window_each) // each), of_windows


def _pool_block_bytes(config: ModelConfig, policy: Policy, pool: str) -> dict[str, int]:
    """Bytes of a block of all layers, by tier."""
    sizes = kv_block_bytes(config, policy.kv_block_size, policy.kv_format)
    if pool == "cpu" and policy.kv_layers:
        on_device = kv_on_device(config.num_layers, policy.kv_layers)
        gpu = sum(size for size, stays in zip(sizes, on_device, strict=True) if stays)
        return {"gpu": gpu, "cpu": sum(sizes) - gpu}
    return {pool: sum(map(aligned, sizes)) if pool == "disk" else sum(sizes)}


def _too_small(
    short: Mapping[str, int], parts: Mapping[str, Mapping[str, int]], budgets: Mapping[str, int], min_tokens: int
) -> str:
    tier, missing = max(short.items(), key=lambda item: item[1])
    fixed = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts[tier].items())
    fewer = ", or a smaller --max-num-seqs" if parts[tier].get("state", 0) >= missing else ""
    return (
        f"{TIER_FLAGS[tier]} {format_bytes(budgets[tier])} is too small for one row of {min_tokens} tokens"
        f" beside {fixed};"
        f" give at least {format_at_least((budgets[tier] + missing) * 1.01)}{fewer}"
    )
