"""How far tests go, and what they draw.

`make test` is for every change; `make test-all` (`pytest --all`) also runs the tests marked `thorough` and takes the
larger of what `quick_or` chooses from. BUDGET.md lists what that is.

`make test` draws the same examples every time, so that a change fails for what it changed and not for the day it is
made on. The draws of `make test-all` differ from day to day, so that examples add up. BATCHGEN_TEST_SEED repeats a
run's.
"""

import os
import random
import time

THOROUGH = os.environ.get("BATCHGEN_TEST_ALL") == "1"
SEED = int(os.environ.get("BATCHGEN_TEST_SEED") or (time.time() // 86400 if THOROUGH else 0))
os.environ["BATCHGEN_TEST_SEED"] = str(SEED)  # for the processes of this run, whose day may be another


def quick_or(quick, thorough):
    """The one or the other, as the tests are run."""
    return thorough if THOROUGH else quick


def some_draws(count: int) -> int:
    """How many examples Hypothesis draws: all of them in `make test-all`, a quarter in `make test`."""
    return quick_or(-(-count // 4), count)


def same_draws_in_every_process() -> None:
    """Keeps Hypothesis from drawing numbers that it finds in the modules loaded so far.

    Which modules those are depends on the tests that a process of pytest-xdist happened to run before.
    """
    from hypothesis.internal.conjecture import providers

    nothing = providers.Constants()
    providers._get_local_constants = lambda: nothing


def rotating(*what) -> random.Random:
    """A generator for what it is called; in `make test-all` another one every day."""
    return random.Random(repr((SEED, *what)))


def some_of(cases, count: int, *what) -> list:
    """All cases of a table in `make test-all`; so many of them, always the same, in `make test`."""
    cases = list(cases)
    drawn = sorted(rotating(*what).sample(range(len(cases)), min(count, len(cases))))
    return quick_or([cases[i] for i in drawn], cases)


def covering(cases, count: int, *what) -> list:
    """All rows of a table in `make test-all`; in `make test` so many, or more, with each value of each column."""
    cases = list(cases)
    return quick_or(cover(cases, count, *what), cases)


def cover(cases, count: int, *what) -> list:
    """So many rows of a table, or more, with each value of each column."""
    cases = list(cases)
    drawn = rotating(*what).sample(range(len(cases)), len(cases))
    missing = {place for case in cases for place in enumerate(case)}
    kept = []
    while missing:
        best = max(drawn, key=lambda i: len(missing.intersection(enumerate(cases[i]))))  # the first of those as good
        missing.difference_update(enumerate(cases[best]))
        kept.append(best)
    rest = [i for i in drawn if i not in kept][: max(0, count - len(kept))]
    return [cases[i] for i in sorted(kept + rest)]
