"""Where `--device cuda` is taken for a GPU that can do all that is asked of it, and what is said elsewhere."""

import warnings
from pathlib import Path

import pytest
import torch

from batchgen.core import device
from batchgen.core.errors import InputError

CARDS = ("nvidia0", "nvidiactl")
# Kernels of PyPI's torch 2.13, and of one that was built for CUDA 11.
OF_CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
OF_CUDA_11 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture
def machine(monkeypatch):
    """machine(names, ...): only these devices are in /dev, and torch would use a GPU, but for what is said."""

    def has(*names, cuda="13.0", warning=None, usable=True, capability=(9, 0), kernels=OF_CUDA_13):
        def is_available():
            if warning:
                warnings.warn(warning, stacklevel=1)
            return usable

        monkeypatch.setattr(Path, "glob", lambda self, pattern: (self / n for n in names if Path(n).match(pattern)))
        monkeypatch.setattr(Path, "exists", lambda self: self.name in names)
        monkeypatch.setattr("torch.version.cuda", cuda)
        monkeypatch.setattr("torch.cuda.is_available", is_available)
        monkeypatch.setattr("torch.cuda.get_arch_list", lambda: kernels)
        monkeypatch.setattr(device, "compute_capability", lambda: capability)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        device.why_no_cuda.cache_clear()

    yield has
    device.why_no_cuda.cache_clear()


def refusal():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the refusal is all that is said
        with pytest.raises(InputError) as refused:
            device.parse_device("cuda")
    said = str(refused.value)
    assert "\n" not in said and said.endswith(", or leave it out")
    return said.removeprefix("--device cuda: torch finds no CUDA device here: ").removesuffix(", or leave it out")


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [((9, 0), OF_CUDA_13), ((8, 9), OF_CUDA_13), ((12, 1), OF_CUDA_13), ((13, 0), OF_CUDA_13), ((7, 0), OF_CUDA_11),
     ((6, 1), OF_CUDA_11), ((5, 0), [])],
)  # fmt: skip
def test_a_gpu_of_nvidias_driver_for_linux_is_taken(machine, capability, kernels):
    machine(*CARDS, capability=capability, kernels=kernels)
    assert device.parse_device("cuda").kind == "cuda"


def test_wsl_is_not_taken_for_it(machine):
    machine("dxg")
    assert not device.has_cuda()
    assert refusal() == "WSL's driver has no stream memory operations, so use Linux itself"


def test_a_machine_without_a_gpu_says_so(machine):
    machine("nvidiactl")
    assert refusal().startswith("there is no /dev/nvidia0, so install NVIDIA's driver, or give the container a GPU")


def test_a_torch_for_cpus_is_named(machine):
    machine(*CARDS, cuda=None, usable=False)
    assert refusal() == f"torch {torch.__version__} is a build without CUDA, so install one with it (docs/cuda.md)"


def test_a_driver_that_is_too_old_is_told_in_one_line(machine):
    machine(*CARDS, usable=False, warning="The NVIDIA driver on your system is too old\n(found version 11040).")
    assert refusal() == (
        f"torch {torch.__version__} cannot use this GPU's driver (The NVIDIA driver on your system is too old (found"
        " version 11040).), so install a newer driver, or a torch that is built for an older CUDA"
    )


def test_cards_that_are_hidden_are_named(machine, monkeypatch):
    machine(*CARDS, usable=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal() == "CUDA_VISIBLE_DEVICES='' leaves none, so name one there, or unset it"


@pytest.mark.parametrize(("capability", "kernels"), [((7, 0), OF_CUDA_13), ((6, 1), OF_CUDA_13), ((12, 0), OF_CUDA_11)])
def test_a_card_that_torch_has_no_kernels_for_is_refused(machine, capability, kernels):
    machine(*CARDS, capability=capability, kernels=kernels)
    said = refusal()
    assert said.startswith(f"the GPU has compute capability {capability[0]}.{capability[1]}, and torch ")
    assert f"has no kernels for it (but {', '.join(kernels)}), so install a torch that has" in said
