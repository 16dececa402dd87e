"""Weights as found against the same weights expanded: the demo model in Q4_1, as it comes, and in Q4_0 and Q8_0.

    python benchmarks/as_found.py --work-dir DIR

Each case is a process of its own: seconds to load, the memory that the model and the process take, and tokens a second of prompts
alone and of decoding 1 and 16 sequences. The two sides of a format take turns; figures are medians of the rounds. The result goes to
benchmarks/results/as_found-CPU.json, named after the kind of CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from cpu_kind import machine, slug

from batchgen.core.machine import resident_bytes
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.job.report import versions
from batchgen.models.files import resolve_model

HERE = Path(__file__).parent
PROMPT_TOKENS, PROMPTS = 512, 16
DECODED = 64


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


def tokens_per_s(engine: Engine, sequences: int, prompt: int, generated: int) -> float:
    """Computed prompt tokens, or where more than one is generated, generated ones. Prompts share nothing."""
    options = SamplingParams(max_tokens=generated, ignore_eos=True)
    requests = [Request([(31 * i + 7 * j) % 40000 + 100 for j in range(prompt)], options) for i in range(sequences)]
    started = time.perf_counter()
    list(engine.generate(requests))
    tokens = sequences * (generated if generated > 1 else prompt)
    return tokens / (time.perf_counter() - started)


def measure(model: str, quantization: str, dtype: str) -> dict[str, float]:
    """Figures of one case, in this process."""
    started = time.perf_counter()
    with Engine(
        model, dtype=dtype, quantization=quantization, max_model_len=1024, max_num_seqs=16, share_prefixes=False
    ) as engine:
        found = {
            "load_s": time.perf_counter() - started,
            "model_bytes": engine.parts.loaded_bytes,
            "process_bytes": resident_bytes(),
        }
        tokens_per_s(engine, 1, 16, 2)
        found["prompt_tokens_per_s"] = tokens_per_s(engine, PROMPTS, PROMPT_TOKENS, 1)
        for sequences in (1, 16):
            found[f"decoded_tokens_per_s_of_{sequences}"] = tokens_per_s(engine, sequences, 8, DECODED)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model in other formats")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/as_found-CPU.json]")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "QUANTIZATION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(*args.case, args.dtype)))
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    demo = resolve_model("demo").path
    models = {"Q4_1": demo} | {
        name: requantized(demo, args.work_dir / f"demo-{name}.gguf", name) for name in ("Q4_0", "Q8_0")
    }
    found: dict[str, dict] = {}
    for name, path in models.items():
        sides: dict[str, list[dict[str, float]]] = {name.lower(): [], "bf16": []}
        for _ in range(args.rounds):
            for quantization, rounds in sides.items():
                command = [sys.executable, __file__, "--work-dir", str(args.work_dir), "--dtype", args.dtype]
                command += ["--case", str(path), quantization]
                rounds.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        medians = {
            side: {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
            for side, rounds in sides.items()
        }
        ratios = {key: round(value / medians["bf16"][key], 3) for key, value in medians[name.lower()].items()}
        found[name] = {"as_found": medians[name.lower()], "expanded": medians["bf16"], "as_found_over_expanded": ratios}
        print(name, ratios, flush=True)
    on = machine()
    output = args.output or HERE / "results" / f"as_found-{slug(on)}.json"
    output.write_text(
        json.dumps({"machine": on, "dtype": args.dtype, "formats": found, "versions": versions()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
