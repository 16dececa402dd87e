"""A knob that is turned while a job runs: it finds its place, does not swing, and looks again later."""

import itertools

from batchgen.schedule.knob import Knob


def test_turns_that_help_become_larger():
    knob, steps = Knob(), []
    for window in range(5):
        steps.append(knob.next_step("up"))
        knob.turn("up", window)
    assert steps == [1 / 8, 1 / 4, 1 / 2, 1 / 2, 1 / 2]


def test_what_failed_is_tried_again_after_pauses_that_grow():
    knob, at = Knob(), []
    for window in range(3000):
        if knob.may_turn("up", window):
            at.append(window)
            knob.turn("up", window)
            knob.take_back(window + 1)
    pauses = [after - before for before, after in itertools.pairwise(at)]
    assert pauses == sorted(pauses) and pauses[0] < 20 and 200 < pauses[-1] < 300 and len(at) < 20
    assert knob.next_step("up") < 1 / 32


def test_a_knob_does_not_swing():
    """Where each turn makes the other one look right, there are fewer and fewer, by less and less."""
    knob, direction, at = Knob(), "up", []
    for window in range(2000):
        if knob.may_turn(direction, window):
            knob.turn(direction, window)
            at.append(window)
            direction = "down" if direction == "up" else "up"
    assert len(at) < 24 and len([window for window in at if window >= 1000]) <= 8
    assert knob.next_step("up") <= 1 / 16
