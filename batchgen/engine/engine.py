"""The engine: it runs requests through a loaded model, sweep by sweep, and yields completions or scores."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from batchgen.core.attention_budget import ALL
from batchgen.core.cache_folder import cache_dir
from batchgen.core.device import parse_device
from batchgen.core.draft_rates import DraftRates, check_drafts
from batchgen.core.dtypes import AUTO, STATE_DTYPES
from batchgen.core.errors import InputError
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import NOT_KNOWN, LaneCosts
from batchgen.core.machine import trim_freed_memory
from batchgen.core.partial import PartialCompletion
from batchgen.core.plan import Policy, takes_forced
from batchgen.core.rare_collections import collected_rarely
from batchgen.core.request import Completion, Embedded, Request, SamplingParams, Scored, ScoreRequest
from batchgen.distributed.launch import ranks_of_host
from batchgen.engine.embedding import Embedding
from batchgen.engine.generation import Generation
from batchgen.engine.in_flight import InFlight
from batchgen.engine.loader import (
    LoadRequest,
    choose_weights,
    in_memory_policy,
    needs_store,
    resolve_budgets,
    resolve_context,
    resolve_dtype,
    with_fitting_states,
)
from batchgen.engine.longest_first import ExpectedLengths, LongestFirst
from batchgen.engine.non_finite import NonFiniteSequences
from batchgen.engine.parts import EngineParts, EngineStats
from batchgen.engine.prefetch import Prefetch
from batchgen.engine.preparation import KnownAnswers, Prepared
from batchgen.engine.prompt_order import PromptOrder
from batchgen.engine.scoring import Scoring
from batchgen.engine.tensor_parallel import first_shard, load_on_ranks, shard_weights
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.model_versions import check_unchanged, model_versions
from batchgen.runtime.grammar import check_grammar
from batchgen.schedule.adaptation import Adaptation, Change, Measured
from batchgen.schedule.deferral_choice import deferral_choice
from batchgen.schedule.deferred_batches import DeferredBatches
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.expansion_choice import expansion_choice
from batchgen.schedule.from_policy import kv_pools, scheduler_limits
from batchgen.schedule.packed_batch import empty_batch
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.sequence import Sequence, complete
from batchgen.schedule.sweep_choice import sweep_choice
from batchgen.schedule.token_slots import TokenSlots

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.runtime.pooler import VectorHead

ON_OVERLONG = ("error", "truncate-left", "truncate-right")
_MAX_NUM_SEQS = 256
_ENOUGH_STEPS = 64  # until forced tokens say anything of those of other jobs
_INPUT_AHEAD = 512  # tokenized requests waiting for the scheduler
_STARTED_AT_ONCE = 64  # requests that start before results are asked for again
_FILL_S = 0.2  # the longest time that a call waits for more requests than one, to begin with the first of them in order


R = TypeVar("R", bound="SweepResult")
N = TypeVar("N", int, float)


class RequestHandler(Protocol[R]):
    """The interface of `Generation`, `Scoring` and `Embedding`, the handlers of the requests of one call of an engine.

    Attributes:
        vocabulary_chunks: Whether `take_logits` accepts a part of the vocabulary's columns at a time.
        non_finite: Sequences with NaN or infinity in their logits.
    """

    vocabulary_chunks: bool
    non_finite: NonFiniteSequences

    def prepare(self, requests: Iterable) -> Iterator:
        """Tokenize and check requests; yields the prepared requests. It runs in the input thread."""

    def start(self, prepared) -> list[Sequence] | Completion | Scored | Embedded:
        """The sequences of a prepared request, or its result where the request cannot be run."""

    def take_logits(self, rows, logits, start: int) -> Tensor | None:
        """Take logits of the sweep that is being run.

        Args:
            rows: Sequences whose logits these are, one for each row.
            logits: fp32 logits, [rows, columns]; of a model without an output matrix hidden states, [rows, hidden].
            start: Index in the vocabulary of the first column.

        Returns:
            The sampled token ids, int64 [rows]; None: nothing is sampled.
        """

    def end_sweep(self) -> R:
        """The result of the sweep that is being run, after `take_logits` has got all of its logits."""

    def advance(self, result: R, stats: EngineStats) -> list[Sequence]:
        """Give the sequences the result of a sweep that has run; returns the sequences that have ended.

        Args:
            result: The sweep's result.
            stats: The engine's counts, to which the sweep's tokens are added.
        """

    def finish(self, sequence: Sequence) -> Completion | Scored | Embedded | None:
        """The result of a sequence's request, if all its other sequences have ended; None: some still run."""


class SweepResult(Protocol):
    """The result of a sweep: its sampled tokens or its scores.

    Attributes:
        needs_host: Whether the host must read the result before it can launch the next sweep.
    """

    @property
    def needs_host(self) -> bool: ...


@dataclass(frozen=True)
class _Sweep:
    """A sweep that has been launched.

    Attributes:
        result: The sweep's result; None: it is known only when the sweep has run.
        wait: Function that returns when the sweep has run; None: the sweep has run already.
        started_s: Time of time.perf_counter at which the sweep's scheduling began.
        has_prompts: Whether it has tokens of prompts.
        num_tokens: Tokens that go through its layers.
        num_logits: Rows of logits.
    """

    result: SweepResult | None
    wait: Callable[[], None] | None
    started_s: float
    has_prompts: bool = False
    num_tokens: int = 0
    num_logits: int = 0


@dataclass
class _Call:
    """The state of one call of `Engine.generate` or `Engine.score`.

    Attributes:
        handler: The handler of the call's requests.
        scheduler: The scheduler of the call's sequences.
        source: The prepared requests, read ahead in a thread, in the order in which they start.
        adaptation: Adaptation of the policy to measurements; None: the policy stays.
        sweeps_in_flight: The most sweeps that may be in flight at once.
        under_way: Sweeps that were launched and whose results have not been taken.
        deferred_batches: Sequences whose attention is deferred.
        drop: Function that makes the executor drop deferred batches.
        lengths: Expected lengths of outputs, by which requests are put in order; None: they are not.
        most_sequences: The most sequences that a request has had; 0: none has started.
    """

    handler: RequestHandler[Any]
    scheduler: Scheduler
    source: Prefetch | PromptOrder
    adaptation: Adaptation | None = None
    sweeps_in_flight: int = 1
    under_way: deque[_Sweep] = field(default_factory=deque)
    deferred_batches: DeferredBatches = field(default_factory=DeferredBatches)
    drop: Callable[[DeferredBatches], None] = lambda deferred_batches: None
    lengths: ExpectedLengths | None = None
    most_sequences: int = 0

    def most_requests(self, wanted: int) -> int:
        """The most requests that may start together so that their sequences are about as many as wanted.

        Args:
            wanted: Sequences, 1 or more.
        """
        return max(1, min(wanted // self.most_sequences, _STARTED_AT_ONCE)) if self.most_sequences else 1

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.under_way)

    def due(self, launched: _Sweep | None) -> Iterator[_Sweep]:
        """Yield the sweeps whose results the host takes now.

        While the device runs one sweep, the host launches the next, and then takes the results of the first. In a
        pipeline each stage runs another sweep.

        Args:
            launched: The sweep that was launched just now; None: none could be, so the oldest sweep's result is taken.
        """
        if launched is None:
            ahead = len(self.under_way) - 1
        else:
            self.under_way.append(launched)
            ahead = self.sweeps_in_flight - 1
            if launched.result is not None:
                drafting = self.scheduler.drafting
                drafts = drafting is not None and drafting.active
                ahead = int(launched.wait is not None and not drafts and not launched.result.needs_host)
        while len(self.under_way) > ahead:
            yield self.under_way.popleft()

    def learn_lengths(self, ended: list[Sequence]) -> None:
        """Count the outputs of sequences that have ended; now and then, put the waiting requests in order anew."""
        generated = [sequence for sequence in ended if not sequence.targets]  # those of scored prompts generate nothing
        if self.adaptation:
            for sequence in generated:
                self.adaptation.finished(sequence.num_generated, len(sequence.tokens))
        if self.lengths is None:
            return
        before = self.lengths.num_ended.bit_length()
        for sequence in generated:
            self.lengths.ended(sequence.num_prompt, sequence.num_generated)
        if self.lengths.num_ended.bit_length() > before and isinstance(self.source, LongestFirst):
            self.source.learn()

    def close(self) -> None:
        """Drop all unfinished sequences."""
        self.source.close()
        for sweep in self.under_way:
            with contextlib.suppress(Exception):  # the next sweep would raise it again
                if sweep.wait is not None:
                    sweep.wait()
        with contextlib.suppress(Exception):
            self.drop(self.deferred_batches)
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.finish(sequence)


def _since(now: dict[str, N], before: dict[str, N]) -> dict[str, N]:
    """Numbers by name, less what they were at an earlier time."""
    return {name: value - before.get(name, 0) for name, value in now.items()}


def _in_order(ahead: Prefetch, lengths: ExpectedLengths | None, *, share_prefixes: bool) -> Prefetch | PromptOrder:
    """The prepared requests in the order in which they start.

    Args:
        ahead: The prepared requests in the order of the call.
        lengths: Expected lengths of outputs, of which the longest come first; None: prompts alone decide.
        share_prefixes: Whether prompts with a common prefix are to follow each other.
    """
    if lengths is None and not share_prefixes:
        return ahead
    order: PromptOrder = PromptOrder(ahead)
    if lengths is not None:

        def length(prepared: Prepared) -> float:
            token_ids, sampling = prepared.prompts[0]
            return lengths.expected(len(token_ids), sampling)

        order = LongestFirst(ahead, length) if share_prefixes else LongestFirst(ahead, length, group_tokens=sys.maxsize)
    return order


class Engine:
    """A model held in memory, which generates completions for any number of requests, or scores texts.

    An engine does not measure the machine. On a CPU all kernels use the first of the instruction sets amx, zen4,
    avx512_bf16, avx512, avx2 and scalar that the CPU has, or the one that BATCHGEN_ISA names. (A job, in contrast, uses
    for each matrix shape the set that is fastest in the machine's profile.)

    Args:
        model: A local Hugging Face directory, a `.gguf` file, a hub id, or "demo".
        lora: Directory of a LoRA adapter as PEFT saves it, which is merged into the weights when they are read; packed
            weights are dequantized. None: there is none.
        dtype: Compute dtype: "float32", "bfloat16", "float16", or "auto". On a CPU "auto" is bfloat16 for models stored
            in 16 bits or less if the CPU is fast at it, else the dtype of the files. On a GPU it is 16 bits: float16
            before compute capability 8.0.
        weights: Format of the layers' matrices: "native" (the model's own), "dequantized" (to `dtype`), "auto" (native,
            but dequantized where that takes at most half of the memory), "int4" (4 bits, quantized once, into the cache
            directory), or "int8" (8 bits, multiplied as integers with tokens quantized to 8 bits). A model of
            compressed-tensors W8A8 is "int8" by itself.
        kv_cache_dtype: Format of KV: "auto" (the compute dtype), "int8", "int5" or "int4".
        state_dtype: Format of the recurrent states of linear attention: "float32" or "bfloat16".
        attention_budget: Tokens that each generated token attends to: "all", a share of those before it such as "10%",
            or a number such as "1024".
        device: "auto", "cpu", "cuda", or an accelerator emulated on the CPU, "emulated:gpu-memory=512MiB".
        cpu_memory: Host memory budget of the process, in bytes or as text such as "14GiB"; None: the free memory less a
            margin.
        gpu_memory: Memory budget on the GPU: a larger card behaves as one of this size. None: all of it.
        admission: "continuous", or "static" (each block of samples runs to its end before the next one starts).
        tensor_parallel: Number of processes that share every layer, each with its part of the weights, the KV and the
            CPU cores. This process starts the others. Each has the whole memory budget.
        max_num_seqs: The most samples in flight; None: 256, or fewer where each has a state and memory is short.
        max_num_batched_tokens: The most tokens in one sweep.
        max_model_len: Longest prompt plus output, in tokens; None: the model's context.
        share_prefixes: Whether a prompt prefix that several rows share is computed once.
        expected_output_len: Tokens that a sample is expected to generate. More samples then run at once than if each
            were to generate `max_tokens`.
        on_overlong: The treatment of a row whose prompt and max_tokens do not fit the context: "error" fails it;
            "truncate-left" and "truncate-right" cut its prompt at that end.
        chat_template: Jinja text of a chat template that replaces the model's; None: the model's.
        sampling: Sampling parameters of requests that have none.
        drafts: Most drafted tokens of a sample that are checked together, where that saves time. They change no text.
            0: nothing is drafted. None: some are while weights or KV stream.
        on_load: Function called with (layers loaded, layers in all) after each layer.

    Raises:
        InputError: The model is not supported or broken, or does not fit the memory budget. It is raised before weights
            are read, if possible.
    """

    def __init__(  # the public API: a keyword for each choice
        self,
        model: str = "demo",
        *,
        lora: str | None = None,
        dtype: str = "auto",
        weights: str = AUTO,
        kv_cache_dtype: str = "auto",
        state_dtype: str = STATE_DTYPES[0],
        attention_budget: str = ALL,
        device: str = "auto",
        cpu_memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        tensor_parallel: int = 1,
        admission: str = "continuous",
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        share_prefixes: bool = True,
        expected_output_len: int | None = None,
        on_overlong: str = "error",
        chat_template: str | None = None,
        sampling: SamplingParams | None = None,
        drafts: int | None = None,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        from batchgen.models.tokenizers.loading import load_tokenizer

        where = parse_device(device)
        sampling = sampling or SamplingParams()
        check_grammar(sampling)
        if drafts is not None:
            check_drafts("drafts", drafts)
        files = resolve_model(model, lora)
        versions = model_versions(files)
        config = read_config(files)
        if config.hidden_output:
            raise InputError(
                f"{files.name} gives no text: its architectures name a class without an output matrix, or it has"
                " use_bidirectional_attention: batchgen.run with task='embed' takes it"
            )
        dtype = resolve_dtype(config, dtype, where)
        shard = None
        if tensor_parallel != 1:
            shard = first_shard(files, config, tensor_parallel, where, weights)
            config = shard.config
        budgets = resolve_budgets(
            where, cpu_memory=cpu_memory, gpu_memory=gpu_memory, processes=ranks_of_host(tensor_parallel)
        )
        tier = "gpu" if where.kind == "cuda" else "cpu"
        weights = choose_weights(files, config, weights, dtype, where, lambda: budgets[tier])
        if shard is not None:
            weights = shard_weights(shard, weights)
        policy = in_memory_policy(
            config,
            where,
            dtype=dtype,
            admission=admission,
            max_num_seqs=_MAX_NUM_SEQS if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=resolve_context(config, max_model_len),
            share_prefixes=share_prefixes,
            weights=weights,
            kv_cache_dtype=kv_cache_dtype,
            state_dtype=state_dtype,
            attention_budget=attention_budget,
        )
        store = None
        if needs_store(policy):
            store = find_or_convert(files, cache_dir(), dtype, weights, shard=shard)
        request = LoadRequest(
            files,
            config,
            policy,
            dtype=dtype,
            device=where,
            budgets=budgets,
            min_output_len=sampling.max_tokens,
            sampling=sampling,
            task=None,
            offload_dir=cache_dir(),
            store=store,
            on_load=on_load,
            shard=shard,
            drafts=drafts,
        )
        if max_num_seqs is None:
            request = with_fitting_states(request)
        parts = load_on_ranks(request, lambda: load_tokenizer(files, chat_template=chat_template))
        self._init(parts, expected_output_len, None, NOT_KNOWN, on_overlong, sampling, drafts)
        try:
            check_unchanged(versions)
        except InputError:
            self.close()
            raise

    @classmethod
    def from_parts(
        cls,
        parts: EngineParts,
        *,
        expected_output_len: int | None = None,
        planned_output_len: float | None = None,
        lane_costs: LaneCosts | None = None,
        on_overlong: str = "error",
        sampling: SamplingParams | None = None,
        longest_first: bool = False,
        drafts: int | Callable[[], Drafting] | None = 0,
    ) -> Engine:
        """Make an engine from a model that is loaded already.

        Args:
            parts: The loaded model.
            expected_output_len: Tokens that a sample is expected to generate; None: its max_tokens.
            planned_output_len: Mean output length of the plan, in tokens; with it the engine adapts the block and the
                streamed fraction to its measurements (`batchgen.schedule.adaptation`). None: the policy stays.
            lane_costs: Seconds of a sweep of the plan, by which an engine that adapts leaves late CPU attention out of
                sweeps (`batchgen.schedule.sweep_choice`). None: it leaves out none.
            on_overlong: "error", "truncate-left" or "truncate-right", for prompts that do not fit the context.
            sampling: Sampling parameters of requests that have none.
            longest_first: Whether requests to generate start in the order of their expected outputs, the longest first.
            drafts: Most drafts of a sequence in a sweep, or what makes the drafts of each call; None: some while
                weights or KV stream.
        """
        engine = cls.__new__(cls)
        costs = lane_costs or NOT_KNOWN
        engine._init(parts, expected_output_len, planned_output_len, costs, on_overlong, sampling, drafts)
        engine._longest_first = longest_first
        return engine

    def _init(
        self,
        parts: EngineParts,
        expected_output_len: int | None,
        planned_output_len: float | None,
        lane_costs: LaneCosts,
        on_overlong: str,
        sampling: SamplingParams | None,
        drafts: int | Callable[[], Drafting] | None,
    ) -> None:
        if on_overlong not in ON_OVERLONG:
            raise InputError(f"on_overlong must be one of {', '.join(ON_OVERLONG)}, not {on_overlong!r}")
        if expected_output_len is not None and expected_output_len < 1:
            raise InputError(f"expected_output_len must be at least 1, not {expected_output_len}")
        self.parts = parts
        self._closed = False
        self._sampling = sampling or SamplingParams()
        self._expected_output_len = expected_output_len
        self._planned_output_len = planned_output_len
        self._lane_costs = lane_costs
        self._on_overlong, self._drafts = on_overlong, drafts
        self._longest_first = False
        self.count_anew()
        self._running: Scheduler | None = None  # of the newest call
        self._generation: Generation | None = None  # of the last call
        policy = parts.policy
        # KV pools outlive a call: later rows find the prefixes of earlier ones.
        self._pools = kv_pools(policy, parts.memory)
        self._token_slots = TokenSlots()  # a call may begin while a sweep of another is in flight
        self._exchange_slots = TokenSlots(policy.kv_seqs.get(KVPlacement.DEFERRED, 0))

    def count_anew(self) -> None:
        """Begin to count with nothing, for another job with the loaded model."""
        executor = self.parts.executor
        self.stats = EngineStats()
        self.changes: list[Change] = []  # made by adaptation
        self._before = executor.busy_s, executor.stalled_s, executor.bytes_moved

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each lane was busy, by the lane's name."""
        return _since(self.parts.executor.busy_s, self._before[0])

    @property
    def stalled_s(self) -> dict[str, float]:
        """Seconds that compute waited for each lane, by the lane's name."""
        return _since(self.parts.executor.stalled_s, self._before[1])

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes that each lane has moved, by the lane's name."""
        return _since(self.parts.executor.bytes_moved, self._before[2])

    @property
    def policy(self) -> Policy:
        return self.parts.policy

    @property
    def used_kv_blocks(self) -> int:
        """Number of KV blocks of running sequences in all tiers, those of sliding-window layers included."""
        pools = [*self._pools.values(), *(pool.windowed for pool in self._pools.values() if pool.windowed)]
        return sum(pool.num_used for pool in pools)

    @property
    def used_state_slots(self) -> int:
        """Number of state slots of running sequences in all tiers, those of snapshots that they read included."""
        return sum(pool.states.num_used for pool in self._pools.values() if pool.states)

    def in_flight(self) -> InFlight:
        """The sequences of the newest call of `generate` or `score`."""
        return InFlight.of(self._running) if self._running else InFlight()

    def close(self) -> None:
        """End the engine's threads and processes and free its memory. A closed engine cannot be used again."""
        self._closed = True
        if self.parts.grammars:
            self.parts.grammars.close()
        self.parts.executor.close()
        trim_freed_memory()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self,
        requests: Iterable[Request | str | None] | Request | str,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_sweep: Callable[[EngineStats], None] = lambda stats: None,
        known: KnownAnswers | None = None,
    ) -> Iterator[Completion]:
        """Generate completions for requests.

        Args:
            requests: An iterable of requests and prompts, or a single Request or text. It is read lazily in another
                thread, so that millions of rows need no memory. None from an iterator means that the next item may take
                a while; None in a list fails as a row. Exceptions of the iterable are raised here.
            should_stop: Function that is called before each sweep. When it returns true, the call ends, and unfinished
                rows are dropped.
            on_sweep: Function that is called after each sweep with the engine's running totals.
            known: Function that looks up answers by the digests of requests (`Completion.digest`), in the thread that
                reads the requests; None: all are computed.

        Yields:
            A Completion when the last sample of its request has ended, so not in input order. The completion of a
                request that failed has an `error`.
        """
        expected = self._expected_output_len
        scheduler = self._scheduler((lambda s: expected) if expected else None)
        adaptation = None
        if self._planned_output_len is not None and self.policy.admission == "continuous":
            adaptation = Adaptation(
                scheduler,
                planned_output_len=self._planned_output_len,
                expected_output_len=expected,
                lane_costs=self._lane_costs,
                sweep_choice=sweep_choice(self.policy, self._lane_costs) if self.parts.compute_tier == "gpu" else None,
                expansion_choice=expansion_choice(self.policy, self._lane_costs),
                deferral_choice=deferral_choice(self.policy, self._lane_costs, self.parts.config.num_layers)
                if self.parts.compute_tier == "gpu"
                else None,
            )
            self.changes = adaptation.changes
        scheduler.drafting = self._drafting()
        self._generation = handler = Generation(self.parts, self._sampling, self._on_overlong, known)
        lengths = ExpectedLengths() if self._longest_first else None
        return self._run_all(handler, requests, scheduler, adaptation, should_stop, on_sweep, lengths)

    def _drafting(self) -> Drafting | None:
        """The object that drafts tokens in a call; None: nothing is drafted."""
        tier, drafts = self.parts.compute_tier, self._drafts
        if callable(drafts):
            return drafts() if self.policy.takes_drafts else None
        if not (most := self.policy.most_drafts(drafts, tier)):
            return None
        reads_grow = self.policy.on_demand_tokens > 0
        of_model = self.parts.draft_proposers()
        return Drafting(only_while_waiting=tier == "gpu", most=most, reads_grow=reads_grow, of_model=of_model)

    @property
    def draft_rates(self) -> DraftRates | None:
        """Rates of the drafts of the last call of `generate`; None: too few were judged."""
        drafting = self._running.drafting if self._running else None
        return drafting.rates if drafting else None

    @property
    def forced_per_step(self) -> float | None:
        """Tokens that grammars forced for each sampled one; None: too few were sampled, or forced ones take sweeps."""
        stats, parts = self.stats, self.parts
        steps = stats.generated_tokens - stats.forced_tokens - stats.accepted_tokens
        takes = takes_forced(parts.compute_tier, self.policy.attention_budget) and parts.sweeps_in_flight == 1
        return stats.forced_tokens / steps if takes and steps >= _ENOUGH_STEPS else None

    def partials(self) -> list[PartialCompletion]:
        """The tokens so far of rows that the last call of `generate` has started and not finished, or had at its end.

        Any thread may call this method. A later `Request` with a row's `PartialCompletion` goes on to the same tokens.
        """
        return self._generation.partials() if self._generation is not None else []

    def score(
        self,
        requests: Iterable[ScoreRequest | None] | ScoreRequest,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_sweep: Callable[[EngineStats], None] = lambda stats: None,
    ) -> Iterator[Scored]:
        """Score requests: compute the log-probabilities of given continuations, without generating anything.

        A context is computed once for all its continuations. A prefix that several contexts share is computed once.
        Logits are computed at scored positions only. The engine's `on_overlong` decides whether a context that is too
        long for the model fails or is cut.

        Args:
            requests: An iterable of ScoreRequests, or a single one. It is read lazily in another thread.
            should_stop: Function that is called before each sweep. When it returns true, the call ends, and unfinished
                rows are dropped.
            on_sweep: Function that is called after each sweep with the engine's running totals.

        Yields:
            A Scored when the last continuation of its request has been scored, so not in input order. The Scored of a
                request that failed has an `error`.
        """
        handler = Scoring(self.parts, self._on_overlong)
        return self._run_all(handler, requests, self._scheduler(), None, should_stop, on_sweep)

    def embed(
        self,
        requests: Iterable[Request | str | None] | Request | str,
        head: VectorHead,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_sweep: Callable[[EngineStats], None] = lambda stats: None,
    ) -> Iterator[Embedded]:
        """Compute the vectors of texts, with a model that was loaded without its output matrix.

        Args:
            requests: An iterable of requests and texts, or a single Request or text. It is read lazily in another
                thread. Sampling parameters are not used.
            head: Pooling, and what follows it.
            should_stop: Function that is called before each sweep. When it returns true, the call ends, and unfinished
                rows are dropped.
            on_sweep: Function that is called after each sweep with the engine's running totals.

        Yields:
            An Embedded when its request has ended, so not in input order. The Embedded of a request that failed has an
                `error`.
        """
        handler = Embedding(self.parts, head, self._on_overlong)
        return self._run_all(handler, requests, self._scheduler(), None, should_stop, on_sweep)

    def _scheduler(self, expected_output_len: Callable[[Sequence], int] | None = None) -> Scheduler:
        parts = self.parts
        limits = scheduler_limits(self.policy, parts.memory, parts.compute_tier, parts.sweeps_in_flight)
        return Scheduler(self._pools, limits, expected_output_len, self._token_slots, self._exchange_slots)

    def _run_all(
        self,
        handler: RequestHandler[Any],
        requests: Any,
        scheduler: Scheduler,
        adaptation: Adaptation | None,
        should_stop: Callable[[], bool],
        on_sweep: Callable[[EngineStats], None],
        lengths: ExpectedLengths | None = None,
    ) -> Iterator:
        self._running = scheduler
        ahead = Prefetch(handler.prepare(requests), ahead=_INPUT_AHEAD)
        source = _in_order(ahead, lengths, share_prefixes=scheduler.tables.share_prefixes)
        drop, in_flight = self.parts.executor.drop, self.parts.sweeps_in_flight
        call = _Call(handler, scheduler, source, adaptation, in_flight, drop=drop, lengths=lengths)
        self._lanes_before, self._collected_s = self._lanes_s(), time.perf_counter()
        self._generated_before = self.stats.generated_tokens
        try:
            with collected_rarely():
                if isinstance(source, PromptOrder):
                    source.fill(_FILL_S)
                while not should_stop():
                    if self._closed:
                        raise InputError("the engine is closed: make another one")
                    yield from self._admit(call)
                    if not call.has_work:
                        break
                    yield from self._step(call, on_sweep)
        finally:
            call.close()

    def _step(self, call: _Call, on_sweep: Callable[[EngineStats], None]) -> Iterator:
        """Schedule a sweep, run it and take its results. Yields the results of requests that have ended."""
        if call.adaptation and call.adaptation.wants_recut:
            yield from self._recut(call, call.adaptation)
            if not call.has_work:
                return
        started_s = time.perf_counter()
        if isinstance(call.handler, Generation):
            before = self.stats.forced_tokens
            finished = call.handler.take_forced(self.stats)
            call.learn_lengths(finished)
            if call.scheduler.drafting:
                call.scheduler.drafting.forced(self.stats.forced_tokens - before)
            yield from self._end(call, finished)
            if not call.has_work:
                return
        scheduled = call.scheduler.schedule()
        launched = self._run(call, scheduled, started_s) if scheduled or call.deferred_batches.waiting else None
        for sweep in call.due(launched):
            yield from self._end(call, self._take(call, sweep))
            on_sweep(self.stats)

    def _recut(self, call: _Call, adaptation: Adaptation) -> Iterator:
        """Have another number of layers' KV on the device; yields the results of the sweeps under way before that."""
        while call.under_way:
            yield from self._end(call, self._take(call, call.under_way.popleft()))
        recut = adaptation.recut()
        if recut is not None:
            self.parts.executor.recut(recut)

    def _end(self, call: _Call, finished: list[Sequence]) -> Iterator:
        """Let sequences that have ended leave; yields the results of requests that have ended with them."""
        for sequence in finished:
            call.scheduler.finish(sequence)
            result = call.handler.finish(sequence)
            if result is not None:
                yield result
        if call.scheduler.drafting:
            call.scheduler.drafting.ended(finished)

    def _admit(self, call: _Call) -> Iterator:
        """Give prepared requests to the scheduler; yields the results of requests that failed before they ran.

        It waits for a request only if no sequence is left to run.
        """
        scheduler, source = call.scheduler, call.source
        while (wanted := self.policy.max_num_seqs - scheduler.num_waiting) > 0:
            if not source.ready and call.has_work:
                return
            started = time.perf_counter()
            taken = source.take(call.most_requests(wanted))
            self.stats.busy_s["input_wait"] += time.perf_counter() - started
            if not taken:
                return
            for prepared in taken:
                begun = call.handler.start(prepared)
                if not isinstance(begun, list):
                    yield begun
                    continue
                call.most_sequences = max(call.most_sequences, len(begun))
                for sequence in begun:
                    scheduler.add(sequence)

    def _run(self, call: _Call, scheduled: list[ScheduledSequence], started_s: float) -> _Sweep:
        """Launch a sweep over scheduled sequences. On a CPU the sweep has run when this returns."""
        stats, parts, handler = self.stats, self.parts, call.handler
        drafted = (
            [one.sequence for one in scheduled if one.sequence.drafts] if call.scheduler.drafting is not None else []
        )
        if drafted and isinstance(handler, Generation):
            handler.drafted(drafted)
        by_layer = call.scheduler.has_layers_on_device and not self.policy.kv_layers  # with it they always may be
        pack = partial(parts.pack, in_place=True) if by_layer else parts.pack
        batches = [pack(batch) if batch else empty_batch() for batch in parts.split(scheduled, **call.scheduler.cut)]
        sampling_s = 0.0

        def on_logits(rows, logits, start: int) -> Tensor | None:
            nonlocal sampling_s
            began = time.perf_counter()
            chosen = handler.take_logits(rows, logits, start)
            sampling_s += time.perf_counter() - began
            return chosen

        call.deferred_batches.pipelines = call.scheduler.pipelines
        wait = parts.executor.run(
            batches,
            on_logits,
            vocabulary_chunks=handler.vocabulary_chunks,
            deferred_batches=call.deferred_batches,
            largest=handler if isinstance(handler, Generation) else None,
        )
        ran = call.scheduler.commit(scheduled)
        stats.decoded += ran.num_decoded
        stats.decode_keys += ran.decode_keys
        stats.prefilled_tokens += ran.num_prefilled
        stats.prefill_keys += ran.prefill_keys
        stats.drafted_tokens += sum([len(sequence.drafts) for sequence in drafted])
        stats.peak_kv_blocks = max(stats.peak_kv_blocks, self.used_kv_blocks)
        stats.sweeps += 1
        stats.preempted, stats.moved = call.scheduler.num_preempted, call.scheduler.num_moved
        stats.left_out, stats.swapped_out = call.scheduler.num_left_out, call.scheduler.num_swapped_out
        num_tokens = sum([batch.num_tokens for batch in batches])
        stats.computed_tokens += num_tokens
        stats.busy_s["compute"] += time.perf_counter() - started_s - sampling_s
        stats.busy_s["sampling"] += sampling_s
        result = handler.end_sweep() if call.sweeps_in_flight == 1 else None
        for sequence in complete(map(itemgetter(0), scheduled)):
            call.scheduler.finish(sequence)
        num_logits = sum(len(batch.logits_rows) for batch in batches)
        return _Sweep(result, wait, started_s, ran.num_prefilled > 0, num_tokens, num_logits)

    def _take(self, call: _Call, sweep: _Sweep) -> list[Sequence]:
        """Take the results of a sweep once it has run; returns the sequences that have ended with it."""
        stats = self.stats
        started = time.perf_counter()
        if sweep.wait is not None:
            sweep.wait()
        ran = time.perf_counter()
        drafting, result = call.scheduler.drafting, sweep.result or call.handler.end_sweep()
        if isinstance(call.handler, Generation):
            # Where a device runs the sweeps, masks are made meanwhile, and the host need not wait for them. Tokens that
            # go through the layers together attend to all before them, whatever the budget of attention.
            is_waited_for = sweep.wait is None or (drafting is not None and drafting.active)
            call.handler.takes_ahead = is_waited_for and self.policy.takes_drafts
        finished = call.handler.advance(result, stats)
        call.handler.non_finite.invalidate(call.scheduler)
        for sequence in finished:
            call.scheduler.finish(sequence)
        stats.busy_s["compute"] += ran - started
        stats.busy_s["sampling"] += time.perf_counter() - ran
        call.learn_lengths(finished)
        if call.adaptation or drafting:
            measured = self._measured(sweep)
            if call.adaptation:
                call.adaptation.after_sweep(measured)
            if drafting:
                drafting.taken()
                drafting.ran(sweep.num_tokens, sweep.num_logits, measured.seconds, measured.busy_s, measured.stalled_s)
                stats.accepted_tokens = drafting.num_accepted
        return finished

    def _measured(self, sweep: _Sweep) -> Measured:
        """The measured times of a sweep, whose tokens have been taken."""
        now, lanes = time.perf_counter(), self._lanes_s()
        busy, stalled = (
            {lane: a[lane] - b[lane] for lane in a} for a, b in zip(lanes, self._lanes_before, strict=True)
        )
        seconds = now - max(sweep.started_s, self._collected_s)
        tokens = self.stats.generated_tokens - self._generated_before  # those that grammars forced before it among them
        self._lanes_before, self._collected_s = lanes, now
        self._generated_before = self.stats.generated_tokens
        return Measured(seconds, tokens, busy, stalled, sweep.has_prompts)

    def _lanes_s(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds that each lane was busy so far, and seconds that compute waited for each lane so far."""
        return self.parts.executor.busy_s, self.parts.executor.stalled_s
