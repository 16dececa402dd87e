"""An engine on a CUDA card, without one: every tensor is where it must be, host memory is pinned as long as it is
there and no longer."""

import gc
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CARD, T4, fake_card
from model_tables import FAMILIES, MODELS
from planner_cases import llama_8b
from thorough import some_of
from tiered import before_each_step, everything_moves, make_parts, make_policy, make_requests

from batchgen.core.device import Device
from batchgen.core.errors import BatchgenError, InputError
from batchgen.engine.engine import Engine
from batchgen.models.checkpoint import dummy_checkpoint
from batchgen.runtime import cuda, executor, graphs, in_memory

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = Device("cuda")
LAYERS = {"num_hidden_layers": 2}
_random = random.Random(3)
PROMPTS = [[_random.randrange(4, 500) for _ in range(n)] for n in (5, 20, 17, 1)]
LENGTHS = [2, 2, 2, 2]


_COMPUTED = {"embed", "pre", "attention", "post", "head"}
_MOVED = {
    "read_weight", "load_weight", "read_cache", "load_cache", "store_cache", "write_cache",
    "load_hidden", "store_hidden",
    "send_qkv", "cpu_attention", "load_attention",
}  # fmt: skip
STEPS = {
    "resident": {"embed", "layers", "head"},
    "everything moves": _COMPUTED | _MOVED | {"load_head"},
    "4 bits": _COMPUTED | _MOVED | {"expand_weight"},
}


@pytest.fixture
def card():
    with fake_card() as card:
        yield card


@pytest.fixture
def t4():
    with fake_card(T4) as card:
        yield card


@pytest.fixture
def cold(monkeypatch):
    """Engines do not warm up."""
    monkeypatch.setattr(executor.Executor, "warm_up", lambda self, *_, **__: None)


def policies(path):
    small = {
        "weight_layers": {"qkv": (1, 1, 0), "out": (0, 1, 1), "up": (0, 0, 2), "down": (1, 1, 0)},
        "gpu_batch_size": 2, "kv_seqs": {"gpu": 1, "cpu": 1, "streamed": 1, "disk": 1},
    }  # fmt: skip
    return {
        "resident": make_policy(path, CUDA, embedding_tier="gpu"),
        "everything moves": everything_moves(path, weight_format="float32", **small),
        "4 bits": everything_moves(
            path, kv_format="int5", head_tier="gpu", embedding_tier="gpu", activation_batches=(1, 1), **small
        ),
    }  # fmt: skip


def engine_on_card(path, folder, kind, **options):
    return Engine.from_parts(make_parts(path, CUDA, policies(path)[kind], folder, longest_tokens=64, **options))


def run(engine):
    done = list(engine.generate(make_requests(PROMPTS, LENGTHS)))
    assert [c.error for c in done] == [None] * len(PROMPTS)


# Each family with its embeddings tied and not, and the other models; each with all on the card, and in another kind of
# policy; in `make test` one of these.
VARIANTS = [(family, {"tie_word_embeddings": tied}) for family in FAMILIES for tied in (False, True)]
VARIANTS += [variant for variant in MODELS.values() if variant[1] and "tie_word_embeddings" not in variant[1]]
MOVED = ("everything moves", "4 bits", "4 bits", "everything moves")
CASES = [
    (*variant, kind)
    for i, variant in enumerate(VARIANTS)
    for kind in some_of(("resident", MOVED[i % 4]), 1, "on a card", i)
]


@pytest.mark.parametrize(("family", "overrides", "kind"), CASES)
def test_every_operation_finds_its_tensors_on_one_device(
    tiny_models, tmp_path, monkeypatch, card, cold, family, overrides, kind
):
    monkeypatch.setattr(graphs, "_UNCAPTURED", 0)
    sizes = overrides | LAYERS
    if "layer_types" in overrides:  # the last two, which have KV of their own
        sizes["layer_types"] = overrides["layer_types"][-2:]
        sizes |= {"num_kv_shared_layers": 0} if family == "gemma4" else {}
    path = tiny_models(family, **sizes)[0]
    with engine_on_card(path, tmp_path, kind) as engine:
        kinds = set()
        before_each_step(engine.parts, lambda step: kinds.add(step.kind))
        run(engine)
        config = engine.parts.config
        has_experts = config.num_experts > 0
    assert kinds == STEPS[kind]
    launched = {name for name, *_ in card.launched}
    assert {"_attend", "_norm", "_rotary_store"} <= launched
    assert has_experts == ({"_sort", "_multiply", "_add"} <= launched)


@pytest.mark.parametrize(("family", "kind"), [("llama", "resident"), ("gemma2", "4 bits"), ("opt", "everything moves")])
def test_a_card_without_triton_products_waits_for_no_copy_either(tiny_models, tmp_path, t4, cold, family, kind):
    path = tiny_models(family, **LAYERS)[0]
    with engine_on_card(path, tmp_path, kind) as engine:
        run(engine)  # tables that are made at their first use
        t4.copies.clear()
        t4.waited_for.clear()
        run(engine)
    assert t4.copies and not t4.waited_for
    launched = {name for name, *_ in t4.launched}
    assert "_norm" in launched and "_attend" not in launched


@pytest.mark.parametrize("closed", [True, False])
def test_engines_one_after_the_other(tiny_models, tmp_path, card, cold, closed):
    """One that is not closed is given up with its pinned memory, before another is mapped there."""
    path = tiny_models("llama", **LAYERS)[0]
    for _ in range(2):
        engine = engine_on_card(path, tmp_path, "everything moves")
        run(engine)
        if closed:
            engine.close()
        del engine
        until = time.monotonic() + 60
        while card.runtime.registered and time.monotonic() < until:
            gc.collect()  # more than once: a lane that is at a Step has the engine until the Step has ended
        assert not card.runtime.registered
        torch.zeros(1 << 22)  # the addresses are somebody else's
        card.runtime.check()


def test_engines_at_once(tiny_models, tmp_path, card, cold):
    path = tiny_models("llama", **LAYERS)[0]
    with engine_on_card(path, tmp_path, "4 bits") as first, engine_on_card(path, tmp_path, "4 bits") as second:
        run(first)
        run(second)
    card.runtime.check()


@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_loading_that_fails_half_way_leaves_nothing_pinned(tiny_models, tmp_path, card, cold, after):
    path = tiny_models("llama", **LAYERS)[0]
    card.runtime.fails_after = after
    with pytest.raises(BatchgenError, match=r"cannot pin .* of host memory \(CUDA error 2\): give less --cpu-memory"):
        engine_on_card(path, tmp_path, "everything moves")
    assert card.runtime.fails_after < 0
    gc.collect()
    assert not card.runtime.registered
    card.runtime.fails_after = None
    engine_on_card(path, tmp_path, "everything moves").close()


def test_an_error_that_was_reported_does_not_end_what_comes_later(card):
    card.runtime.fails_after = 0
    with pytest.raises(BatchgenError, match="cannot pin"):
        cuda.PinnedMemory().zeros((5,), torch.float32)
    assert torch.zeros(1, device="cuda").device == CARD


def test_a_driver_by_which_the_card_cannot_wait_for_the_host_is_refused(tiny_models, tmp_path, card, cold):
    card.wait_error = 801  # cudaErrorNotSupported
    path = tiny_models("llama", **LAYERS)[0]
    with pytest.raises(InputError, match=r"^--device cuda: .* no stream memory operations .*801\); use --device cpu$"):
        engine_on_card(path, tmp_path, "resident")
    gc.collect()
    assert not card.runtime.registered


def test_a_card_is_held_to_what_tensors_and_the_work_space_of_cublas_take(monkeypatch):
    total, fractions = 80 << 30, []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - (1 << 30), total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    hopper_bytes = 32 << 20
    for card_bytes in (2 << 30, 16 << 30):
        usable = cuda.usable_memory(card_bytes)
        assert 0.9 * (card_bytes - (600 << 20)) - hopper_bytes < usable < card_bytes - (600 << 20) - hopper_bytes
        cuda.cap_memory(usable)
        assert usable + hopper_bytes < fractions[-1] * total < card_bytes - (600 << 20) + (2 << 20)


def test_pinned_memory_belongs_to_its_tensors(card):
    memory = cuda.PinnedMemory()
    first, second = (memory.zeros((300, 7), torch.float32) for _ in range(2))
    view = second[10:].view(-1)
    del memory, second
    gc.collect()
    assert card.is_pinned(first) and card.is_pinned(view)
    del view
    assert len(card.runtime.registered) == 1
    memory = cuda.PinnedMemory()
    third = memory.keep(torch.arange(5))
    assert memory.keep(third) is third
    memory.close()
    memory.close()
    assert card.is_pinned(first) and not card.is_pinned(third)
    assert third.tolist() == [0, 1, 2, 3, 4]
    card.runtime.check()


def test_large_copies_are_made_in_pieces(tiny_models, tmp_path, card, cold, monkeypatch):
    """So that another stream's small ones come between."""
    monkeypatch.setattr(cuda, "COPY_BYTES", 1000)
    link, source = cuda.CudaLink(cuda.CudaDriver(), to_gpu=True), torch.arange(3000.0).view(30, 100)
    assert torch.equal(link.copy(torch.zeros(30, 100), source), source)
    assert link.moved_bytes == 12_000
    assert link._driver._num_copies == 12, "a stream's operations are counted by these"
    with engine_on_card(tiny_models("llama", **LAYERS)[0], tmp_path, "everything moves") as engine:
        card.copies.clear()
        run(engine)
        moved = engine.parts.executor.bytes_moved
    to_card = [size for size, to_card in card.copies if to_card]
    assert max(to_card) == 1000 and moved["h2d"] > 100_000
    assert max(size for size, _ in card.copies) <= 1000


@pytest.mark.parametrize("family", some_of(["llama", "gpt_oss"], 1, "warm"))
def test_after_warming_up_nothing_is_new(tiny_models, tmp_path, card, monkeypatch, family):
    """Every kind of Step has run, every variant of a kernel was launched, and nothing has waited for the host."""
    path = tiny_models(family, **LAYERS)[0]
    steps, seen, waited = [], set(), []
    real = cuda.CudaDriver.wait_for_host
    monkeypatch.setattr(cuda.CudaDriver, "wait_for_host", lambda *args: waited.append(args) or real(*args))
    perform = executor.Executor._perform
    monkeypatch.setattr(executor.Executor, "_perform", lambda self, step: seen.add(step.kind) or perform(self, step))
    for kind in ("everything moves", "4 bits"):
        seen.clear()
        card.launched.clear()
        engine = engine_on_card(path, tmp_path, kind, on_step=lambda *step: steps.append(step))
        with engine:
            assert seen == STEPS[kind] and not waited and not steps
            known = set(card.launched)
            assert "_merge" in {name for name, *_ in known}, "no context was long enough"
            made = engine.parts.executor
            assert not any(made.bytes_moved.values()) and not any(made.busy_s.values())
            assert not any(pool.any() for pool in made.kv_cache.pools["cpu"].values())
            run(engine)
            assert waited and steps and made.bytes_moved["h2d"]
        assert set(card.launched) == known  # those of warming up are among them
        waited.clear()
        steps.clear()


def test_an_engine_made_of_dummy_weights_warms_up(card):
    config = llama_8b()
    config = replace(config, num_layers=1, windows=(None,), max_position=64, vocab_size=100, hidden_size=256)
    made = in_memory.in_memory(config, dummy_checkpoint(config), torch.float16, 8, 16, CARD, captured_tokens=4)
    assert {"_attend", "_norm", "_rotary_store"} <= {name for name, *_ in card.launched}
    made.close()
