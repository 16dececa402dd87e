"""The parts of an engine, made by loading a model, and the engine's counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.kv_expansion import Recut
from batchgen.core.machine import peak_resident_bytes
from batchgen.core.plan import MemoryPlan, Policy
from batchgen.core.request import PositionLogprobs, TokenLogprob
from batchgen.core.routing import RoutingCounts
from batchgen.models.config import ModelConfig
from batchgen.runtime.grammar import Grammars
from batchgen.schedule.deferred_batches import DeferredBatches

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer
    from batchgen.runtime.sweep_options import Largest
    from batchgen.schedule.draft_proposer import Proposer


class SweepRunner(Protocol):
    """The interface of an executor, as the engine uses it: it runs sweeps of packed micro-batches.

    `run` computes the micro-batches and calls on_logits(rows, fp32 logits [rows, columns], first column) until all
    requested logits have come. With vocabulary_chunks a call may have a part of the columns. on_logits returns the
    sampled token ids, int64 [rows] on the device of the logits, or None where nothing is sampled.

    `run` returns None where the sweep has run. Otherwise the sweep is in flight, and the returned function waits for
    its end. Another sweep may be run before that; tokens that the first sweep samples are PENDING in it.

    `run` may be called without micro-batches while deferred batches wait. `drop` forgets deferred batches. `recut` cuts
    a KV pool anew whose memory plan has an expansion, while no sweep is in flight.
    """

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes that each lane has moved, by the lane's name."""

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each lane was busy, by the lane's name."""

    @property
    def stalled_s(self) -> dict[str, float]:
        """Seconds that compute waited for each lane, by the lane's name."""

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes of each tier but host memory, by the tier's name."""

    @property
    def routing(self) -> RoutingCounts:
        """Counts of the tokens that mixture-of-experts layers of this process routed to each expert."""

    def run(
        self,
        batches,
        on_logits,
        *,
        vocabulary_chunks: bool,
        deferred_batches: DeferredBatches,
        largest: Largest | None = None,
    ) -> Callable[[], None] | None: ...

    def drop(self, deferred_batches: DeferredBatches) -> None: ...

    def recut(self, recut: Recut) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineParts:
    """A loaded model, ready for an engine.

    Attributes:
        config: The model's configuration.
        tokenizer: The model's tokenizer.
        executor: Runs sweeps. In a pipeline it hands on results of the last stage, which only `sample` and `scorer`
            understand, in place of logits.
        split: Function from a sweep's scheduled sequences to micro-batches.
        pack: Function from a micro-batch to a packed batch.
        sample: Function from logits and their sequences to sampled tokens.
        policy: Placement and schedule.
        memory: The memory plan.
        eos_token_ids: Ids of the tokens that end a text.
        dtype: Compute dtype.
        loaded_bytes: Bytes of loaded weights.
        compute_tier: Tier of the compute device.
        load_s: Seconds that loading took.
        scorer: Factory of the object that scores a sweep's logits.
        grammars: Grammars over the tokens; None: no request may have one.
        kernels: Kernel of each shape.
        sweeps_in_flight: The most sweeps in flight at once; a sequence is in two of them only with chunks of its
            prompt.
        draft_proposers: Function that makes the proposers of drafts that the model has, for one call of the engine.
        peaks_of_others: Function that returns the peak bytes of each tier of the other processes that run the model,
            once the executor is closed; None stands for a process that has failed.
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
    draft_proposers: Callable[[], Sequence[Proposer]] = tuple
    peaks_of_others: Callable[[], Sequence[Mapping[str, int] | None]] = tuple

    def token_logprob(self, token_id: int, logprob: float | None) -> TokenLogprob:
        """A token's log-probability, with the token's text."""
        return TokenLogprob(token_id, self.tokenizer.token_text(token_id), logprob)

    def position_logprobs(
        self, token_id: int, logprob: float | None, top: Iterable[tuple[int, float]] = ()
    ) -> PositionLogprobs:
        """The log-probabilities at one position, with the texts of tokens.

        Args:
            token_id: The token at the position.
            logprob: Its log-probability.
            top: The most likely tokens, each with its log-probability.
        """
        return PositionLogprobs(self.token_logprob(token_id, logprob), tuple(self.token_logprob(*pair) for pair in top))

    @property
    def not_finite(self) -> str:
        """The error message for a row whose logits, or whose vector, hold NaN or infinity."""
        what = "vectors" if self.config.hidden_output else "logits"
        if self.dtype == "float16":
            return (
                f"{what} are not finite in float16: run with --dtype bfloat16 or float32;"
                " a row that fails there too has met damaged weights"
            )
        return f"{what} are not finite in {self.dtype}: the model's weights are damaged, fetch or convert it again"


def process_peaks(executor: SweepRunner | None) -> dict[str, int]:
    """Peak bytes of each tier in this process. Memory of an emulated accelerator counts as host memory too."""
    return {"gpu": 0, "disk": 0} | (executor.peak_bytes if executor else {}) | {"cpu": peak_resident_bytes()}


@dataclass
class EngineStats:
    """Running totals since the engine was made, or since it counts anew.

    Attributes:
        prompt_tokens: Prompt tokens of prefilled rows, whether computed or taken from the prefix cache.
        cached_prompt_tokens: Prompt tokens taken from the prefix cache.
        computed_tokens: Tokens that went through the layers.
        prefilled_tokens: Prompt tokens among `computed_tokens`, or what else went through in chunks.
        prefill_keys: Tokens that these attended to, all together.
        decoded: Sequences that gained tokens in a sweep after that of their prompt, summed over sweeps.
        decode_keys: Tokens that the first token of each of these in a sweep attended to, all together.
        generated_tokens: Generated tokens.
        drafted_tokens: Drafted tokens that went through the layers beside `computed_tokens` that were known.
        forced_tokens: Generated tokens that no sweep sampled, as their grammar allowed no others.
        accepted_tokens: Drafted tokens that were generated; the sweep that checked them gave one more.
        scored_tokens: Scored tokens of continuations.
        embedded: Number of vectors.
        sweeps: Number of sweeps.
        preempted: Number of preempted sequences.
        left_out: Tokens that a sweep left for a later one, as the CPU was late with attention.
        moved: Number of sequences that the CPU attended to, and that moved to the compute device.
        swapped_out: Number of sequences whose KV moved from the compute device to host memory.
        peak_kv_blocks: The most KV blocks in use at once.
        begins_twice: Whether a prompt began with the beginning-of-text token that the tokenizer adds as well.
        busy_s: Seconds of compute, of sampling, and of waiting for requests ("input_wait"); with grammars also of the
            thread that makes masks ("masks") and of waiting for it ("mask_wait", a part of sampling).
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_keys: int = 0
    decoded: int = 0
    decode_keys: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    forced_tokens: int = 0
    accepted_tokens: int = 0
    scored_tokens: int = 0
    embedded: int = 0
    sweeps: int = 0
    preempted: int = 0
    left_out: int = 0
    moved: int = 0
    swapped_out: int = 0
    peak_kv_blocks: int = 0
    begins_twice: bool = False
    busy_s: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "sampling": 0.0, "input_wait": 0.0})
