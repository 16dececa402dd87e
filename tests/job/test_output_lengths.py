"""Lengths of outputs, told from those that have ended and those that still run."""

import numpy as np

from batchgen.job.output_lengths import OutputLengths


def drawn(outputs, running, limit):
    running = np.array(running)
    return outputs.draw(running, np.full(len(running), limit), running)


def test_the_first_outputs_to_end_do_not_make_all_others_short():
    outputs = OutputLengths()
    for tokens in (4, 6, 7, 9, 10, 11):
        outputs.add(tokens, cut=False)
    assert drawn(outputs, [12] * 394, 96).mean() > 80


def test_lengths_that_were_seen_are_drawn_as_often_as_they_were_seen():
    outputs = OutputLengths()
    for _ in range(50):
        outputs.add(10, cut=False)
        outputs.add(30, cut=False)
    lengths = outputs.draw(np.zeros(100, int), np.full(100, 96), np.zeros(0, int))
    assert 45 <= (lengths == 10).sum() <= 55 and set(lengths.tolist()) == {10, 30}
    assert (outputs.draw(np.full(10, 15), np.full(10, 96), np.zeros(0, int)) == 30).all()


def test_outputs_that_reach_their_limit_go_to_the_limit():
    outputs = OutputLengths()
    for _ in range(50):
        outputs.add(96, cut=True)
    assert (drawn(outputs, [5, 50], 96) == 96).all() and outputs.known
