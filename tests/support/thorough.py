"""How far tests go, and what they draw.

`make test` is for every change; `make test-all` (`pytest --all`) also runs the tests marked `thorough` and takes the larger of
what `quick_or` chooses from. BUDGET.md lists what that is.

Draws differ from day to day, so that examples add up, and are the same all day long; BATCHGEN_TEST_SEED repeats another day's.
"""

import os
import random
import time

THOROUGH = os.environ.get("BATCHGEN_TEST_ALL") == "1"
SEED = int(os.environ.get("BATCHGEN_TEST_SEED") or time.time() // 86400)
os.environ["BATCHGEN_TEST_SEED"] = str(SEED)  # for the processes of this run, whose day may be another


def quick_or(quick, thorough):
    """The one or the other, as the tests are run."""
    return thorough if THOROUGH else quick


def rotating(*what) -> random.Random:
    """A generator for what it is called, another one every day."""
    return random.Random(repr((SEED, *what)))
