"""Where `--device cuda` is taken for a GPU that can do all that is asked of it."""

from pathlib import Path

import pytest

from batchgen.core import device
from batchgen.core.errors import InputError


@pytest.fixture
def machine(monkeypatch):
    """machine(names): only these devices are in /dev, and torch would use a GPU."""

    def has(*names):
        monkeypatch.setattr(Path, "glob", lambda self, pattern: (self / n for n in names if Path(n).match(pattern)))
        monkeypatch.setattr(Path, "exists", lambda self: self.name in names)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        device.has_cuda.cache_clear()

    yield has
    device.has_cuda.cache_clear()


def test_a_gpu_of_nvidias_driver_for_linux_is_taken(machine):
    machine("nvidia0", "nvidiactl")
    assert device.parse_device("cuda").kind == "cuda"


def test_wsl_is_not_taken_for_it(machine):
    machine("dxg")
    assert not device.has_cuda()
    with pytest.raises(InputError, match=r"^--device cuda is not for WSL, .*: use Linux itself, or leave it out$"):
        device.parse_device("cuda")


def test_a_machine_without_a_gpu_says_so(machine):
    machine("nvidiactl")
    with pytest.raises(InputError, match="torch finds no CUDA device here"):
        device.parse_device("cuda")
