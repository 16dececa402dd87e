"""docs/failures.md has what happens (support/failure_cases.py writes it)."""

import pytest
from failure_cases import CASES, PAGE, line, outcome
from thorough import some_of


@pytest.mark.parametrize("case", some_of(CASES, 8, "failures"), ids=lambda case: case.what)
def test_the_page_has_what_happens(tiny_models, tmp_path, case):
    assert line(case, outcome(case, tiny_models("llama")[0], tmp_path)) in PAGE.read_text().splitlines()


def test_the_page_has_all_cases_and_no_others():
    lines = [text for text in PAGE.read_text().splitlines() if text.startswith("| ")]
    named = [text.split(" | ")[0].removeprefix("| ") for text in lines]
    assert [name for name in named if name != "what"] == [case.what for case in CASES]
