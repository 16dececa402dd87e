"""Stands in for torchvision in vLLM's environment: its models of text and images import it, and for text call nothing.

torchvision has no build without CUDA on PyPI. The file is copied there as the package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

__version__ = "0"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module inside of torchvision."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        inside = fullname.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "torchvision":
    sys.meta_path.append(_Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
