"""Errors of failed rows are told in groups, whatever the order in which their rows were written."""

import pytest

from batchgen.output.error_kinds import ErrorKind, error_kinds
from batchgen.output.parts import part_paths, write_part
from batchgen.output.row_result import RowResult

ERRORS = ["the prompt has 5 tokens", "column 'text' is null", "the prompt has 20 tokens", "the answer is empty"]


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[2, 3], [0, 1]], [[0, 1], [2, 3]], [[3], [2], [1], [0]]])
def test_a_group_is_shown_by_its_first_row_and_equal_groups_come_in_the_order_of_rows(tmp_path, parts):
    for number, rows in enumerate(parts):
        write_part(tmp_path, number, {row: RowResult((), (), 0, (), error=ERRORS[row]) for row in rows})
    assert error_kinds(part_paths(tmp_path)) == [
        ErrorKind("the prompt has 5 tokens", 2),
        ErrorKind("column 'text' is null", 1),
        ErrorKind("the answer is empty", 1),
    ]
