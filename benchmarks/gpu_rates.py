"""What a machine is and the best that each of its resources does, for `gpu_bound`. Writes JSON. Takes some seconds.

python benchmarks/gpu_rates.py --output rates.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from gpu_bound import Rates
from gpu_device import machine

from batchgen.profiler.timing import FULL, Device, Effort, Trial
from batchgen.profiler.transfer import copy_rates, dram_read_rate

_QUICK = replace(FULL, point_s=0.01, pool_bytes=4 << 20)  # of a device that is no card: nobody looks at the numbers


def measure_rates(kind: str, dtype: str, effort: Effort) -> Rates:
    """Of matrix products, the best of several sizes; of the GPU's memory, the better of sums and copies."""
    device = Device(kind)
    sizes, pool_bytes = ((4096, 8192), 2 << 30) if kind == "cuda" else ((64, 128), 4 << 20)
    products = []
    for size in sizes:
        a, b = (torch.randn(size, size, device=kind).to(getattr(torch, dtype)) for _ in range(2))
        products.append(device.rate(Trial(2 * size**3, lambda i, a=a, b=b: torch.mm(a, b)), effort))
    numbers = torch.ones(pool_bytes // 4, dtype=torch.float32, device=kind)
    copied = torch.empty_like(numbers)
    reads = (
        device.rate(Trial(numbers.nbytes, lambda i: numbers.sum()), effort),
        device.rate(Trial(2 * numbers.nbytes, lambda i: copied.copy_(numbers)), effort),
    )
    return Rates(copy_rates(device, effort)[0], max(products), max(reads), dram_read_rate(effort))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_rates: torch finds no CUDA device here")
    found = {"machine": machine(args.device)}
    effort = FULL if args.device == "cuda" else _QUICK
    found["rates"] = asdict(measure_rates(args.device, args.dtype, effort))
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    rates = {name: rate / 1e9 for name, rate in found["rates"].items()}
    print(
        f"summary: host to GPU {rates['h2d_bytes_per_s']:.1f} GB/s, {rates['gpu_flops_per_s'] / 1e3:.0f} TFLOP/s,"
        f" GPU memory {rates['gpu_read_bytes_per_s']:,.0f} GB/s, host memory {rates['cpu_read_bytes_per_s']:.0f} GB/s"
    )


if __name__ == "__main__":
    main()
