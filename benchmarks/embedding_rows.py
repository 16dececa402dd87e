"""Peak memory of a job that embeds many short rows, by their number: memory must not grow with them.

The encoder is a random BERT of two layers, so that reading, tokenizing, scheduling, pooling and writing take most of
the time. Each size is a process of its own, with an input and an output in Parquet.

    python benchmarks/embedding_rows.py --tokenizer all-MiniLM-L6-v2 --rows 100000 1000000 10000000
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_flat import write_input
from recording import result_path, write


def make_encoder(folder: Path, tokenizer: Path) -> None:
    """Write a random BERT with the tokenizer of another model."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / file).exists():
            shutil.copyfile(tokenizer / file, folder / file)


def run_one(model: str, rows: int, folder: Path) -> dict[str, Any]:
    """The job in this process: its rows, and the peak of its memory in bytes."""
    import batchgen

    source, output = folder / "in.parquet", folder / "out.parquet"
    write_input(source, rows)
    report = batchgen.run(
        model, source, output, task="embed", prompt_template="item {{ name }} {{ number }}", dtype="float32",
        vector_dtype="float16",
    )  # fmt: skip
    assert report["rows_ok"] == rows
    return {"rows": rows, "peak_bytes": report["peak_bytes"]["cpu"], "prompt_tokens": report["prompt_tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of a model, whose tokenizer is used")
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--output", type=Path, default=result_path("embedding_rows", by_cpu=True))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_one(str(arguments.tokenizer), arguments.one, Path(folder))))
        return
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "encoder")
        make_encoder(model, arguments.tokenizer)
        for rows in arguments.rows:
            command = [sys.executable, __file__, "--tokenizer", str(model), "--one", str(rows)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(results[-1]), flush=True)
    growth = results[-1]["peak_bytes"] - results[0]["peak_bytes"]
    write(arguments.output, {"runs": results, "growth_bytes": growth})
    print(f"growth: {growth / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
