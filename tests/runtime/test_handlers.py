"""Every kind of Step has a lane and a function that does its work."""

from __future__ import annotations

from typing import get_args

from batchgen.runtime.steps.handlers import HANDLERS
from batchgen.schedule.step_graph import KINDS, LANES, StepKind


def test_every_kind_of_step_has_a_handler_and_every_handler_a_kind():
    assert set(HANDLERS) == set(KINDS) == set(get_args(StepKind))


def test_no_two_kinds_of_step_share_a_handler():
    assert len(set(HANDLERS.values())) == len(HANDLERS)


def test_every_lane_has_a_kind_of_step_and_every_kind_a_lane():
    assert set(KINDS.values()) == set(LANES)
