"""Rows of 32,768 prompt tokens through the demo model's shape, within memory limits that their KV does not fit in.

With --layers the shape has fewer layers, for rows that would take hours.

The shape has random weights and positions for 262,144 tokens. Each limit is a control group in which page cache counts;
the job is `batchgen bench`, which says beforehand how long it will take. Needs root and cgroup v1.

    python benchmarks/long_rows.py --work-dir DIR
    python benchmarks/long_rows.py --tokens 131072 --layers 6 --memory 1GiB --work-dir DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from peers.memory_limit import empty_page_cache, run_limited
from recording import machine, result_path, write

from batchgen.core.units import format_bytes, parse_bytes
from batchgen.models.files import resolve_for_planning

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 262144,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_BESIDE_FRAC = 0.08  # of the limit, for what the kernel counts beside the process
_KEPT = ("predicted_wall_s", "wall_s", "load_s", "policy", "peak_bytes", "bytes_moved", "prompt_tokens", "sweeps")
_KEPT_OF_PREDICTION = ("low_s", "high_s", "source")  # the source says what ran beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="of each prompt")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--memory", type=parse_bytes, nargs="+", default=[parse_bytes("900MiB")])
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=result_path("long_rows", by_cpu=True))
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    (args.work_dir / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
    _, config = resolve_for_planning(str(args.work_dir / "config.json"))
    kv_bytes = config.kv_bytes_per_token(2) * (args.tokens + args.output_tokens) * args.rows
    runs = json.loads(args.output.read_text())["runs"] if args.output.exists() else {}
    for limit in args.memory:
        report_file = args.work_dir / "report.json"
        report_file.unlink(missing_ok=True)
        command = [
            str(Path(sys.executable).with_name("batchgen")), "bench", "-m", str(args.work_dir / "config.json"),
            "--load-format", "dummy", "--num-prompts", str(args.rows), "--input-len", str(args.tokens),
            "--output-len", str(args.output_tokens), "--cpu-memory", str(int(limit * (1 - _BESIDE_FRAC))),
            "--report", str(report_file), "--progress", "none",
        ]  # fmt: skip
        empty_page_cache([])
        limited = run_limited(command, limit, args.work_dir / "bench.log", timeout_s=args.limit_s)
        if limited.exit_code or limited.oom_kills:
            raise SystemExit(f"{limited}\n{(args.work_dir / 'bench.log').read_text()[-2000:]}")
        report = json.loads(report_file.read_text())
        name = f"{args.rows} x {args.tokens}, {args.layers} layers, within {format_bytes(limit)}"
        kept = {key: report[key] for key in _KEPT if key in report}
        kept |= {f"predicted_{key}": report["predicted"][key] for key in _KEPT_OF_PREDICTION}
        runs[name] = {"kv_bytes": kv_bytes, "limited": asdict(limited), "report": kept, "machine": machine()["cpu"]}
        write(args.output, {"runs": runs})
        print(f"{name}: {report['wall_s']:.0f} s, predicted {report['predicted_wall_s']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
