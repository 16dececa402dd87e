"""The GPU and its machine: sizes, versions, and which packages are missing. Fails where there is no CUDA device.

python benchmarks/gpu_device.py --output device.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from batchgen.core.machine import available_memory_bytes, cpu_name
from batchgen.core.units import format_bytes

_OPTIONAL = ("highspy", "gguf", "xxhash", "accelerate", "flashinfer", "flexgen", "xdist")


def machine(kind: str) -> dict:
    """Versions, sizes, and what is not installed."""
    facts = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if find_spec("triton") else None,
        "missing": [name for name in _OPTIONAL if find_spec(name) is None],
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "host_memory_bytes": available_memory_bytes(),
        "kernel": platform.release(),
    }
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpus": torch.cuda.device_count(),
        }
        facts |= {"compute_capability": f"{properties.major}.{properties.minor}", "driver": _driver_version()}
    return facts


def _driver_version() -> str | None:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_device: torch finds no CUDA device here")
    torch.zeros(1, device="cuda")  # a card that is listed may not be usable
    facts = machine("cuda")
    args.output.write_text(json.dumps(facts, indent=1) + "\n")
    sizes = (
        f"{format_bytes(facts['gpu_memory_bytes'])}, {facts['cores']} cores, {format_bytes(facts['host_memory_bytes'])}"
    )
    print(f"summary: {facts['gpu']}, {sizes} free, torch {facts['torch']}, Triton {facts['triton']}")


if __name__ == "__main__":
    main()
