"""Rates of the machine at its best, of reads from disk and of matrix products, each alone; and its free memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from batchgen.core.direct_io import DirectFile, aligned_buffer
from batchgen.models.config import ModelConfig

_READ_PIECE_BYTES, _READ_PIECES, _READ_SECONDS = 8 << 20, 8, 6.0
_GEMM_SECONDS = 1.5


def disk_read_rate(files: list[Path]) -> float:
    """The median rate, in bytes per second, of direct reads from the model's own files, several at a time."""
    buffer = memoryview(aligned_buffer(_READ_PIECE_BYTES * _READ_PIECES))
    rates, deadline = [], time.perf_counter() + _READ_SECONDS
    for path in files:
        file, offset, size = DirectFile(path), 0, path.stat().st_size
        while offset + len(buffer) <= size and time.perf_counter() < deadline:
            starts = range(0, len(buffer), _READ_PIECE_BYTES)
            started = time.perf_counter()
            done = file.read([(offset + at, buffer[at : at + _READ_PIECE_BYTES]) for at in starts])
            rates.append(done / (time.perf_counter() - started))
            offset += len(buffer)
        file.close()
    return statistics.median(rates)


def provide_memory(num_bytes: int) -> None:
    """Have so much free memory provided by the host of a virtual machine, if this is one.

    Hosts take back what has been free for seconds, and give it again at a twentieth of the rate at which memory is
    written. An engine that fills its KV memory as it loads would have that time outside of what is measured, one that
    uses memory as it needs it inside.
    """
    subprocess.run([sys.executable, "-c", f"b'1' * {num_bytes}"], check=True)


def gemm_rates(
    config: ModelConfig, token_counts: list[int], weight_format: str = "", dtype: str = "bfloat16"
) -> dict[int, float]:
    """FLOP/s of a layer's matrix products, for each number of tokens, weights coming from memory.

    They are torch's in a dtype, or of weights in a format of blocks batchgen's in bfloat16.
    """
    import torch
    import torch.nn.functional as F

    from batchgen.core.dtypes import weight_row_bytes
    from batchgen.ops import cpp

    number = getattr(torch, dtype)

    def weight(columns: int, depth: int) -> Any:
        if not weight_format:
            return torch.randn(columns, depth).to(number)
        # Of these bytes a scale is a number that is neither tiny nor infinite.
        rows = torch.full((columns, weight_row_bytes(depth, weight_format)), 0x60, dtype=torch.uint8)
        return cpp.pack_blocks(cpp.BlockWeight(rows, weight_format), torch.bfloat16)

    product = cpp.linear if weight_format else F.linear
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv, out = config.matmul_shapes["qkv"], config.matmul_shapes["out"]
    shapes = [qkv, out, (2 * inner, hidden), (hidden, inner)]
    layers = [[weight(*shape) for shape in shapes] for _ in range(2)]
    rates = {}
    with torch.inference_mode():
        for tokens in token_counts:
            inputs = {n: torch.randn(tokens, n).to(number) for _, n in shapes}
            seconds: list[float] = []
            deadline = time.perf_counter() + _GEMM_SECONDS
            while len(seconds) < 4 or time.perf_counter() < deadline:
                started = time.perf_counter()
                for own in layers[len(seconds) % 2]:
                    product(inputs[own.shape[1]], own)
                seconds.append(time.perf_counter() - started)
            work = sum(2 * tokens * rows * columns for rows, columns in shapes)
            rates[tokens] = work / statistics.median(seconds[1:])  # the first one warms up
    return rates
