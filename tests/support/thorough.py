"""How far tests go: `make test` takes a quarter of an hour on two cores, `make test-thorough` as long as it needs."""

import os

import pytest

THOROUGH = os.environ.get("BATCHGEN_TEST_THOROUGH") == "1"
only_thorough = pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it")


def quick_or(quick, thorough):
    """The one or the other, as the tests are run."""
    return thorough if THOROUGH else quick
