"""`Engine.close` gives memory back at once, whoever still has the engine."""

import gc
import weakref

import pytest
import torch
from tiered import CPU, EMULATED, everything_moves, make_parts, make_policy

import batchgen
from batchgen.core.errors import InputError
from batchgen.core.machine import resident_bytes
from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine

FEW = SamplingParams(max_tokens=3, ignore_eos=True)


def tensors_made(make):
    """The result of `make`, and weak references to the tensors that it left behind."""
    before = {id(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}
    made = make()
    return made, [weakref.ref(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and id(o) not in before]


@pytest.mark.parametrize("where", ["memory", "everything moves"])
def test_a_closed_engine_holds_no_tensors(where, tiny_models, tmp_path):
    path, _ = tiny_models("llama")

    def used():
        device, policy = (CPU, make_policy(path, CPU)) if where == "memory" else (EMULATED, everything_moves(path))
        parts = make_parts(path, device, policy, tmp_path)
        engine = Engine.from_parts(parts)
        assert all(c.error is None for c in engine.generate([Request([5, 6], FEW)]))
        assert all(s.error is None for s in engine.score([ScoreRequest([5, 6], ([7],))]))
        return engine

    engine, tensors = tensors_made(used)
    held = [tensor() for tensor in tensors]  # some end with what made them, at any moment
    assert sum(tensor.nbytes for tensor in held if tensor is not None) > 100_000
    del held
    engine.close()
    left = [tensor for tensor in (tensor() for tensor in tensors) if tensor is not None]
    assert sum(tensor.nbytes for tensor in left) < 10_000, [tensor.shape for tensor in left]
    assert engine.parts.executor.bytes_moved["disk_read"] >= 0 and engine.parts.executor.peak_bytes.keys() == {
        "gpu",
        "disk",
    }


def test_a_closed_engine_says_so(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    engine = Engine.from_parts(make_parts(path, CPU, make_policy(path, CPU), tmp_path), sampling=FEW)
    under_way = engine.generate([[5, 6]] * 20)
    next(under_way)
    engine.close()
    engine.close()
    for call in (under_way, engine.generate([[5]]), engine.score([ScoreRequest([5], ([6],))])):
        with pytest.raises(InputError, match="the engine is closed: make another one"):
            list(call)


def test_another_engine_has_the_same_budget_while_the_name_of_the_first_lives(tiny_models):
    """The memory that a process holds counts against the budget.

    Beside the first one's KV there would be none for the second.
    """
    path, _ = tiny_models("llama")
    options = {"dtype": "float32", "cpu_memory": resident_bytes() + (400 << 20), "max_num_seqs": 4096}
    first = batchgen.Engine(str(path), **options)
    pools = first.parts.executor.kv_cache.pools["cpu"].values()
    for pool in pools:
        pool.fill_(1)  # as a job would
    assert sum(pool.nbytes for pool in pools) > 100 << 20
    first.close()
    del pools, pool
    with batchgen.Engine(str(path), **options) as second:
        assert second.parts.memory.kv_blocks["cpu"] > 0.8 * first.parts.memory.kv_blocks["cpu"]
