"""Losses of formats are those of the shipped measurement, and `--quality` allows what it says."""

import json
import math
from pathlib import Path
from statistics import mean

import pytest

from batchgen.core.dtypes import KV_CODE_BITS
from batchgen.core.quality import KV_LOSSES, QUALITIES, WEIGHT_LOSSES, allowed, format_loss, loss_of

RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "perplexity.json").read_text())["results"]


def measured_loss(name):
    """The loss in the result file, over fp32 or, for windows that were scored in part, over int8 KV in the same."""
    result, nats = RESULTS[name], RESULTS["fp32"]["nats_per_token"]
    if result["tokens_scored"] == RESULTS["fp32"]["tokens_scored"]:
        return math.exp(result["nats_per_token"] - nats) - 1
    windows = RESULTS["int8 KV"]["nats_by_window"][: len(result["nats_by_window"])]
    beyond = result["nats_per_token"] - mean(windows)
    return math.exp(RESULTS["int8 KV"]["nats_per_token"] + beyond - nats) - 1


@pytest.mark.parametrize(
    ("name", "loss"),
    [(f"{name} weights", loss) for name, loss in WEIGHT_LOSSES.items()]
    + [(f"{name} KV", loss) for name, loss in KV_LOSSES.items()],
)
def test_losses_are_those_of_the_result_file(name, loss):
    assert loss == round(measured_loss(name), 4)


def test_the_loss_of_two_formats_is_about_what_was_measured_for_both():
    assert loss_of("int4", "int5") == pytest.approx(measured_loss("int4 weights, int5 KV"), abs=0.002)
    assert loss_of("bfloat16", "bfloat16") == loss_of("q4_0", "float16") == 0


def test_every_kv_format_has_a_loss():
    assert KV_LOSSES.keys() == KV_CODE_BITS.keys()


def test_each_quality_allows_more_than_the_one_before():
    kv = [allowed(KV_LOSSES, KV_LOSSES, quality) for quality in QUALITIES]
    assert kv == [(), ("int8",), ("int8", "int5", "int4")]
    assert [allowed(WEIGHT_LOSSES, WEIGHT_LOSSES, quality) for quality in QUALITIES] == [
        (),
        ("int8",),
        ("int8", "int4"),
    ]


def test_losses_are_written_with_digits_that_tell_them_apart():
    assert [format_loss(loss) for loss in KV_LOSSES.values()] == ["0.06 %", "1.6 %", "7.3 %"]
