"""Overheads of the engine outside of its kernels, measured on a model so small that it computes almost nothing."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchgen.core.machine import available_memory_bytes
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE, MemoryPlan, Policy
from batchgen.core.request import Request, SamplingParams
from batchgen.dataset import open_dataset
from batchgen.dataset.prompts import PromptSpec, compile_prompts, rows_to_requests
from batchgen.dataset.sampling_column import RowSampling
from batchgen.engine.engine import Engine
from batchgen.engine.parts import EngineParts, EngineStats
from batchgen.models.hf.config import config_of_hf
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer import NoText, Tokenizer
from batchgen.output.part_writer import PartWriter
from batchgen.output.row_map import DoneRows
from batchgen.output.row_result import RowResult
from batchgen.profiler.measure import Overheads

_MANY = 128  # sequences
_BATCHES = 4  # micro-batches of a sweep, one sequence each
_LAYERS = 9
_PROMPT_TOKENS, _OUTPUT_TOKENS = 8, 24
_ROWS_OF_ONE_TOKEN = 2048
_ISSUED, _ISSUING_WIDTH, _ISSUING_ROUNDS = 100, 512, 5  # Steps for another lane beside computations of such width
_WORDS = 64  # of the model's vocabulary
_VOCAB = 49_152  # for the sampler
_PASSING_BYTES = 64 << 20  # more than cores have caches for, and read as fast as memory is


def measure_overheads(device: str) -> Overheads:
    """Measure the overheads of an engine, in a few seconds. device: compute device, "cpu" or "cuda"."""
    _sweep_s(device, 1, 1)  # warm-up
    one, deep, many = _sweep_s(device, 1, 1), _sweep_s(device, _LAYERS, 1), _sweep_s(device, 1, _MANY)
    step_s = max(0.0, (deep - one) / (_LAYERS - 1))
    sequence_s = max(0.0, (many - one) / (_MANY - 1))
    parted = _sweep_s(device, 1, _BATCHES, batches=_BATCHES)
    return Overheads(
        sweep_overhead_s=max(0.0, one - step_s),
        batch_overhead_s=max(0.0, (parted - one) / (_BATCHES - 1) - step_s - sequence_s),
        sequence_overhead_s=sequence_s,
        issue_overhead_s=_issue_s() if device == "cpu" else 0.0,
        step_overhead_s=step_s,
        row_overhead_s=_row_s(device),
        sampling_logits_per_s=_sampling_logits_per_s(device),
        load_bytes_per_s=_load_bytes_per_s(),
        gguf_load_bytes_per_s=_gguf_load_bytes_per_s(),
    )


def _llama(layers: int, width: int, vocab_size: int) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        "dtype": "float16",
    }


def _engine(device: str, layers: int, tokenizer: Tokenizer | None = None, batches: int = 1) -> Engine:
    """An engine of a tiny model.

    Args:
        device: Compute device.
        layers: Layers of the model.
        tokenizer: Its tokenizer; None: prompts are token ids, and nothing is decoded.
        batches: Micro-batches of each sweep that has as many sequences.
    """
    import torch

    from batchgen.models.checkpoint import dummy_checkpoint
    from batchgen.runtime.in_memory import in_memory
    from batchgen.runtime.sampler import sample
    from batchgen.schedule.packed_batch import pack

    config = config_of_hf(_llama(layers, 32, _WORDS))
    blocks, tier = 4 * _MANY, "gpu" if device == "cuda" else "cpu"
    policy = Policy(
        admission="continuous",
        gpu_batch_size=_MANY,
        num_gpu_batches=1,
        max_num_batched_tokens=_MANY * _PROMPT_TOKENS,
        max_model_len=config.max_position,
        kv_block_size=DEFAULT_KV_BLOCK_SIZE,
        kv_blocks={tier: blocks},
        share_prefixes=False,
        weight_format="float32",
        kv_format="float32",
        kv_seqs={tier: _MANY},
    )
    parts = EngineParts(
        config=config,
        tokenizer=tokenizer or NoText(),  # type: ignore[arg-type]  # it decodes nothing
        executor=in_memory(
            config, dummy_checkpoint(config), torch.float32, blocks, DEFAULT_KV_BLOCK_SIZE, torch.device(device)
        ),
        split=lambda sweep, **_: [part for i in range(batches) if (part := sweep[i::batches])],
        pack=partial(
            pack,
            kv_block_size=DEFAULT_KV_BLOCK_SIZE,
            key_bytes=128,
            windows=frozenset(config.windows),
            compute_tier=tier,
        ),
        sample=sample,
        policy=policy,
        memory=MemoryPlan({}, {}, policy.kv_blocks, 0, policy.max_num_batched_tokens),
        eos_token_ids=frozenset(),
        dtype="float32",
        loaded_bytes=0,
        compute_tier=tier,
    )
    return Engine.from_parts(parts)


def _requests(count: int, output_tokens: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    return [Request(_prompt(i), sampling) for i in range(count)]


def _prompt(i: int) -> list[int]:
    return [(i + j) % _WORDS for j in range(_PROMPT_TOKENS)]


def _sweep_s(device: str, layers: int, sequences: int, batches: int = 1) -> float:
    """Median seconds of a decode sweep, with caches emptied between sweeps as a model's weights would empty them."""
    import torch

    begun: list[float] = []
    times: list[float] = []
    passing = torch.ones(min(_PASSING_BYTES, available_memory_bytes() // 8), dtype=torch.uint8)

    def next_sweep(stats: EngineStats) -> None:
        ended = time.perf_counter()
        if begun:
            times.append(ended - begun[-1])
        passing.add_(1)
        begun.append(time.perf_counter())

    with _engine(device, layers, batches=batches) as engine:
        for _ in engine.generate(_requests(sequences, _OUTPUT_TOKENS), on_sweep=next_sweep):
            pass
    return statistics.median(times[1:])  # the first sweep prefills


def _issue_s() -> float:
    """Seconds in which a computing thread hands a Step to another lane, which copies while it goes on."""
    import torch

    from batchgen.ops import dispatch as ops
    from batchgen.runtime.lanes import Lanes
    from batchgen.schedule.step_graph import Step

    weights = [ops.pack_weight(torch.ones(_ISSUING_WIDTH, _ISSUING_WIDTH)) for _ in range(3)]
    x, target = torch.ones(8, _ISSUING_WIDTH), torch.ones(8, _ISSUING_WIDTH)

    def perform(step: Step) -> None:
        if step.lane != "compute":
            target.copy_(x)
            return
        for weight in weights:
            ops.linear(x, weight)

    computing = [Step(2 * i, "post", "compute", 0, 0, 0, None, None, ()) for i in range(_ISSUED)]
    copying = [Step(2 * i + 1, "store_hidden", "d2h", 0, 0, 0, None, None, (2 * i,)) for i in range(_ISSUED)]

    def between_s(steps: list[Step]) -> float:
        lanes = Lanes(perform)
        started = time.perf_counter()
        lanes.execute(steps)
        ended = time.perf_counter()
        lanes.drain()
        lanes.close()
        return ended - started - lanes.busy_s["compute"] - sum(lanes.stalled_s.values())

    both = [step for pair in zip(computing, copying, strict=True) for step in pair]
    times = [(between_s(both) - between_s(computing)) / _ISSUED for _ in range(_ISSUING_ROUNDS)]
    return max(0.0, statistics.median(times))


def _row_s(device: str) -> float:
    """Seconds per row of a job whose rows generate a single token each, from a file of texts to parts on disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [" ".join(f"w{token_id}" for token_id in _prompt(i)) for i in range(_ROWS_OF_ONE_TOKEN)]
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder, _engine(device, 1, _tokenizer()) as engine:
        source = Path(folder, "rows.parquet")
        pq.write_table(pa.table({"prompt": texts}), source)
        started = time.perf_counter()
        with PartWriter(Path(folder), DoneRows()) as writer:
            for completion in engine.generate(_rows_of(source)):
                assert completion.row is not None and completion.error is None, completion
                writer.add(completion.row, RowResult.from_completion(completion))
        return (time.perf_counter() - started) / _ROWS_OF_ONE_TOKEN


def _rows_of(source: Path) -> Iterator[Request]:
    """Yield the requests of a file of texts, each for a single token."""
    dataset = open_dataset(source)
    compiled = compile_prompts(PromptSpec(column="prompt", chat=False), dataset.schema)
    sampling = RowSampling(SamplingParams(max_tokens=1, ignore_eos=True))
    for first, batch in dataset.batches():
        for row, request in enumerate(rows_to_requests(batch, first, compiled, sampling), first):
            yield replace(request, row=row)


def _tokenizer() -> Tokenizer:
    """A tokenizer of words, with the text "wI" for token I."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    backend = Backend(WordLevel({f"w{i}": i for i in range(_WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return Tokenizer(TokenizerParts(backend))


def _sampling_logits_per_s(device: str) -> float:
    import torch

    from batchgen.runtime.sampler import sample
    from batchgen.schedule.sequence import Sequence

    sequences = [Sequence(i, i, 0, [1], SamplingParams()) for i in range(64)]
    logits = torch.randn(len(sequences), _VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        sample(logits, sequences).tokens()
        times.append(time.perf_counter() - started)
    return logits.numel() / statistics.median(times)


_WIDTH, _ROWS = 1024, 8192  # of the matrices that are loaded


def _load_bytes_per_s() -> float:
    """Bytes in memory per second of loading safetensors from the page cache."""
    import torch
    from safetensors.torch import save_file

    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_ROWS, _WIDTH),
        "lm_head.weight": (_ROWS, _WIDTH),
    }
    shapes |= {f"model.layers.0.self_attn.{name}_proj.weight": (_WIDTH, _WIDTH) for name in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{name}_proj.weight": (_WIDTH, _WIDTH) for name in ("gate", "up", "down")}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    shapes |= {f"{name}.weight": (_WIDTH,) for name in norms}
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        path = Path(folder)
        path.joinpath("config.json").write_text(json.dumps(_llama(1, _WIDTH, _ROWS)))
        save_file(
            {name: torch.ones(shape, dtype=torch.float16) for name, shape in shapes.items()}, path / "model.safetensors"
        )
        return _bytes_loaded_per_s(path)


def _gguf_load_bytes_per_s() -> float | None:
    """Bytes in memory per second of loading a quantized GGUF; None without the package `gguf`."""
    import numpy as np

    try:
        import gguf
    except ImportError:
        return None

    kind = gguf.GGMLQuantizationType.Q4_1
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    matrices = {"token_embd": _ROWS, "output": _ROWS}
    matrices |= {f"blk.0.attn_{name}": _WIDTH for name in ("q", "k", "v", "output")}
    matrices |= {f"blk.0.ffn_{name}": _WIDTH for name in ("gate", "up", "down")}
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        path = Path(folder, "model.gguf")
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(_WIDTH)
        writer.add_feed_forward_length(_WIDTH)
        writer.add_head_count(1)
        for name, rows in matrices.items():
            packed = np.zeros((rows, _WIDTH // per_block * block_bytes), dtype=np.uint8)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return _bytes_loaded_per_s(path)


def _bytes_loaded_per_s(path: Path) -> float:
    """Bytes per second of loading a model in bfloat16 from the page cache: the second of two loads is timed."""
    import torch

    from batchgen.models.checkpoint import open_checkpoint
    from batchgen.models.files import resolve_model
    from batchgen.runtime.memory.weights import Weights
    from batchgen.schedule.residency import WeightResidency

    checkpoint = open_checkpoint(resolve_model(str(path)))
    residency = WeightResidency.in_memory(checkpoint.config, "bfloat16")
    Weights(checkpoint.config, residency, torch.bfloat16, checkpoint=checkpoint).close()
    started = time.perf_counter()
    weights = Weights(checkpoint.config, residency, torch.bfloat16, checkpoint=checkpoint)
    seconds = time.perf_counter() - started
    num_bytes = weights.num_bytes  # before they are closed
    weights.close()
    return num_bytes / seconds
