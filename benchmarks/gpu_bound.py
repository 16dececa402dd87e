"""The least time that a job of equal rows can take on a machine, whatever the schedule. Arithmetic only.

The schedules that are bounded: matrix products and the attention of prompts run on the GPU; decode attention runs there
or on the CPU; weights and KV are in GPU or host memory; a row is computed in passes through all layers, its prompt in
the first. Everything may overlap. Weights that the GPU holds when the job starts are free.

With n rows of s prompt and g output tokens, W bytes of weights (layers and output matrix), G bytes of GPU memory, H of
the host's:

- After its k-th pass (k < g) a row has the KV of s + k - 1 tokens, and all of that is in one memory or the other.
  Summed over rows and passes:   K = kv_bytes_per_token * n * sum(s + k - 1 for k = 1 .. g - 1).
- All rows in flight have no more KV than G + H - W, so that the number of passes over the weights is
                                 P >= max(g, 1 + ceil(K / (G + H - W))).
- A pass reads all weights on the GPU, and decode attention reads all KV that there is, which is K in the end. A share x
of it
  is attended to by the CPU. Of what a pass reads on the GPU, all but G bytes cross the link during it.
- FLOPs on the GPU: 2 per weight and token in the layers, the output matrix once for each output token, and the
attention of
  prompts to themselves.

The bound is the least t for which some x in [0, 1] and some P exist with

    GPU   products:  FLOPs                     <= t * gpu_flops_per_s
          memory:    P W + (1 - x) K           <= t * gpu_read_bytes_per_s
    link  to it:     P (W - G) + (1 - x) K     <= t * h2d_bytes_per_s
    CPU   memory:    x K                       <= t * cpu_read_bytes_per_s

Nothing in it is what an engine did: one that moves more than it has to is further from the bound, not nearer. With
sliding windows, only the KV inside of them counts. Left out, so that no schedule is treated unfairly: activations, the
embedding, fragments of blocks, and the time that the host takes to schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.core.dtypes import FORMAT_BYTES
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.models.config import ModelConfig
from batchgen.planner.kv_memory import kv_block_bytes
from batchgen.planner.sizes import group_bytes

_ROUNDING = 1e-9  # of sums and quotients


@dataclass(frozen=True)
class Rates:
    """The best that each resource does: bytes per second, and FLOP/s of matrix products."""

    h2d_bytes_per_s: float
    gpu_flops_per_s: float
    gpu_read_bytes_per_s: float
    cpu_read_bytes_per_s: float


@dataclass(frozen=True)
class Job:
    """What has to be done, and with how much memory. Formats: as in `Policy`; dtype: what is computed in."""

    num_prompts: int
    input_len: int
    output_len: int
    gpu_bytes: int
    host_bytes: int
    dtype: str
    weight_format: str
    kv_format: str


@dataclass(frozen=True)
class Bound:
    """The bound of a job, and its terms in bytes and FLOPs.

    Attributes:
        seconds: the bound.
        by: the resource that decides it; of the CPU, only its share tells.
        passes: P at the bound.
        cpu_kv_frac: x at the bound.
    """

    seconds: float
    by: str
    passes: float
    cpu_kv_frac: float
    weight_bytes: int
    kv_read_bytes: int
    gpu_flops: int


def weight_bytes(config: ModelConfig, job: Job) -> int:
    """Bytes of what a pass reads: all layers and the output matrix."""
    layer = sum(group_bytes(config, job.dtype, job.weight_format).values())
    projection = 0 if config.embed_size == config.hidden_size else config.embed_size * config.hidden_size
    head = config.vocab_size * config.embed_size + projection
    return config.num_layers * layer + head * int(FORMAT_BYTES[job.dtype])


def kv_read_bytes(config: ModelConfig, job: Job) -> int:
    """Bytes of KV that decode attention reads, over all rows and passes: K."""
    sizes = kv_block_bytes(config, DEFAULT_KV_BLOCK_SIZE, job.kv_format)
    lengths = range(job.input_len, job.input_len + job.output_len - 1)
    seen = [
        sizes[config.kv_source(j)] * min(n, config.windows[j] or n) for j in config.attention_layers for n in lengths
    ]
    return job.num_prompts * sum(seen) // DEFAULT_KV_BLOCK_SIZE


def gpu_flops(config: ModelConfig, job: Job) -> int:
    """FLOPs of matrix products and of the attention of prompts, for all rows."""
    tokens = job.input_len + job.output_len - 1
    projection = 0 if config.embed_size == config.hidden_size else config.embed_size * config.hidden_size
    layers = 2 * config.num_layers * config.matmul_params_per_layer * tokens
    head = 2 * (config.vocab_size * config.embed_size + projection) * job.output_len
    seen = sum(min(n, w or n) for w in config.windows for n in range(1, job.input_len + 1))
    return job.num_prompts * (layers + head + 4 * config.num_heads * config.head_dim * seen)


def bound(config: ModelConfig, job: Job, rates: Rates) -> Bound:
    """The bound of a job on a machine. Raises ValueError where the weights leave no memory for KV."""
    weights, kv, flops = weight_bytes(config, job), kv_read_bytes(config, job), gpu_flops(config, job)
    capacity = job.gpu_bytes + job.host_bytes - weights
    if capacity <= 0:
        raise ValueError(f"{weights:,} bytes of weights do not fit {job.gpu_bytes:,} on the GPU and {job.host_bytes:,}")
    least_passes = max(job.output_len, 1 + -(-kv // capacity))

    def cpu_share(seconds: float) -> float:
        return min(1.0, seconds * rates.cpu_read_bytes_per_s / kv) if kv else 0.0

    def passes(seconds: float) -> float:
        """Where the GPU holds all weights, more passes, of fewer rows each, keep more of the KV there too."""
        if weights >= job.gpu_bytes:
            return least_passes
        left = (1 - cpu_share(seconds)) * kv - seconds * rates.h2d_bytes_per_s
        return max(least_passes, left / (job.gpu_bytes - weights))

    def needed(seconds: float) -> dict[str, float]:
        """Seconds that each resource takes if the CPU attends to as much as it can in so many seconds."""
        on_gpu, times = (1 - cpu_share(seconds)) * kv, passes(seconds)
        return {
            "GPU products": flops / rates.gpu_flops_per_s,
            "GPU memory": (times * weights + on_gpu) / rates.gpu_read_bytes_per_s,
            "link": max(0.0, times * (weights - job.gpu_bytes) + on_gpu) / rates.h2d_bytes_per_s,
        }

    low, high = 0.0, sum(needed(0.0).values())
    for _ in range(100):
        middle = (low + high) / 2
        enough = max(needed(middle).values()) <= middle * (1 + _ROUNDING)
        low, high = (low, middle) if enough else (middle, high)
    by = " and ".join(name for name, taken in needed(high).items() if taken >= high * (1 - 1e-6))
    return Bound(high, by, passes(high), cpu_share(high), weights, kv, flops)
