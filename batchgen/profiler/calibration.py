"""Calibration of a measured profile: its rates are scaled so that they predict the time of whole sweeps.

The rates of a profile are measured by running one operation many times. In a sweep another operation has used the
caches in between, so each takes longer. Calibration runs a few sweeps of known sequences on a few layers of the model,
with dummy weights. It fits one factor for each kind of cost (GEMMs of few and of many tokens, attention, element-wise
work), so that the predicted times come closest to the measured times.
"""

from __future__ import annotations

import contextlib
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchgen.core.dtypes import FORMAT_BYTES
from batchgen.core.hardware import HardwareProfile
from batchgen.core.kernel_choice import KernelChoice
from batchgen.core.knowledge import few_share
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.machine import available_memory_bytes
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.core.request import SamplingParams
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.planner.costs import (
    phase_decode_attention_s,
    phase_matmul_s,
    phase_prefill_attention_s,
    phase_prefix_attention_s,
)
from batchgen.planner.phases import Phase
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.search_space import search_space
from batchgen.planner.step_seconds import before_attention_frac, elementwise_s
from batchgen.profiler.timing import last_level_cache_bytes
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence as Generated
from batchgen.schedule.state_slots import NO_STATE, StateSlot
from batchgen.schedule.step_graph import Step

_VOCAB = 1024
_OUTSIDE_LAYERS = ("embed", "head")
_ROUNDS = 6
_LONGEST_S = 0.6  # sweeps expected to take longer are left out
_MEMORY_FRAC = 0.6  # of the free memory, for layers and KV
# Weight of a rate's factor's distance from 1 beside relative errors of times, which count once. A factor with a wider
# limit has as much less weight.
_PRIOR = 0.05
_FACTORS = ("gemm_few", "gemm_many", "elementwise", "prefill_attention", "decode_attention", "shared_attention")
_GEMM = _FACTORS[:2]
# The fixed time of a layer is measured on a model that fits the innermost caches. Beside the weights of a real one it
# grows by more than any rate does.
_FIXED, _MOST_FIXED = "step_overhead", 10.0
_LEAST, _MOST = 0.5, 3.0  # factors of rates


@dataclass(frozen=True)
class _Sweep:
    """A sweep of equal sequences, which calibration times.

    Attributes:
        count: Number of sequences.
        new: New tokens of each sequence.
        cached: Tokens of each sequence whose KV is there already.
        shared: Whether the cached tokens are one prefix that all sequences share.
    """

    count: int
    new: int
    cached: int = 0
    shared: bool = False


_SWEEPS = (
    _Sweep(2, 512),
    _Sweep(8, 128),
    _Sweep(32, 32),
    _Sweep(2, 1, 128),
    _Sweep(8, 1, 256),
    _Sweep(16, 1, 1024),
    _Sweep(64, 1, 512),
    _Sweep(128, 1, 128),
    _Sweep(16, 64, 1024, shared=True),
    _Sweep(64, 1, 1024, shared=True),
)


def calibrated(profile: HardwareProfile, model: ModelConfig, dtype: str, until_s: float = math.inf) -> HardwareProfile:
    """A profile whose compute rates are scaled to the measured times of whole sweeps.

    Args:
        profile: A profile that was measured operation by operation.
        model: Model whose sweeps are run, with as many of its layers as fit the memory.
        dtype: Compute dtype.
        until_s: Time of time.perf_counter after which no further round of sweeps begins; two rounds are run in any
            case.

    Returns:
        The profile. Its `measured` has the factors of time, and the `spread`: the longest time of equal runs divided by
            the shortest.
    """
    itemsize = FORMAT_BYTES[dtype]
    layer_bytes = int(model.params_per_layer * itemsize)
    layers = min(model.num_layers, max(2, -(-2 * last_level_cache_bytes() // layer_bytes)))
    memory_bytes = int(available_memory_bytes() * _MEMORY_FRAC)
    token_bytes = int(2 * model.kv_size * itemsize)
    sweeps = [s for s in _SWEEPS if max(s.new, s.cached) + 1 < model.max_position]
    layers, sweeps = affordable_sweeps(sweeps, layers, layer_bytes, token_bytes, memory_bytes)
    part = replace(model.first_layers(layers), vocab_size=_VOCAB)
    # The rate of attention to shared prefixes begins as that of a prompt to itself.
    cpu = profile.cpu
    cpu = replace(cpu, shared_attention_flops_per_s=dict(cpu.prefill_attention_flops_per_s))
    profile = replace(profile, cpu=cpu)
    terms = [_terms(profile, part, dtype, sweep) for sweep in sweeps]
    affordable = [i for i, t in enumerate(terms) if sum(t) < _LONGEST_S] or [int(np.argmin([sum(t) for t in terms]))]
    with _runner(part, dtype, profile.kernels, [sweeps[i] for i in affordable]) as run:
        for i in affordable:  # memory that was used before, as that of jobs
            run(sweeps[i])
        # In rounds, so that a moment in which the machine is slow does not decide about one of them.
        rounds: list[list[float]] = []
        while len(rounds) < 2 or (len(rounds) < _ROUNDS and time.perf_counter() < until_s):
            rounds.append([run(sweeps[i]) for i in affordable])
    times = np.median(rounds, axis=0)
    limits = [(_LEAST, _MOST)] * len(_FACTORS) + [(_LEAST, _MOST_FIXED)]
    found = fit(np.array([terms[i] for i in affordable]), times, limits).tolist()
    factors = dict(zip((*_FACTORS, _FIXED), found, strict=True))
    scaled = profile.scaled(**{name: 1 / factors[name] for name in _FACTORS if name not in _GEMM})
    products = {kind: rates.slowed(gemm_slowing(factors)) for kind, rates in scaled.cpu.gemm_flops_per_s.items()}
    fixed_s = profile.cpu.step_overhead_s * factors[_FIXED]
    cpu = replace(scaled.cpu, gemm_flops_per_s=products, step_overhead_s=fixed_s)
    scaled = replace(scaled, cpu=cpu)
    noted = {name: round(float(factor), 3) for name, factor in factors.items()}
    spread = float(np.median(np.max(rounds, axis=0) / np.min(rounds, axis=0)))
    kept = {
        "sweep_factors": {dtype: noted},
        "spread": round(spread, 3),
    }
    return replace(scaled, measured=profile.measured | kept)


def gemm_slowing(factors: Mapping[str, float]) -> Callable[[float], float]:
    """The function from a number of tokens to the factor on the seconds of GEMMs.

    Few tokens wait for weights, and many for the cores: what slows the one need not slow the other.

    Args:
        factors: Factors of `calibrated`, by name; those that are missing are 1.
    """
    few, many = (factors.get(name, 1.0) for name in _GEMM)

    def factor(tokens: float) -> float:
        share = few_share(tokens)
        return share * few + (1 - share) * many

    return factor


def affordable_sweeps(
    sweeps: list[_Sweep], layers: int, layer_bytes: int, token_bytes: int, memory_bytes: int
) -> tuple[int, list[_Sweep]]:
    """The number of layers and the sweeps whose weights and KV fit the memory.

    There are at least two layers, if any sweep fits with two. Sweeps with too much KV for them are left out.

    Args:
        sweeps: The wanted sweeps.
        layers: The wanted number of layers.
        layer_bytes: Bytes of a layer's weights.
        token_bytes: Bytes of a token's KV in a layer.
        memory_bytes: Bytes for weights and KV.
    """

    def in_all(sweep: _Sweep) -> int:
        return layer_bytes + _kv_tokens(sweep) * token_bytes

    fits = [s for s in sweeps if min(layers, 2) * in_all(s) <= memory_bytes] or [min(sweeps, key=_kv_tokens)]
    return max(1, min(layers, memory_bytes // max(map(in_all, fits)))), fits


def _kv_tokens(sweep: _Sweep) -> int:
    """Number of tokens for which a sweep needs KV blocks."""
    return sweep.count * -(-(sweep.new + sweep.cached) // DEFAULT_KV_BLOCK_SIZE) * DEFAULT_KV_BLOCK_SIZE


def fit(terms: np.ndarray, times: np.ndarray, limits: Sequence[tuple[float, float]]) -> np.ndarray:
    """Factors by which terms of cost must be multiplied so that their sums come closest to measured times.

    The distance is the relative error.

    Args:
        terms: Seconds of each kind of cost in each sweep, [sweeps, kinds].
        times: Measured seconds of each sweep, [sweeps].
        limits: The least and the greatest factor of each kind. Factors of other kinds make up for a kind at its limit.
    """
    kinds = terms.shape[1]
    least, most = np.array(limits).T
    prior = _PRIOR * _MOST / most
    a = np.vstack([terms / times[:, None], np.diag(prior)])
    b = np.concatenate([np.ones(len(times)), prior])
    factors, free = np.ones(kinds), np.ones(kinds, dtype=bool)
    while free.any():
        rest = b - a[:, ~free] @ factors[~free]
        factors[free] = np.linalg.lstsq(a[:, free], rest, rcond=None)[0]
        beyond = np.maximum(least - factors, factors - most) / factors.clip(least, most)
        worst = int(np.argmax(np.where(free, beyond, -1.0)))
        if beyond[worst] <= 0:
            break
        factors[worst] = np.clip(factors[worst], least[worst], most[worst])
        free[worst] = False
    return factors


def _terms(profile: HardwareProfile, model: ModelConfig, dtype: str, sweep: _Sweep) -> list[float]:
    """Predicted seconds of each kind of cost in a sweep, from the profile's rates."""
    prefix = sweep.cached if sweep.shared else 0
    inputs = _inputs(profile, model, dtype, Workload.uniform(sweep.count, max(2, prefix + sweep.new), 2, prefix))
    if sweep.new == 1:
        phase = Phase(1, 0, 0, sweep.count, sweep.cached + 1)
        decode = phase_decode_attention_s(inputs, phase, inputs.rates)
    else:
        phase = Phase(1, sweep.count * sweep.new, sweep.count, 0, 0)
        decode = 0.0
    # What comes after attention in the last layer is computed for what is sampled.
    after, last = 1 - before_attention_frac(model), Phase(1, 0, 0, sweep.count, sweep.cached + 1)

    def of_all(seconds: Callable[[CostInputs, Phase], float]) -> float:
        return (model.num_layers - after) * seconds(inputs, phase) + after * seconds(inputs, last)

    rest = (
        phase_prefill_attention_s(inputs, phase),
        decode,
        phase_prefix_attention_s(inputs, phase),
        inputs.rates.step_overhead_s,
    )
    few = of_all(lambda s, part: few_share(part.tokens) * phase_matmul_s(s, part))
    moved = of_all(lambda s, part: elementwise_s(s, part.tokens))
    return [few, of_all(phase_matmul_s) - few, moved, *(model.num_layers * seconds for seconds in rest)]


def _inputs(profile: HardwareProfile, model: ModelConfig, dtype: str, workload: Workload) -> CostInputs:
    problem = Problem(
        hardware=profile,
        model=model,
        workload=workload,
        budgets={"cpu": profile.cpu_memory_bytes, "disk": profile.disk_bytes},
        compute_format=dtype,
        weight_formats=(dtype,),
        kv_formats=(dtype,),
        max_num_seqs=workload.num_seqs,
        max_num_batched_tokens=1 << 20,
    )
    return next(iter(search_space(problem)))[0]


@contextlib.contextmanager
def _runner(
    model: ModelConfig, dtype: str, kernels: KernelChoice, sweeps: list[_Sweep]
) -> Iterator[Callable[[_Sweep], float]]:
    """Yield a function that runs a sweep and returns the seconds of its layers; `overheads` measures the rest."""
    import torch

    from batchgen.models.checkpoint import dummy_checkpoint
    from batchgen.runtime.in_memory import in_memory
    from batchgen.schedule.packed_batch import pack

    torch_dtype = getattr(torch, dtype)
    longest = max(s.new + s.cached for s in sweeps) + 1
    blocks = max(map(_kv_tokens, sweeps)) // DEFAULT_KV_BLOCK_SIZE
    part = replace(model, max_position=min(longest, model.max_position))
    spans: list[tuple[float, float]] = []  # of a sweep's Steps in layers

    def on_step(step: Step, start: float, end: float) -> None:
        if step.kind not in _OUTSIDE_LAYERS:
            spans.append((start, end))

    executor = in_memory(
        part, dummy_checkpoint(part), torch_dtype, blocks, DEFAULT_KV_BLOCK_SIZE, kernels=kernels, on_step=on_step
    )
    key_bytes = model.kv_size * torch_dtype.itemsize

    def run(sweep: _Sweep) -> float:
        batch = pack(
            _scheduled(sweep, model.state is not None),
            kv_block_size=DEFAULT_KV_BLOCK_SIZE,
            key_bytes=key_bytes,
            windows=frozenset(model.window_layers),
        )
        spans.clear()
        executor.run([batch], lambda rows, logits, start: None)
        return spans[-1][1] - spans[0][0]

    with contextlib.closing(executor):
        yield run


def _scheduled(sweep: _Sweep, has_states: bool) -> list[ScheduledSequence]:
    scheduled = []
    shared_blocks = sweep.cached // DEFAULT_KV_BLOCK_SIZE if sweep.shared else 0
    next_block = shared_blocks
    for i in range(sweep.count):
        sequence = Generated(
            i, i, 0, [(i + j) % _VOCAB for j in range(sweep.cached + sweep.new)], SamplingParams(), KVPlacement.CPU
        )
        num_blocks = -(-(sweep.cached + sweep.new) // DEFAULT_KV_BLOCK_SIZE) - shared_blocks
        sequence.block_table = array("i", [*range(shared_blocks), *range(next_block, next_block + num_blocks)])
        next_block += num_blocks
        sequence.num_computed, sequence.num_matched_blocks = sweep.cached, shared_blocks
        if has_states:
            sequence.state = StateSlot(i if sweep.cached else NO_STATE, i)
        scheduled.append(ScheduledSequence(sequence, sweep.new))
    return scheduled
