"""What the engine itself costs beside the kernels: measured by running it on a model that computes next to nothing."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from functools import partial

from batchgen.engine import Engine, EngineParts
from batchgen.model_config import ModelConfig
from batchgen.policy import MemoryPlan, Policy
from batchgen.request import Request, SamplingParams

_MANY = 128  # sequences
_LAYERS = 9
_PROMPT_TOKENS, _OUTPUT_TOKENS = 8, 24
_VOCAB = 49_152  # for the sampler's share


@dataclass(frozen=True)
class EngineOverheads:
    """Fixed costs in seconds: of a sweep, of a sequence in a sweep, of one layer in a sweep, of a row from request to
    completion; and logits per second that the sampler turns into tokens."""

    sweep_s: float
    sequence_s: float
    step_s: float
    row_s: float
    sampling_logits_per_s: float


def measure_overheads() -> EngineOverheads:
    """Takes a few seconds."""
    _sweep_s(1, 1)  # warm-up
    one, deep, many = _sweep_s(1, 1), _sweep_s(_LAYERS, 1), _sweep_s(1, _MANY)
    step_s = max(0.0, (deep - one) / (_LAYERS - 1))
    return EngineOverheads(
        sweep_s=max(0.0, one - step_s),
        sequence_s=max(0.0, (many - one) / (_MANY - 1)),
        step_s=step_s,
        row_s=_row_s(),
        sampling_logits_per_s=_sampling_logits_per_s(),
    )


class _NoText:
    """In place of a tokenizer: rows are token ids already."""

    eos_token_ids = ()

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return ""


def _engine(layers: int) -> Engine:
    import torch

    from batchgen.runtime.batch import pack
    from batchgen.runtime.checkpoint import dummy_checkpoint
    from batchgen.runtime.executor import Executor
    from batchgen.runtime.kv_cache import KVCache
    from batchgen.runtime.sampler import sample
    from batchgen.runtime.weights import load_weights

    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": 1,
            "vocab_size": 64,
            "max_position_embeddings": 64,
        }
    )
    blocks = 4 * _MANY
    policy = Policy(
        admission="continuous",
        gpu_batch_size=_MANY,
        num_gpu_batches=1,
        max_num_batched_tokens=_MANY * _PROMPT_TOKENS,
        max_model_len=config.max_position,
        kv_block_size=16,
        num_kv_blocks=blocks,
        share_prefixes=False,
        weight_format="float32",
        kv_format="float32",
    )
    weights = load_weights(dummy_checkpoint(config), torch.float32)
    parts = EngineParts(
        config=config,
        tokenizer=_NoText(),
        executor=Executor(config, weights, KVCache(config, blocks, 16, torch.float32), config.max_position),
        pack=partial(pack, block_size=16, key_bytes=128, windows=frozenset(config.windows)),
        sample=sample,
        policy=policy,
        memory=MemoryPlan(0, 0, 0, 0, 0),
        eos_token_ids=frozenset(),
        dtype="float32",
        weights_file_bytes=0,
    )
    return Engine.from_parts(parts)


def _requests(count: int, output_tokens: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    return [Request([(i + j) % 64 for j in range(_PROMPT_TOKENS)], sampling) for i in range(count)]


def _sweep_s(layers: int, sequences: int) -> float:
    """Median seconds of a decode sweep."""
    times: list[float] = []
    engine = _engine(layers)
    for _ in engine.generate(
        _requests(sequences, _OUTPUT_TOKENS), on_sweep=lambda stats: times.append(time.perf_counter())
    ):
        pass
    decoding = times[2:]  # the first sweep prefills
    return statistics.median(b - a for a, b in itertools.pairwise(decoding))


def _row_s() -> float:
    """Seconds a row adds when it generates a single token: the whole way less the sweep it is in."""
    engine = _engine(1)
    count = 2048
    started = time.perf_counter()
    for _ in engine.generate(_requests(count, 1)):
        pass
    return (time.perf_counter() - started) / count


def _sampling_logits_per_s() -> float:
    import torch

    from batchgen.runtime.sampler import sample
    from batchgen.runtime.sequence import Sequence

    sequences = [Sequence(i, i, 0, [1], SamplingParams()) for i in range(64)]
    logits = torch.randn(len(sequences), _VOCAB, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        sample(logits, sequences)
        times.append(time.perf_counter() - started)
    return logits.numel() / statistics.median(times)
