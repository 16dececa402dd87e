"""Embeddings of a corpus, by batchgen and by sentence-transformers on the same cores.

The corpus is the paragraphs of this repository's pages, so lengths are those of real text. Each measurement is a
process of its own, from its start until the vectors are in a Parquet file; engines take turns. sentence-transformers
sorts texts by length and pads each batch; of its batch sizes the fastest counts. Vectors of both are compared.

    python benchmarks/embeddings.py --model all-MiniLM-L6-v2 --packages DIRECTORY
    python benchmarks/embeddings.py --shape qwen3-embedding-0.6b --tokenizer all-MiniLM-L6-v2 --packages DIRECTORY

`--packages` is a directory that has sentence-transformers (`pip install --target`). With `--shape` the weights are
random, and texts are tokenized by another model's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
_QWEN3_06B = {
    "vocab_size": 151669, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
_SHAPES = {"qwen3-embedding-0.6b": _QWEN3_06B}


def corpus(rows: int) -> list[str]:
    """Paragraphs of the repository's pages, shuffled, as many times as are needed."""
    import random

    texts: list[str] = []
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        texts += [" ".join(part.split()) for part in re.split(r"\n\s*\n", page.read_text())]
    texts = [text for text in texts if len(text) > 3]
    random.Random(0).shuffle(texts)
    return [texts[i % len(texts)] + ("" if i < len(texts) else f" {i // len(texts)}") for i in range(rows)]


def make_shape(name: str, tokenizer: Path, folder: Path) -> None:
    """Write a random model of a shape in bfloat16, with the tokenizer of another one and last-token pooling."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    Qwen3Model(Qwen3Config(**_SHAPES[name])).to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / file).exists():
            shutil.copyfile(tokenizer / file, folder / file)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 1024, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))


def by_batchgen(job: dict[str, Any]) -> dict[str, Any]:
    import batchgen

    report = batchgen.run(
        job["model"], job["input"], job["output"], task="embed", dtype=job["dtype"], on_overlong="truncate-right"
    )
    busy = report["busy_s"]
    return {"prompt_tokens": report["prompt_tokens"], "predicted_s": report["predicted_wall_s"], "busy_s": busy}


def by_sentence_transformers(job: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, job["packages"])
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from sentence_transformers import SentenceTransformer, __version__

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = {"torch_dtype": getattr(torch, job["dtype"])}
    model = SentenceTransformer(job["model"], device="cpu", model_kwargs=dtype)
    table = pq.read_table(job["input"])
    started = time.perf_counter()
    vectors = model.encode(table["text"].to_pylist(), batch_size=job["batch_size"], convert_to_tensor=True)
    took = time.perf_counter() - started
    vectors = vectors.float().numpy()
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    pq.write_table(table.append_column("embedding", column), job["output"])
    return {"encode_s": took, "sentence-transformers": __version__, "torch": torch.__version__}


ENGINES = {"batchgen": by_batchgen, "sentence-transformers": by_sentence_transformers}


def measured(engine: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A process of an engine: its wall time from start to end, and what it says."""
    asked, said = folder / "job.json", folder / "result.json"
    asked.write_text(json.dumps(job))
    started = time.perf_counter()
    subprocess.run([sys.executable, __file__, "--run", engine, str(asked), str(said)], check=True, cwd=ROOT)
    return {"wall_s": time.perf_counter() - started, **json.loads(said.read_text())}


def differences(folder: Path) -> dict[str, float]:
    """How far the vectors of the engines are from each other: the largest difference, and the least cosine."""
    import numpy as np
    import pyarrow.parquet as pq

    found = [
        pq.read_table(folder / f"{name}.parquet")["embedding"].combine_chunks().flatten().to_numpy() for name in ENGINES
    ]
    size = pq.read_table(folder / "batchgen.parquet").schema.field("embedding").type.list_size
    ours, theirs = (vectors.reshape(-1, size) for vectors in found)
    return {"largest": float(np.abs(ours - theirs).max()), "least_cosine": float((ours * theirs).sum(1).min())}


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        engine, asked, said = sys.argv[2:]
        Path(said).write_text(json.dumps(ENGINES[engine](json.loads(Path(asked).read_text()))))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=_SHAPES)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--packages", required=True)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import pyarrow as pa
    import pyarrow.parquet as pq
    from recording import result_path, write

    with tempfile.TemporaryDirectory(prefix="batchgen-embeddings-") as scratch:
        folder = Path(scratch)
        if arguments.shape:
            make_shape(arguments.shape, arguments.tokenizer, folder / arguments.shape)
        model = arguments.model or folder / arguments.shape
        pq.write_table(pa.table({"text": corpus(arguments.rows)}), folder / "in.parquet")
        job = {"model": str(model), "input": str(folder / "in.parquet"), "dtype": arguments.dtype}
        runs: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.repeats):
            for engine in ENGINES:
                for size in arguments.batch_sizes if engine != "batchgen" else [0]:
                    output = folder / f"{engine}.parquet"
                    output.unlink(missing_ok=True)
                    name = engine if engine == "batchgen" else f"{engine}, batches of {size}"
                    more = {"output": str(output), "packages": arguments.packages, "batch_size": size}
                    runs.setdefault(name, []).append(measured(engine, job | more, folder))
                    print(name, json.dumps(runs[name][-1]), flush=True)
        walls = {name: statistics.median(run["wall_s"] for run in of) for name, of in runs.items()}
        tokens = runs["batchgen"][0]["prompt_tokens"]
        best = min(wall for name, wall in walls.items() if name != "batchgen")
        result = {
            "model": arguments.shape or model.resolve().name,
            "dtype": arguments.dtype,
            "rows": arguments.rows,
            "tokens": tokens,
            "median_wall_s": walls,
            "tokens_per_s": {name: tokens / wall for name, wall in walls.items()},
            "times_as_fast": best / walls["batchgen"],
            "differences": differences(folder),
            "runs": runs,
        }
    name = f"embeddings-{arguments.shape or 'minilm'}"
    write(arguments.output or result_path(name, by_cpu=True), result)
    print(json.dumps({key: result[key] for key in ("median_wall_s", "times_as_fast", "differences")}, indent=1))


if __name__ == "__main__":
    main()
