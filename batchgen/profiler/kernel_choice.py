"""Choice of the fastest kernel for each shape of a model, by timing.

The candidates are the kernels of the CPU's instruction sets, and torch's own linear. There is one choice for each shape
and dtype, and for each block-quantized format. It does not depend on the number of tokens: instruction sets sum in
different orders, so otherwise a row would be rounded differently in batches of different sizes. Where candidates are
equally fast but for noise, the first in the order of preference is chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.core.dtypes import BLOCK_FORMATS, FORMAT_BYTES, KVFormat, dtype_name, matmul_key
from batchgen.core.kernel_choice import PROCESS_SET, TORCH, KernelChoice, Measured, attention_key, linear_key
from batchgen.core.machine import available_memory_bytes, keep_freed_memory
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.models.config import ModelConfig
from batchgen.ops import cpp, dispatch
from batchgen.profiler.compute import paged_attention, paged_kv
from batchgen.profiler.timing import Trial

# Factor by which another candidate than the first by name must be faster.
_MARGIN = 1.05
# Candidates slower than the fastest by these factors are pruned: after the first round, and after the last but one.
_PRUNED = (10.0, 4.0)
_TOKENS = (16, 128, 512)
_PREFILL_TOKENS, _DECODE_SEQS, _DECODE_CONTEXT = 512, 16, 512
_ROUNDS, _SAMPLE_S = 3, 0.003
# Limits of a timed call: of larger weights a part of N is timed, but enough that every thread has panels.
_CALL_FLOPS_PER_THREAD, _COLUMNS_PER_THREAD, _CALL_WEIGHT_BYTES = 5e8, 128, 64 << 20
# Part of the free memory for a call's weights: each candidate prepacks them for itself.
_MEMORY_PARTS = 16
# Bytes that operands of one shape are spread over, so that they come from beyond the nearest caches.
_SPREAD_BYTES = 16 << 20
# Numbers of rows in which torch's linear must give a row the same bits that it has among TORCH_ROWS, the most it gets.
_ROW_COUNTS = (
    1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 511,
)  # fmt: skip
_CHECKED_BYTES = 1 << 30
DEPENDS_ON_ROWS = "its rows depend on how many rows there are"
NOT_CHECKED = "it is too large to check whether its rows depend on how many rows there are"
ROUNDS_LOGITS = "its logits would be rounded to 16 bits"

# Function from (candidate, name of the point, work) to the seconds of a run, the best of a few.
Timer = Callable[[str, str, Trial], float]


@dataclass(frozen=True)
class Kernels:
    """The kernels to choose from for each shape, and the function that times them.

    Attributes:
        candidates: Names of the CPU's instruction sets and TORCH, torch's own linear, in order of preference. TORCH is
            a candidate for unquantized linear layers alone.
        timer: Function of (candidate, name of the timed point, work) that gives the seconds of one run.
    """

    candidates: tuple[str, ...]
    timer: Timer

    @classmethod
    def here(cls) -> Kernels:
        """The kernels that this machine can run, timed by its clock."""
        return cls((*cpp.instruction_sets(), TORCH), best_seconds)


@dataclass(frozen=True)
class _Shape:
    """A matrix shape or an attention shape for which a kernel is chosen.

    Attributes:
        key: Name of the shape in a `KernelChoice`.
        points: By the name of each timed point, a function that prepares it: it returns a function from a candidate to
            the work that is timed.
        refuse: Function from a candidate to the reason why it may not be chosen; None: all may.
    """

    key: str
    points: Mapping[str, Callable[[], Callable[[str], Trial]]]
    refuse: Callable[[str], str | None]


@dataclass(frozen=True)
class Shapes:
    """The models for whose shapes kernels are chosen.

    Attributes:
        products: Models whose linear layers run on the CPU.
        attention: Models whose attention runs on the CPU.
        formats: Block-quantized formats of the first model's weights.
    """

    products: tuple[ModelConfig, ...]
    attention: tuple[ModelConfig, ...]
    formats: tuple[str, ...] = ()

    def keys(self, dtype: str) -> list[str]:
        """Names of all shapes in a `KernelChoice`. dtype: compute dtype."""
        keys = [linear_key(*shape, dtype) for model in self.products for shape in _matrices(model)]
        keys += [matmul_key(name, dtype) for name in self.formats if self.products]
        heads = [(m.num_heads, m.num_kv_heads, m.head_dim) for m in self.attention if _has_attention(m)]
        return list(dict.fromkeys(keys + [attention_key(*shape, dtype) for shape in heads]))


def measure_kernels(shapes: Shapes, dtype: str, kernels: Kernels, known: KernelChoice = PROCESS_SET) -> KernelChoice:
    """Choose the kernels of linear layers and attention, which takes a second or two for each model.

    Args:
        shapes: The models whose shapes are timed.
        dtype: Compute dtype.
        kernels: The kernels to choose from, and their timer.
        known: Earlier choice, whose shapes are not timed again.

    Returns:
        The earlier choice with all other shapes added.
    """
    keep_freed_memory()  # as jobs do
    linear, attention = dict(known.linear), dict(known.attention)
    sets = tuple(name for name in kernels.candidates if name != TORCH)
    with torch.inference_mode(), _torch_threads(cpp.num_threads()):
        for model in shapes.products:
            for shape in _linear_shapes(model, dtype):
                if shape.key not in linear:
                    linear[shape.key] = _measured(shape, kernels.candidates, kernels.timer)
        for weight_format in shapes.formats if shapes.products else ():
            shape = _blocks_shape(shapes.products[0], weight_format, dtype)
            if shape.key not in linear:
                linear[shape.key] = _measured(shape, sets, kernels.timer)
        for model in filter(_has_attention, shapes.attention):
            shape = _attention_shape(model, dtype)
            if shape.key not in attention:
                attention[shape.key] = _measured(shape, sets, kernels.timer)
    return KernelChoice(linear, attention, kernels.candidates[0])


def _matrices(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Shapes of a layer's matrices and of the output matrix, which models of any size do not have."""
    return model.linear_shapes if model.vocab_size > 1 else tuple(dict.fromkeys(model.matmul_shapes.values()))


def _has_attention(model: ModelConfig) -> bool:
    """Tell whether the kernels have attention for the model's heads; otherwise torch computes it."""
    return cpp.supports_attention(model.head_dim, model.num_heads // model.num_kv_heads)


def best_seconds(candidate: str, point: str, trial: Trial) -> float:
    """Seconds of one run of a kernel. Short runs are repeated and timed together, as a single one is mostly noise.

    Args:
        candidate: Name of the kernel.
        point: Name of the timed point.
        trial: The work to time.
    """
    trial.run(0)
    started = time.perf_counter()
    trial.run(1)
    once = time.perf_counter() - started
    if once > _SAMPLE_S:
        return once
    count = math.ceil(_SAMPLE_S / max(once, 1e-7))
    started = time.perf_counter()
    for i in range(count):
        trial.run(i)
    return (time.perf_counter() - started) / count


def choose(rates: Mapping[str, Mapping[str, float]], refused: Mapping[str, str]) -> str:
    """The fastest candidate, by the geometric mean of its rates; of candidates equal but for noise, the first.

    Args:
        rates: Rate at each timed point, by candidate, in order of preference.
        refused: Candidates that may not be chosen, with the reason. A point counts if all candidates that may be chosen
            were timed there.
    """
    allowed = {name: of_points for name, of_points in rates.items() if name not in refused}
    points = max(map(len, allowed.values()))
    means = {
        name: math.exp(sum(map(math.log, of_points.values())) / points)
        for name, of_points in allowed.items()
        if len(of_points) == points
    }
    return next(name for name, mean in means.items() if mean * _MARGIN >= max(means.values()))


def _measured(shape: _Shape, candidates: Sequence[str], timer: Timer) -> Measured:
    rates = _rates(shape, candidates, timer)
    refused: dict[str, str] = {}
    while True:
        chosen = choose(rates, refused)
        if chosen != candidates[0]:  # once more: a moment in which the machine was slow must not decide
            again = _rates(shape, (candidates[0], chosen), timer)
            rates |= {name: {**timed, **_larger(rates[name], timed)} for name, timed in again.items()}
            chosen = choose(rates, refused)
        if reason := shape.refuse(chosen):
            refused[chosen] = reason
        else:
            return Measured(chosen, rates, refused)


def _larger(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {point: max(a[point], b.get(point, 0.0)) for point in a}


def _rates(shape: _Shape, candidates: Sequence[str], timer: Timer) -> dict[str, dict[str, float]]:
    """Time each candidate in several rounds; returns the best rate of each at each timed point."""
    rates: dict[str, dict[str, float]] = {name: {} for name in candidates}
    kept = list(candidates)
    for point, prepare in shape.points.items():
        trial_of = prepare()
        trials = {name: trial_of(name) for name in kept}
        seconds = dict.fromkeys(kept, math.inf)
        for done in range(_ROUNDS):
            if done:
                kept = [name for name in kept if seconds[name] <= _PRUNED[done - 1] * min(seconds.values())]
            for name in kept:
                seconds[name] = min(seconds[name], timer(name, point, trials[name]))
        for name, trial in trials.items():
            rates[name][point] = float(f"{trial.work / seconds[name]:.4g}")
    return rates


def _linear_shapes(model: ModelConfig, dtype: str) -> Iterator[_Shape]:
    gated = [shape for name, shape in model.matmul_shapes.items() if name.endswith("up") and model.gated_mlp]
    head = (model.vocab_size, model.embed_size)
    for shape in _matrices(model):
        yield _linear_shape(shape, getattr(torch, dtype), gated=shape in gated, head=shape == head)


def _linear_shape(shape: tuple[int, int], dtype: torch.dtype, *, gated: bool, head: bool) -> _Shape:
    columns, depth = shape

    def weights(some: int) -> Callable[[str], Sequence[dispatch.Weight]]:
        spread = _spread((some, depth), dtype)
        return lambda candidate: [dispatch.pack_weight(w, gated=gated, isa=candidate) for w in spread]

    def refuse(candidate: str) -> str | None:
        if candidate != TORCH:
            return None
        if head and dtype != torch.float32:
            return ROUNDS_LOGITS
        if columns * depth * dtype.itemsize > min(_CHECKED_BYTES, available_memory_bytes() // 4):
            return NOT_CHECKED
        return DEPENDS_ON_ROWS if rows_depend(torch.randn(columns, depth).to(dtype)) else None

    options = {"activation": "silu_mul" if gated else None, "out_dtype": torch.float32 if head else None}
    points = _points(shape, dtype, depth * dtype.itemsize, weights, options)
    return _Shape(linear_key(columns, depth, dtype_name(dtype)), points, refuse)


def _blocks_shape(model: ModelConfig, weight_format: str, dtype_name: str) -> _Shape:
    """GEMMs of the matrix with the largest N, as if it were in this format."""
    columns, width = max(model.matmul_shapes.values())
    values, block_bytes = BLOCK_FORMATS[weight_format]
    dtype, depth = getattr(torch, dtype_name), -(-width // values) * values
    row_bytes = depth // values * block_bytes

    def weights(some: int) -> Callable[[str], Sequence[dispatch.Weight]]:
        count = max(1, _SPREAD_BYTES // (some * row_bytes))
        spread = torch.full((count, some, row_bytes), 0x2A, dtype=torch.uint8)  # scales are numbers
        return lambda candidate: [
            dispatch.pack_blocks(cpp.BlockWeight(data, weight_format, candidate), dtype) for data in spread
        ]

    points = _points((columns, depth), dtype, row_bytes, weights, {})
    return _Shape(matmul_key(weight_format, dtype_name), points, lambda candidate: None)


def _points(
    shape: tuple[int, int],
    dtype: torch.dtype,
    row_bytes: int,
    weights: Callable[[int], Callable[[str], Sequence[dispatch.Weight]]],
    options: Mapping[str, Any],
) -> dict[str, Callable[[], Callable[[str], Trial]]]:
    """The `_Shape.points` of GEMMs.

    Args:
        shape: (N, K) of the weight.
        dtype: Dtype of the tokens.
        row_bytes: Bytes of one of the weight's N rows.
        weights: Function that draws weights with so many rows, and returns one from a candidate to its prepacked
            weights.
        options: Keyword arguments of `dispatch.linear`.
    """
    columns, depth = shape
    threads = cpp.num_threads()

    def prepare(tokens: int) -> Callable[[str], Trial]:
        affordable = int(threads * _CALL_FLOPS_PER_THREAD / (2 * tokens * depth))
        most_bytes = min(_CALL_WEIGHT_BYTES, available_memory_bytes() // _MEMORY_PARTS)
        affordable = min(affordable, most_bytes // row_bytes)
        some = min(columns, max(threads * _COLUMNS_PER_THREAD, affordable // 2 * 2))
        weights_for = weights(some)
        x, weight = torch.randn(tokens, depth).to(dtype), torch.ones(depth, dtype=dtype)

        def trial(candidate: str) -> Trial:
            bound = weights_for(candidate)

            def run(i: int) -> None:
                # In a sweep kernels of the process's set come before and after: torch's threads may still be spinning.
                dispatch.linear(dispatch.norm(x, weight, None, 1e-5), bound[i % len(bound)], **options)

            return Trial(2 * tokens * some * depth, run)

        return trial

    return {f"{tokens} tokens": partial(prepare, tokens) for tokens in _TOKENS}


def rows_depend(weight: Tensor, linear: Callable[[Tensor, Tensor], Tensor] = F.linear) -> bool:
    """Tell whether a GEMM computes a row to other bits in a batch of another size, or at another place in it.

    Args:
        weight: The weight, [N, K].
        linear: The GEMM: function of (rows [M, K], weight) that returns [M, N].
    """
    x = torch.randn(dispatch.TORCH_ROWS, weight.shape[1]).to(weight.dtype)
    whole = linear(x, weight)
    return any(
        not torch.equal(linear(x[start : start + count], weight), whole[start : start + count])
        for count in _ROW_COUNTS
        for start in {0, dispatch.TORCH_ROWS - count}
    )


def _attention_shape(model: ModelConfig, dtype_name: str) -> _Shape:
    dtype, kv_format = getattr(torch, dtype_name), KVFormat.of(dtype_name)

    def prepare(sequences: list[tuple[int, int]], work: float) -> Callable[[str], Trial]:
        blocks = sum(-(-(new + cached) // DEFAULT_KV_BLOCK_SIZE) for new, cached in sequences)
        block = 2 * model.num_kv_heads * DEFAULT_KV_BLOCK_SIZE * model.head_dim
        pool = torch.cat(_spread((blocks, block), dtype)).view(-1)
        kv = paged_kv(pool, model, kv_format)
        return lambda candidate: Trial(work, paged_attention(kv, kv_format, model, sequences, dtype, candidate))

    n = _PREFILL_TOKENS
    flops = 4 * model.q_size * (n * (n + 1) // 2)
    token_bytes = 2 * model.kv_size * FORMAT_BYTES[dtype_name]
    points = {
        f"prefill of {n} tokens": lambda: prepare([(n, 0)], flops),
        f"decode of {_DECODE_SEQS} rows of {_DECODE_CONTEXT} tokens": lambda: prepare(
            [(1, _DECODE_CONTEXT - 1)] * _DECODE_SEQS, _DECODE_SEQS * _DECODE_CONTEXT * token_bytes
        ),
    }
    key = attention_key(model.num_heads, model.num_kv_heads, model.head_dim, dtype_name)
    return _Shape(key, points, lambda candidate: None)


def _spread(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Operands of one shape, normally distributed, some megabytes in all: a repeated pattern, as drawing takes long."""
    size = math.prod(shape)
    count = max(1, -(-_SPREAD_BYTES // (size * dtype.itemsize)))
    pattern = torch.randn(1 << 16).to(dtype)
    return list(pattern.repeat(-(-count * size // len(pattern)))[: count * size].view(count, *shape))


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
