"""The engine: requests in, completions out, with the model, its KV and the scheduler in between."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from batchgen.errors import InputError, RowError
from batchgen.model_config import ModelConfig
from batchgen.policy import MemoryPlan, Policy
from batchgen.prefetch import Prefetch
from batchgen.request import (
    Completion,
    PositionLogprobs,
    Request,
    Sample,
    SamplingParams,
    TokenLogprob,
    cut_overlong,
)
from batchgen.runtime.adaptation import Adaptation, Change, Measured
from batchgen.runtime.scheduler import Scheduler
from batchgen.runtime.scheduling import kv_pools, longest_sequence, scheduler_limits
from batchgen.runtime.sequence import Sequence

if TYPE_CHECKING:
    from batchgen.tokenizer import Tokenizer

ON_OVERLONG = ("error", "truncate-left", "truncate-right")
_ENCODE_CHUNK = 64  # requests tokenized together
_INPUT_AHEAD = 512  # tokenized requests waiting for the scheduler


class SweepRunner(Protocol):
    """What the engine needs of an executor: `run(batches, on_logits)` computes packed GPU batches and calls
    on_logits(sequences, fp32 logits [sequences, vocab]) until all that are sampled have theirs."""

    bytes_moved: dict[str, int]  # by lane
    busy_s: dict[str, float]  # by lane
    stalled_s: dict[str, float]  # of compute, by the lane it waited for
    peak_bytes: dict[str, int]  # of the tiers beside the host's memory

    def run(self, batches, on_logits) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineParts:
    """A loaded model: what the engine puts to work. `split` and `pack` are gpu_batches.split_batches and batch.pack with
    the model's numbers filled in, `sample` is sampler.sample."""

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
    compute_home: str = "cpu"
    load_s: float = 0.0


@dataclass
class EngineStats:
    """Running totals since the engine was made. Times in seconds; input_wait is time spent waiting for requests."""

    prompt_tokens: int = 0  # of prefilled rows, whether computed or taken from the prefix cache
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0  # tokens that went through the layers
    generated_tokens: int = 0
    sweeps: int = 0
    preempted: int = 0
    peak_kv_blocks: int = 0
    busy_s: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "sampling": 0.0, "input_wait": 0.0})


@dataclass
class _InFlight:
    """A request some of whose samples are still running."""

    index: int
    row_id: str | int
    prompt_tokens: int
    samples: list[Sample | None]
    cached_tokens: int = 0

    def add(self, sequence: Sequence, sample: Sample) -> None:
        self.samples[sequence.sample_index] = sample
        self.cached_tokens = max(self.cached_tokens, sequence.num_cached)

    @property
    def done(self) -> bool:
        return None not in self.samples

    def completion(self) -> Completion:
        return Completion(
            self.index, self.row_id, self.prompt_tokens, tuple(self.samples), cached_tokens=self.cached_tokens
        )


@dataclass(frozen=True)
class _Finish:
    """Why a sample ended; `stop` is the stop string or token id that ended it, if one did."""

    reason: str
    stop: str | int | None
    ends_with_stop_token: bool = False


@dataclass(frozen=True)
class _Prepared:
    index: int
    request: Request
    token_ids: array  # four bytes a token: many of these wait
    error: str | None


class Engine:
    """A model held in memory, ready to complete any number of requests.

    model: a local Hugging Face directory, a `.gguf` file, a hub id, or "demo".
    dtype: "auto" (bfloat16 for models stored in 16 bits or less where the CPU is fast at it, else as stored),
        "float32", "bfloat16" or "float16".
    device: "auto", "cpu", "cuda", or an accelerator emulated on the CPU, "emulated:gpu-memory=512MiB".
    cpu_memory: budget for the whole process, bytes or text such as "14GiB"; None: what is free, less a margin.
    gpu_memory: budget of the GPU: a larger card behaves as one of this size. None: all of it.
    admission: "continuous", or "static" (each block runs to its end before the next starts).
    max_num_seqs, max_num_batched_tokens: most samples in flight, most tokens in one sweep.
    max_model_len: longest prompt plus output; None: the model's context.
    share_prefixes: compute a prompt prefix that several rows share once.
    expected_output_len: tokens a sample is expected to generate, to admit more rows than `max_tokens` would allow.
    on_overlong: "error" fails a row whose prompt leaves no room in the context; "truncate-left" and
        "truncate-right" cut its prompt instead, so that its max_tokens fit.
    sampling: parameters for requests that bring none.
    on_load(done, total): called after each layer is loaded.

    Raises InputError, before weights are read where possible: unsupported or broken model, impossible budget.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        device: str = "auto",
        cpu_memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        admission: str = "continuous",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        share_prefixes: bool = True,
        expected_output_len: int | None = None,
        on_overlong: str = "error",
        sampling: SamplingParams | None = None,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        from batchgen.device import parse_device
        from batchgen.loading import in_memory_policy, load_parts, resolve_budgets
        from batchgen.model_files import read_config, resolve_model
        from batchgen.tokenizer import load_tokenizer

        where = parse_device(device)
        files = resolve_model(model)
        policy = in_memory_policy(
            read_config(files),
            where,
            dtype=dtype,
            admission=admission,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            share_prefixes=share_prefixes,
        )
        parts = load_parts(
            files,
            lambda: load_tokenizer(files),
            policy=policy,
            dtype=dtype,
            device=where,
            budgets=resolve_budgets(where, cpu_memory=cpu_memory, gpu_memory=gpu_memory),
            min_output_len=(sampling or SamplingParams()).max_tokens,
            on_load=on_load,
        )
        self._init(parts, expected_output_len, on_overlong, sampling)

    @classmethod
    def from_parts(
        cls,
        parts: EngineParts,
        *,
        expected_output_len: int | None = None,
        planned_output_len: float | None = None,
        on_overlong: str = "error",
        sampling: SamplingParams | None = None,
    ) -> Engine:
        """An engine around a model that is loaded already, or around anything else that runs sweeps.

        planned_output_len: the mean that its policy was planned for; where it is given, the engine adapts the block and
        the streamed share to what it measures (runtime.adaptation)."""
        engine = cls.__new__(cls)
        engine._init(parts, expected_output_len, on_overlong, sampling)
        engine._planned_output_len = planned_output_len
        return engine

    def _init(
        self, parts: EngineParts, expected_output_len: int | None, on_overlong: str, sampling: SamplingParams | None
    ) -> None:
        if on_overlong not in ON_OVERLONG:
            raise InputError(f"on_overlong must be one of {', '.join(ON_OVERLONG)}, not {on_overlong!r}")
        if expected_output_len is not None and expected_output_len < 1:
            raise InputError(f"expected_output_len must be at least 1, not {expected_output_len}")
        self.parts = parts
        self.stats = EngineStats()
        self._sampling = sampling or SamplingParams()
        self._expected_output_len = expected_output_len
        self._planned_output_len: float | None = None
        self._on_overlong = on_overlong
        self.changes: list[Change] = []  # what adaptation has changed
        policy = parts.policy
        # Outlives a call of `generate`: later rows find the prefixes of earlier ones.
        self._pools = kv_pools(policy, parts.memory)

    @property
    def policy(self) -> Policy:
        return self.parts.policy

    @property
    def used_kv_blocks(self) -> int:
        """Blocks that sequences in flight hold, in all tiers."""
        return sum(pool.num_used for pool in self._pools.values())

    def close(self) -> None:
        """Ends what runs beside the engine and gives files back. An engine that is closed cannot be used again."""
        self.parts.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self,
        requests: Iterable[Request | str],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_sweep: Callable[[EngineStats], None] = lambda stats: None,
    ) -> Iterator[Completion]:
        """Completes every request; yields each Completion when its last sample is done, so not in input order.

        requests: read lazily, in a thread of its own, so that millions of rows need no memory; a plain string is a
            Request with that prompt. should_stop: asked before each sweep; once true, unfinished rows are dropped.
        on_sweep: called after each sweep with the running totals.
        A bad row comes back with `error`. What the iterable itself raises is raised here.
        """
        policy = self.policy
        limits = scheduler_limits(policy, self.parts.memory, self.parts.compute_home)
        expected = self._expected_output_len
        scheduler = Scheduler(self._pools, limits, (lambda s: expected) if expected else None)
        adaptation = None
        if self._planned_output_len is not None and policy.admission == "continuous":
            adaptation = Adaptation(
                scheduler, planned_output_len=self._planned_output_len, expected_output_len=expected
            )
            scheduler.expected_output_len = lambda s: adaptation.expected_output_len(s.sampling.max_tokens)
            self.changes = adaptation.changes
        in_flight: dict[int, _InFlight] = {}
        detectors: dict[Sequence, object] = {}
        source = Prefetch(self._prepare(requests), ahead=_INPUT_AHEAD)
        try:
            while not should_stop():
                yield from self._take_requests(source, scheduler, in_flight, detectors)
                if not scheduler.has_work:
                    break
                for sequence, reason in self._sweep(scheduler, detectors, adaptation):
                    flight = in_flight[sequence.request_index]
                    flight.add(sequence, self._sample(sequence, reason, detectors.pop(sequence, None)))
                    if flight.done:
                        yield in_flight.pop(sequence.request_index).completion()
                on_sweep(self.stats)
        finally:
            source.close()
            for sequence in list(scheduler.running):
                scheduler.finish(sequence)

    def _prepare(self, requests: Iterable[Request | str]) -> Iterator[_Prepared]:
        """Tokenizes requests, some at a time; runs in the input thread."""
        numbered = enumerate(r if isinstance(r, Request) else Request(r) for r in requests)
        while chunk := list(itertools.islice(numbered, _ENCODE_CHUNK)):
            texts = [r.prompt for _, r in chunk if r.error is None and isinstance(r.prompt, str) and r.prompt]
            encoded = iter(self.parts.tokenizer.encode_batch(texts)) if texts else iter(())
            for index, request in chunk:
                token_ids: list[int] = []
                error = request.error
                if error is None:
                    try:
                        token_ids = self._encode(request, encoded)
                        request, token_ids = self._fit(request, token_ids)
                    except (RowError, InputError) as problem:
                        error = str(problem)
                yield _Prepared(index, request, array("i", token_ids), error)

    def _encode(self, request: Request, encoded: Iterator[list[int]]) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, str):
            if not prompt:
                raise RowError("the prompt is empty")
            token_ids = next(encoded)
        elif len(prompt) and isinstance(prompt[0], dict):
            token_ids = self.parts.tokenizer.encode_chat(prompt)
        else:
            token_ids = [int(t) for t in prompt]
        if not token_ids:
            raise RowError("the prompt is empty")
        # Tokenizers may have tokens that the model has no embedding for.
        vocab_size = self.parts.config.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise RowError(f"the prompt has a token id outside the model's vocabulary of {vocab_size}")
        return token_ids

    def _fit(self, request: Request, token_ids: list[int]) -> tuple[Request, list[int]]:
        """The request with prompt and max_tokens within the context and the KV there is, or RowError."""
        sampling = request.sampling or self._sampling
        context = self.policy.max_model_len
        token_ids = cut_overlong(token_ids, sampling.max_tokens, context, self._on_overlong)
        count = len(token_ids)
        if count >= context:
            raise RowError(f"the prompt has {count} tokens, the context holds {context}")
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, context - count))
        pool = longest_sequence(self.policy, self.parts.memory, self.parts.compute_home)
        if count + sampling.max_tokens - 1 > pool:
            raise RowError(
                f"{count} prompt and {sampling.max_tokens} output tokens need more KV than the {pool} tokens"
                " that fit the memory budget"
            )
        return replace(request, sampling=sampling), token_ids

    def _take_requests(self, source: Prefetch[_Prepared], scheduler: Scheduler, in_flight: dict, detectors: dict):
        """Moves requests from the input to the scheduler; yields those that failed before they ran.

        Waits for input only when there is nothing else to do.
        """
        while len(scheduler.waiting) < self.policy.max_num_seqs:
            if scheduler.has_work and not source.ready:
                return
            started = time.perf_counter()
            prepared = next(source, None)
            self.stats.busy_s["input_wait"] += time.perf_counter() - started
            if prepared is None:
                return
            request, index = prepared.request, prepared.index
            row_id = index if request.id is None else request.id
            if prepared.error is not None:
                yield Completion(index, row_id, len(prepared.token_ids), error=prepared.error)
                continue
            in_flight[index] = _InFlight(index, row_id, len(prepared.token_ids), [None] * request.sampling.n)
            for k in range(request.sampling.n):
                sequence = Sequence(index, row_id, k, list(prepared.token_ids), request.sampling)
                if request.sampling.stop:
                    detectors[sequence] = self.parts.tokenizer.stop_detector(request.sampling.stop)
                scheduler.add(sequence)

    def _sweep(
        self, scheduler: Scheduler, detectors: dict, adaptation: Adaptation | None
    ) -> list[tuple[Sequence, _Finish]]:
        """Runs one sweep; returns the sequences it finished."""
        stats, parts = self.stats, self.parts
        started = time.perf_counter()
        before = adaptation and (parts.executor.busy_s, parts.executor.stalled_s)
        sweep = scheduler.schedule()
        batches = [parts.pack(batch) for batch in parts.split(sweep)]
        sampled = []
        sampling_s = 0.0

        def on_logits(sequences, logits) -> None:
            nonlocal sampling_s
            began = time.perf_counter()
            sampled.extend(zip(sequences, parts.sample(logits, sequences), strict=True))
            sampling_s += time.perf_counter() - began

        parts.executor.run(batches, on_logits)
        scheduler.commit(sweep)
        ran = time.perf_counter()
        finished = []
        for sequence, token in sampled:
            if sequence.num_generated == 0 and sequence.sample_index == 0:
                stats.prompt_tokens += sequence.num_prompt
                stats.cached_prompt_tokens += sequence.num_cached
            sequence.tokens.append(token.token_id)
            if sequence.sampling.logprobs is not None:
                sequence.logprobs.append(token)
            reason = self._finish_reason(sequence, detectors.get(sequence))
            if reason is not None:
                finished.append((sequence, reason))
        stats.peak_kv_blocks = max(stats.peak_kv_blocks, self.used_kv_blocks)
        for sequence, _ in finished:
            scheduler.finish(sequence)
        stats.sweeps += 1
        stats.preempted = scheduler.num_preempted
        stats.computed_tokens += sum(batch.num_tokens for batch in batches)
        stats.generated_tokens += len(sampled)
        stats.busy_s["compute"] += ran - started - sampling_s
        stats.busy_s["sampling"] += sampling_s + time.perf_counter() - ran
        if adaptation:
            for sequence, _ in finished:
                adaptation.finished(sequence.num_generated, len(sequence.tokens))
            after = (parts.executor.busy_s, parts.executor.stalled_s)
            lanes = [{lane: now[lane] - then[lane] for lane in now} for now, then in zip(after, before, strict=True)]
            adaptation.after_sweep(Measured(time.perf_counter() - started, len(sampled), *lanes))
        return finished

    def _finish_reason(self, sequence: Sequence, detector) -> _Finish | None:
        sampling, token = sequence.sampling, sequence.tokens[-1]
        if not sampling.ignore_eos and token in self.parts.eos_token_ids:
            return _Finish("stop", None, ends_with_stop_token=True)
        if token in sampling.stop_token_ids:
            return _Finish("stop", token, ends_with_stop_token=True)
        if detector is not None:
            stop = detector.push(token)
            if stop is not None:
                return _Finish("stop", stop)
        if sequence.num_generated >= sampling.max_tokens:
            return _Finish("length", None)
        return None

    def _sample(self, sequence: Sequence, finish: _Finish, detector) -> Sample:
        tokenizer, generated = self.parts.tokenizer, sequence.generated
        if detector is not None and isinstance(finish.stop, str):
            text = detector.text
        else:
            text = tokenizer.decode(generated[:-1] if finish.ends_with_stop_token else generated)
        logprobs = None
        if sequence.sampling.logprobs is not None:
            logprobs = tuple(
                PositionLogprobs(self._named(t.token_id, t.logprob), tuple(self._named(*pair) for pair in t.top))
                for t in sequence.logprobs
            )
        return Sample(text, tuple(generated), finish.reason, logprobs, finish.stop)

    def _named(self, token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, self.parts.tokenizer.token_text(token_id), logprob)
