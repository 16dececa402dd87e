"""Weights as found against the same weights expanded, and against llama.cpp on the same file: the demo model in Q4_1, as it comes,
and in Q4_0 and Q8_0, and layers of Llama-3.2-3B's shape with random blocks of Q4_1 and Q4_K.

    python benchmarks/as_found.py --work-dir DIR
    python benchmarks/as_found.py --work-dir DIR --peers DIR                    # llama.cpp too, compiled there once
    python benchmarks/as_found.py --work-dir DIR --only 3B-Q4_1 --layers 2 --rounds 1

Each case is a process of its own: seconds to load, the memory that the model and the process take, and tokens a second of prompts
alone and of decoding 1, 4 and 16 sequences. The sides of a format take turns; figures are medians of the rounds. The result goes to
benchmarks/results/as_found-CPU.json, named after the kind of CPU; models that a run leaves out stay in it as they were.
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

import numpy as np
from cpu_kind import machine, slug
from peers.environments import python_of

from batchgen.core.machine import resident_bytes
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.job.report import versions
from batchgen.models.files import resolve_model
from batchgen.ops.instruction_set import num_threads

HERE = Path(__file__).parent
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


def requantized(source: Path, target: Path, name: str) -> Path:
    """The GGUF with its layers' matrices in another format; all else as it is."""
    import gguf

    if target.exists():
        return target
    reader, kind = gguf.GGUFReader(str(source)), gguf.GGMLQuantizationType[name]
    writer = gguf.GGUFWriter(str(target), reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def shaped(source: Path, target: Path, name: str, layers: int) -> Path:
    """A GGUF of so many layers of SHAPE_3B in one format, with random blocks; tokenizer and all else are the source's.

    Its table of embeddings is the output matrix.
    """
    import gguf

    if target.exists():
        return target
    reader = gguf.GGUFReader(str(source))
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(str(target), arch)
    changed = {f"{arch}.{key}": value for key, value in SHAPE_3B.items()} | {f"{arch}.block_count": layers}
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", *changed):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for key, value in changed.items():
        writer.add_uint32(key, value)
    draw = np.random.default_rng(0)

    def add_matrix(tensor: str, rows: int, columns: int, kind: str) -> None:
        values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        pattern = draw.integers(0, 256, (_PATTERN_BLOCKS, num_bytes), dtype=np.uint8)
        for at, half in _HALVES[kind].items():
            pattern[:, at : at + 2] = np.frombuffer(np.float16(half).tobytes(), np.uint8)
        blocks = np.resize(pattern, (rows * columns // values, num_bytes)).reshape(rows, -1)
        writer.add_tensor(tensor, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])

    width, inner, head = (
        SHAPE_3B["embedding_length"],
        SHAPE_3B["feed_forward_length"],
        SHAPE_3B["attention.key_length"],
    )
    queries, keys = SHAPE_3B["attention.head_count"] * head, SHAPE_3B["attention.head_count_kv"] * head
    vocab = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    ones = np.ones(width, np.float32)
    add_matrix("token_embd.weight", vocab, width, _TABLE_FORMAT)
    writer.add_tensor("output_norm.weight", ones)
    shapes = {
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for part, shape in shapes.items():
            add_matrix(f"blk.{layer}.{part}.weight", *shape, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def by_llama_cpp(python: Path, model: Path, work_dir: Path, threads: int) -> dict[str, float]:
    """Tokens a second of decoding alone, as many sequences at once."""
    found = {}
    for sequences in SEQUENCES:
        prompts, output = work_dir / "prompts.json", work_dir / "llama_cpp.json"
        prompts.write_text(json.dumps([prompt(i, DECODE_PROMPT) for i in range(sequences)]))
        command = [
            str(python),
            str(HERE / "peers" / "llama_cpp_sequences.py"),
            "--model",
            str(model),
            "--limit-s",
            "60",
        ]
        command += ["--prompts", str(prompts), "--max-new-tokens", str(DECODED), "--sequences", str(sequences)]
        subprocess.run([*command, "--threads", str(threads), "--output", str(output)], check=True)
        passes = [p for p in json.loads(output.read_text())["passes"] if not p["prompt_tokens"]]
        found[f"decoded_tokens_per_s_of_{sequences}"] = sum(p["generated_tokens"] for p in passes) / sum(
            p["seconds"] for p in passes
        )
    return found


def prompt(i: int, length: int) -> list[int]:
    """Token ids; prompts share nothing."""
    return [(31 * i + 7 * j) % 40000 + 100 for j in range(length)]


def tokens_per_s(engine: Engine, sequences: int, length: int, generated: int) -> float:
    """Computed prompt tokens, or where more than one is generated, generated ones. length: of a prompt."""
    options = SamplingParams(max_tokens=generated, ignore_eos=True)
    requests = [Request(prompt(i, length), options) for i in range(sequences)]
    started = time.perf_counter()
    list(engine.generate(requests))
    tokens = sequences * (generated if generated > 1 else length)
    return tokens / (time.perf_counter() - started)


def measure(model: str, weights: str, dtype: str) -> dict[str, float]:
    """Figures of one case, in this process."""
    started = time.perf_counter()
    with Engine(
        model, dtype=dtype, weights=weights, max_model_len=1024, max_num_seqs=16, share_prefixes=False
    ) as engine:
        found = {
            "load_s": time.perf_counter() - started,
            "model_bytes": engine.parts.loaded_bytes,
            "process_bytes": resident_bytes(),
        }
        tokens_per_s(engine, 1, 16, 2)
        found["prompt_tokens_per_s"] = tokens_per_s(engine, PROMPTS, PROMPT_TOKENS, 1)
        for sequences in SEQUENCES:
            found[f"decoded_tokens_per_s_of_{sequences}"] = tokens_per_s(engine, sequences, DECODE_PROMPT, DECODED)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model in other formats")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="of the models of 3B's shape")
    parser.add_argument("--only", type=lambda text: text.split(","), help="some models, such as demo-Q4_1,3B-Q4_K")
    parser.add_argument(
        "--peers", type=Path, help="where peers' environments are, or will be: llama.cpp is measured too"
    )
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/as_found-CPU.json]")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "QUANTIZATION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(*args.case, args.dtype)))
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    demo = resolve_model("demo").path

    def file_of(case: str) -> Path:
        model, kind = case.split("-")
        if model == "3B":
            return shaped(demo, args.work_dir / f"{case}-{args.layers}.gguf", kind, args.layers)
        return demo if kind == "Q4_1" else requantized(demo, args.work_dir / f"{case}.gguf", kind)

    def measured(side: str, path: Path) -> dict[str, float]:
        if side == "llama.cpp":
            return by_llama_cpp(python_of(side, args.peers), path, args.work_dir, num_threads())
        command = [sys.executable, __file__, "--work-dir", str(args.work_dir), "--dtype", args.dtype]
        command += ["--case", str(path), side]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    found: dict[str, dict] = {}
    for case in ("demo-Q4_1", "demo-Q4_0", "demo-Q8_0", "3B-Q4_1", "3B-Q4_K"):
        if args.only and case not in args.only:
            continue
        path, kept = file_of(case), case.split("-")[1].lower()
        os.sync()  # the first to load it must not wait for it to be written
        sides: dict[str, list[dict[str, float]]] = {kept: [], "dequantized": []} | (
            {"llama.cpp": []} if args.peers else {}
        )
        for _ in range(args.rounds):
            for side, rounds in sides.items():
                rounds.append(measured(side, path))
        medians = {
            side: {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
            for side, rounds in sides.items()
        }
        found[case] = {"as_found": medians[kept], "expanded": medians["dequantized"]}
        for name, side in (("expanded", "dequantized"), ("llama.cpp", "llama.cpp")):
            if side in medians:
                ratios = {key: round(medians[kept][key] / value, 3) for key, value in medians[side].items()}
                found[case] |= {name: medians[side], f"as_found_over_{name}": ratios}
                print(case, name, ratios, flush=True)
    on = machine()
    same = {"machine": on, "dtype": args.dtype, "layers_of_3B": args.layers, "table_of_3B": _TABLE_FORMAT}
    output = args.output or HERE / "results" / f"as_found-{slug(on)}.json"
    before = json.loads(output.read_text()) if output.exists() else {}
    if all(before.get(key) == value for key, value in same.items()):
        found = before["models"] | found
    output.write_text(json.dumps({**same, "models": found, "versions": versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
