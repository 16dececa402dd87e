"""Options of an executor's sweeps, and whom it hands logits and activations to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from batchgen.core.attention_budget import ALL
from batchgen.core.kernel_choice import KernelChoice
from batchgen.models.config import AttentionShape, ModelConfig
from batchgen.models.layers import Reduce
from batchgen.runtime.lanes import OnStep
from batchgen.schedule.sequence import LogitsRow

# Takes (rows, fp32 logits [rows, columns], token of the first column) as soon as they are there. Returns the tokens
# chosen, int64 [rows], if any are.
OnLogits = Callable[[Sequence[LogitsRow], Tensor, int], Tensor | None]


class Largest(Protocol):
    """Takes the tokens with the largest logits, where it needs no logits beside them."""

    def takes_largest(self, rows: Sequence[LogitsRow]) -> bool:
        """Tell whether of each row the token with the largest logit is chosen, and nothing else is asked for."""

    def take_largest(self, rows: Sequence[LogitsRow], chosen: Tensor, if_finite: Tensor) -> None:
        """Take chosen tokens of the sweep that is being run, which the device keeps for the next one.

        Args:
            rows: Rows of logits that they were chosen from.
            chosen: The tokens, int64 [rows], on the device; valid until the next sweep.
            if_finite: These tokens, with NOT_FINITE where logits are not finite.
        """


class AdjacentRanks(Protocol):
    """The ranks of the previous and the next stage of a pipeline. Each call waits until it is done."""

    def receive_from_previous(self, hidden: Tensor) -> None:
        """Fill `hidden`, in host memory, with the next activations of the previous stage."""

    def send_to_next(self, hidden: Tensor) -> None:
        """Hand activations in host memory to the next stage."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of an `Executor`'s sweeps.

    Attributes:
        max_positions: most tokens of a sequence.
        rotary_positions: positions for which there are rotary tables from the start; None: `max_positions`. The host's
            grow as sequences are longer; on an accelerator, whose work may be under way, they cannot.
        attention_budget: tokens that a decoding token attends to (`core.attention_budget`).
        batches_on_host: micro-batches, the last ones of a sweep, whose activations wait in host memory between layers.
        batch_tokens: most tokens of a micro-batch.
        delegated_seqs: most sequences of a micro-batch that the CPU attends to; 0: it attends to none.
        deferred_seqs: most sequences in flight whose attention is deferred.
        chunk_tokens: tokens that go through a layer's matmuls together; None: a micro-batch.
        logit_rows: rows whose logits are made together; None: a micro-batch.
        captured_tokens: most tokens of a sweep that becomes a CUDA graph (`graphs`), for models whose weights
            and KV are all on the device; 0: none does.
        attention_isa: instruction set that attends on the CPU, by the shape of attention; others: the process's.
        reduce: all-reduce over the ranks, on tensors of the compute device; None: there is one rank.
        makes_logits: Whether this rank is asked for logits.
        stage_tokens: most tokens of a sweep of a pipeline's stage; 0: there is one stage.
        adjacent_ranks: ranks of the previous and the next pipeline stage; None: there is one stage.
        serial: Whether Steps run one after the other in the caller's thread (`Lanes`).
        shared_cores: Whether compute and CPU attention take turns on the same cores (`Lanes`).
        on_step: function that is called after each Step with its times (`Lanes`).
    """

    max_positions: int
    rotary_positions: int | None = None
    attention_budget: str = ALL
    batches_on_host: int = 0
    batch_tokens: int = 0
    delegated_seqs: int = 0
    deferred_seqs: int = 0
    chunk_tokens: int | None = None
    logit_rows: int | None = None
    captured_tokens: int = 0
    attention_isa: Mapping[AttentionShape, str] = field(default_factory=dict)
    reduce: Reduce | None = None
    makes_logits: bool = True
    stage_tokens: int = 0
    adjacent_ranks: AdjacentRanks | None = None
    serial: bool = False
    shared_cores: bool = False
    on_step: OnStep | None = None

    @property
    def is_whole(self) -> bool:
        """Tell whether the whole model is in this process."""
        return self.reduce is None and self.adjacent_ranks is None

    @property
    def ranks(self) -> AdjacentRanks:
        """The adjacent ranks of a stage that has any."""
        assert self.adjacent_ranks is not None, "there is one stage"
        return self.adjacent_ranks


def attention_isas(config: ModelConfig, kernels: KernelChoice, dtype: str) -> dict[AttentionShape, str]:
    """The instruction set for each shape of attention that a model has.

    Args:
        config: Configuration of the model.
        kernels: Instruction set of each shape.
        dtype: Dtype of queries.
    """
    shapes = map(config.attention_of, config.attention_layers)
    return {shape: kernels.attention_isa(*shape, dtype) for shape in shapes}
