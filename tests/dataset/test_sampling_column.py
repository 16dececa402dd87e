"""Rows with sampling parameters of their own."""

from batchgen.core.request import SamplingParams
from batchgen.dataset.sampling_column import SamplingColumn


def test_structs_have_the_fields_of_all_rows():
    """JSON objects become structs, in which a row has nulls for what other rows give."""
    column = SamplingColumn("s", SamplingParams())
    row = {"temperature": None, "logit_bias": {"13": 5.0, "20": None}}
    assert column.of_row(row) == SamplingParams(logit_bias=((13, 5.0),))
