"""The compiled C++ kernels, loaded once and compared with the sources that lie beside the package in a checkout.

Python hands addresses and sizes to the kernels. So a library that was compiled from other sources would read memory
that is not there.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from batchgen.core.errors import BatchgenError

__all__ = ["check_interface", "interface_of", "library"]

_SOURCES = Path(__file__).parents[2] / "csrc"
# What Python hands over is declared here. csrc/CMakeLists.txt compiles the same digest into the library.
_INTERFACE = ("bindings.cpp", "kernels.h")
_REBUILD = "compile them again with `pip install --no-deps -e .` in the checkout"

try:
    from batchgen.ops import _kernels as library
except ImportError as error:
    raise BatchgenError(f"the C++ kernels cannot be loaded ({error}): {_REBUILD}") from error


def interface_of(sources: Path) -> str:
    """Digest of the sources that declare what Python hands to the kernels.

    Args:
        sources: Directory of the C++ sources.
    """
    digests = [hashlib.sha256((sources / name).read_bytes()).hexdigest() for name in _INTERFACE]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def check_interface(compiled: str, sources: Path) -> None:
    """Refuse a library that was compiled from other declarations than those of the checkout.

    Without sources, the package and its library came in one wheel.

    Args:
        compiled: Digest that the library has.
        sources: Directory of the C++ sources, which may be missing.

    Raises:
        BatchgenError: The library was compiled from other sources.
    """
    if (sources / _INTERFACE[0]).exists() and compiled != interface_of(sources):
        raise BatchgenError(f"the C++ kernels were compiled from other sources than {sources} has now: {_REBUILD}")


check_interface(getattr(library, "INTERFACE", ""), _SOURCES)
