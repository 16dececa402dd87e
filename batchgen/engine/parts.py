"""What the engine is made of, and what it counts: handed between loading, the engine and its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.machine import peak_resident_bytes
from batchgen.core.plan import MemoryPlan, Policy
from batchgen.core.routing import RoutingCounts
from batchgen.models.config import ModelConfig
from batchgen.runtime.grammar import Grammars
from batchgen.schedule.deferred_batches import DeferredBatches

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer


class SweepRunner(Protocol):
    """What the engine needs of an executor.

    `run` computes packed micro-batches and calls on_logits(rows, fp32 logits [rows, columns], first column) until all logits
    that are asked for have come; with vocabulary_chunks perhaps not all columns at once. on_logits returns the tokens that it
    chose, int64 [rows] where the logits are, if it chose any.

    Where `run` returns a function, the sweep is under way: the function returns when it has run. Another sweep may be run
    before, with PENDING for tokens that this one samples.

    `deferred_batches`: sequences of the job whose attention is deferred, which `drop` forgets; while some are waiting, `run` may be called
    without a batch.
    """

    bytes_moved: dict[str, int]  # by lane
    busy_s: dict[str, float]  # by lane
    stalled_s: dict[str, float]  # of compute, by the lane it waited for
    peak_bytes: dict[str, int]  # of the tiers beside the host's memory
    routing: RoutingCounts  # of the layers that this process has

    def run(
        self, batches, on_logits, *, vocabulary_chunks: bool, deferred_batches: DeferredBatches
    ) -> Callable[[], None] | None: ...

    def drop(self, deferred_batches: DeferredBatches) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineParts:
    """A loaded model: what the engine puts to work.

    `split` and `pack` are micro_batches.split_batches and batch.pack with the model's numbers filled in, `sample` is
    sampler.sample, `scorer` is scorer.Scorer. `grammars`: over its tokens; without them no request may have one.
    `kernels`: what each shape runs on. `sweeps_in_flight`: the most that may be under way at once, no sequence in two of them but
    with chunks of its prompt. With more than one, tokens are chosen where the last stage of a pipeline is (`engine.pipeline`): what
    `executor` hands over for logits is for `sample` and `scorer` alone to know. `peaks_of_others`: of the other processes that run the
    model, `process_peaks`, once the executor is closed; None: of one that did not come to its end.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    executor: SweepRunner
    split: Callable
    pack: Callable
    sample: Callable
    policy: Policy
    memory: MemoryPlan
    eos_token_ids: frozenset[int]
    dtype: str
    loaded_bytes: int
    compute_tier: str = "cpu"
    load_s: float = 0.0
    scorer: Callable | None = None
    grammars: Grammars | None = None
    kernels: KernelChoice = PROCESS_SET
    sweeps_in_flight: int = 1
    peaks_of_others: Callable[[], Sequence[Mapping[str, int] | None]] = tuple

    @property
    def not_finite(self) -> str:
        """The error of a row whose logits hold NaN or infinity."""
        if self.dtype == "float16":
            return (
                "logits are not finite in float16: run with --dtype bfloat16 or float32;"
                " a row that fails there too has met damaged weights"
            )
        return f"logits are not finite in {self.dtype}: the model's weights are damaged, fetch or convert it again"


def process_peaks(executor: SweepRunner | None) -> dict[str, int]:
    """The most bytes of each tier that this process held. What an emulated accelerator has of the host's memory counts as both."""
    return {"gpu": 0, "disk": 0} | (executor.peak_bytes if executor else {}) | {"cpu": peak_resident_bytes()}


@dataclass
class EngineStats:
    """Running totals since the engine was made.

    Times in seconds; input_wait is time spent waiting for requests, masks that of the thread that makes masks, and
    mask_wait (a part of sampling) what was waited for them.
    """

    prompt_tokens: int = 0  # of prefilled rows, whether computed or taken from the prefix cache
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0  # tokens that went through the layers
    generated_tokens: int = 0
    scored_tokens: int = 0  # of continuations
    sweeps: int = 0
    preempted: int = 0
    peak_kv_blocks: int = 0
    begins_twice: bool = False  # whether a prompt began with the token that the tokenizer puts before it as well
    busy_s: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "sampling": 0.0, "input_wait": 0.0})
