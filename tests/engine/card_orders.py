"""Tokens on a played card whose streams run in any order and with delays: what is right by good timing alone is wrong.

`test_played_card.py` runs this file with several seeds. Each kind of wait is taken away in turn: then tokens change, so
that a missing one would be noticed.
"""

import time

import pytest
import test_token_identity as identity
from card_checks import parts_of
from test_token_identity import tokens_of
from tiered import before_each_step

from batchgen.runtime.cuda import CudaDriver
from batchgen.runtime.streams import STREAMS

pytestmark = pytest.mark.usefixtures("one_thread")

expected, stores = identity.expected, identity.stores
MODEL = "llama"


@pytest.mark.parametrize("tier", ["mixed", "delegated", "streamed"])
def test_tokens_equal_those_of_transformers(tier, expected, stores):
    path, prompts, wanted = expected(MODEL)
    assert tokens_of(parts_of(path, tier, stores, "continuous", 2), prompts) == wanted


@pytest.mark.parametrize("wait", ["wait", "wait_for_host"])
def test_a_missing_wait_changes_tokens(wait, expected, stores, monkeypatch):
    path, prompts, wanted = expected(MODEL)
    parts = parts_of(path, "mixed", stores, "continuous", 2)
    monkeypatch.setattr(CudaDriver, wait, lambda *_: None)
    if wait == "wait_for_host":  # lanes of the host are early otherwise
        before_each_step(parts, lambda step: time.sleep(0.0 if step.lane in STREAMS else 0.01))
    with pytest.raises(AssertionError):
        assert tokens_of(parts, prompts) == wanted
