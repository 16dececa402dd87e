"""The search for formats of weights and KV: a coarse one over all that are allowed, before the one in two of them.

Of formats whose fastest plans take about the same time, those that lose least are taken.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

from batchgen.core.errors import InputError
from batchgen.core.quality import loss_of
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.search import TIE, BestFirst, search


def in_best_formats(problem: Problem) -> Problem:
    """The problem in the formats whose fastest plan is the fastest, or of about equal ones in those that lose least.

    Raises:
        InputError: No plan fits in any of the formats.
    """
    if len(list(problem.formats)) < 2:
        return problem
    entries = BestFirst(replace(problem, coarse=True))
    try:
        chosen = entries.fastest()
    except InputError:
        search(problem)  # which says what is short
        raise
    assert chosen is not None  # nothing was pruned
    limit_s, inputs = TIE * chosen.job_s, chosen.inputs
    with contextlib.suppress(InputError):  # nothing is left
        while (other := entries.fastest(lambda seconds: seconds > limit_s, _loses_less(inputs))) is not None:
            inputs = other.inputs
    return in_formats(problem, inputs.weight_format, inputs.kv_format)


def _loses_less(than: CostInputs) -> Callable[[CostInputs], bool]:
    """A predicate of inputs, true for those in formats that lose less than the given ones."""
    loss = loss_of(than.weight_format, than.kv_format)
    return lambda inputs: loss_of(inputs.weight_format, inputs.kv_format) < loss


def in_formats(problem: Problem, weight_format: str, kv_format: str) -> Problem:
    """The problem in one format of weights and one of KV."""
    return replace(problem, weight_formats=(weight_format,), kv_formats=(kv_format,), most_loss=math.inf)
