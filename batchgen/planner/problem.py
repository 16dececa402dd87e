"""A planning problem, and the inputs of the cost model that the search enumerates for it.

`CostInputs` are fixed while the placement (placement.py) is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from batchgen.core.attention_budget import ALL
from batchgen.core.draft_rates import draft_state_share
from batchgen.core.dtypes import INT4, INT8, NATIVE, weight_format_of
from batchgen.core.errors import InputError
from batchgen.core.hardware import ComputeRates, HardwareProfile
from batchgen.core.kv_placement import TIERS, KVPlacement
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE, most_batch_seqs, most_batch_tokens, takes_drafts, window_blocks
from batchgen.core.quality import loss_of
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.planner.kv_memory import chunk_blocks, giving_window, window_bytes
from batchgen.planner.phases import Deferral
from batchgen.planner.sizes import Sizes

# Most sequences in flight that are looked at.
_MOST_SEQS = 8192
# Of the disk space that is free, this fraction is left alone.
_DISK_MARGIN_FRAC = 0.1
LANES = ("compute", "cpu_attention", "h2d", "d2h", "disk_read", "disk_write", "dram")


@dataclass(frozen=True)
class Balance:
    """Two micro-batches of unequal size, in NEO's order.

    Attributes:
        tokens: `Policy.balance_tokens`.
        cpu_frac: fraction of the decoding sequences that the CPU attends to, by which tokens are divided before the
            placement is known.
    """

    tokens: int
    cpu_frac: float


@dataclass(frozen=True)
class Loading:
    """The cost of bringing weights of one format to where they are used, before the first sweep.

    Attributes:
        read_s: Seconds to read all weights.
        store_bytes: Bytes of the weight store that is written before weights stay on disk; 0: there is one.
    """

    read_s: float = 0.0
    store_bytes: int = 0


@dataclass(frozen=True)
class CostInputs(Sizes):
    """All that is fixed while placement is decided.

    Attributes:
        admission, batch_order, on_demand_tokens, packed_tokens, captured_tokens: fields of `core.plan.Policy`.
        max_num_seqs: sequences in flight.
        budgets: tier -> bytes; without "gpu" where there is none.
        process_bytes: host memory the process takes before any of the model's.
        longest_tokens: tokens of a sequence that staging buffers must hold; None: those of the workload's longest.
        max_model_len: longest prompt plus output, in tokens; None: that of the workload.
        deferral: sequences in flight whose attention is deferred; None: there are none.
        balance: division of sweeps into unequal micro-batches; None: they are equal.
        share_prefixes: field of `core.plan.Policy`.
        loading: cost of loading weights in this format.
    """

    hardware: HardwareProfile
    workload: Workload
    admission: str
    max_num_seqs: int
    num_gpu_batches: int
    max_num_batched_tokens: int
    budgets: Mapping[str, int]
    process_bytes: int
    longest_tokens: int | None = None
    max_model_len: int | None = None
    batch_order: str = "even"
    deferral: Deferral | None = None
    balance: Balance | None = None
    on_demand_tokens: int = 0
    packed_tokens: int = 0
    captured_tokens: int = 0
    share_prefixes: bool = True
    loading: Loading = Loading()

    @property
    def deferred_seqs(self) -> int:
        """Sequences of the block that gain a token in so many sweeps as `phases.Deferral` says."""
        return self.deferral.seqs if self.deferral else 0

    @property
    def swept_seqs(self) -> int:
        """Sequences in flight that gain a token in every sweep: all but the deferred ones."""
        return self.max_num_seqs - self.deferred_seqs

    @property
    def on_gpu(self) -> bool:
        """True if a GPU computes."""
        return self.hardware.gpu is not None

    @property
    def shares_cores(self) -> bool:
        """True if the host's cores are the compute device."""
        return not self.on_gpu or self.hardware.shared_cores

    @property
    def must_write_store(self) -> bool:
        """True if any placement has a weight store written: one of int4, or of weights that memory cannot hold.

        Weights that memory cannot hold have no placement where the disk cannot hold their store.
        """
        size = self.loading.store_bytes
        if not size or self.weight_format == INT4:
            return bool(size)
        memory = sum(budget for tier, budget in self.budgets.items() if tier != "disk")
        return size <= self.budgets["disk"] and self.layer_bytes * self.model.num_layers > memory

    @property
    def draft_state_share(self) -> float:
        """State slots for drafts, for each sequence; 0 where memory holds all layers, or no drafts are asked for."""
        memory, rates = self.budgets["gpu" if self.on_gpu else "cpu"], self.workload.drafts
        is_asked_for = rates is not None and not rates.only_while_streaming
        if not is_asked_for or not self.model.state or not takes_drafts(self.attention_budget):
            return 0.0
        return draft_state_share(self.max_num_seqs) if self.layer_bytes * self.model.num_layers > memory else 0.0

    @property
    def rates(self) -> ComputeRates:
        """Rates of the compute device."""
        return self.hardware.compute

    @property
    def gpu_batch_size(self) -> int:
        """Sequences of a micro-batch, if all are of equal size."""
        return -(-self.max_num_seqs // self.num_gpu_batches)

    @property
    def equal_parts(self) -> int:
        """Number of equal parts of a sweep of which a micro-batch has at most one: 1 where their sizes are unequal."""
        return 1 if self.balance else self.num_gpu_batches

    @property
    def batch_seqs(self) -> int:
        """Most sequences of one micro-batch."""
        return most_batch_seqs(self.max_num_seqs, self.equal_parts)

    @property
    def batch_tokens(self) -> int:
        """Most tokens of one micro-batch."""
        return most_batch_tokens(self.max_num_batched_tokens, self.max_num_seqs, self.equal_parts)

    @cached_property
    def one_batch(self) -> CostInputs:
        """Inputs of a sweep with a single micro-batch."""
        return replace(self, num_gpu_batches=1, batch_order="even", balance=None)

    @cached_property
    def seq_blocks(self) -> int:
        """KV blocks reserved for one sequence: its own part of the prompt and as much output as it may have."""
        return self.kv_blocks(self.workload.computed_prompt_len + self.workload.max_output_len)

    @cached_property
    def disk_seq_blocks(self) -> int:
        """KV blocks reserved for one sequence on disk, where no prefix is shared."""
        return self.kv_blocks(self.workload.prompt_len.mean + self.workload.max_output_len)

    # Layers with a sliding window give back what no later token sees (schedule/window_pool.py), but on disk.

    @cached_property
    def _windowed_block_bytes(self) -> int:
        """Bytes of a KV block of all layers with a sliding window, whose KV is in pools of their own."""
        return window_bytes(self.model, self.layers.blocks) if self.window else 0

    @cached_property
    def _kept_block_bytes(self) -> int:
        """Bytes of a KV block of all other layers."""
        return sum(self.layers.blocks) - self._windowed_block_bytes

    @cached_property
    def window(self) -> int | None:
        """Tokens that layers with a sliding window see; None: no sequence gets longer than that."""
        return giving_window(self.model, self.kv_block_size, self.longest_blocks * self.kv_block_size)

    def held_blocks(self, blocks: int) -> int:
        """Blocks that a decoding sequence with a table of so many holds in layers with a sliding window."""
        return min(blocks, window_blocks(self.window, self.kv_block_size)) if self.window else blocks

    def kv_bytes_of(self, blocks: int) -> int:
        """Bytes of KV of a sequence with so many blocks, in all layers, and of the summaries of its pages."""
        kept_bytes = self._kept_block_bytes + self.layers.summary_block
        return kept_bytes * blocks + self._windowed_block_bytes * self.held_blocks(blocks)

    def read_kv_bytes(self, tokens: float, windowed: float) -> float:
        """Bytes of KV of so many tokens, in all layers that attend: where layers reuse KV it comes to each of them.

        Args:
            tokens: Tokens in layers that keep all KV.
            windowed: Tokens in layers that free what no later token sees.
        """
        kept, freed = self.layers.all_read
        return (kept * tokens + freed * (windowed if self.window else tokens)) / self.kv_block_size

    @property
    def seq_kv_bytes(self) -> float:
        """Bytes of KV reserved for one sequence in memory."""
        return self.kv_bytes_of(self.seq_blocks)

    @property
    def shared_kv_bytes(self) -> float:
        """Bytes of KV of the prefix that sequences share."""
        shared = self.workload.shared_prefix_len
        in_window = min(shared, self.held_blocks(self.kv_blocks(shared)) * self.kv_block_size)
        kept_bytes = self._kept_block_bytes + self.layers.summary_block
        return (kept_bytes * shared + self._windowed_block_bytes * in_window) / self.kv_block_size

    @property
    def chunk_kv_bytes(self) -> int:
        """Bytes of KV of prompts beyond their windows, in the sweep that computes them."""
        blocks = chunk_blocks(self.max_num_batched_tokens, self.kv_block_size) + 1
        return self._windowed_block_bytes * blocks

    @property
    def disk_seq_kv_bytes(self) -> float:
        """Bytes of KV reserved for one sequence on disk."""
        return self.disk_seq_blocks * self.layers.mean_disk_block * self.model.num_layers

    @property
    def disk_seq_summary_bytes(self) -> float:
        """Bytes of host memory for the summaries of one sequence's pages on disk."""
        return self.disk_seq_blocks * self.layers.summary_block

    @property
    def longest_seq_len(self) -> int:
        """Tokens of the longest sequence that buffers must hold."""
        return self.longest_tokens or self.workload.max_seq_len

    @cached_property
    def longest_blocks(self) -> int:
        """KV blocks of the longest sequence that staging buffers must hold."""
        return self.kv_blocks(self.longest_seq_len)


@dataclass(frozen=True)
class Allowed:
    """Tiers and KV placements that a plan may use.

    Attributes:
        weight_tiers, kv_placements: subsets of `TIERS` and of `KVPlacement`.
        kv_by_layer: KV of placement "streamed", the only one then, stays on the GPU in some layers (Policy.kv_layers).
    """

    weight_tiers: tuple[str, ...] = TIERS
    kv_placements: tuple[str, ...] = tuple(KVPlacement)
    kv_by_layer: bool = False


@dataclass(frozen=True)
class Problem:
    """A job and a machine, as far as planning needs to know them.

    Attributes:
        hardware: The machine of one process.
        model: The configuration of one process's part of the model.
        workload: The rows of the job.
        budgets: Bytes of each tier that the plan may use; "gpu" only where there is a GPU.
        compute_format: The dtype that is computed in.
        weight_formats: Formats that weights may have.
        kv_formats: Formats that KV may have.
        most_loss: The most that two of these formats may lose beyond the first of each (`core.quality.loss_of`).
        open_weights: Formats that `--quality` could allow weights to have.
        open_kv: Formats that `--quality` could allow KV to have.
        state_dtype: Format of the matrices of state layers.
        attention_budget: Tokens that a decoding token attends to, as `--attention-budget` states them.
        admissions: Kinds of admission that the plan may have.
        make_inputs: Makes the inputs of the cost model: `CostInputs`, or a subclass for another runtime than this one.
        allowed: Tiers and KV placements that the plan may use.
        max_num_seqs: Sequences in flight, where the user gives them.
        most_seqs: The most sequences in flight that are looked at.
        coarse: True to look at a part of the settings only, whose times tell how fast formats are.
        num_gpu_batches: Micro-batches, where the user gives them.
        max_num_batched_tokens: The most tokens of a sweep, where the user gives them.
        max_block_latency_s: The longest time from a block's first prompt to its last token.
        kv_block_size: Tokens of a KV block.
        process_bytes: Host memory that a process takes before any of the model's.
        longest_tokens: Tokens of a sequence that staging buffers must hold; None: the longest of the workload.
        sharing: Processes that share host memory and disk; `budgets` are those of one process.
        offers_int4: True where the user could ask for weights in 4 bits.
        model_name: The model's name, for the plan.
        max_model_len: The longest prompt plus output, in tokens; None: that of the workload.
        share_prefixes: True where rows take over the KV of a prefix that another row has computed.
        output_len_known: True where the workload's output lengths are more than an upper bound.
        startup_s: Seconds from the start of the command to where weights are loaded.
        loading: Weight format -> cost of loading; for each format that the user could ask for.
    """

    hardware: HardwareProfile
    model: ModelConfig
    workload: Workload
    budgets: Mapping[str, int]
    compute_format: str
    weight_formats: tuple[str, ...]
    kv_formats: tuple[str, ...]
    most_loss: float = math.inf
    open_weights: tuple[str, ...] = ()
    open_kv: tuple[str, ...] = ()
    admissions: tuple[str, ...] = ("continuous", "static")
    make_inputs: Callable[..., CostInputs] = CostInputs
    allowed: Allowed = field(default_factory=Allowed)
    max_num_seqs: int | None = None
    most_seqs: int = _MOST_SEQS
    coarse: bool = False
    num_gpu_batches: int | None = None
    max_num_batched_tokens: int | None = None
    max_block_latency_s: float | None = None
    kv_block_size: int = DEFAULT_KV_BLOCK_SIZE
    process_bytes: int = 0
    longest_tokens: int | None = None
    state_dtype: str = "float32"
    attention_budget: str = ALL
    sharing: int = 1
    offers_int4: bool = True
    model_name: str = ""
    max_model_len: int | None = None
    share_prefixes: bool = True
    output_len_known: bool = True
    startup_s: float = 0.0
    loading: Mapping[str, Loading] = field(default_factory=dict)

    @property
    def formats(self) -> Iterator[tuple[str, str]]:
        """Each format of weights with each of KV, as far as the machine has rates and both lose little enough."""
        least = 1 + loss_of(self.weight_formats[0], self.kv_formats[0])
        for weight_format in self.weight_formats:
            for kv_format in self.kv_formats:
                loss = (1 + loss_of(weight_format, kv_format)) / least - 1
                if loss <= self.most_loss and self._has_rates(weight_format, kv_format):
                    yield weight_format, kv_format

    def _has_rates(self, weight_format: str, kv_format: str) -> bool:
        """True if the machine has rates for both formats. Without a choice, int8 may have other products' rates."""
        rates = self.hardware.compute
        if weight_format == INT4 and not rates.expand_bytes_per_s:
            return False
        is_chosen = weight_format != self.weight_formats[0]
        if weight_format == INT8 and is_chosen and not rates.has_rates("gemm_flops_per_s", INT8):
            return False
        return rates.has_rates("decode_attention_bytes_per_s", kv_format)


def problem_of(
    hardware: HardwareProfile,
    model: ModelConfig,
    workload: Workload,
    *,
    dtype: str,
    max_model_len: int,
    weights: str = NATIVE,
    kv_cache_dtype: str = "auto",
    admission: str | None = None,
    gpu_memory: int | None = None,
    cpu_memory: int | None = None,
    disk_memory: int | None = None,
    sharing: int = 1,
    kv_placements: tuple[KVPlacement, ...] = tuple(KVPlacement),
    **given: Any,
) -> Problem:
    """The problem of a job whose values are those of the command line's options.

    Args:
        hardware: The machine.
        model: The configuration of one process's part of the model.
        workload: The rows of the job.
        dtype: The compute dtype.
        max_model_len: The longest prompt plus output, in tokens.
        weights: A value of `--weights`, or a format.
        kv_cache_dtype: A KV format, or "auto" for the compute dtype.
        admission: "continuous" or "static"; None: either.
        gpu_memory, cpu_memory, disk_memory: Bytes of one process's budgets; None: what the machine has.
        sharing: Processes that share host memory and disk.
        kv_placements: KV placements that the plan may use.
        **given: Other fields of `Problem`.

    Raises:
        InputError: A GPU's memory is given for a machine that has no GPU.
    """
    if hardware.gpu is None and gpu_memory is not None:
        raise InputError(f"--gpu-memory is given, but {hardware.name} has no GPU: leave it out")
    budgets = {
        "cpu": hardware.cpu_memory_bytes // sharing if cpu_memory is None else cpu_memory,
        "disk": int(hardware.disk_bytes * (1 - _DISK_MARGIN_FRAC)) // sharing if disk_memory is None else disk_memory,
    }
    if hardware.gpu is not None and hardware.gpu_memory_bytes is not None:
        budgets["gpu"] = hardware.gpu_memory_bytes if gpu_memory is None else gpu_memory
    return Problem(
        hardware=hardware,
        model=model,
        workload=workload,
        budgets=budgets,
        compute_format=dtype,
        weight_formats=(weight_format_of(dtype, weights),),
        kv_formats=(dtype if kv_cache_dtype == "auto" else kv_cache_dtype,),
        admissions=("continuous", "static") if admission is None else (admission,),
        allowed=Allowed(kv_placements=kv_placements),
        max_model_len=max_model_len,
        sharing=sharing,
        **given,
    )
