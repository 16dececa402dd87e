"""A planning problem, and the inputs of the cost model that the search enumerates for it.

`CostInputs` are fixed while the placement (placement.py) is decided; a `RuntimeModel` says what the runtime can do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from batchgen.core.direct_io import aligned
from batchgen.core.dtypes import FORMAT_BYTES, INT4
from batchgen.core.hardware import ComputeRates, HardwareProfile
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE, TIERS, window_blocks
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import end_bytes, main_format, output_format, output_row_bytes
from batchgen.planner.kv_memory import chunk_blocks, giving_window, kv_block_bytes
from batchgen.planner.memory import disk_bytes, expert_bytes, group_bytes, group_tensors_of_layers, slot_bytes
from batchgen.planner.phases import Deferral

# Most sequences in flight that are looked at.
_MOST_SEQS = 8192
LANES = ("compute", "cpu_attention", "h2d", "d2h", "disk_read", "disk_write", "dram")


@dataclass(frozen=True)
class RuntimeModel:
    """What tells one runtime from another.

    Lanes named in `serial` run by themselves, before the others.

    Attributes:
        dequantizes_per_micro_batch: 4-bit weights are dequantized for every micro-batch, not once per layer and sweep.
        dequantizes_kv: packed KV is dequantized before attention, whose kernels read the compute dtype alone.
        attends_disk_kv_on_cpu: KV from disk is attended to by the CPU, and does not go on to the GPU.
    """

    name: str
    serial: tuple[str, ...] = ()
    dequantizes_per_micro_batch: bool = False
    dequantizes_kv: bool = False
    attends_disk_kv_on_cpu: bool = False


BATCHGEN = RuntimeModel("batchgen")
# FlexGen's released code starts loading a layer's weights with its first micro-batch, and its CPU attention keeps the
# launching thread busy meanwhile: the loads are not hidden, the rest is. docs/flexgen_check.md compares.
FLEXGEN = RuntimeModel(
    "flexgen", serial=("h2d",), dequantizes_per_micro_batch=True, dequantizes_kv=True, attends_disk_kv_on_cpu=True
)


@dataclass(frozen=True)
class Balance:
    """Two micro-batches of unequal size, in NEO's order.

    Attributes:
        tokens: `balance_tokens` of policy.Policy.
        cpu_frac: of the sequences that decode, those that the CPU attends to: how tokens are shared out is fixed before the placement.
    """

    tokens: int
    cpu_frac: float


@dataclass(frozen=True)
class CostInputs:
    """All that is fixed while placement is decided.

    Memory budgets in bytes, None where there is no such tier.

    Attributes:
        max_num_seqs: sequences in flight.
        process_bytes: host memory the process takes before any of the model's.
        longest_tokens: of a sequence that staging buffers must hold; None: the longest of the workload.
        batch_order: of policy.Policy.
        deferral: sequences of the block whose attention is deferred; None: there are none.
        balance: how unequal micro-batches are made; None: they are equal.
        on_demand_tokens: of policy.Policy.
    """

    hardware: HardwareProfile
    model: ModelConfig
    workload: Workload
    runtime: RuntimeModel
    compute_format: str
    weight_format: str
    kv_format: str
    admission: str
    max_num_seqs: int
    num_gpu_batches: int
    max_num_batched_tokens: int
    kv_block_size: int
    budgets: Mapping[str, int]
    process_bytes: int
    longest_tokens: int | None = None
    batch_order: str = "even"
    deferral: Deferral | None = None
    balance: Balance | None = None
    on_demand_tokens: int = 0

    @property
    def deferred_seqs(self) -> int:
        """Sequences of the block that gain a token in so many sweeps as `phases.Deferral` says."""
        return self.deferral.seqs if self.deferral else 0

    @property
    def swept_seqs(self) -> int:
        """The others, which gain one in every sweep."""
        return self.max_num_seqs - self.deferred_seqs

    @property
    def on_gpu(self) -> bool:
        return self.hardware.gpu is not None

    @property
    def shares_cores(self) -> bool:
        """Whether the host's cores are the compute device."""
        return not self.on_gpu or self.hardware.shared_cores

    @property
    def rates(self) -> ComputeRates:
        return self.hardware.compute

    @property
    def gpu_batch_size(self) -> int:
        return -(-self.max_num_seqs // self.num_gpu_batches)

    @property
    def equal_parts(self) -> int:
        """As of policy.Policy."""
        return 1 if self.balance else self.num_gpu_batches

    @property
    def batch_seqs(self) -> int:
        """Most sequences of one micro-batch."""
        return -(-self.max_num_seqs // self.equal_parts)

    @property
    def batch_tokens(self) -> int:
        """Most tokens of one micro-batch."""
        return -(-max(self.max_num_batched_tokens, self.max_num_seqs) // self.equal_parts)

    @cached_property
    def one_batch(self) -> CostInputs:
        """The same for what a single micro-batch computes."""
        return replace(self, num_gpu_batches=1, batch_order="even", balance=None)

    # Sizes in bytes, under the names that the papers use.

    @property
    def element_bytes(self) -> float:
        return FORMAT_BYTES[self.compute_format]

    @cached_property
    def group_bytes(self) -> dict[str, int]:
        """Stored bytes of what can be placed on its own in one layer, `ModelConfig.layer_tensors`."""
        return group_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def layer_bytes(self) -> int:
        """W: one layer's weights as stored."""
        return sum(self.group_bytes.values())

    @cached_property
    def layer_tensors(self) -> float:
        """Tensors of one layer, the mean over layers."""
        layers = group_tensors_of_layers(self.model, self.compute_format, self.weight_format)
        return sum(sum(groups.values()) for groups in layers) / len(layers)

    @cached_property
    def expert_bytes(self) -> dict[str, int]:
        """Stored bytes of one expert's matrices, by group; none where there are no experts."""
        return expert_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def all_expert_bytes(self) -> float:
        """Stored bytes of all experts of one layer, the mean of layers with and without."""
        mixtures = self.model.expert_layers / self.model.num_layers
        return mixtures * self.model.num_experts * sum(self.expert_bytes.values())

    @cached_property
    def disk_group_bytes(self) -> dict[str, int]:
        """The same of a buffer in host memory that any layer is read into from disk."""
        return disk_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def slot_group_bytes(self) -> dict[str, int]:
        """Of a buffer that any layer's tensors of each group fit into."""
        return slot_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def dequantized_slot_bytes(self) -> int:
        """Of a buffer for the dequantized weights of any layer."""
        return sum(slot_bytes(self.model, self.compute_format, self.compute_format).values())

    @cached_property
    def dequantized_layer_bytes(self) -> float:
        return self.model.params_per_layer * self.element_bytes

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a token's activations between layers: FlexGen's h."""
        return self.model.hidden_size * self.element_bytes

    @property
    def head_bytes(self) -> float:
        """Final norm and output matrix."""
        embedding, head = self._end_bytes
        return float(head + (embedding if self.model.tied_embeddings else 0))

    @property
    def embedding_bytes(self) -> float:
        """The input embedding, where it is a tensor of its own."""
        return 0.0 if self.model.tied_embeddings else float(self._end_bytes[0])

    @cached_property
    def _end_bytes(self) -> tuple[int, int]:
        return end_bytes(self.model, self.compute_format, self.weight_format)

    @cached_property
    def main_format(self) -> str:
        """What most of the layers' weights are in."""
        return main_format(self.model, self.weight_format)

    @cached_property
    def output_format(self) -> str:
        """What the output matrix is in."""
        return output_format(self.model, self.compute_format, self.weight_format)

    @property
    def output_row_bytes(self) -> int:
        """Of a row of the output matrix."""
        return output_row_bytes(self.model, self.compute_format, self.weight_format)

    # KV, which is stored in blocks of `kv_block_size` tokens, and on disk in whole pages.

    @cached_property
    def kv_block_bytes(self) -> int:
        """One block of one layer."""
        return kv_block_bytes(self.model, self.kv_block_size, self.kv_format)

    @property
    def dequantizes_kv(self) -> bool:
        """Whether packed KV is dequantized before attention reads it."""
        return self.runtime.dequantizes_kv and self.kv_format == INT4

    @property
    def disk_block_bytes(self) -> int:
        return aligned(self.kv_block_bytes)

    @cached_property
    def kv_token_bytes(self) -> float:
        """κ: keys and values of one token in one layer, as stored."""
        return self.kv_block_bytes / self.kv_block_size

    def kv_blocks(self, tokens: float) -> int:
        return -(-math.ceil(tokens) // self.kv_block_size)

    @cached_property
    def seq_blocks(self) -> int:
        """Reserved for one sequence: its own part of the prompt and as much output as it may have."""
        return self.kv_blocks(self.workload.computed_prompt_len + self.workload.max_output_len)

    @cached_property
    def disk_seq_blocks(self) -> int:
        """The same on disk, where no prefix is shared."""
        return self.kv_blocks(self.workload.prompt_len.mean + self.workload.max_output_len)

    # Layers with a sliding window give back what no later token sees (schedule/window_pool.py), but on disk.

    @cached_property
    def window_layers(self) -> int:
        """How many there are, in pools of their own."""
        return self.model.num_layers - self.model.window_layers.get(None, 0) if self.window else 0

    @cached_property
    def window(self) -> int | None:
        """Tokens that they see; None: no sequence gets longer than that."""
        return giving_window(self.model, self.kv_block_size, self.longest_blocks * self.kv_block_size)

    def held_blocks(self, blocks: int) -> int:
        """Of a table of so many blocks, those that a decoding sequence holds in layers with a sliding window."""
        return min(blocks, window_blocks(self.window, self.kv_block_size)) if self.window else blocks

    def kv_bytes_of(self, blocks: int) -> int:
        """KV of a sequence with so many blocks, in all layers."""
        keeping = self.model.num_layers - self.window_layers
        return (keeping * blocks + self.window_layers * self.held_blocks(blocks)) * self.kv_block_bytes

    @property
    def seq_kv_bytes(self) -> float:
        return self.kv_bytes_of(self.seq_blocks)

    @property
    def shared_kv_bytes(self) -> float:
        """Of the prefix that sequences share."""
        shared = self.workload.shared_prefix_len
        in_window = min(shared, self.held_blocks(self.kv_blocks(shared)) * self.kv_block_size)
        tokens = (self.model.num_layers - self.window_layers) * shared + self.window_layers * in_window
        return tokens * self.kv_token_bytes

    @property
    def chunk_kv_bytes(self) -> int:
        """Of prompts beyond their windows, in the sweep that computes them."""
        blocks = chunk_blocks(self.max_num_batched_tokens, self.kv_block_size) + 1
        return self.window_layers * blocks * self.kv_block_bytes

    @property
    def disk_seq_kv_bytes(self) -> float:
        return self.disk_seq_blocks * self.disk_block_bytes * self.model.num_layers

    @cached_property
    def longest_blocks(self) -> int:
        """Of the longest sequence that staging buffers must hold."""
        return self.kv_blocks(self.longest_tokens or self.workload.prompt_len.max + self.workload.max_output_len)

    @property
    def delegated_prompt_blocks(self) -> int:
        """Of a staging buffer, for the prompts of sequences that the CPU attends to, which pass through it once."""
        return self.kv_blocks(self.batch_tokens) + min(self.batch_seqs, self.batch_tokens)


@dataclass(frozen=True)
class Allowed:
    """What a plan may use.

    Attributes:
        weight_tiers, kv_placements: subsets of `TIERS` and of `KVPlacement`.
        kv_by_layer: KV of placement "streamed", the only one then, stays on the GPU in some layers (Policy.kv_layers).
    """

    weight_tiers: tuple[str, ...] = TIERS
    kv_placements: tuple[str, ...] = tuple(KVPlacement)
    kv_by_layer: bool = False


@dataclass(frozen=True)
class Problem:
    """What the search is given.

    Attributes:
        budgets: bytes per tier of policy.TIERS; "gpu" only where there is one.
        weight_formats, kv_formats: those the user allows, the compute format among them unless quantisation is asked
            for.
        max_num_seqs, num_gpu_batches, max_num_batched_tokens: fixed by the user, or None.
        max_block_latency_s: longest time from a block's first prompt to its last token.
        longest_tokens: of a sequence that staging buffers must hold; None: the longest of the workload.
        sharing: processes that share what the user gives of host memory and disk; `budgets` are of one of them.
        offers_int4: whether the user could ask for it.
    """

    hardware: HardwareProfile
    model: ModelConfig
    workload: Workload
    budgets: Mapping[str, int]
    compute_format: str
    weight_formats: tuple[str, ...]
    kv_formats: tuple[str, ...]
    admissions: tuple[str, ...] = ("continuous", "static")
    runtime: RuntimeModel = BATCHGEN
    allowed: Allowed = field(default_factory=Allowed)
    max_num_seqs: int | None = None
    most_seqs: int = _MOST_SEQS
    num_gpu_batches: int | None = None
    max_num_batched_tokens: int | None = None
    max_block_latency_s: float | None = None
    kv_block_size: int = DEFAULT_KV_BLOCK_SIZE
    process_bytes: int = 0
    longest_tokens: int | None = None
    sharing: int = 1
    offers_int4: bool = True
