"""Pipeline parallelism (FlexGen section 4.4): each stage has some of the layers, in a process of its own.

Rank 0 is the first stage. It schedules and packs each sweep as an engine alone does, broadcasts it, and computes its
own layers. Activations go from stage to stage. The last stage samples tokens or computes scores, and sends them to rank
0. At any moment each stage runs another sweep, with other sequences. All stages run the sweeps in the same order. Rank
0 assigns KV slots, which are the same in all stages.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.plan import MemoryPlan, Policy
from batchgen.engine.loader import LoadRequest, load_executor, load_words, pack_for, plan_load
from batchgen.engine.messages import Answers, SentSequence, StageLoads, SweepMessage, decode, encode
from batchgen.engine.parts import EngineParts, process_peaks
from batchgen.engine.ranks import RankGroup, RankZeroCounts
from batchgen.runtime.executor import Executor
from batchgen.runtime.logits_parts import LogitsParts, take
from batchgen.runtime.sampler import Sampled, SampledToken, sample
from batchgen.runtime.scorer import Scorer
from batchgen.runtime.sweep_options import Largest, OnLogits
from batchgen.schedule.deferred_batches import DeferredBatches
from batchgen.schedule.from_policy import splitter
from batchgen.schedule.packed_batch import PackedBatch
from batchgen.schedule.sequence import LogitsRow, ScoredPosition

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer
    from batchgen.schedule.sequence import Sequence as InFlight


@dataclass(frozen=True)
class Stage:
    """The layers of one process of a pipeline, and their policy.

    Attributes:
        first: Index of the first layer.
        stop: Index after the last layer.
        policy: The policy of these layers. Block, micro-batches, KV placements and admission are the same in all
            stages.
    """

    first: int
    stop: int
    policy: Policy


@dataclass(frozen=True)
class _Sampled:
    """Tokens that the last stage has sampled, in place of `sampler.Sampled`."""

    sampled: list[SampledToken]
    token_ids = None  # no device of this process has them

    def tokens(self) -> list[SampledToken]:
        return self.sampled


class _Scores:
    """Scores that the last stage has computed, in place of `scorer.Scorer`."""

    needs_host = False

    def __init__(self) -> None:
        self._scores: list[tuple[LogitsRow, ScoredPosition]] = []

    def take(self, rows: Sequence[LogitsRow], scores: list[ScoredPosition], start: int) -> None:
        self._scores.extend(zip(rows, scores, strict=True))

    def results(self) -> Iterator[tuple[LogitsRow, ScoredPosition]]:
        return iter(self._scores)


class _StageRanks:
    """The previous and the next stage of a pipeline, as `AdjacentRanks`: it sends and receives activations."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def receive_from_previous(self, hidden: Tensor) -> None:
        self._group.receive(hidden, self._group.rank - 1)

    def send_to_next(self, hidden: Tensor) -> None:
        self._group.send(hidden.contiguous(), self._group.rank + 1)


class PipelineRunner(RankZeroCounts):
    """The `SweepRunner` of rank 0 in a pipeline: it runs each sweep over all stages."""

    _executor: Executor

    def __init__(self, executor: Executor, group: RankGroup) -> None:
        super().__init__(executor)
        self._group = group
        self._num_launched = self._num_answered = 0
        self._answers: dict[int, Answers] = {}  # by sweep, those that have come before they are taken
        self._broken = False

    def run(
        self,
        batches: Sequence[PackedBatch],
        on_logits: OnLogits,
        *,
        vocabulary_chunks: bool,
        deferred_batches: DeferredBatches,
        largest: Largest | None = None,
    ) -> Callable[[], None]:
        """Launch a sweep over all stages.

        Args:
            batches: Packed micro-batches of the sweep.
            on_logits: Function called with the last stage's results in place of logits.
            vocabulary_chunks: Whether logits may be computed for a part of the vocabulary at a time.
            deferred_batches: Not used: a pipeline has no deferred batches.
            largest: Not used: sweeps of stages are no CUDA graphs.

        Returns:
            Function that waits for the last stage's results and calls `on_logits` with them.
        """
        number = self._num_launched
        rows = [row for batch in batches for row in batch.logits_rows]
        with self._noting():
            self._group.broadcast(encode(SweepMessage([_sent(batch) for batch in batches], vocabulary_chunks)))
            self._num_launched += 1
            self._executor.run(batches, _nothing)

        def wait() -> None:
            with self._noting():
                while number >= self._num_answered:
                    self._answers[self._num_answered] = _receive(self._group, self._group.size - 1)
                    self._num_answered += 1
            answers = self._answers.pop(number)
            if rows:
                on_logits(rows, answers, 0)

        return wait

    def drop(self, deferred_batches: DeferredBatches) -> None:
        """Do nothing: a pipeline has no deferred batches."""

    def close(self) -> None:
        """End all stages."""
        self._group.close(done=not self._broken)
        self._executor.close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Note that the block has failed: the other stages may be in any sweep, so `close` does not wait for them."""
        try:
            yield
        except BaseException:
            self._broken = True
            raise


def load_pipeline(
    request: LoadRequest, stages: Sequence[Stage], group: RankGroup, tokenizer: Callable[[], Tokenizer]
) -> EngineParts:
    """Load a model over the stages of a pipeline, as rank 0.

    Args:
        request: The whole model to load, whose budgets are those of each stage. Its policy is not used.
        stages: The stages with their policies, one for each rank.
        group: The processes; all ranks but rank 0 run `serve_stage`. The group ends with the engine.
        tokenizer: Function that returns the tokenizer.

    Raises:
        InputError: The model does not fit, or something is not supported.
        BatchgenError: Memory or disk failed, or another stage did.
    """
    check_stages(request, stages, group.size)
    words = load_words(request, tokenizer)
    loads = _plan_stages(request, stages)
    load, memory = loads[0]
    group.broadcast(encode(StageLoads(loads)))
    load = replace(load, on_step=request.on_step, on_load=request.on_load)
    executor, _ = load_executor(load, memory, adjacent_ranks=_StageRanks(group))
    try:
        group.ready()
    except BaseException:
        executor.close()
        raise
    policy = replace(stages[0].policy, kv_blocks=memory.kv_blocks)
    tier = executor.compute_tier
    return EngineParts(
        config=request.config,
        tokenizer=words.tokenizer,
        executor=PipelineRunner(executor, group),
        split=splitter(policy, memory, tier),
        pack=pack_for(
            replace(request, policy=policy), tier, memory.kv_blocks
        ),  # of all layers: stages differ in windows
        sample=lambda answers, sequences: _Sampled(answers),
        scorer=_Scores,
        policy=policy,
        memory=memory,
        eos_token_ids=words.eos_token_ids,
        dtype=request.dtype,
        loaded_bytes=executor.weights.num_bytes,
        kernels=request.kernels,
        compute_tier=tier,
        load_s=words.seconds(),
        grammars=words.grammars,
        sweeps_in_flight=len(stages),
        peaks_of_others=group.peaks,
    )


def check_stages(request: LoadRequest, stages: Sequence[Stage], size: int) -> None:
    """Check that stages can run a model together.

    Args:
        request: The whole model to load.
        stages: The stages.
        size: Number of ranks.

    Raises:
        InputError: The stages cannot run the model; the message says why.
    """
    if size != len(stages):
        raise InputError(f"{len(stages)} stages need as many processes, not {size}")
    if any(stage.policy.kv_seqs.get("deferred") for stage in stages):
        raise InputError("a pipeline has no sequences whose attention is deferred: plan it with --pipeline")
    if any(stage.policy.kv_layers for stage in stages):
        raise InputError('a pipeline keeps KV of placement "streamed" in host memory: plan it with --pipeline')
    assert [s.first for s in stages] + [request.config.num_layers] == [0] + [s.stop for s in stages], (
        "layers are missing"
    )


def _plan_stages(request: LoadRequest, stages: Sequence[Stage]) -> list[tuple[LoadRequest, MemoryPlan]]:
    """The part that each stage loads, and its memory plan; all pools have the blocks and slots of the smallest."""
    loads = []
    for stage in stages:
        load = replace(
            request,
            config=request.config.stage(stage.first, stage.stop),
            policy=stage.policy,
            on_step=None,  # callbacks are rank 0's
            on_load=None,
        )
        loads.append((load, plan_load(load)))
    fewest = _fewest([memory.kv_blocks for _, memory in loads])
    window = max((memory.window for _, memory in loads if memory.window is not None), default=None)
    window_blocks = _fewest([memory.window_blocks for _, memory in loads if memory.window is not None])
    of_states = [memory for load, memory in loads if load.config.state is not None]
    slots = _fewest([memory.state_slots for memory in of_states])
    staged = min((memory.staging_states for memory in of_states), default=0)

    held = loads[-1][1].held_logit_rows  # of the stage that has the head

    def as_in_all(memory: MemoryPlan) -> MemoryPlan:
        pools = replace(memory, kv_blocks=fewest, window=window, window_blocks=window_blocks)
        return replace(pools, state_slots=slots, staging_states=staged, held_logit_rows=held)

    return [(load, as_in_all(memory)) for load, memory in loads]


def _fewest(pools: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {tier: min(blocks[tier] for blocks in pools) for tier in (pools[0] if pools else ())}


def serve_stage(group: RankGroup, loads: Sequence[tuple[LoadRequest, MemoryPlan]]) -> dict[str, int]:
    """Load one of the stages after the first, and run the sweeps that rank 0 sends until rank 0 ends.

    Args:
        group: The processes of the pipeline.
        loads: The layers to load and the memory plan, for each rank.

    Returns:
        Peak bytes of each tier in this process.

    Raises:
        BatchgenError: This stage has failed, or another one.
    """
    request, memory = loads[group.rank]
    executor, _ = load_executor(request, memory, adjacent_ranks=_StageRanks(group))
    with contextlib.closing(executor):
        group.ready()
        with contextlib.closing(_Answering(group)) as answering:
            while True:
                try:
                    sweep: SweepMessage = decode(group.receive_broadcast())
                except EOFError:
                    break
                answers = _SweepAnswers()
                executor.run(sweep.batches, answers.take, vocabulary_chunks=sweep.vocabulary_chunks)
                if request.config.has_head:
                    answering.send(answers.in_order())
    return process_peaks(executor)


class _SweepAnswers:
    """The tokens that the last stage samples in a sweep, and the positions that it scores."""

    def __init__(self) -> None:
        self._rows: list[LogitsRow] = []
        self._sampled: list[Sampled] = []
        self._scorer = Scorer()

    def take(self, rows: Sequence[LogitsRow], logits: Tensor, start: int) -> None:
        """Take logits of rows; those that are sampled come whole.

        Args:
            rows: Rows of logits.
            logits: Their logits, fp32 [rows, columns].
            start: Token of the first column.
        """
        parts = LogitsParts.of(rows)
        if start == 0:
            self._rows += rows
        if parts.scored:
            self._scorer.take([rows[i] for i in parts.scored], take(logits, parts.scored), start)
        if parts.sampled:
            sequences = [rows[i][0] for i in parts.sampled]
            self._sampled.append(sample(take(logits, parts.sampled), sequences))

    def in_order(self) -> Answers:
        """The token or the score of each row, in the order of the rows, once the sweep has run."""
        tokens = (token for sampled in self._sampled for token in sampled.tokens())
        scores = (score for _, score in self._scorer.results())
        return [next(scores) if sequence.targets else next(tokens) for sequence, _ in self._rows]


class _Answering:
    """A thread that sends results to rank 0, which may be running its next sweep."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._queue: queue.SimpleQueue[Answers | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="batchgen-answers", daemon=True)
        self._thread.start()

    def send(self, answers: Answers) -> None:
        if self._failure is not None:
            raise self._failure
        self._queue.put(answers)

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (answers := self._queue.get()) is not None:
                content = torch.frombuffer(bytearray(encode(answers)), dtype=torch.uint8)
                self._group.send(torch.tensor([len(content)]), 0)
                self._group.send(content, 0)
        except BatchgenError as error:  # a rank has ended, which rank 0 notices itself
            self._failure = error
        except Exception as error:
            self._failure = error
            self._group.fail(error)  # rank 0 waits for results


def _receive(group: RankGroup, rank: int) -> Answers:
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, rank)
    content = torch.empty(int(length), dtype=torch.uint8)
    group.receive(content, rank)
    return decode(content.numpy().tobytes())


def _sent(batch: PackedBatch) -> PackedBatch:
    """A copy of a packed batch for the last stage, whose sequences have only what sampling and scoring need."""
    sent = {sequence: SentSequence.of(sequence) for sequence, _ in batch.logits_rows}
    rows = [(cast("InFlight", sent[sequence]), position) for sequence, position in batch.logits_rows]
    return replace(batch, logits_rows=rows)


def _nothing(rows: Sequence[LogitsRow], logits: Tensor, start: int) -> None:
    raise AssertionError("logits are made in the last stage")
