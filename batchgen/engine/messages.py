"""Messages between rank 0 and the other ranks of a model, as bytes.

A reader makes values of the kinds that are listed here, and of no others.
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
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import MemoryPlan, Policy
from batchgen.core.request import SamplingParams
from batchgen.engine.loader import LoadRequest
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles
from batchgen.models.rope import RopeConfig
from batchgen.models.shard import Shard
from batchgen.models.store.layout import Extent, StoredTensor, StoreFile, WeightStore
from batchgen.ops.attention_plan import AttentionPlan, DecodeGroup, PrefillItem, SharedItem
from batchgen.runtime.sampler import SampledToken
from batchgen.schedule.packed_batch import PackedBatch, Segment
from batchgen.schedule.sequence import LogitsRow, ScoredPosition
from batchgen.schedule.sequence import Sequence as InFlight
from batchgen.schedule.staging import Run, Staging

# The function that other ranks run, as `distributed.serve.serve` takes it.
WORK = "batchgen.engine.follow:follow_rank_zero"
Answers = list[SampledToken] | list[ScoredPosition]  # one for each row of logits of a sweep, in order


@dataclass(frozen=True)
class StageLoads:
    """The model that each stage of a pipeline loads, and its memory."""

    loads: Sequence[tuple[LoadRequest, MemoryPlan]]


@dataclass(frozen=True)
class ShardLoad:
    """The model that each rank of tensor parallelism loads its part of, and rank 0's memory plan."""

    request: LoadRequest
    memory: MemoryPlan


@dataclass(frozen=True)
class SweepMessage:
    """A sweep that all ranks run.

    Attributes:
        batches: Its packed micro-batches.
        vocabulary_chunks: Whether logits may be made in chunks of the vocabulary, as sweeps that score have them.
    """

    batches: list[PackedBatch]
    vocabulary_chunks: bool


@dataclass(frozen=True)
class SentMask:
    """Stands for a `Constraint` in the last stage."""

    words: np.ndarray

    def mask(self) -> np.ndarray:
        return self.words


@dataclass(frozen=True, eq=False)
class SentSequence:
    """The part of a `Sequence` that the sampler and the scorer of the last stage use.

    Its tokens are sent only where sampling changes logits by them.
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
    LoadRequest, MemoryPlan, Policy, ModelFiles, ModelConfig, RopeConfig, Device, SamplingParams, KernelChoice,
    Measured, Shard,
    WeightStore, StoreFile, Extent, StoredTensor,
    PackedBatch, Segment, KVPlacement, Staging, Run, AttentionPlan, DecodeGroup, PrefillItem, SharedItem, LogitsRow,
    SentSequence, SentMask, SampledToken, ScoredPosition,
)  # fmt: skip


def encode(message: StageLoads | ShardLoad | SweepMessage | Answers) -> bytes:
    """Make a message, as bytes."""
    return messages.encode(message, _TABLE)


def decode(content: bytes) -> Any:
    """Make the message of these bytes. Raises BatchgenError where they are not one."""
    try:
        return messages.decode(content, _TABLE)
    except ValueError as error:
        raise BatchgenError(
            f"another rank says what this one does not know ({error}): all of them need the same version of batchgen"
        ) from error
