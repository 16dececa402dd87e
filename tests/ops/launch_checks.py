"""Every Triton kernel through Triton's own launcher, on a card that is not there. `test_triton.py` runs this file in a
process of its own, in whose environment `absent_cuda.c` is the CUDA driver."""

import ctypes
import inspect
import os
import pkgutil
from functools import cached_property
from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import JITFunction, driver
from triton.runtime.jit import create_function_from_signature

from batchgen.ops import triton as triton_kernels
from batchgen.ops.triton import compile_ahead
from batchgen.ops.triton.compile_ahead import AbsentCard, all_launches
from batchgen.ops.triton.launch import SHARED_MEMORY, Card, Launch

CAPABILITY = int(os.environ["BATCHGEN_CHECK_CAPABILITY"])
os.environ["ABSENT_CUDA_SHARED_MEMORY"] = str(SHARED_MEMORY[CAPABILITY])
HEAD_DIMS = tuple(int(n) for n in os.environ["BATCHGEN_CHECK_HEAD_DIMS"].split(","))


class LaunchingCard(AbsentCard):
    """An absent card whose kernels are loaded and launched by Triton's code for CUDA."""

    @cached_property
    def utils(self):
        from triton.backends.nvidia.driver import CudaUtils

        return CudaUtils()

    @property
    def launcher_cls(self):
        from triton.backends.nvidia.driver import CudaLauncher

        return CudaLauncher


@triton.jit
def _of_no_use(x, N: tl.constexpr):
    tl.store(x, N)


def taken_names():
    """Names of arguments that Triton takes for itself, or loses, at a launch with all arguments by name."""
    backend = make_backend(GPUTarget("cuda", CAPABILITY, 32))
    bind = create_function_from_signature(_of_no_use.signature, _of_no_use.params, backend).__code__
    own = {"x", "N"}
    names = set(bind.co_varnames) | set(bind.co_names) | set(inspect.signature(JITFunction.run).parameters)
    return (names | set(vars(backend.parse_options({}))) | {"device", "device_type", "stream"}) - own


def functions():
    """All functions for Triton's compiler, by name."""
    modules = [
        import_module(found.name) for found in pkgutil.iter_modules(triton_kernels.__path__, "batchgen.ops.triton.")
    ]
    return {x.fn.__qualname__: x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}


def kernels():
    """The functions that no other one calls."""
    called = {name for function in functions().values() for name in function.fn.__code__.co_names}
    return {name: function for name, function in functions().items() if name not in called}


def test_names_that_the_launcher_takes_are_known():
    assert {"params", "options", "grid", "warmup", "stream", "num_warps", "num_stages"} <= taken_names()


def test_no_kernel_has_a_parameter_that_the_launcher_takes():
    assert len(kernels()) > 20
    taken = {name: taken_names() & set(kernel.arg_names) for name, kernel in kernels().items()}
    assert not any(taken.values()), taken


def test_every_kernel_is_compiled_ahead():
    card = Card(90, 132, SHARED_MEMORY[90])
    launched = {launch.kernel.fn.__qualname__ for _, launch in all_launches(card, (64,), (4,))}
    assert launched == set(kernels())


def test_the_command_compiles_every_kernel_and_all_fit(monkeypatch, capsys):
    command = ["compile_ahead", "--capability", str(CAPABILITY), "--group", "4", "--head-dim", *map(str, HEAD_DIMS)]
    monkeypatch.setattr("sys.argv", command)
    assert compile_ahead.main() == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("_quantize", "_copy_rows", "_draw")) and "TOO LARGE" not in told
    products = told.count("_attend")
    assert products == 0 if CAPABILITY == 75 else products >= 8 * len(HEAD_DIMS)
    assert told.count("_multiply, ") == (0 if CAPABILITY == 75 else 64)
    assert (told.count("_multiply_packed, ") >= 20) == (told.count("_code_rows, ") > 0) == (CAPABILITY != 75)


@pytest.mark.skipif("ABSENT_CUDA" not in os.environ, reason="no C compiler")
def test_every_kernel_is_launched():
    """Arguments are bound, checked and handed over as on a card, grids and shared memory are what a card can have."""
    driver.set_active(LaunchingCard(CAPABILITY))
    count = ctypes.CDLL(os.environ["ABSENT_CUDA"]).absent_cuda_launches
    launches = list(all_launches(Card(CAPABILITY, 132, SHARED_MEMORY[CAPABILITY]), HEAD_DIMS, (4,)))
    for i, (name, launch) in enumerate(launches):
        launch()
        assert count() == i + 1, name


@pytest.mark.skipif("ABSENT_CUDA" not in os.environ, reason="no C compiler")
def test_a_launch_that_a_card_refuses_is_noticed():
    driver.set_active(LaunchingCard(CAPABILITY))
    x = torch.zeros(1, dtype=torch.int32)
    Launch(_of_no_use, (1, 65535), {"x": x}, {"N": 3})()
    with pytest.raises(RuntimeError, match="invalid argument"):
        Launch(_of_no_use, (1, 65536), {"x": x}, {"N": 3})()
