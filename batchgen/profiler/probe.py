"""A probe of this machine's speed that ends in time: products of many and of few tokens, and decode attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from batchgen.core.dtypes import matmul_key
from batchgen.core.hardware import HardwareProfile
from batchgen.core.knowledge import DECODE, FEW, MANY, SPEED, Knowledge, Parts, weights_name
from batchgen.profiler.contention import Beside, slowed_by
from batchgen.profiler.timing import Trial

# Standard deviations of the logarithms: a probe of a second sees a moment, and no cache that other work has used.
# Work of others adds to the deviation, by a part of what it slows the probe down.
_NOISE, _NOISE_OF_OTHERS = 0.1, 0.5
_WIDTH, _MANY_TOKENS, _MANY_BYTES = 1024, 256, 8 << 20
_OPERAND_BYTES = 64 << 20  # more than most cores have of the last cache
_SEQUENCES, _CONTEXT, _GROUP = 16, 1024, 4
# Parts of the time that is left, of the first, the second and the last trial.
_PARTS = (0.34, 0.5, 1.0)

Clock = Callable[[], float]
# The parts of a trial's time, the rate that is expected, and a function that prepares the trial.
ProbeTrial = tuple[Parts, float, Callable[[], Trial]]


def probed(
    knowledge: Knowledge,
    trials: Iterable[ProbeTrial],
    seconds: float,
    clock: Clock = time.perf_counter,
    taken_frac: Callable[[], float] | None = None,
) -> Knowledge:
    """Probe the machine; returns the knowledge of its rates afterwards.

    Args:
        knowledge: The knowledge before, with which the trials' rates are expected.
        trials: The trials.
        seconds: Seconds that the probe may take. Each trial gets a part of what is left of them, and is left out where
            it does not fit.
        clock: Function that tells the time, in seconds.
        taken_frac: Function that tells which part of the cores' time others have taken since the probe began; None:
            the kernel's counters tell it.
    """
    ends, after, taken_frac = clock() + seconds, knowledge, taken_frac or Beside().taken_frac
    for part, (parts, expected, prepare) in zip(_PARTS, trials, strict=False):
        rate = _rate(prepare, clock() + part * (ends - clock()), clock)
        if rate is not None:
            slower = slowed_by(taken_frac())
            logarithm = knowledge.mean(parts) + math.log(expected / rate) - slower
            after = after.after(parts, logarithm, math.hypot(_NOISE, _NOISE_OF_OTHERS * slower))
    return after


def _rate(prepare: Callable[[], Trial], until: float, clock: Clock) -> float | None:
    """Mean rate of a trial until a time; None where that time comes before it has run."""
    if clock() >= until:
        return None
    trial = prepare()
    trial.run(0)  # a warm-up
    started, runs = clock(), 0
    while clock() < until:
        runs += 1
        trial.run(runs)
    return trial.work * runs / (clock() - started) if runs else None


def trials_here(profile: HardwareProfile, dtype: str, memory_bytes: int) -> Iterator[ProbeTrial]:
    """The trials of this machine's CPU: products of many tokens, of one token, and decode attention.

    Args:
        profile: The profile whose rates are expected.
        dtype: Compute dtype.
        memory_bytes: Bytes that operands may take.
    """
    weights, cpu = weights_name(matmul_key(dtype, dtype)), profile.cpu

    def gemm(tokens: int) -> float:
        return cpu.rates("gemm_flops_per_s", dtype).at(width=_WIDTH, tokens=tokens)

    decode = cpu.rates("decode_attention_bytes_per_s", dtype).at(group=_GROUP, batch=_SEQUENCES, context=_CONTEXT)
    operand_bytes = min(_OPERAND_BYTES, memory_bytes // 4)
    many, few = ({SPEED: 1.0, name: 1.0, weights: 1.0} for name in (MANY, FEW))
    yield many, gemm(_MANY_TOKENS), partial(_products, dtype, _MANY_TOKENS, min(_MANY_BYTES, operand_bytes))
    yield few, gemm(1), partial(_products, dtype, 1, operand_bytes)
    yield {SPEED: 1.0, DECODE: 1.0}, decode, partial(_attention, dtype, operand_bytes)


def _products(dtype: str, tokens: int, weight_bytes: int) -> Trial:
    """Products of some tokens with a weight of so many bytes."""
    import torch

    from batchgen.ops import dispatch as ops

    kind = getattr(torch, dtype)
    rows = max(64, weight_bytes // (_WIDTH * kind.itemsize))
    weight = ops.pack_weight(torch.ones(rows, _WIDTH, dtype=kind))
    x = torch.ones(tokens, _WIDTH, dtype=kind)
    return Trial(2 * tokens * rows * _WIDTH, lambda i: ops.linear(x, weight))


def _attention(dtype: str, kv_bytes: int) -> Trial:
    """Decode attention of some sequences over KV of so many bytes, by turns."""
    import torch

    from batchgen.core.dtypes import KVFormat
    from batchgen.profiler.compute import paged_attention, paged_kv, subjects_of
    from batchgen.profiler.timing import FULL

    kind = getattr(torch, dtype)
    model = subjects_of("cpu", FULL, None).main
    kv = paged_kv(torch.ones(kv_bytes // kind.itemsize, dtype=kind), model, KVFormat.of(dtype))
    run = paged_attention(kv, KVFormat.of(dtype), model, [(1, _CONTEXT - 1)] * _SEQUENCES, kind)
    return Trial(_SEQUENCES * _CONTEXT * 2 * model.kv_size * kind.itemsize, run)
