"""Launches of Triton's kernels on a played card: each goes through Triton's own launcher, which runs nothing, and is
played on its stream, by a counterpart in torch or by Triton's interpreter."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import played_kernels
import triton_device
from played_operations import Place, enqueue
from torch import Tensor

_interpreting, _compiling = threading.Lock(), threading.Lock()


def install(launch) -> None:
    """Has every launch played: `launch` is the module `batchgen.ops.triton.launch`."""
    to_card = launch.Launch.__call__

    def launched(this) -> None:
        to_card(this)
        if 0 in this.grid or not any(isinstance(value, Tensor) and value.is_cuda for value in this.args.values()):
            return
        # Of the host, what is pinned: a kernel reads and writes it when it runs.
        args = {name: Place.of(value) if isinstance(value, Tensor) else value for name, value in this.args.items()}
        kernel, grid, constants = this.kernel.fn, this.grid, this.constants
        counterpart = played_kernels.COUNTERPARTS.get(kernel.__name__)
        if counterpart is None:  # imported here: the thread that carries out must not wait for imports of others
            interpreted = _interpreted(kernel.__module__, kernel.__name__)

        def job() -> None:
            found = {name: value.tensor() if isinstance(value, Place) else value for name, value in args.items()}
            if counterpart is not None:
                counterpart(**found, **constants)
                return
            with _interpreting:
                interpreted[grid](**found, **constants)

        enqueue(job)

    launch.Launch.__call__ = launched


@cache
def _interpreted(module: str, name: str) -> Any:
    return getattr(_interpreted_modules()[module], name)


@cache
def _interpreted_modules() -> dict[str, Any]:
    """The modules of kernels once more, with a Triton of their own that interprets them."""

    def is_own(name: str) -> bool:
        return any(name == root or name.startswith(f"{root}.") for root in ("batchgen.ops.triton", "triton")) and (
            not name.startswith("triton._C")
        )

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if is_own(name)}
    ops = sys.modules["batchgen.ops"]
    kernels = ops.triton
    try:
        triton_device.teach_interpreter()
        importlib.import_module("batchgen.ops.triton")
        return {name: sys.modules.pop(name) for name in list(sys.modules) if is_own(name)}
    finally:
        del os.environ["TRITON_INTERPRET"]
        sys.modules.update(kept)
        ops.triton = kernels


def compile_nothing(src, target=None, options=None, **_):
    """In place of triton.compile: a kernel without a program, which the played card does not run anyway."""
    from triton.compiler import CompiledKernel, make_backend

    backend = make_backend(target)
    given = backend.parse_options(dict(options or {}, **src.parse_options()))
    metadata = {
        **vars(given), "hash": src.hash(), "target": target, "name": src.fn.__name__, "shared": 0, "tmem_size": 0,
        "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
    }  # fmt: skip
    folder = Path(_folder.name)
    told, program = folder / f"{src.hash()}.json", folder / "nothing.cubin"
    with _compiling:  # stages of a pipeline are threads in tests
        told.write_text(json.dumps(metadata, default=vars))
        program.write_bytes(b"")
        return CompiledKernel(src, {told.name: str(told), program.name: str(program)}, src.hash())


_folder = tempfile.TemporaryDirectory(prefix="batchgen-played-")
