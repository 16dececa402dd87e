"""The compiled kernels, whose functions csrc/bindings.cpp declares."""

from typing import Any

def __getattr__(name: str) -> Any: ...
