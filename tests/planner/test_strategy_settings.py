"""The settings of benchmarks/strategy_plans.py: the plan follows the strategy that is meant to win."""

import sys
from pathlib import Path

import pytest
from thorough import some_of

from batchgen.models.hf.config import config_of_hf
from batchgen.planner.strategies import NEO
from batchgen.planner.strategy_times import best_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from random_model import LLAMA_3B
from strategy_settings import (
    FLIPPED,
    ROUND_PROCESS_BYTES,
    SETTINGS,
    SHAPE,
    plans_of,
    problem_on,
    round_machine,
    seconds_of,
)


def test_no_two_settings_are_won_by_the_same_strategy():
    winners = [name for setting in SETTINGS for name in setting.winners]
    assert len(winners) == len(set(winners)) and {"GPU-only", "NEO", "APEX", "FlexGen"} <= set(winners)


def test_a_strategy_has_the_micro_batches_in_the_order_in_which_they_are_fastest():
    """On the fast link mixed ones take 13.4 simulated seconds, equal ones 16.5, and those of unequal size 26.4."""
    config, setting = config_of_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE), SETTINGS[2]
    problem = problem_on(round_machine(setting.device), config, setting.workload, ROUND_PROCESS_BYTES)
    assert best_plan(NEO, problem).policy.batch_order == "mixed"


@pytest.mark.parametrize("setting", some_of((*SETTINGS, FLIPPED), 3, "settings"), ids=lambda setting: setting.name)
def test_the_plan_follows_the_strategy_that_is_meant_to_win(setting):
    config = config_of_hf(LLAMA_3B | {"rope_scaling": None} | SHAPE)
    plans, _, follows = plans_of(setting, round_machine(setting.device), config, ROUND_PROCESS_BYTES)
    assert follows in setting.winners
    seconds = dict(seconds_of(plans))
    assert seconds["chosen"] <= 1.05 * min(seconds.values())
    # FlexGen's strategy may be any placement: where it comes to the plan's own, it is no other.
    own = plans["chosen"].policy
    others = {n: s for n, s in seconds.items() if n not in (*setting.winners, "chosen") and plans[n].policy != own}
    assert others and seconds["chosen"] < min(others.values())
