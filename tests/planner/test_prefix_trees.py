"""Prefixes of which a job has many, each of some of its rows: what plans count, against one prefix of all rows."""

from dataclasses import replace

import pytest

from batchgen.core.errors import InputError
from batchgen.core.workload import Workload

ONE = Workload.uniform(600, 200, 20, shared_prefix_len=100)


def test_a_prefix_of_all_rows_is_one_whatever_is_in_flight():
    assert ONE.prefix_len == 100
    assert [ONE.prefixes_of(seqs) for seqs in (0, 1, 64)] == [0, 1, 1]


def test_of_each_group_one_row_computes_the_prefix():
    groups = replace(ONE, prefix_seqs=5.0)
    assert groups.prefix_len == pytest.approx(125)
    assert groups.prefix_len * (1 - 1 / 5) == pytest.approx(ONE.shared_prefix_len)
    assert [groups.prefixes_of(seqs) for seqs in (0, 2, 40)] == [0, 1, 8]
    assert replace(ONE, prefix_seqs=1.6).prefix_len < ONE.prompt_len.mean


def test_a_prefix_of_one_row_is_refused():
    with pytest.raises(InputError, match="shared by more than one sequence"):
        replace(ONE, prefix_seqs=1.0)
