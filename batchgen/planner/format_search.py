"""The search for formats of weights and KV: a coarse one over all that are allowed, before the one in two of them.

Of formats whose fastest plans take about the same time, those that lose least are taken.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from batchgen.core.errors import InputError
from batchgen.core.quality import loss_of
from batchgen.planner.problem import Problem
from batchgen.planner.search import TIE, BestFirst, search

_Formats = tuple[str, str]


def in_best_formats(problem: Problem) -> Problem:
    """The problem in the formats whose fastest plan is the fastest, or of about equal ones in those that lose least.

    Raises:
        InputError: No plan fits in any of the formats.
    """
    pairs = sorted(problem.formats, key=lambda pair: loss_of(*pair))
    if len(pairs) < 2:
        return problem
    searches = {pair: BestFirst(replace(in_formats(problem, *pair), coarse=True)) for pair in pairs}
    job_s: dict[_Formats, float] = {}

    def is_within(pair: _Formats, limit_s: float) -> bool:
        """True if the fastest plan in two formats takes no longer; it is searched for no further than that."""
        if pair not in job_s:
            with contextlib.suppress(InputError):
                fastest = searches[pair].fastest(lambda seconds: seconds > limit_s)
                if fastest is not None:
                    job_s[pair] = fastest.job_s
        return pair in job_s and job_s[pair] <= limit_s

    best_s = math.inf
    for pair in sorted(pairs, key=lambda pair: searches[pair].bound_s):
        if is_within(pair, best_s):
            best_s = job_s[pair]
    if not job_s:
        search(problem)  # which says what is short
    return in_formats(problem, *next(pair for pair in pairs if is_within(pair, TIE * best_s)))


def in_formats(problem: Problem, weight_format: str, kv_format: str) -> Problem:
    """The problem in one format of weights and one of KV."""
    return replace(problem, weight_formats=(weight_format,), kv_formats=(kv_format,), most_loss=math.inf)
