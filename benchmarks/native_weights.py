"""Weights in their native blocks against the same weights dequantized, and against llama.cpp on the same file.

Models are the demo model in Q4_1, as it comes, and in Q4_0 and Q8_0, and layers of Llama-3.2-3B's shape with random
blocks of Q4_1 and Q4_K. Each case is a process of its own: seconds to load, the memory that the model and the process
take, and tokens a second of prompts alone and of decoding 1, 4 and 16 sequences. The sides of a format take turns;
figures are medians of the rounds. Models that a run leaves out stay in the result file as they were.

    python benchmarks/native_weights.py --work-dir DIR
    python benchmarks/native_weights.py --work-dir DIR --peers DIR                # llama.cpp too, compiled there once
    python benchmarks/native_weights.py --work-dir DIR --only 3B-Q4_1 --layers 2 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from peers.environments import python_of
from peers.model_files import write_requantized_gguf, write_shaped_gguf
from recording import machine, result_path, write

from batchgen.core.machine import resident_bytes
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.files import resolve_model
from batchgen.ops.instruction_set import num_threads

LLAMA_CPP = Path(__file__).parent / "peers" / "llama_cpp_sequences.py"
CASES = ["demo-Q4_1", "demo-Q4_0", "demo-Q8_0", "3B-Q4_1", "3B-Q4_K"]
PROMPT_TOKENS, PROMPTS = 512, 16
DECODED, SEQUENCES, DECODE_PROMPT = 64, (1, 4, 16), 8
# Llama-3.2-3B's shape, by the names of a GGUF's fields: with the demo model's vocabulary, so that its tokenizer fits.
SHAPE_3B = {
    "embedding_length": 3072,
    "feed_forward_length": 8192,
    "attention.head_count": 24,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "attention.value_length": 128,
    "rope.dimension_count": 128,
}
# The fp16 numbers of a block, by where they are: so that weights are of about the size that a model's are.
_HALVES = {
    "Q4_1": {0: 1e-3, 2: -7e-3},
    "Q4_K": {0: 1e-5, 2: 7e-5},
    "Q6_K": {208: 1.5e-5},
}
_TABLE_FORMAT = "Q6_K"  # which llama.cpp's quantizer gives an output matrix, so also embeddings that are one
_PATTERN_BLOCKS = 1 << 12


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """A matrix [rows, bytes] of random blocks of a format."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    pattern = np.random.default_rng(0).integers(0, 256, (_PATTERN_BLOCKS, num_bytes), dtype=np.uint8)
    for at, half in _HALVES[kind].items():
        pattern[:, at : at + 2] = np.frombuffer(np.float16(half).tobytes(), np.uint8)
    return np.resize(pattern, (rows * columns // values, num_bytes)).reshape(rows, -1)


def file_of(case: str, work_dir: Path, layers: int) -> Path:
    """The GGUF of a case, made in the work directory where it is not there yet."""
    demo, (model, kind) = resolve_model("demo").path, case.split("-")
    if model == "demo":
        return demo if kind == "Q4_1" else write_requantized_gguf(demo, work_dir / f"{case}.gguf", kind)

    def blocks(name: str, rows: int, columns: int) -> tuple:
        used = _TABLE_FORMAT if name == "token_embd" else kind
        return random_blocks(used, rows, columns), gguf.GGMLQuantizationType[used]

    return write_shaped_gguf(demo, work_dir / f"{case}-{layers}.gguf", SHAPE_3B, layers, blocks)


def by_llama_cpp(python: Path, model: Path, work_dir: Path, threads: int) -> dict[str, float]:
    """Decoded tokens a second by llama.cpp, for each number of sequences."""
    rates = {}
    for sequences in SEQUENCES:
        prompts, output = work_dir / "prompts.json", work_dir / "llama_cpp.json"
        prompts.write_text(json.dumps([prompt(i, DECODE_PROMPT) for i in range(sequences)]))
        command = [str(python), str(LLAMA_CPP), "--model", str(model), "--limit-s", "60", "--prompts", str(prompts)]
        command += ["--max-new-tokens", str(DECODED), "--sequences", str(sequences)]
        subprocess.run([*command, "--threads", str(threads), "--output", str(output)], check=True)
        passes = [p for p in json.loads(output.read_text())["passes"] if not p["prompt_tokens"]]
        tokens, seconds = (sum(p[key] for p in passes) for key in ("generated_tokens", "seconds"))
        rates[f"decoded_tokens_per_s_of_{sequences}"] = tokens / seconds
    return rates


def prompt(i: int, length: int) -> list[int]:
    """Token ids of prompt i; prompts share nothing."""
    return [(31 * i + 7 * j) % 40000 + 100 for j in range(length)]


def tokens_per_s(engine: Engine, sequences: int, length: int, generated: int) -> float:
    """Tokens a second: generated ones, or of prompts of this length where only one is generated."""
    options = SamplingParams(max_tokens=generated, ignore_eos=True)
    requests = [Request(prompt(i, length), options) for i in range(sequences)]
    started = time.perf_counter()
    list(engine.generate(requests))
    tokens = sequences * (generated if generated > 1 else length)
    return tokens / (time.perf_counter() - started)


def measure(model: str, weights: str, dtype: str) -> dict[str, float]:
    """Figures of one side of a case, measured in this process."""
    started = time.perf_counter()
    with Engine(
        model, dtype=dtype, weights=weights, max_model_len=1024, max_num_seqs=16, share_prefixes=False
    ) as engine:
        figures = {
            "load_s": time.perf_counter() - started,
            "model_bytes": engine.parts.loaded_bytes,
            "process_bytes": resident_bytes(),
        }
        tokens_per_s(engine, 1, 16, 2)
        figures["prompt_tokens_per_s"] = tokens_per_s(engine, PROMPTS, PROMPT_TOKENS, 1)
        for sequences in SEQUENCES:
            figures[f"decoded_tokens_per_s_of_{sequences}"] = tokens_per_s(engine, sequences, DECODE_PROMPT, DECODED)
    return figures


def sides_of(case: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of the figures of each side of a case."""
    path, native = file_of(case, args.work_dir, args.layers), case.split("-")[1].lower()
    os.sync()  # the first to load it must not wait for it to be written

    def measured(side: str) -> dict[str, float]:
        if side == "llama.cpp":
            return by_llama_cpp(python_of(side, args.peers), path, args.work_dir, num_threads())
        command = [sys.executable, __file__, "--work-dir", str(args.work_dir), "--dtype", args.dtype]
        command += ["--case", str(path), native if side == "native" else "bf16"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    sides = ["native", "dequantized", *(["llama.cpp"] if args.peers else [])]
    rounds = [{side: measured(side) for side in sides} for _ in range(args.rounds)]
    return {
        side: {key: statistics.median(figures[side][key] for figures in rounds) for key in rounds[0][side]}
        for side in sides
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model in other formats")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="layers of the models of 3B's shape")
    parser.add_argument("--only", type=lambda text: text.split(","), help="some models, such as demo-Q4_1,3B-Q4_K")
    parser.add_argument("--peers", type=Path, help="where llama.cpp's environment is, or will be; it is measured too")
    parser.add_argument("--output", type=Path, default=result_path("native_weights", by_cpu=True))
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "QUANTIZATION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(*args.case, args.dtype)))
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    models: dict[str, dict] = {}
    for case in CASES if args.only is None else args.only:
        models[case] = sides = sides_of(case, args)
        for side in sides.keys() - {"native"}:
            ratios = {key: round(sides["native"][key] / value, 3) for key, value in sides[side].items()}
            models[case] = models[case] | {f"native_over_{side}": ratios}
            print(case, side, ratios, flush=True)
    same = {"machine": machine(), "dtype": args.dtype, "layers_of_3B": args.layers, "table_of_3B": _TABLE_FORMAT}
    before = json.loads(args.output.read_text()) if args.output.exists() else {}
    if all(before.get(key) == value for key, value in same.items()):
        models = before["models"] | models
    write(args.output, same | {"models": models})


if __name__ == "__main__":
    main()
