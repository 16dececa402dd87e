"""The identity table on a CUDA card: whole engines with `--device cuda`, unmodified.

`test_played_card.py` runs this file, in a process that finds a played card; it runs on a real one as well.
"""

import ctypes
import itertools
import random
from dataclasses import replace

import first_launches
import pytest
import test_attention_budget as budgets
import test_pipeline as pipelines
import test_token_identity as identity
import torch
from model_tables import DELTA_NETS, GGUF_FAMILIES, MODELS
from played_counts import counts
from stages import make_pipeline
from test_token_identity import (
    DTYPE,
    EMULATED,
    TIERS,
    clear_tokens,
    policy_of,
    samples_of,
    schedules,
    tokens_of,
)
from thorough import cover, quick_or, rotating
from tiered import CPU, make_parts

from batchgen import Engine
from batchgen.core.device import Device
from batchgen.core.dtypes import INT4, INT5, INT8, MIXED, NATIVE_FORMATS, STATE_DTYPES, weight_format_of
from batchgen.core.errors import InputError
from batchgen.engine.loader import native_formats
from batchgen.models import experts, layers
from batchgen.models.files import resolve_model, resolve_weights
from batchgen.ops import dispatch as ops
from batchgen.ops.long_steps import LongStep
from batchgen.runtime import graphs
from batchgen.runtime.cuda import CudaDriver
from batchgen.runtime.streams import StreamLanes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Fixtures of the table.
expected, expected_of_codes, stores = identity.expected, identity.expected_of_codes, identity.stores
expected_as_found = identity.expected_as_found
expected_under_budgets = budgets.expected


@pytest.fixture(autouse=True)
def steps_launch_no_more_than_is_counted(monkeypatch):
    """On a played card: a Step has no more operations than its stream is then taken to hold.

    But for Steps of all layers, where nothing waits for the host, and where each is done before the next is launched.
    """
    launched = getattr(ctypes.CDLL("libcuda.so.1"), "played_launched", None)
    if launched is None:
        return
    launched.argtypes, launched.restype = [ctypes.c_void_p], ctypes.c_long
    launch = StreamLanes._launch

    def checked(lanes, step):
        stream = lanes._driver.streams[step.lane].cuda_stream
        before = launched(stream)
        launch(lanes, step)
        operations, counted = launched(stream) - before, lanes._queued[step.lane][-1][1]
        is_free = lanes._serial or step.kind == "layers"
        assert operations <= counted or is_free, f"{operations} operations, counted as {counted}: {step}"

    monkeypatch.setattr(StreamLanes, "_launch", checked)
    # All that are noted, not those that are in the queue at once.
    monkeypatch.setattr(LongStep, "most_queued", property(lambda step: step._total))


@pytest.fixture(autouse=True)
def products_are_never_in_fp64():
    """On a played card, which counts them: cards for inference multiply so at 1/32 to 1/64 of their rate."""
    yield
    if hasattr(ctypes.CDLL("libcuda.so.1"), "played_report"):
        assert "product in fp64" not in counts()


@pytest.fixture(autouse=True)
def jobs_launch_nothing_for_the_first_time(monkeypatch):
    """Triton's kernels have been loaded while the engine warmed up, when nothing waits for the host."""
    noted = first_launches.noted_in_jobs(monkeypatch)
    yield
    assert noted == []


CARD = Device("cuda")
ON_CARD = {tier: (CARD, fields) for tier, (device, fields) in TIERS.items() if device is EMULATED}
NEVER = 10**9
# Tokens of the sweeps that multiply int4 weights as they are stored: some sweeps, or all.
PACKED_TOKENS = (6, NEVER)
# As `CLOSE` of the table, where activations and KV have 16 bits.
CLOSE_IN_16_BITS = 0.2
# Experts whose scores are as near as this may change places by rounding, in standard deviations of a token's scores. In
# bf16 half of the differences between the last expert that is chosen and the next one change by more than 0.005 to
# 0.016, by model, on the CPU.
CLOSE_SCORES = 0.02
# Sweeps of one size before it is captured. All that is on the card alone is captured.
UNCAPTURED = {"captured": 0, "launched": NEVER}
# A captured sweep, and each tier launched Step by Step; of these two of each model, others every day.
_CELLS = [(model, tier, "launched") for model in MODELS for tier in ON_CARD] + [
    (model, "device", "captured") for model in MODELS
]
_OF_MODELS = [[cell for cell in _CELLS if cell[0] == model] for model in MODELS]
_SOME = [cell for cells in _OF_MODELS for cell in rotating("card", cells[0]).sample(cells, 2)]


def parts_of(path, tier, stores, *schedule, dtype=DTYPE, kv_format=DTYPE, weight_format=DTYPE, **changes):
    policy = policy_of(path, tier, kv_format, *schedule, weight_format, ON_CARD)
    policy = replace(policy, captured_tokens=policy.max_num_batched_tokens, **changes)
    return make_parts(path, CARD, policy, stores, longest_tokens=80, dtype=dtype)


def schedules_of(model, tier, launches):
    """The admissions and numbers of micro-batches of a cell, at most two; a sweep of one micro-batch is captured."""
    if launches == "captured":
        return quick_or([("static", 1)], [("static", 1), ("continuous", 1)])
    return schedules(model, tier)[:2]


def captured_sweeps(monkeypatch, launches):
    """Has sweeps captured or not; a list to which each capture is added."""
    captured, capture = [], CudaDriver.capture
    monkeypatch.setattr(graphs, "_UNCAPTURED", UNCAPTURED[launches])
    monkeypatch.setattr(CudaDriver, "capture", lambda driver, work: captured.append(work) or capture(driver, work))
    return captured


def are_those(found, wanted, least_frac=0.4):
    """Tokens are the wanted ones, as far as these are clear."""
    assert sum(map(len, wanted)) > least_frac * sum(map(len, found))
    assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted


def agreed(tokens, others):
    """The first tokens, as far as they are the others too."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return tokens[: next((i for i, (token, other) in pairs if token != other), len(tokens))]


def turned_routers(patch):
    """Have routers take the next expert in place of the last one wherever rounding might do so."""
    route, linear = experts.route, ops.linear

    def turned(config, weights, x):
        shares, chosen = route(config, weights, x)
        if not len(x):
            return shares, chosen

        def lowered(*args, **options):
            scores = linear(*args, **options)
            return scores.scatter_add(1, chosen[:, -1:], -CLOSE_SCORES * scores.std(1, keepdim=True))

        with pytest.MonkeyPatch.context() as within:
            within.setattr(ops, "linear", lowered)
            other_shares, others = route(config, weights, x)
        same = (chosen.sort().values == others.sort().values).all(1, keepdim=True)
        return shares.where(same, other_shares), chosen.where(same, others)

    patch.setattr(experts, "route", turned)
    patch.setattr(layers, "route", turned)


@pytest.mark.parametrize(("model", "tier", "launches"), quick_or(rotating("card").sample(_CELLS, 3), _SOME))
def test_tokens_equal_those_of_transformers(model, tier, launches, expected, stores, monkeypatch):
    captured = captured_sweeps(monkeypatch, launches)
    path, prompts, wanted = expected(model)
    for schedule in schedules_of(model, tier, launches):
        parts = parts_of(path, tier, stores, *schedule)
        captures = launches == "captured" and parts.executor.context.graphs is not None
        captured.clear()
        assert tokens_of(parts, prompts) == wanted, schedule
        assert bool(captured) == captures


_UNDER_BUDGETS = [(model, tier) for model in MODELS for tier in ON_CARD]


@pytest.mark.parametrize(
    ("model", "tier"),
    quick_or(rotating("budgets on a card").sample(_UNDER_BUDGETS, 2), cover(_UNDER_BUDGETS, 30, "budgets on a card")),
)
def test_tokens_under_an_attention_budget_are_those_of_the_cpu(
    model, tier, expected_under_budgets, tiny_models, stores, monkeypatch
):
    if not budgets.chooses_pages(tiny_models(*MODELS[model][:1], **MODELS[model][1])[0]):
        pytest.skip("no layer of the model chooses pages")
    path, wanted = expected_under_budgets(model)
    monkeypatch.setattr(budgets, "TIERS", ON_CARD)
    found = [sample.token_ids for sample in budgets.samples_of(path, tier, stores)]
    assert [tokens[: len(clear)] for tokens, clear in zip(found, wanted, strict=True)] == wanted


_OF_CODES = [
    (model, tier, launches, formats, packed_tokens)
    for model, tier, launches in _CELLS
    for formats in itertools.product((DTYPE, INT8, INT4), (DTYPE, INT8, INT5, INT4))
    if formats != (DTYPE, DTYPE)
    for packed_tokens in ((0, *PACKED_TOKENS) if INT4 in formats[:1] else (0,))
]


@pytest.mark.parametrize(
    ("model", "tier", "launches", "formats", "packed_tokens"),
    quick_or(rotating("codes on a card").sample(_OF_CODES, 2), cover(_OF_CODES, 80, "codes on a card")),
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
    captured_sweeps(monkeypatch, launches)
    path, prompts, wanted = expected_of_codes(model, formats)
    weight_format, kv_format = formats
    given = {"weight_format": weight_format, "kv_format": kv_format, "packed_tokens": packed_tokens}
    parts = parts_of(path, tier, stores, *schedules_of(model, tier, launches)[0], **given)
    are_those(tokens_of(parts, prompts), wanted)


# Dtypes of activations and of states, and the tokens of a sweep: where there are many, experts have torch's product.
_OF_DTYPES = [
    (*cell, dtype, state_dtype, sweep_tokens)
    for cell in _CELLS
    for dtype in ("bfloat16", "float16")
    for state_dtype in (STATE_DTYPES if MODELS[cell[0]][0] in DELTA_NETS else STATE_DTYPES[:1])
    for sweep_tokens in (50, 400)
]


@pytest.mark.parametrize(
    ("model", "tier", "launches", "dtype", "state_dtype", "sweep_tokens"),
    quick_or(rotating("dtypes on a card").sample(_OF_DTYPES, 1), cover(_OF_DTYPES, 60, "dtypes on a card")),
)
def test_tokens_in_16_bits_are_those_of_32(
    model, tier, launches, dtype, state_dtype, sweep_tokens, expected, stores, monkeypatch
):
    """As far as these are so clear that rounding does not change them.

    Of a mixture of experts, as far as they do not depend on experts that rounding might exchange: the CPU has them in
    16 bits too, and in 32 bits with all such experts exchanged.
    """
    path, prompts, _ = expected(model)
    policy = policy_of(path, "memory", DTYPE, "continuous", 1)
    samples = samples_of(make_parts(path, CPU, policy, stores, longest_tokens=80), prompts, logprobs=2)
    wanted = [clear_tokens(sample, CLOSE_IN_16_BITS) for sample in samples]
    given = {"weight_format": dtype, "kv_format": dtype, "state_dtype": state_dtype}
    if identity.has_experts(model):
        rounded = make_parts(path, CPU, replace(policy, **given), stores, longest_tokens=80, dtype=dtype)
        wanted = list(map(agreed, wanted, tokens_of(rounded, prompts)))
        with pytest.MonkeyPatch.context() as patch:
            turned_routers(patch)
            turned = tokens_of(make_parts(path, CPU, policy, stores, longest_tokens=80), prompts)
        wanted = list(map(agreed, wanted, turned))
    captured_sweeps(monkeypatch, launches)
    given["dtype"] = dtype
    parts = parts_of(
        path, tier, stores, *schedules_of(model, tier, launches)[0], **given, max_num_batched_tokens=sweep_tokens
    )
    are_those(tokens_of(parts, prompts), wanted, least_frac=0.1)


# All sequences in one KV placement; None: in each a few.
_OF_STAGES = [(model, placement) for model in MODELS for placement in (*pipelines.PLACEMENTS, None)]


@pytest.mark.parametrize(
    ("model", "placement"),
    quick_or(rotating("stages on a card").sample(_OF_STAGES, 1), cover(_OF_STAGES, 50, "stages on a card")),
)
def test_stages_give_the_tokens_of_transformers(model, placement, expected, stores):
    path, prompts, wanted = expected(model)
    if pipelines.is_refused(path):
        return
    stages = pipelines.stages_anywhere(path, CARD, placement, random.Random(f"{model} {placement}"))
    parts = make_pipeline(path, CARD, stages, stores, longest_tokens=80)
    assert tokens_of(parts, prompts) == wanted


_EXPANDED = [(weight_format, "llama", tier) for weight_format in NATIVE_FORMATS for tier in ON_CARD] + [
    (MIXED, family, tier) for family in GGUF_FAMILIES for tier in ON_CARD
]


@pytest.mark.parametrize(
    ("weight_format", "family", "tier"),
    quick_or(rotating("files on a card").sample(_EXPANDED, 1), cover(_EXPANDED, 40, "files on a card")),
)
def test_weights_of_every_format_of_files_are_expanded(weight_format, family, tier, expected_as_found, stores):
    path, prompts, wanted = expected_as_found(weight_format, family)
    are_those(tokens_of(parts_of(path, tier, stores, *schedules(family, tier)[0]), prompts), wanted)


_AS_FOUND = [
    (weight_format, "llama", tier, launches)
    for weight_format in NATIVE_FORMATS
    if weight_format != MIXED
    for model, tier, launches in _CELLS
    if model == "llama"
] + [
    (MIXED, family, tier, launches)
    for family in GGUF_FAMILIES
    for tier, launches in (*itertools.product(ON_CARD, ("launched",)), ("device", "captured"))
]


@pytest.mark.parametrize(
    ("weight_format", "family", "tier", "launches"),
    quick_or(rotating("as found on a card").sample(_AS_FOUND, 3), cover(_AS_FOUND, 50, "as found on a card")),
)
def test_weights_as_found_give_the_tokens_of_expanded_ones(
    weight_format, family, tier, launches, expected_as_found, stores, monkeypatch
):
    """A card without kernels for such products has expanded ones, unless it is told otherwise: it then refuses."""
    captured_sweeps(monkeypatch, launches)
    path, prompts, wanted = expected_as_found(weight_format, family)
    has_products = torch.cuda.get_device_capability() >= (8, 0)
    if not has_products:
        with pytest.raises(InputError, match=f"--weights native: .* weights in {weight_format}: leave it out"):
            Engine(str(path), device="cuda", weights="native")
    resolved = resolve_weights(resolve_model(str(path)), "auto", native_formats(CARD))
    chosen = weight_format_of(DTYPE, resolved)
    assert chosen == (weight_format if has_products else DTYPE)
    parts = parts_of(path, tier, stores, *schedules_of(family, tier, launches)[0], weight_format=chosen)
    are_those(tokens_of(parts, prompts), wanted)
