"""What has to be run for some continuations, and what is made of the logits: against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.request import SamplingParams
from batchgen.engine.token_tree import paths_of, windows_of
from batchgen.runtime.scorer import Scorer
from batchgen.schedule.sequence import NOT_FINITE, Sequence

few_tokens = st.integers(0, 2)  # so that continuations have much in common


@settings(max_examples=some_draws(300), deadline=None)
@given(
    st.lists(few_tokens, min_size=1, max_size=4),
    st.lists(st.lists(few_tokens, min_size=1, max_size=5), min_size=1, max_size=7),
)
def test_every_token_is_scored_given_what_is_before_it(context, continuations):
    paths, places = paths_of(context, continuations)
    asked = set()
    for path in paths:
        first = len(path.tokens) - len(path.targets)
        for position, targets in enumerate(path.targets):
            before = path.tokens[: first + position + 1]
            assert before not in asked, "a place of the tree is asked for once"
            asked.add(before)
            assert len(targets) == len(set(targets)) > 0
    for tokens, own in zip(continuations, places, strict=True):
        assert len(own) == len(tokens)
        for j, (path, position, target) in enumerate(own):
            first = len(paths[path].tokens) - len(paths[path].targets)
            assert list(paths[path].tokens[: first + position + 1]) == [*context, *tokens[:j]]
            assert paths[path].targets[position][target] == tokens[j]
    assert asked == {(*context, *tokens[:j]) for tokens in continuations for j in range(len(tokens))}
    runs = {tuple(tokens[:-1]) for tokens in continuations}
    leaves = [run for run in runs if not any(other != run and other[: len(run)] == run for other in runs)]
    assert len(paths) == len(leaves), "as few sequences as there can be"


@given(st.integers(1, 60), st.integers(1, 12))
def test_windows_score_every_token_once_with_a_context_as_long_as_can_be(count, length):
    text = [100 + i for i in range(count)]
    scored = []
    for number, window in enumerate(windows_of(0, text, length)):
        tokens = [0, *text]
        assert len(window.tokens) <= length
        first = len(window.tokens) - len(window.targets)
        assert first == 0 if number == 0 else first >= 0
        for position, (target,) in enumerate(window.targets):
            seen = list(window.tokens[: first + position + 1])
            at = tokens.index(target)
            assert tokens[at - len(seen) : at] == seen
            scored.append(target)
        assert len(window.tokens) == min(length, count), "all of the context is made use of"
    assert scored == text


def scores_of(logits, targets, logprobs, chunk_widths, rows_at_a_time):
    """Of one sequence that asks for all rows, fed to a Scorer in chunks of rows and columns."""
    sequence = Sequence(0, 0, 0, [0] * len(logits), SamplingParams(logprobs=logprobs), targets=targets)
    asked = [(sequence, i) for i in range(len(logits))]
    scorer, start = Scorer(), 0
    for width in chunk_widths:
        for i in range(0, len(asked), rows_at_a_time):
            part = logits[i : i + rows_at_a_time, start : start + width].contiguous()
            scorer.take(asked[i : i + rows_at_a_time], part, start)
        start += width
    assert start == logits.shape[1]
    found = list(scorer.results())
    assert [a for a, _ in found] == asked
    return [score for _, score in found]


@pytest.mark.parametrize("chunk_widths", [(40,), (5,) * 8, (39, 1), (1,) * 40])
@pytest.mark.parametrize("rows_at_a_time", [1, 4, 100])
@pytest.mark.parametrize("logprobs", [None, 0, 3, 100])
def test_scores_are_those_of_a_softmax(chunk_widths, rows_at_a_time, logprobs):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 40, generator=generator) * 5
    targets = tuple(tuple(torch.randperm(40, generator=generator)[: 1 + i % 3].tolist()) for i in range(9))
    expected = logits.double().log_softmax(-1)
    for row, score in enumerate(scores_of(logits, targets, logprobs, chunk_widths, rows_at_a_time)):
        assert score.logprobs == pytest.approx(expected[row][list(targets[row])].tolist(), abs=1e-5)
        assert score.argmax == expected[row].argmax().item()
        values, tokens = expected[row].topk(min(logprobs or 0, 40))
        assert [token for token, _ in score.top] == tokens.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("chunk_widths", [(12,), (3,) * 4, (1,) * 12])
def test_of_equally_likely_tokens_the_first_counts(chunk_widths):
    logits = torch.zeros(3, 12)
    logits[0, [4, 7, 11]] = 2.5
    logits[1, [2, 3]] = 1.0
    found = scores_of(logits, ((7, 4),) * 3, 0, chunk_widths, 100)
    assert [score.argmax for score in found] == [4, 2, 0]
    assert found[0].logprobs[0] == found[0].logprobs[1]


@pytest.mark.parametrize("chunk_widths", [(12,), (3,) * 4, (1,) * 12])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_with_a_logit_that_is_not_finite_are_marked(value, chunk_widths):
    for at in (0, 4, 11):
        logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(at))
        healthy = scores_of(logits, ((7, 4),) * 3, 2, chunk_widths, 100)
        logits[1, at] = value
        first, second, third = scores_of(logits, ((7, 4),) * 3, 2, chunk_widths, 100)
        assert (first, second.argmax, third) == (healthy[0], NOT_FINITE, healthy[2])
