"""What Python does first in a process with a played card: packages of the main environment come after its own, and some
modules are changed once they are imported."""

import os
import site
import sys
from importlib.machinery import ModuleSpec

_KERNELS = os.environ.get("PLAYED_CUDA_KERNELS", "1") == "1"
_COMPILES = os.environ.get("PLAYED_CUDA_COMPILE", "0") == "1"


def _has_devices(device) -> None:
    device._driver_has_devices = lambda: True  # in /dev


def _has_no_cudnn(torch) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)


def _plays_operations(torch) -> None:
    import played_operations

    _has_no_cudnn(torch)
    # torch has these for CUDA alone; without them attention is products, which the CPU has too.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    played_operations.install()


def _plays_launches(launch) -> None:
    import played_launches

    played_launches.install(launch)


def _compiles_nothing(compiler) -> None:
    import played_launches

    compiler.compile = played_launches.compile_nothing


_CHANGES = {"batchgen.core.device": _has_devices, "torch": _has_no_cudnn}
if _KERNELS:
    _CHANGES |= {"torch": _plays_operations, "batchgen.ops.triton.launch": _plays_launches}
if not _COMPILES:
    _CHANGES["triton.compiler"] = _compiles_nothing


class _Changes:
    """An import finder that has the other ones find a module, and changes it once it is there."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name not in _CHANGES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                execute(module)
                _CHANGES[name](module)

            spec.loader.exec_module = exec_module
        return spec


site.addsitedir(os.environ["PLAYED_SITE_PACKAGES"])
sys.meta_path.insert(0, _Changes())
