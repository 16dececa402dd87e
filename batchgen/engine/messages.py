"""Messages between rank 0 and the other ranks of a model, encoded as bytes.

Decoding makes values of the types that are listed in this module, and of no other types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchgen.core import messages
from batchgen.core.device import Device
from batchgen.core.errors import BatchgenError
from batchgen.core.kernel_choice import KernelChoice, Measured
from batchgen.core.kv_expansion import KVExpansion
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import MemoryPlan, Policy
from batchgen.core.request import SamplingParams
from batchgen.engine.loader import LoadRequest
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles
from batchgen.models.rope import RopeConfig
from batchgen.models.shard import Shard
from batchgen.models.state_layers import DeltaNet, ShortConv
from batchgen.models.store.layout import Extent, StoredTensor, StoreFile, WeightStore
from batchgen.ops.attention_plan import AttentionPlan, DecodeGroup, SequenceItems, SharedItem
from batchgen.runtime.sampler import SampledToken
from batchgen.schedule.packed_batch import PackedBatch, Segment
from batchgen.schedule.sequence import ScoredPosition
from batchgen.schedule.sequence import Sequence as InFlight
from batchgen.schedule.staging import Run, Staging
from batchgen.schedule.state_rows import StateRows, StateStaging

# The function that other ranks run, as `distributed.serve.serve` takes it.
WORK = "batchgen.engine.follow:follow_rank_zero"
Answers = list[SampledToken | ScoredPosition]  # one for each row of logits of a sweep, in order


@dataclass(frozen=True)
class StageLoads:
    """A message that tells each stage of a pipeline to load its layers.

    Attributes:
        loads: Layers to load and memory plan, for each stage.
    """

    loads: Sequence[tuple[LoadRequest, MemoryPlan]]


@dataclass(frozen=True)
class ShardLoad:
    """A message that tells each rank of tensor parallelism to load its part of a model.

    Attributes:
        request: The model to load, with the shard of rank 0.
        memory: The memory plan of rank 0, which is also that of the others.
    """

    request: LoadRequest
    memory: MemoryPlan


@dataclass(frozen=True)
class SweepMessage:
    """A message with a sweep that all ranks run.

    Attributes:
        batches: The sweep's packed micro-batches.
        vocabulary_chunks: Whether logits may be computed for a part of the vocabulary at a time, as for scoring.
    """

    batches: list[PackedBatch]
    vocabulary_chunks: bool


@dataclass(frozen=True)
class SentMask:
    """The mask of the tokens that a grammar allows next, sent to the last stage in place of a `Constraint`.

    Attributes:
        words: Bits of the mask, one for each token.
    """

    words: np.ndarray

    def mask(self) -> np.ndarray:
        return self.words


@dataclass(frozen=True, eq=False)
class SentSequence:
    """The part of a `Sequence` that sampling and scoring in the last stage of a pipeline use.

    Its tokens are sent only where penalties change logits by them.
    """

    row_id: str | int
    sample_index: int
    sampling: SamplingParams
    num_prompt: int
    num_generated: int
    tokens: list[int]
    targets: tuple[tuple[int, ...], ...]
    scored_from: int
    constraint: SentMask | None

    @classmethod
    def of(cls, sequence: InFlight) -> SentSequence:
        return cls(
            sequence.row_id,
            sequence.sample_index,
            sequence.sampling,
            sequence.num_prompt,
            sequence.num_generated,
            list(sequence.tokens) if sequence.sampling.changes_logits else [],
            sequence.targets,
            sequence.scored_from,
            None if sequence.constraint is None else SentMask(sequence.constraint.mask()),
        )

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


_TABLE = messages.table_of(
    StageLoads, ShardLoad, SweepMessage,
    LoadRequest, MemoryPlan, KVExpansion, Policy, ModelFiles, ModelConfig, DeltaNet, ShortConv, RopeConfig,
    Device, SamplingParams, KernelChoice, Measured, Shard,
    WeightStore, StoreFile, Extent, StoredTensor,
    PackedBatch, Segment, KVPlacement, Staging, StateRows, StateStaging, Run,
    AttentionPlan, DecodeGroup, SequenceItems, SharedItem,
    SentSequence, SentMask, SampledToken, ScoredPosition,
)  # fmt: skip


def encode(message: StageLoads | ShardLoad | SweepMessage | Answers) -> bytes:
    """The bytes of a message."""
    return messages.encode(message, _TABLE)


def decode(content: bytes) -> Any:
    """The message in these bytes. Raises BatchgenError where the bytes are not a message."""
    try:
        return messages.decode(content, _TABLE)
    except ValueError as error:
        raise BatchgenError(
            f"another rank says what this one does not know ({error}): all of them need the same version of batchgen"
        ) from error
