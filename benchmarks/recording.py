"""Result files: what a benchmark ran on, and where its figures go."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from batchgen.core.machine import available_cores
from batchgen.job.report import versions
from batchgen.ops import cpp as kernels
from batchgen.ops.instruction_set import unavailable

RESULTS = Path(__file__).parent / "results"
# What is measured finds bytecode, as an installed program does: a process that may not write it compiles its imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def machine() -> dict[str, Any]:
    """The kind of CPU, with the instruction sets that the kernels can use of it: the same in every process on it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""

    def field(name: str) -> str:
        match = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        return match[1].strip() if match else "unknown"

    return {
        "cpu": field("model name") if "model name" in text else platform.machine(),
        "family": field("cpu family"),
        "model": field("model"),
        "cores": available_cores(),
        "instruction_sets": kernels.instruction_sets(),
        "unavailable": unavailable(),
    }


def slug(machine: dict[str, Any]) -> str:
    """A kind of CPU as part of a file's name: what it is called, its family and model, its best instruction set.

    zen4 has no instructions beyond avx512_bf16, but other products.
    """
    best = next(name for name in machine["instruction_sets"] if name != "zen4")
    called = re.sub(r"\(.*?\)|@.*", " ", machine["cpu"]).lower()
    name = f"{called} {machine['family']} {machine['model']} {best}"
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def result_path(name: str, *, by_cpu: bool = False) -> Path:
    """The file of a benchmark's result.

    Args:
        by_cpu: the kind of CPU is in the file's name, so that results of others stay.
    """
    return RESULTS / (f"{name}-{slug(machine())}.json" if by_cpu else f"{name}.json")


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result with the command, without paths, the machine, the threads and the versions that it is of."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_paths(sys.argv[1:])])
    threads = kernels.num_threads()
    clock = "of the thread" if threads == 1 else "of the wall"
    about = {"command": command, "machine": machine(), "threads": threads, "clock": clock, "versions": versions()}
    if "arguments" in result:
        result = result | {"arguments": _without_paths(result["arguments"])}
    path.write_text(json.dumps(about | result, indent=1) + "\n")


def _without_paths(value: Any) -> Any:
    """Arguments in which each path is replaced by a word."""
    if isinstance(value, dict):
        return {name: _without_paths(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part) for part in value]
    return "PATH" if isinstance(value, str | os.PathLike) and os.sep in str(value) else value


def joined(path: Path, key: str, named: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """Entries by name, those of the file where a command measured only some of them.

    Args:
        key: where in the file they are.
        order: all names.
    """
    before = json.loads(path.read_text())[key] if path.exists() else {}
    return {name: (before | named)[name] for name in order if name in before | named}
