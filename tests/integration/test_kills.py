"""The campaign of `make kill-check`, in small.

Jobs killed and interrupted in every tier end in the output of an undisturbed one.
"""

import sys
from pathlib import Path

import pytest
from thorough import SEED

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kills import HOW, TIERS, run_campaign


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(7200)
def test_killed_and_interrupted_in_every_tier(tmp_path):
    wanted = 30
    found = run_campaign(tmp_path, kills=wanted, interrupts=wanted, seed=SEED, rows=60)
    assert found["mismatches"] == 0 and found["exact_tiers_are_equal"]
    for kind in HOW:
        accounts = [found["tiers"][name][kind] for name in TIERS]
        assert sum(account["hits"] for account in accounts) >= wanted
        assert sum(account["runs_resumed"] for account in accounts) >= wanted - 1
    interrupted = [found["tiers"][name]["interrupts"] for name in TIERS]
    assert all(account["rows_run_again"] == 0 for account in interrupted), (
        "an interrupted job saves all that is finished"
    )
