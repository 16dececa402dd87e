"""Imports that take little time, and an end of the process that takes little: for processes of batchgen's own.

Half of the time of a short job would be neither model nor data. A hundred thousand objects come with imported modules;
Python's garbage collector searches them again and again while they are imported, and once more as the process ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def importing() -> Iterator[None]:
    """Within a `with` block, modules are imported without garbage collections; none searches their objects later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_pandas_out() -> None:
    """Have pyarrow work without pandas, unless this process has imported it.

    With its first array pyarrow imports pandas where that is installed, which takes half a second and serves no job.
    pyarrow still knows pandas once something asks it for a pandas object.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    missing = _Missing()
    sys.meta_path.insert(0, missing)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(missing)


def import_torch() -> None:
    """Import torch without the shapes of its operations in Python, unless this process has imported it.

    They are a quarter of torch's import, and only what traces a program asks for them: torch.compile, torch.export.
    `torch.Generator` needs a module that comes with them, so that is imported by itself.
    """
    if "torch" in sys.modules:
        return
    shapes = "_meta_registrations"
    sys.modules[f"torch.{shapes}"] = ModuleType(shapes)
    try:
        import torch
        import torch._prims.rng_prims
    finally:
        del sys.modules[f"torch.{shapes}"]
    vars(torch).pop(shapes, None)  # whoever asks for them later gets them


class _Missing:
    """A finder of modules that hides pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
