"""The search space: the discrete settings that are enumerated, and how a job flows through each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from batchgen.core.dtypes import INT4
from batchgen.planner.captured_sweeps import captured_tokens
from batchgen.planner.packed_products import packed_tokens
from batchgen.planner.phases import Phase, phases_of_each
from batchgen.planner.problem import CostInputs, Loading, Problem

_MICRO_BATCHES, _COARSE_MICRO_BATCHES = (1, 2, 4, 8, 16), (1, 2, 4)
# Sizes of each doubling, in eighths.
_EIGHTHS, _COARSE_EIGHTHS = range(8, 16), (8, 12)
# Fewer tokens than this leave matmuls far from their best rate.
LEAST_BATCHED_TOKENS = 1024
# Matmuls are at their best rate, and a sweep ends soon: what is done by then is saved.
_SHORT_SWEEP_TOKENS = 4096
# Sequences that need this part of a sweep's tokens fill it: more of them would be in flight for a moment only.
_FILLED_FRAC = 0.97


def search_space(problem: Problem) -> Iterator[tuple[CostInputs, tuple[Phase, ...]]]:
    """Everything that is enumerated, and how the job flows through it."""
    sizes = max_num_seqs_choices(problem)
    settings = tuple(
        (admission, max_num_seqs, tokens)
        for admission in problem.admissions
        for smaller, max_num_seqs in zip([0, *sizes], sizes, strict=False)
        for tokens in _token_budgets(problem, max_num_seqs)
        if (admission == "static" and max_num_seqs < problem.workload.num_seqs) or not _fills(problem, smaller, tokens)
    )
    flows = phases_of_each(problem.workload, settings)
    packed: dict[int, int] = {}  # by number of micro-batches
    launched: dict[str, int] = {}  # by format of weights
    for weight_format, kv_format in problem.formats:
        for (admission, max_num_seqs, tokens), phases in zip(settings, flows, strict=True):
            for batches in _micro_batches(problem, max_num_seqs):
                inputs = problem.make_inputs(
                    hardware=problem.hardware,
                    model=problem.model,
                    workload=problem.workload,
                    compute_format=problem.compute_format,
                    weight_format=weight_format,
                    kv_format=kv_format,
                    admission=admission,
                    max_num_seqs=-(-max_num_seqs // batches) * batches,
                    num_gpu_batches=batches,
                    max_num_batched_tokens=tokens,
                    kv_block_size=problem.kv_block_size,
                    budgets=problem.budgets,
                    process_bytes=problem.process_bytes,
                    longest_tokens=problem.longest_tokens,
                    max_model_len=problem.max_model_len,
                    state_dtype=problem.state_dtype,
                    attention_budget=problem.attention_budget,
                    share_prefixes=problem.share_prefixes,
                    loading=problem.loading.get(weight_format, Loading()),
                )
                if weight_format == INT4:
                    if batches not in packed:
                        packed[batches] = packed_tokens(inputs)
                    inputs = replace(inputs, packed_tokens=packed[batches])
                if inputs.rates.launch_overhead_s:
                    if weight_format not in launched:
                        launched[weight_format] = captured_tokens(inputs)
                    inputs = replace(inputs, captured_tokens=min(tokens, launched[weight_format]))
                yield inputs, phases


def _fills(problem: Problem, max_num_seqs: int, tokens: int) -> bool:
    """Tell whether so many sequences fill short sweeps all the time, with their own tokens and the next ones' prompts.

    More sequences would hardly ever be in flight, but memory would be kept for their KV, and quotas of its placements
    made for them, of which those that are filled last would be empty.
    """
    if tokens != _SHORT_SWEEP_TOKENS or problem.workload.output_len.mean <= 1:
        return False
    return _steady_tokens(problem, max_num_seqs) >= _FILLED_FRAC * tokens


def _steady_tokens(problem: Problem, max_num_seqs: int) -> float:
    """Tokens of a sweep that keeps up with finishing rows."""
    workload = problem.workload
    return max_num_seqs * (1 + workload.computed_prompt_len / workload.output_len.mean)


def max_num_seqs_choices(problem: Problem) -> list[int]:
    """Numbers of sequences in flight: all up to 16, then eight a doubling, as larger steps lose throughput.

    In a coarse problem there are two a doubling.
    """
    most = min(problem.most_seqs, problem.workload.num_seqs)
    if problem.max_num_seqs is not None:
        return [min(problem.max_num_seqs, problem.workload.num_seqs)]
    eighths = _COARSE_EIGHTHS if problem.coarse else _EIGHTHS
    ladder = sorted({m * 2**k // 8 for m in eighths for k in range(14)} | {most})
    return [size for size in ladder if size <= most]


def least_batched_tokens(problem: Problem, max_num_seqs: int) -> int:
    """The least tokens of a sweep that are looked at for so many sequences in flight."""
    return min(_token_budgets(problem, max_num_seqs))


def _token_budgets(problem: Problem, max_num_seqs: int) -> list[int]:
    """Token budgets: enough to keep up with finishing rows; four times that; 4,096; the whole block at once."""
    if problem.max_num_batched_tokens is not None:
        return [problem.max_num_batched_tokens]
    workload = problem.workload
    prompts, steady = workload.computed_prompt_len * max_num_seqs, _steady_tokens(problem, max_num_seqs)
    least = LEAST_BATCHED_TOKENS
    if not problem.model.causal:  # the longest text has to fit in a sweep
        least = max(least, problem.max_model_len or workload.prompt_len.max)
    whole = max(least, round(prompts))
    sizes = {min(whole, max(least, round(steady * more))) for more in (1.25, 5)}
    if max(max_num_seqs, least) <= _SHORT_SWEEP_TOKENS < min(sizes):
        sizes.add(_SHORT_SWEEP_TOKENS)
    return sorted(sizes | {whole})


def _micro_batches(problem: Problem, max_num_seqs: int) -> list[int]:
    """Numbers of micro-batches that part the block equally; a block of all rows is rounded up."""
    if problem.num_gpu_batches is not None:
        return [problem.num_gpu_batches]
    if problem.hardware.gpu is None or not problem.model.causal:
        return [1]  # nothing runs beside the matmuls: parts of a batch only make them smaller
    whole_job = max_num_seqs in (problem.workload.num_seqs, problem.max_num_seqs)
    choices = _COARSE_MICRO_BATCHES if problem.coarse else _MICRO_BATCHES
    return [k for k in choices if k <= max_num_seqs and (whole_job or max_num_seqs % k == 0)]
