"""What a benchmark ran on, and the name of its result file: one for each kind of CPU, so that those of others stay."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from batchgen.ops import cpp as kernels
from batchgen.ops.instruction_set import unavailable


def machine() -> dict:
    """What was measured on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""

    def field(name: str) -> str:
        found = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        return found[1].strip() if found else "unknown"

    return {
        "cpu": field("model name") if "model name" in text else platform.machine(),
        "family": field("cpu family"),
        "model": field("model"),
        "threads": kernels.num_threads(),
        "clock": "of the thread" if kernels.num_threads() == 1 else "of the wall",
        "instruction_sets": kernels.instruction_sets(),
        "unavailable": unavailable(),
    }


def slug(machine: dict) -> str:
    """A kind of CPU as part of a file's name: what it is called, its family and model, its best instruction set."""
    called = re.sub(r"\(.*?\)|@.*", " ", machine["cpu"]).lower()
    name = f"{called} {machine['family']} {machine['model']} {machine['instruction_sets'][0]}"
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
