"""The search for the fastest policy: discrete settings are enumerated, and a MIP places weights, KV and activations.

FlexGen 4.3, two levels: block size, micro-batches, token budget, dtypes and admission are enumerated, placement is an
LP. Here the search is exact on its ladder: inputs are visited in the order of a lower bound that needs no solver, each
LP is a bound on what its integer placement can reach, and the search ends when no bound beats the best integer
placement found. So more memory or a faster rate can never lead to a slower plan.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from batchgen.core.errors import InputError
from batchgen.core.kv_placement import KVPlacement
from batchgen.planner.balance import with_unequal_batches
from batchgen.planner.bound import LowerBounds
from batchgen.planner.costs import job_seconds
from batchgen.planner.experts import on_demand_tokens
from batchgen.planner.feasibility import Feasibility
from batchgen.planner.infeasible import check_budgets, explain_infeasible
from batchgen.planner.mip import EQUALLY_FAST, Solution, fits, in_host_memory, solve, with_embeddings
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts
from batchgen.planner.problem import Allowed, CostInputs, Problem
from batchgen.planner.search_space import max_num_seqs_choices, search_space
from batchgen.planner.startup import least_startup_s

# Predicted times this close count as equal.
TIE = 1.02
# What is slower than the fastest by more than this factor is not looked at again: the cost model is not that far off.
_SIMULATED_WITHIN = 1.25
# A candidate that would be pruned if it were slower by this factor gains nothing from another order of micro-batches.
_AS_GOOD = 1.05


@dataclass(frozen=True)
class Candidate:
    """Inputs and the best placement found for them.

    Attributes:
        inputs: settings of the search space.
        phases: the job's sweeps under them.
        relaxed: the LP's optimum, a bound that no placement of these inputs beats.
        incumbent: the fastest integer placement that was found.
    """

    inputs: CostInputs
    phases: tuple[Phase, ...]
    relaxed: Solution
    incumbent: Solution

    @property
    def seconds(self) -> float:
        """Seconds of all sweeps."""
        return self.incumbent.seconds

    @property
    def startup_s(self) -> float:
        """Seconds from where weights begin to load to the first sweep."""
        return self.incumbent.startup_s

    @property
    def job_s(self) -> float:
        """Seconds of the job, from where weights begin to load."""
        return self.incumbent.job_s

    @property
    def counts(self) -> Counts:
        return self.incumbent.counts


# So many LPs, those of the least bounds that can be used, are solved for a kind: its other sizes are about as fast.
_MOST_OF_KIND = 3

_ORDERS = ("even", "neo", "mixed")
# Prune predicates: true if a candidate whose job takes so many seconds or more by the cost model cannot be the plan, or
# one with these inputs in this order of micro-batches, with these seconds of its sweeps and of its start-up.
Prune = Callable[[float], bool]
PruneOrder = Callable[[CostInputs, str, float, float], bool]


def prune_nothing(*_: object) -> bool:
    """A prune predicate that keeps all candidates."""
    return False


# The best placement by the LP alone, for inputs and phases.
_Relaxed = tuple[Solution, CostInputs, tuple[Phase, ...]]


def search(problem: Problem) -> Candidate:
    """The fastest plan whose peak fits every budget. Raises InputError, saying what is short, if none does."""
    return next(candidates(problem, most=1))


def search_unless_pruned(problem: Problem, prune: Prune, bounds: LowerBounds | None = None) -> Candidate | None:
    """The fastest plan; None once all that may still be found are pruned. Raises InputError if no plan fits.

    bounds: of another search of the same problem, or of one with restrictions; None: of this one alone.
    """
    entries = BestFirst(problem, bounds)
    fastest = entries.fastest(prune)
    return _least_movement(fastest, entries.problem.allowed) if fastest else None


def candidates(
    problem: Problem,
    most: int,
    prune: Prune = prune_nothing,
    prune_order: PruneOrder = prune_nothing,
    bounds: LowerBounds | None = None,
) -> Iterator[Candidate]:
    """The fastest plan by the cost model, and then plans of other kinds that are not much slower by it.

    A kind is a number of micro-batches and a length of sweeps. Those with more than one micro-batch come in each order
    that may be the best one (`in_orders`); a single one that is asked for comes as it is.

    Args:
        most: kinds that are looked at, the fastest of each number of micro-batches before any others.
        prune: prune predicate, asked with a lower bound on a candidate's seconds before the candidate is worked out.
        prune_order: prune predicate for an order of micro-batches, asked likewise.
        bounds: Bounds of other searches of the same problem too; None: those of this one alone.

    Raises:
        InputError: no plan fits. It says what is short.
    """
    entries = BestFirst(problem, bounds)
    problem = entries.problem
    fastest = entries.fastest()
    assert fastest is not None  # nothing was given up
    best = _least_movement(fastest, problem.allowed)
    if most == 1:
        yield best
        return
    yield from in_orders(problem, best, prune, prune_order)
    kinds, looked_at = entries.kinds(fastest.job_s * _SIMULATED_WITHIN, most, prune), [best.inputs]
    for relaxed, inputs, phases in _other_kinds(best, kinds)[: most - 1]:
        if any(_is_like(inputs, others) for others in looked_at):
            continue
        looked_at.append(inputs)
        orders = [order for order in _ORDERS if order != "neo" or inputs.num_gpu_batches == 2]
        if all(prune_order(inputs, order, relaxed.seconds, relaxed.startup_s) for order in orders):
            continue
        candidate = integer_candidate(problem, relaxed, inputs, phases, prune)
        if candidate is not None:
            yield from in_orders(problem, candidate, prune, prune_order)


class BestFirst:
    """Entries of the search space, the most promising first.

    An entry is known by a bound of a few products, then by a closer one that needs no solver either, then by the LP,
    which is a bound on integer placements, and then by its integer placement. Whatever has the least of these seconds
    is worked out next. So no bound is computed, and no LP and no integer MIP solved, that the answer does not depend
    on.
    """

    def __init__(self, problem: Problem, bounds: LowerBounds | None = None) -> None:
        """Put all entries in their order by quick bounds.

        Args:
            problem: The problem.
            bounds: Bounds of other searches of the same problem too; None: of this one alone.

        Raises:
            InputError: The machine does not have one of the budgets.
        """
        check_budgets(problem)
        self._too_slow = False
        self._kinds: dict[tuple[int, int], _Relaxed] = {}
        self._bounds = bounds or LowerBounds()
        self._heap = [
            _Entry(least_startup_s(s) + self._bounds.quick_s(s, phases), i, s, phases)
            for i, (s, phases) in enumerate(search_space(problem))
        ]
        heapq.heapify(self._heap)
        self.problem = problem = _without_disk_for_kv(problem, [entry.inputs for entry in self._heap])
        self._feasible = Feasibility((entry.inputs for entry in self._heap), lambda s: fits(s, problem.allowed))

    def fastest(
        self, prune: Prune = prune_nothing, is_wanted: Callable[[CostInputs], bool] = lambda inputs: True
    ) -> Candidate | None:
        """The fastest integer placement that is left.

        Args:
            prune: Prune predicate.
            is_wanted: Predicate of inputs; entries for which it is false are left out.

        Returns:
            The placement with its inputs; None where it is pruned.

        Raises:
            InputError: None fits, or none is left.
        """
        while self._heap:
            if prune(self._heap[0].seconds):
                return None
            entry = heapq.heappop(self._heap)
            if not is_wanted(entry.inputs):
                continue
            if not entry.bounded:
                self._bound(entry)
                continue
            if entry.relaxed is not None:
                self._kinds.setdefault(_kind(entry.inputs), (entry.relaxed, entry.inputs, entry.phases))
                if entry.incumbent is not None:
                    return Candidate(entry.inputs, entry.phases, entry.relaxed, entry.incumbent)
            self._work_out(entry)
        raise InputError(_too_slow(self.problem) if self._too_slow else explain_infeasible(self.problem))

    def kinds(self, limit_s: float, most: int, prune: Prune) -> Mapping[tuple[int, int], _Relaxed]:
        """The kinds that `_other_kinds` takes: about the fastest by the LP, where that is below a limit and not pruned.

        The first kind of each number of micro-batches is among them, others only until there are `most`: they come in
        the order of their seconds.
        """
        worked_out = Counter[tuple[int, int]]()
        while self._heap and self._heap[0].seconds < limit_s and not prune(self._heap[0].seconds):
            entry = heapq.heappop(self._heap)
            kind = _kind(entry.inputs)
            if kind in self._kinds or (len(self._kinds) >= most and kind[0] in {number for number, _ in self._kinds}):
                continue
            if not entry.bounded:
                if worked_out[kind] < _MOST_OF_KIND:
                    self._bound(entry)
            elif entry.relaxed is not None:
                self._kinds[kind] = entry.relaxed, entry.inputs, entry.phases
            elif worked_out[kind] < _MOST_OF_KIND:
                worked_out[kind] += self._work_out(entry)
        return self._kinds

    def _bound(self, entry: _Entry) -> None:
        """Put an entry back with its closer bound, unless that says that it does not fit."""
        seconds = least_startup_s(entry.inputs) + self._bounds.bound_s(entry.inputs, entry.phases)
        if seconds < math.inf:
            heapq.heappush(self._heap, replace(entry, seconds=seconds, bounded=True))

    def _work_out(self, entry: _Entry) -> bool:
        """Solve the entry; return true if it is back in the heap, as something fits and its blocks are fast enough."""
        known = in_host_memory(entry.inputs, entry.phases, self.problem.allowed) if entry.relaxed is None else None
        if known is not None:
            if _exceeds_latency(self.problem, entry.inputs, entry.phases, known):
                self._too_slow = True
                return False
            heapq.heappush(self._heap, replace(entry, seconds=known.job_s, relaxed=known, incumbent=known))
            return True
        if entry.relaxed is None and entry.inputs not in self._feasible:
            return False
        solution = solve(entry.inputs, entry.phases, self.problem.allowed, integer=entry.relaxed is not None)
        if solution is None:
            return False
        inputs = entry.inputs
        if entry.relaxed is None:
            inputs, solution = _with_experts_on_demand(inputs, entry.phases, self.problem.allowed, solution)
        if _exceeds_latency(self.problem, inputs, entry.phases, solution):
            self._too_slow = True
            return False
        if entry.relaxed is None:
            better = replace(entry, seconds=solution.job_s, inputs=inputs, relaxed=solution)
        else:
            better = replace(entry, seconds=solution.job_s, incumbent=solution)
        heapq.heappush(self._heap, better)
        return True


def _without_disk_for_kv(problem: Problem, entries: list[CostInputs]) -> Problem:
    """The problem of a job that generates nothing without KV on disk, where its smallest block fits without it.

    Such KV is not read again after its prompt. On disk it would only spare the memory that is used for the first time.

    Args:
        problem: The problem.
        entries: The inputs of the search space.
    """
    placements = tuple(name for name in problem.allowed.kv_placements if name != KVPlacement.DISK)
    if problem.workload.scored_len is None or not placements or not entries:
        return problem
    allowed = replace(problem.allowed, kv_placements=placements)
    smallest = min(entries, key=lambda s: (s.max_num_seqs, s.max_num_batched_tokens))
    return replace(problem, allowed=allowed) if fits(smallest, allowed) else problem


@dataclass(frozen=True, order=True)
class _Entry:
    """An entry of the search space.

    Attributes:
        seconds: Seconds of the job, as far as they are known.
        number: A number that decides between entries of equal seconds.
        inputs: The inputs of the cost model.
        phases: The job's sweeps under them.
        bounded: Whether `seconds` is at least the bound of `LowerBounds`; otherwise it is the quick one.
        relaxed: The optimum of the LP, once it is solved.
        incumbent: The integer placement, once it is found.
    """

    seconds: float
    number: int
    inputs: CostInputs = field(compare=False)
    phases: tuple[Phase, ...] = field(compare=False)
    bounded: bool = field(default=False, compare=False)
    relaxed: Solution | None = field(default=None, compare=False)
    incumbent: Solution | None = field(default=None, compare=False)


def _with_experts_on_demand(
    s: CostInputs, phases: tuple[Phase, ...], allowed: Allowed, solution: Solution
) -> tuple[CostInputs, Solution]:
    """Inputs that read experts on demand, where that is faster with this placement, and the best placement for them."""
    tokens = on_demand_tokens(s, solution.placement)
    if not tokens:
        return s, solution
    inputs = replace(s, on_demand_tokens=tokens)
    if all(phase.tokens > tokens for phase in phases):
        return inputs, solution
    return inputs, solve(inputs, phases, allowed, integer=False) or solution


def _kind(s: CostInputs) -> tuple[int, int]:
    """Number of micro-batches, and tokens of a sweep to a factor of four."""
    return s.num_gpu_batches, round(math.log(s.max_num_batched_tokens, 4))


def _is_like(s: CostInputs, other: CostInputs) -> bool:
    """Tell whether inputs of two kinds lie on both sides of a limit between these: their sweeps are about as long."""
    tokens = sorted((s.max_num_batched_tokens, other.max_num_batched_tokens))
    return s.num_gpu_batches == other.num_gpu_batches and tokens[1] < 2 * tokens[0]


def _other_kinds(best: Candidate, kinds: Mapping[tuple[int, int], _Relaxed]) -> list[_Relaxed]:
    """Other kinds than the best one's: the fastest of each number of micro-batches, then the rest.

    Among the former the one with a single micro-batch comes first, as the cost model knows its time best, then the
    fastest.
    """
    ranked = sorted((entry for kind, entry in kinds.items() if kind != _kind(best.inputs)), key=lambda e: e[0].job_s)
    seen = {best.inputs.num_gpu_batches}
    first: list[_Relaxed] = []
    rest: list[_Relaxed] = []
    for entry in ranked:
        (rest if entry[1].num_gpu_batches in seen else first).append(entry)
        seen.add(entry[1].num_gpu_batches)
    return sorted(first, key=lambda entry: entry[1].num_gpu_batches != 1) + rest


def integer_candidate(
    problem: Problem, relaxed: Solution, inputs: CostInputs, phases: tuple[Phase, ...], prune: Prune
) -> Candidate | None:
    """The candidate with an integer placement; None where there is none, or it is pruned."""
    if prune(relaxed.job_s):
        return None
    incumbent = relaxed if _is_known(relaxed) else solve(inputs, phases, problem.allowed, integer=True)
    if incumbent is None or _exceeds_latency(problem, inputs, phases, incumbent):
        return None
    return _least_movement(Candidate(inputs, phases, relaxed, incumbent), problem.allowed)


def in_orders(
    problem: Problem, candidate: Candidate, prune: Prune = prune_nothing, prune_order: PruneOrder = prune_nothing
) -> Iterator[Candidate]:
    """The candidate in each order that may be the best.

    Where the CPU attends to some of its sequences, micro-batches with one class after the other leave it nothing to do
    beside the first of them: they are as they are only where no other order is tried.
    """
    others = _in_other_orders(problem, candidate, prune, prune_order)
    if (
        candidate.inputs.num_gpu_batches > 1
        and KVPlacement.CPU in (attended := _attended(candidate))
        and len(attended) > 1
    ):
        first = next(others, None)
        yield candidate if first is None else first
    else:
        yield candidate
    yield from others


def _in_other_orders(
    problem: Problem, candidate: Candidate, prune: Prune, prune_order: PruneOrder
) -> Iterator[Candidate]:
    """The candidate in NEO's order, and with micro-batches that are mixed, which are the same to the cost model.

    These are tried only where the cost model leaves them something to gain.
    """
    inputs, startup_s = candidate.inputs, candidate.startup_s

    def prune_neo(job_s: float) -> bool:
        return prune(job_s) or prune_order(inputs, "neo", job_s - startup_s, startup_s)

    yield from _in_neos_order(problem, candidate, prune_neo)
    if inputs.num_gpu_batches > 1 and len(_attended(candidate)) > 1 and not prune(candidate.job_s * _AS_GOOD):
        yield replace(candidate, inputs=replace(inputs, batch_order="mixed"))


def _attended(candidate: Candidate) -> set[KVPlacement]:
    """KV placements that decode attention sees in a sweep; micro-batches of only one of them are mixed anyway."""
    counts = candidate.counts.kv_seqs
    return {KVPlacement(name).in_sweep("gpu", decodes=True) for name, count in counts.items() if count}


def _in_neos_order(problem: Problem, candidate: Candidate, prune: Prune) -> Iterator[Candidate]:
    """The candidate with unequal micro-batches, where it has two, and sequences that the CPU attends to."""
    if candidate.inputs.num_gpu_batches != 2 or not candidate.counts.kv_seqs.get("cpu"):
        return
    inputs = with_unequal_batches(candidate.inputs, candidate.counts.kv_seqs["cpu"])
    relaxed = solve(inputs, candidate.phases, problem.allowed, integer=False)
    unequal = relaxed and integer_candidate(problem, relaxed, inputs, candidate.phases, prune)
    if unequal and unequal.counts.kv_seqs.get("cpu"):
        yield unequal


def _is_known(relaxed: Solution) -> bool:
    """True for a placement that is known without a solver (`in_host_memory`)."""
    return not relaxed.columns


def _exceeds_latency(problem: Problem, s: CostInputs, phases: tuple[Phase, ...], solution: Solution) -> bool:
    return _block_latency_s(s, phases, solution.seconds) > (problem.max_block_latency_s or float("inf"))


def _least_movement(best: Candidate, allowed: Allowed) -> Candidate:
    """The candidate with the placement that moves least, among those that are about as fast.

    Where one resource binds, many placements are equally fast; this one leaves the disk alone if it is not needed.
    """
    if _is_known(best.relaxed):  # it moves nothing, and the solver has its prices
        return replace(best, relaxed=solve(best.inputs, best.phases, allowed, integer=False) or best.relaxed)
    within_s = best.job_s * (1 + EQUALLY_FAST)
    least = solve(best.inputs, best.phases, allowed, integer=True, within_s=within_s, start=best.incumbent)
    incumbent = with_embeddings(best.inputs, least or best.incumbent)
    tokens = on_demand_tokens(best.inputs, incumbent.placement)
    if tokens == best.inputs.on_demand_tokens:
        return replace(best, incumbent=incumbent)
    inputs = replace(best.inputs, on_demand_tokens=tokens)
    seconds = job_seconds(inputs, best.phases, incumbent.placement)
    return replace(best, inputs=inputs, incumbent=replace(incumbent, seconds=seconds))


def block_latency_s(candidate: Candidate) -> float:
    """Seconds from the first prompt of a block to its last token."""
    return _block_latency_s(candidate.inputs, candidate.phases, candidate.seconds)


def first_rows_s(candidate: Candidate) -> float:
    """Seconds until the first rows are finished: sweeps that fill the block, and then such as keep it full."""
    s = candidate.inputs
    sweeps = float(min(s.workload.output_len.values))
    filling = min(sweeps, max(1.0, s.workload.computed_prompt_len * s.max_num_seqs / s.max_num_batched_tokens))
    tokens = min(s.max_num_batched_tokens, s.workload.computed_prompt_len * s.max_num_seqs)
    seqs = tokens / s.workload.computed_prompt_len
    full = Phase(1, tokens, seqs, 0.0, s.workload.prompt_len.mean)
    later = max(candidate.phases, key=lambda phase: phase.decode_seqs)
    at = candidate.counts.placement(s)
    decoding = (sweeps - filling) / later.gained
    return filling * job_seconds(s, [full], at) + decoding * job_seconds(s, [later], at) / later.sweeps


def _block_latency_s(s: CostInputs, phases: tuple[Phase, ...], seconds: float) -> float:
    sweeps = sum(phase.sweeps * phase.gained for phase in phases)  # in which a row gains a token
    fill = s.workload.computed_prompt_len * s.max_num_seqs / s.max_num_batched_tokens
    per_token = s.deferral.sweeps_per_token if s.deferral else 1
    return seconds * min(1.0, (max(1.0, fill) + (s.workload.output_len.max - 1) * per_token) / sweeps)


def frontier(problem: Problem) -> list[tuple[float, float, Candidate]]:
    """The latency-throughput trade-off (FlexGen figure 1), from the shortest latency to the highest throughput.

    Returns:
        (block latency in s, generated or scored tokens/s, plan), without those that another one beats in both.
    """
    candidates_of_sizes = []
    for max_num_seqs in max_num_seqs_choices(problem):
        try:
            candidate = search(replace(problem, max_num_seqs=max_num_seqs, max_block_latency_s=None))
        except InputError:
            break  # larger blocks need more memory still
        rate = problem.workload.num_seqs * problem.workload.made_len / candidate.seconds
        candidates_of_sizes.append((block_latency_s(candidate), rate, candidate))
    candidates_of_sizes.sort(key=lambda entry: (entry[0], -entry[1]))
    best, pareto = 0.0, []
    for entry in candidates_of_sizes:
        if entry[1] > best * 1.001:
            best = entry[1]
            pareto.append(entry)
    return pareto


def _too_slow(problem: Problem) -> str:
    fastest = min(
        block_latency_s(search(replace(problem, max_block_latency_s=None, max_num_seqs=size)))
        for size in max_num_seqs_choices(problem)[:2]
    )
    return (
        f"no plan has a block latency of {problem.max_block_latency_s:g} s: the shortest possible is {fastest:.3g} s,"
        " give --max-block-latency at least that"
    )
