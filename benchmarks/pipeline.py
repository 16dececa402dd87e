"""Two stages beside one engine, on emulated accelerators whose links are so slow that weights bind.

Every device has the same memory. The block over two stages is twice as large: each holds the KV of twice as many rows
in half of the layers.

    python benchmarks/pipeline.py [--model demo] [--h2d 200MiB/s]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from recording import result_path, write

import batchgen

BLOCK, OUTPUT_LEN = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--gpu-memory", default="256MiB")
    parser.add_argument("--h2d", default="200MiB/s")
    parser.add_argument("--rows", type=int, default=4 * BLOCK)
    parser.add_argument("-o", "--output", type=Path, default=result_path("pipeline"))
    args = parser.parse_args()
    device = f"emulated:gpu-memory={args.gpu_memory},h2d={args.h2d},d2h={args.h2d}"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.parquet"
        pq.write_table(pa.table({"prompt": [f"Row {i} of a table about the quay:" for i in range(args.rows)]}), source)
        for stages in (1, 2):
            report = batchgen.run(
                args.model, str(source), Path(folder) / f"{stages}.jsonl", device=device, pipeline=stages,
                dtype="float32",
                max_num_seqs=BLOCK * stages, max_tokens=OUTPUT_LEN, ignore_eos=True, progress="plain",
            )  # fmt: skip
            startup_s = report["predicted"]["startup_s"]
            predicted_s = report["predicted_wall_s"] - startup_s
            # The sweeps, as rank 0 has them: loading, and starting a process, take a few seconds of any job.
            sweeps_s = report["busy_s"]["compute"] + report["busy_s"]["sampling"]
            found[stages] = {
                "wall_s": report["wall_s"],
                "load_s": report["load_s"],
                "sweeps_s": sweeps_s,
                "predicted_sweeps_s": predicted_s,
                "predicted_over_measured": predicted_s / sweeps_s,
                "policy": report["policy"],
                "stalled_s": report["stalled_s"],
            }
            print(json.dumps({k: v for k, v in found[stages].items() if k != "policy"}, indent=1), flush=True)
        same = (Path(folder) / "1.jsonl").read_text() == (Path(folder) / "2.jsonl").read_text()
    result = {
        "device": device,
        "rows": args.rows,
        "same_output": same,
        "speedup": found[1]["sweeps_s"] / found[2]["sweeps_s"],
        "stages": found,
    }
    print(f"two stages: {result['speedup']:.2f} times one; the same output: {same}")
    write(args.output, result)


if __name__ == "__main__":
    main()
