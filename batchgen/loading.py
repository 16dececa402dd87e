"""From a model's name to an engine's parts: files, configuration, memory plan, weights, tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from batchgen.engine import EngineParts
from batchgen.errors import InputError
from batchgen.machine import available_memory_bytes, has_fast_bfloat16, keep_freed_memory, resident_bytes
from batchgen.model_config import DTYPES, ModelConfig
from batchgen.model_files import ModelFiles, read_config, weight_paths
from batchgen.planner.memory import plan_memory
from batchgen.policy import Policy
from batchgen.units import parse_bytes

if TYPE_CHECKING:
    from batchgen.tokenizer import Tokenizer

BLOCK_SIZE = 16
ADMISSIONS = ("continuous", "static")
# Of the memory that is free, this share is left for everything else on the machine.
_MARGIN_FRAC = 0.1
# What interpreter, torch, transformers, pyarrow and their buffers hold in a running job, without any model.
_PROCESS_BYTES = 700 << 20


def resolve_dtype(config: ModelConfig, dtype: str) -> str:
    """The dtype to compute in; "auto" as `Engine` says. Raises InputError for an unknown name."""
    if dtype == "auto":
        if config.dtype == "float32":
            return "float32"
        return "bfloat16" if has_fast_bfloat16() else "float32"
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported: use auto, {', '.join(DTYPES)}")
    return dtype


def resolve_context(config: ModelConfig, max_model_len: int | None) -> int:
    """The longest prompt plus output, in tokens: the model's context unless told otherwise. Raises InputError."""
    if max_model_len is None:
        return config.max_position
    if not 2 <= max_model_len <= config.max_position:
        raise InputError(f"max_model_len must be between 2 and the model's context of {config.max_position}")
    return max_model_len


def resolve_budget(cpu_memory: int | str | None) -> int:
    """The CPU memory budget in bytes, for the whole process."""
    if cpu_memory is None:
        return int((available_memory_bytes() + resident_bytes()) * (1 - _MARGIN_FRAC))
    return parse_bytes(cpu_memory) if isinstance(cpu_memory, str) else int(cpu_memory)


def process_bytes() -> int:
    """Host memory of the running process without any model, as far as can be known before the job runs."""
    return max(resident_bytes(), _PROCESS_BYTES)


def load_parts(
    files: ModelFiles,
    tokenizer: Callable[[], Tokenizer],
    *,
    dtype: str,
    device: str,
    cpu_memory: int | str | None,
    admission: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int | None,
    share_prefixes: bool,
    min_output_len: int,
    most_kv_tokens: int | None = None,
    on_load: Callable[[int, int], None] | None,
) -> EngineParts:
    """Loads a model for the engine. Arguments as `Engine`.

    tokenizer: gives the tokenizer; called after all that can be refused quickly, and before weights are read.
    min_output_len: what a row must at least be able to generate. most_kv_tokens: KV that the job is expected to use;
    memory beyond it is left alone.
    """
    started = time.perf_counter()
    if device not in ("auto", "cpu"):
        raise InputError(f"device {device!r} is not supported: use auto or cpu")
    if admission not in ADMISSIONS:
        raise InputError(f"admission {admission!r} is not one of {', '.join(ADMISSIONS)}")
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    config = read_config(files)
    dtype = resolve_dtype(config, dtype)
    context = resolve_context(config, max_model_len)

    import torch

    from batchgen.runtime.batch import pack
    from batchgen.runtime.checkpoint import open_checkpoint
    from batchgen.runtime.executor import Executor
    from batchgen.runtime.kv_cache import KVCache
    from batchgen.runtime.sampler import sample
    from batchgen.runtime.weights import load_weights

    keep_freed_memory()
    torch_dtype = getattr(torch, dtype)
    memory, num_blocks = plan_memory(
        config,
        dtype_bytes=torch_dtype.itemsize,
        budget_bytes=resolve_budget(cpu_memory),
        process_bytes=process_bytes(),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=context,
        min_tokens=min(min_output_len + 1, context),
        block_size=BLOCK_SIZE,
        most_kv_tokens=most_kv_tokens,
    )
    tokenizer = tokenizer()
    weights = load_weights(open_checkpoint(files), torch_dtype, on_load)
    policy = Policy(
        admission=admission,
        gpu_batch_size=max_num_seqs,
        num_gpu_batches=1,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=context,
        kv_block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        share_prefixes=share_prefixes,
        weight_format=dtype,
        kv_format=dtype,
        weight_layers={name: (0, config.num_layers, 0) for name in config.layer_tensors},
        kv_seqs={"cpu": max_num_seqs},
    )
    key_bytes = config.num_kv_heads * config.head_dim * torch_dtype.itemsize
    return EngineParts(
        config=config,
        tokenizer=tokenizer,
        executor=Executor(config, weights, KVCache(config, num_blocks, BLOCK_SIZE, torch_dtype), context),
        pack=partial(pack, block_size=BLOCK_SIZE, key_bytes=key_bytes, windows=frozenset(config.windows)),
        sample=sample,
        policy=policy,
        memory=memory,
        eos_token_ids=frozenset(config.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
        dtype=dtype,
        weights_file_bytes=sum(path.stat().st_size for path in weight_paths(files)),
        load_s=time.perf_counter() - started,
    )
