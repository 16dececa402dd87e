"""The identity table on a CUDA card: whole engines with `--device cuda`, unmodified.

`test_played_card.py` runs this file, in a process that finds a played card; it runs on a real one as well.
"""

from dataclasses import replace

import pytest
import test_token_identity as identity
import torch
from model_tables import MODELS
from test_token_identity import DTYPE, EMULATED, TIERS, policy_of, schedules, tokens_of
from thorough import quick_or, rotating
from tiered import make_parts

from batchgen.core.device import Device
from batchgen.core.dtypes import GPU_FORMATS, INT4, INT5, INT8
from batchgen.runtime import graphs

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Fixtures of the table.
expected, expected_of_codes, stores = identity.expected, identity.expected_of_codes, identity.stores
expected_as_found = identity.expected_as_found

CARD = Device("cuda")
ON_CARD = {tier: (CARD, fields) for tier, (device, fields) in TIERS.items() if device is EMULATED}
NEVER = 10**9
# Tokens of the sweeps that multiply int4 weights as they are stored: some sweeps, or all.
PACKED_TOKENS = (6, NEVER)
# Sweeps of one size before it is captured. All that is on the card alone is captured.
UNCAPTURED = {"captured": 0, "launched": NEVER}
# A captured sweep, and each tier launched Step by Step; of these two of each model, others every day.
_CELLS = [(model, tier, "launched") for model in MODELS for tier in ON_CARD] + [
    (model, "device", "captured") for model in MODELS
]
_OF_MODELS = [[cell for cell in _CELLS if cell[0] == model] for model in MODELS]
_SOME = [cell for cells in _OF_MODELS for cell in rotating("card", cells[0]).sample(cells, 2)]


def parts_of(path, tier, stores, *schedule, kv_format=DTYPE, weight_format=DTYPE, packed_tokens=0):
    policy = policy_of(path, tier, kv_format, *schedule, weight_format, ON_CARD)
    policy = replace(policy, packed_tokens=packed_tokens, captured_tokens=policy.max_num_batched_tokens)
    return make_parts(path, CARD, policy, stores, longest_tokens=80)


def are_those(found, wanted):
    """Tokens are the wanted ones, as far as these are clear."""
    assert sum(map(len, wanted)) > 0.4 * sum(map(len, found))
    assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize(("model", "tier", "launches"), quick_or(rotating("card").sample(_CELLS, 3), _SOME))
def test_tokens_equal_those_of_transformers(model, tier, launches, expected, stores, monkeypatch):
    monkeypatch.setattr(graphs, "_UNCAPTURED", UNCAPTURED[launches])
    path, prompts, wanted = expected(model)
    for schedule in schedules(model, tier)[:2]:
        parts = parts_of(path, tier, stores, *schedule)
        assert tokens_of(parts, prompts) == wanted, schedule


_OF_CODES = [
    (model, tier, launches, formats, packed_tokens)
    for model, tier, launches in _CELLS
    if model in ("llama", "opt", "qwen3_moe", "gpt_oss", "gemma3")
    for formats in ((INT8, DTYPE), (INT4, DTYPE), (DTYPE, INT8), (DTYPE, INT5), (DTYPE, INT4), (INT4, INT4))
    for packed_tokens in ((0, *PACKED_TOKENS) if INT4 in formats[:1] else (0,))
]


@pytest.mark.parametrize(
    ("model", "tier", "launches", "formats", "packed_tokens"),
    rotating("codes on a card").sample(_OF_CODES, quick_or(3, 40)),
)
def test_tokens_of_codes_equal_those_of_torch(
    model,
    tier,
    launches,
    formats,
    packed_tokens,
    expected_of_codes,
    stores,
    monkeypatch,
):
    monkeypatch.setattr(graphs, "_UNCAPTURED", UNCAPTURED[launches])
    path, prompts, wanted = expected_of_codes(model, formats)
    weight_format, kv_format = formats
    given = {"weight_format": weight_format, "kv_format": kv_format, "packed_tokens": packed_tokens}
    parts = parts_of(path, tier, stores, *schedules(model, tier)[0], **given)
    are_those(tokens_of(parts, prompts), wanted)


_AS_FOUND = [
    (weight_format, tier, launches)
    for weight_format in GPU_FORMATS
    for model, tier, launches in _CELLS
    if model == "llama"
]


@pytest.mark.parametrize(
    ("weight_format", "tier", "launches"), rotating("as found on a card").sample(_AS_FOUND, quick_or(2, 12))
)
def test_weights_as_found_give_the_tokens_of_expanded_ones(
    weight_format, tier, launches, expected_as_found, stores, monkeypatch
):
    monkeypatch.setattr(graphs, "_UNCAPTURED", UNCAPTURED[launches])
    path, prompts, wanted = expected_as_found(weight_format)
    parts = parts_of(path, tier, stores, *schedules("llama", tier)[0], weight_format=weight_format)
    are_those(tokens_of(parts, prompts), wanted)
