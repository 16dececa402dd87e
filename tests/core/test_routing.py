"""How routers spread tokens, fitted to what was counted."""

import random

import pytest

from batchgen.core.routing import INDEPENDENT, RoutingCounts

EXPERTS, CHOSEN = 64, 4


def counted(calls, num_groups=None, favourites=()):
    """Counts of calls of so many tokens. num_groups: tokens of one group choose alike; None: each draws by itself."""
    draw, counts = random.Random(0), RoutingCounts(EXPERTS, CHOSEN)
    for tokens in calls:
        of_each = [0] * EXPERTS
        choices = [
            (*favourites, *draw.sample(range(len(favourites), EXPERTS), CHOSEN - len(favourites)))
            for _ in range(num_groups or tokens)
        ]
        for i in range(tokens):
            for expert in choices[i % len(choices)]:
                of_each[expert] += 1
        counts.add(of_each)
    return counts


def mean_touched(calls, **how):
    draw_of = {tokens: counted([tokens] * 200, **how) for tokens in set(calls)}
    return {tokens: counts._totals[tokens][1] / 200 for tokens, counts in draw_of.items()}


def test_tokens_that_draw_by_themselves_are_found_to():
    found = counted([2, 4, 8, 16] * 100).fitted()
    assert found.exponent == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("how", [{"favourites": (0, 1)}, {"favourites": (0, 1, 2)}, {"num_groups": 3}])
def test_tokens_that_are_alike_touch_as_many_as_were_counted(how):
    calls = [2, 4, 8, 16] * 100
    found = counted(calls, **how).fitted()
    assert 0 < found.exponent < 0.95
    touched = mean_touched(calls, **how)
    expected = sum(found.touched(EXPERTS, CHOSEN, tokens) for tokens in touched)
    assert expected == pytest.approx(sum(touched.values()), rel=0.05)


def test_the_busiest_expert_is_compared_with_the_mean_of_those_touched():
    counts = RoutingCounts(4, 2)
    for _ in range(50):
        counts.add([3, 2, 1, 0])
    assert counts.fitted().imbalance == pytest.approx(3 / 2)
    assert counted([8] * 50, favourites=(0,)).fitted().imbalance > counted([8] * 50).fitted().imbalance > 1


def test_what_says_too_little_is_not_fitted():
    assert RoutingCounts(0, 0, 0).fitted() is None, "no experts"
    assert counted([8] * 10).fitted() is None, "few calls"
    assert counted([1] * 100).fitted() is None, "one token touches as many as it chooses"
    assert counted([200] * 100).fitted() is None, "all are touched, however tokens choose"
    of_a_sweep = RoutingCounts(EXPERTS, CHOSEN, layers=48)  # one call for each layer
    for _ in range(48):
        of_a_sweep.add([8] * 4 + [0] * 60)
    assert of_a_sweep.fitted() is None, "few sweeps, which have many calls"
    counts = counted([8] * 100)
    counts.reset_counts()
    counts.add([0] * EXPERTS)
    assert counts.fitted() is None


def test_calls_that_touch_all_leave_the_exponent_alone():
    assert counted([8] * 100 + [200] * 100).fitted().exponent == counted([8] * 100).fitted().exponent
    assert INDEPENDENT.touched(EXPERTS, CHOSEN, 200) > 0.95 * EXPERTS
