"""Engines on a played card: what they pin, copy and launch, one after the other, at once, and where making one fails.

`test_played_card.py` runs this file.
"""

import ctypes
import gc
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from planner_cases import llama_8b
from played_counts import counts
from stages import make_pipeline
from thorough import some_of
from tiered import before_each_step, everything_moves, make_parts, make_policy, make_requests

from batchgen.core.device import Device
from batchgen.core.errors import BatchgenError, InputError
from batchgen.engine.engine import Engine
from batchgen.engine.pipeline import Stage
from batchgen.models.checkpoint import dummy_checkpoint
from batchgen.ops import dispatch as ops
from batchgen.runtime import cuda, executor, in_memory

played = ctypes.CDLL("libcuda.so.1")
played.played_pinned_bytes.restype = ctypes.c_long
played.played_refuse_pin.argtypes = [ctypes.c_long]

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


def pinned_bytes():
    gc.collect()
    return played.played_pinned_bytes()


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


@pytest.mark.parametrize("kind", STEPS)
def test_no_copy_is_waited_for(tiny_models, tmp_path, kind):
    """Also where torch does what Triton has no fast products for."""
    with engine_on_card(tiny_models("llama", **LAYERS)[0], tmp_path, kind) as engine:
        run(engine)  # tables that are made at their first use
        played.played_forget()
        run(engine)
        found = counts()
    assert found["bytes d2h"] and "pageable copy" not in found


@pytest.mark.parametrize("closed", [True, False])
def test_engines_one_after_the_other(tiny_models, tmp_path, cold, closed):
    """One that is not closed is given up with its pinned memory, before another is mapped there."""
    before, path = pinned_bytes(), tiny_models("llama", **LAYERS)[0]
    for _ in range(2):
        engine = engine_on_card(path, tmp_path, "everything moves")
        assert pinned_bytes() > before
        run(engine)
        if closed:
            engine.close()
        del engine
        until = time.monotonic() + 60
        while pinned_bytes() > before and time.monotonic() < until:
            time.sleep(0.05)  # a lane that is at a Step has the engine until the Step has ended
        assert pinned_bytes() == before
        torch.zeros(1 << 22)  # the addresses are somebody else's


def test_engines_one_after_the_other_take_no_more_of_the_card(tiny_models, tmp_path, cold):
    """Torch keeps memory for a stream, and cuBLAS's work space of it for good: later engines have the same streams."""
    path, taken = tiny_models("llama", **LAYERS)[0], []
    for _ in range(3):
        with engine_on_card(path, tmp_path, "resident") as engine:
            run(engine)
        del engine
        gc.collect()
        taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert taken[1] == taken[2]


def test_engines_at_once(tiny_models, tmp_path, cold):
    path = tiny_models("llama", **LAYERS)[0]
    with engine_on_card(path, tmp_path, "4 bits") as first, engine_on_card(path, tmp_path, "4 bits") as second:
        run(first)
        run(second)


def test_a_closed_engine_has_nothing_pinned(tiny_models, tmp_path, cold):
    """No later collection of garbage unpins memory: it may come while a stream waits for the host, in a lane's thread.

    The runtime may then wait for the device, and the device for the lane.
    """
    before, path = pinned_bytes(), tiny_models("llama", **LAYERS)[0]
    with engine_on_card(path, tmp_path, "everything moves") as engine:
        assert played.played_pinned_bytes() > before
        run(engine)
    assert played.played_pinned_bytes() == before


def test_memory_is_unpinned_when_the_streams_are_through(tiny_models, tmp_path, monkeypatch):
    """Also that of the stages of a pipeline, each of which has its own."""
    path = tiny_models("llama", **LAYERS)[0]
    driver_of, launched, finished, unpinned = {}, Counter(), Counter(), []
    make, launch, finish, unpin = (
        cuda.CudaDriver.__init__, cuda.CudaDriver.launch, cuda.CudaDriver.finish, cuda._PinnedPages.unpin,
    )  # fmt: skip

    def made(driver):
        make(driver)
        driver_of[threading.current_thread()] = driver  # a stage is a thread here

    def counted(driver, lane, work):
        launched[driver] += 1
        return launch(driver, lane, work)

    def through(driver):
        before = launched[driver]
        finish(driver)
        finished[driver] = before

    def noted(pages):
        driver = driver_of.get(threading.current_thread())
        if pages.address is not None and driver is not None:
            unpinned.append(launched[driver] - finished[driver])
        unpin(pages)

    for name, function in {"__init__": made, "launch": counted, "finish": through}.items():
        monkeypatch.setattr(cuda.CudaDriver, name, function)
    monkeypatch.setattr(cuda._PinnedPages, "unpin", noted)
    policy = replace(
        policies(path)["everything moves"], weight_layers=dict.fromkeys(("qkv", "out", "up", "down"), (0, 0, 1))
    )
    stages = [Stage(k, k + 1, policy) for k in range(2)]
    with Engine.from_parts(make_pipeline(path, CUDA, stages, tmp_path, longest_tokens=64)) as engine:
        run(engine)
    assert len(driver_of) == 2 and all(launched.values()) and unpinned and not any(unpinned)


@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_loading_that_fails_half_way_leaves_nothing_pinned(tiny_models, tmp_path, cold, after):
    before, path = pinned_bytes(), tiny_models("llama", **LAYERS)[0]
    played.played_refuse_pin(after)
    with pytest.raises(BatchgenError, match=r"cannot pin .* of host memory \(CUDA error 2\): give less --cpu-memory"):
        engine_on_card(path, tmp_path, "everything moves")
    assert pinned_bytes() == before
    engine_on_card(path, tmp_path, "everything moves").close()


def test_a_driver_by_which_the_card_cannot_wait_for_the_host_is_refused(tiny_models, tmp_path, cold):
    before, path = pinned_bytes(), tiny_models("llama", **LAYERS)[0]
    played.played_refuse_waits(801)  # cudaErrorNotSupported
    with pytest.raises(InputError, match=r"^--device cuda: .* no stream memory operations .*801\); use --device cpu$"):
        engine_on_card(path, tmp_path, "resident")
    played.played_refuse_waits(0)
    assert pinned_bytes() == before


def test_pinned_memory_belongs_to_its_tensors():
    before, memory = pinned_bytes(), cuda.PinnedMemory()
    first, second = (memory.zeros((300, 7), torch.float32) for _ in range(2))
    both, view = pinned_bytes() - before, second[10:].view(-1)
    del memory, second
    assert pinned_bytes() - before == both and first.is_pinned() and view.is_pinned()
    del view
    assert pinned_bytes() - before == both // 2
    memory = cuda.PinnedMemory()
    third = memory.keep(torch.arange(5))
    assert memory.keep(third) is third
    memory.close()
    memory.close()
    assert first.is_pinned() and not third.is_pinned()
    assert third.tolist() == [0, 1, 2, 3, 4]


def test_large_copies_are_made_in_pieces(tiny_models, tmp_path, cold, monkeypatch):
    """So that another stream's small ones come between."""
    monkeypatch.setattr(cuda, "COPY_BYTES", 1000)
    link, source = cuda.CudaLink(cuda.CudaDriver(), to_gpu=True), torch.arange(3000.0).view(30, 100)
    target = link.copy(torch.zeros(30, 100, device="cuda"), cuda.PinnedMemory().keep(source))
    assert torch.equal(target.cpu(), source)
    assert link.moved_bytes == 12_000
    assert link._driver._num_copies == 12, "a stream's operations are counted by these"
    sizes, copy = [], cuda.CudaLink._copy
    monkeypatch.setattr(
        cuda.CudaLink, "_copy", lambda own, target, source: sizes.append(source.nbytes) or copy(own, target, source)
    )
    with engine_on_card(tiny_models("llama", **LAYERS)[0], tmp_path, "everything moves") as engine:
        run(engine)
        moved = engine.parts.executor.bytes_moved
    assert max(sizes) == 1000 and moved["h2d"] > 100_000


@pytest.mark.parametrize("family", some_of(["llama", "gpt_oss", "qwen3_5"], 1, "warm"))
def test_after_warming_up_nothing_is_new(tiny_models, tmp_path, monkeypatch, family):
    """Every kind of Step has run, every variant of a kernel is loaded, and nothing has waited for the host."""
    path = tiny_models(family, **LAYERS)[0]
    steps, seen, waited = [], set(), []
    real = cuda.CudaDriver.wait_for_host
    monkeypatch.setattr(cuda.CudaDriver, "wait_for_host", lambda *args: waited.append(args) or real(*args))
    perform = executor.Executor._perform
    monkeypatch.setattr(executor.Executor, "_perform", lambda self, step: seen.add(step.kind) or perform(self, step))
    for kind in ("everything moves", "4 bits"):
        seen.clear()
        engine = engine_on_card(path, tmp_path, kind, on_step=lambda *step: steps.append(step))
        with engine:
            assert seen == STEPS[kind] and not waited and not steps
            made = engine.parts.executor
            assert not any(made.bytes_moved.values()) and not any(made.busy_s.values())
            assert not any(pool.any() for pool in made.kv_cache.pools["cpu"].values())
            played.played_forget()
            run(engine)
            assert waited and steps and made.bytes_moved["h2d"]
        assert not {"cuModuleLoadData", "cudaMalloc", "cudaHostRegister", "cublasCreate"} & counts().keys()
        waited.clear()
        steps.clear()


# What the played card counts for kernels: of torch, of Triton, and products of cuBLAS.
KERNELS = ("kernel", "triton kernel", "product")
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 8448,
}  # more than 2 M weights a matrix: their codes once came in parts


def kernels_of_a_layer(tiny_models, folder, weight_format, num_tokens, **shape):
    """Kernels that one layer more takes in a sweep that is launched, all on the card."""
    launched = []
    for num_layers in (1, 2):
        path = tiny_models("llama", num_hidden_layers=num_layers, **shape)[0]
        policy = make_policy(path, CUDA, embedding_tier="gpu", weight_format=weight_format)
        with Engine.from_parts(make_parts(path, CUDA, policy, folder, longest_tokens=64)) as engine:
            requests = make_requests([PROMPTS[1][:num_tokens]], [1])
            list(engine.generate(requests))  # what is made at its first use
            played.played_forget()
            list(engine.generate(requests))
            assert engine.stats.sweeps == 2
        launched.append(sum(counts().get(kind, 0) for kind in KERNELS))
    return launched[1] - launched[0]


def test_weights_in_few_bits_take_few_more_kernels_than_others(tiny_models, tmp_path, cold):
    """However large they are: of a layer's four products, each has one kernel more, which quantizes or dequantizes.

    Where Triton has no fast products, torch rotates rows of x and quantizes them, by some sixty operations a product.
    """
    multiplied = ops.multiplies_packed(torch.device("cuda"))
    of_numbers = kernels_of_a_layer(tiny_models, tmp_path, "float32", 17)
    for weight_format, more in (("int8", 4 if multiplied else 4 * 64), ("int4", 4)):
        launched = kernels_of_a_layer(tiny_models, tmp_path, weight_format, 17, **_WIDE)
        assert 0 < launched <= of_numbers + more, weight_format


def test_every_kind_of_step_comes(tiny_models, tmp_path, cold):
    for kind, wanted in STEPS.items():
        with engine_on_card(tiny_models("llama", **LAYERS)[0], tmp_path, kind) as engine:
            kinds = set()
            before_each_step(engine.parts, lambda step, kinds=kinds: kinds.add(step.kind))
            run(engine)
        assert kinds == wanted


def test_an_engine_made_of_dummy_weights_warms_up():
    config = llama_8b()
    config = replace(config, num_layers=1, windows=(None,), max_position=64, vocab_size=100, hidden_size=256)
    card = torch.device("cuda")
    in_memory.in_memory(config, dummy_checkpoint(config), torch.float16, 8, 16, card, captured_tokens=4).close()
