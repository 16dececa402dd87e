"""Tokens on a played card whose streams run in any order and with delays: what is right by good timing alone is wrong.

`test_played_card.py` runs this file with several seeds. Each kind of wait is taken away in turn: then tokens change, so
that a missing one would be noticed.
"""

import time

import pytest
import test_token_identity as identity
from card_checks import NEVER, are_those, captured_sweeps, parts_of
from test_token_identity import DTYPE, tokens_of
from tiered import before_each_step

from batchgen.core.dtypes import INT4, INT8
from batchgen.runtime.cuda import CudaDriver
from batchgen.runtime.streams import STREAMS

pytestmark = pytest.mark.usefixtures("one_thread")

expected, expected_of_codes, stores = identity.expected, identity.expected_of_codes, identity.stores
MODEL = "llama"
# Model, tier, formats of weights and KV, the most tokens of sweeps whose int4 weights stay packed. In the tier "device"
# sweeps are captured, and one is launched while the one before it runs.
PLAIN = (DTYPE, DTYPE)
CASES = [
    *((MODEL, tier, PLAIN, 0) for tier in ("mixed", "delegated", "streamed", "deferred", "device")),
    ("gemma3", "unequal batches", PLAIN, 0),
    ("qwen3_5", "mixed", PLAIN, 0),
    ("qwen3_5", "device", PLAIN, 0),
    ("qwen3_next", "streamed", PLAIN, 0),
    ("lfm2", "delegated", PLAIN, 0),
    ("lfm2_moe", "deferred", PLAIN, 0),
    ("qwen3_moe", "streamed", PLAIN, 0),
    ("gpt_oss", "device", PLAIN, 0),
    (MODEL, "mixed", (INT8, DTYPE), 0),
    ("qwen3_moe", "streamed", (INT8, INT8), 0),
    (MODEL, "mixed", (INT4, INT4), 6),
    ("opt", "streamed layers", (INT4, DTYPE), 0),
    ("qwen3_moe", "device", (INT4, DTYPE), NEVER),
]


@pytest.mark.parametrize(("model", "tier", "formats", "packed_tokens"), CASES)
def test_tokens_do_not_depend_on_orders(
    model, tier, formats, packed_tokens, expected, expected_of_codes, stores, monkeypatch
):
    captured_sweeps(monkeypatch, "captured")
    path, prompts, wanted = expected(model) if formats == PLAIN else expected_of_codes(model, formats)
    given = {"weight_format": formats[0], "kv_format": formats[1], "packed_tokens": packed_tokens}
    parts = parts_of(path, tier, stores, "continuous", 1 if tier == "device" else 2, **given)
    are_those(tokens_of(parts, prompts), wanted)


@pytest.mark.parametrize("wait", ["wait", "wait_for_host"])
def test_a_missing_wait_changes_tokens(wait, expected, stores, monkeypatch):
    """Or operations fail of what they find, as of an index that has not come yet."""
    import played_operations  # torch imports it first, to change it

    failures = []
    monkeypatch.setattr(played_operations, "on_failure", failures.append)
    path, prompts, wanted = expected(MODEL)
    parts = parts_of(path, "mixed", stores, "continuous", 2)
    monkeypatch.setattr(CudaDriver, wait, lambda *_: None)
    if wait == "wait_for_host":  # lanes of the host are early otherwise
        before_each_step(parts, lambda step: time.sleep(0.0 if step.lane in STREAMS else 0.01))
    with pytest.raises(AssertionError):  # of tokens, or of rows that have failed
        assert tokens_of(parts, prompts) == wanted and not failures
