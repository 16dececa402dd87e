"""Launches keep the kernels that Triton compiles, and take another one wherever Triton would."""

import pytest
import torch

from batchgen.ops.triton.launch import Launch


class Kernel:
    """A kernel of `x`, `count` and the constant `BLOCK`; it notes what is compiled, and what compiled kernels get."""

    arg_names = ("x", "count", "BLOCK")

    def __init__(self, compiles=True):
        self.compiled, self.launched, self._compiles = [], [], compiles

    def __getitem__(self, grid):
        def compile_and_launch(**options):
            self.compiled.append((grid, options))
            return Compiled(self, len(self.compiled)) if self._compiles else None

        return compile_and_launch


class Compiled:
    def __init__(self, kernel, number):
        self._kernel, self._number = kernel, number

    def __getitem__(self, grid):
        return lambda *args: self._kernel.launched.append((self._number, grid, args))


def launch(kernel, x, count, grid=(3,), block=16):
    Launch(kernel, grid, {"count": count, "x": x}, {"BLOCK": block})()


def test_the_second_launch_gets_its_own_arguments_in_their_order():
    kernel, x, y = Kernel(), torch.zeros(8), torch.ones(8)
    launch(kernel, x, 5)
    launch(kernel, y, 7, grid=(2, 4))
    assert len(kernel.compiled) == 1
    ((number, grid, (tensor, count, block)),) = kernel.launched
    assert (number, grid, count, block) == (1, (2, 4, 1), 7, 16) and tensor is y


@pytest.mark.parametrize(
    "other",
    [
        {"count": 1},
        {"count": 32},
        {"count": 1 << 40},
        {"count": None},
        {"x": torch.zeros(8)[1:]},
        {"x": torch.zeros(8, dtype=torch.float16)},
        {"block": 32},
    ],
    ids=["one", "multiple of 16", "64 bits", "none", "unaligned", "dtype", "constant"],
)
def test_arguments_that_triton_compiles_anew_for_go_to_triton(other):
    kernel, usual = Kernel(), {"x": torch.zeros(8), "count": 5}
    launch(kernel, **usual)
    launch(kernel, **usual | other)
    assert len(kernel.compiled) == 2 and not kernel.launched
    launch(kernel, **usual)
    launch(kernel, **usual | other)
    assert [number for number, _, _ in kernel.launched] == [1, 2]


def test_an_interpreted_kernel_is_launched_every_time():
    kernel = Kernel(compiles=False)
    for _ in range(2):
        launch(kernel, torch.zeros(8), 5)
    assert len(kernel.compiled) == 2


def test_an_empty_grid_launches_nothing():
    kernel = Kernel()
    launch(kernel, torch.zeros(8), 5, grid=(4, 0))
    assert not kernel.compiled
