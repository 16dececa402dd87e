"""Attention to chosen pages: kernels against torch, and both against a loop over pages in float64."""

import pytest
from hypothesis import given, settings
from page_cases import check_chosen_pages, page_cases
from thorough import some_draws

from batchgen.core.attention_budget import AttentionBudget
from batchgen.ops import cpp


@pytest.mark.parametrize("instruction_set", cpp.instruction_sets())
def test_kernels_attend_to_the_pages_of_the_rule(instruction_set):
    @settings(max_examples=some_draws(30), deadline=None)
    @given(page_cases())
    def test(case):
        with cpp.using(instruction_set):
            check_chosen_pages(case, by_torch=False)

    test()


@settings(max_examples=some_draws(40), deadline=None)
@given(page_cases())
def test_torch_attends_to_the_pages_of_the_rule(case):
    check_chosen_pages(case, by_torch=True)


def test_a_budget_is_a_share_or_a_number_of_tokens():
    assert AttentionBudget.of("all") is None and AttentionBudget.of("100%") is None
    assert AttentionBudget.of("10%").pages(100, 16) == 10
    assert AttentionBudget.of("10%").pages(101, 16) == 11
    assert AttentionBudget.of("1024").pages(512, 16) == 64
    assert AttentionBudget.of("1%").pages(100, 16) == 4  # the first page, the two newest and one more
    assert AttentionBudget.of("1%").pages(3, 16) == 3


@pytest.mark.parametrize("text", ["1%", "10%", "30%", "99%", "1", "270", "1024"])
def test_a_sequence_with_a_token_more_than_it_attends_to_chooses(text):
    budget = AttentionBudget.of(text)
    most = budget.most_dense_tokens(16) // 16
    assert budget.pages(most, 16) == most and budget.pages(most + 1, 16) <= most


@pytest.mark.parametrize("text", ["0", "0%", "101%", "ten", "-5", "", "%", "1e3"])
def test_what_is_no_budget_is_refused(text):
    from batchgen.core.errors import InputError

    with pytest.raises(InputError, match="--attention-budget"):
        AttentionBudget.of(text)
