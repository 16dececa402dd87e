"""Requests are tokenized some at a time."""

from batchgen.engine.encode import chunks


def test_requests_that_may_be_the_last_for_a_while_do_not_wait_for_more():
    source = iter(["a", "b", None, None, "c", *"d" * 64])
    made = chunks(source)
    assert next(made) == [(0, "a"), (1, "b")]
    assert next(source) is None  # nothing was read ahead
    rest = list(made)
    assert [len(chunk) for chunk in rest] == [64, 1]
    assert [number for chunk in rest for number, _ in chunk] == list(range(2, 67))
