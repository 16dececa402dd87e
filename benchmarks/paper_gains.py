"""NEO's and APEX's gains over the GPU alone, planned and simulated for machines like theirs.

NEO, figure 10a: Llama-3.1-8B on an A10G beside hosts of four sizes, prompts of about 1,000 tokens. APEX, figures 5 and
7: the same model on the largest of these, and Llama-2-7B on a T4, outputs of different lengths. A strategy's time is
the simulated time of its best plan.

    python benchmarks/paper_gains.py             # writes benchmarks/results/paper_gains.json
    python benchmarks/paper_gains.py --markdown  # the tables of docs/neo_apex_check.md, of that file
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.workload import Lengths, Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.problem import problem_of
from batchgen.planner.strategies import WITH_GPU, NotApplicable
from batchgen.planner.strategy_times import best_plan
from batchgen.profiler.shipped import shipped_profile

HERE = Path(__file__).parent
RESULT = HERE / "results" / "paper_gains.json"
ROWS, PROMPT = 2000, 1000
OUTPUT_LENS = (50, 100, 200, 400, 800)
# Parts of the CPU of g5.16xlarge, which is the shipped profile; 2x has nearly the bandwidth of 4x (NEO section 5.5).
HOSTS = {"2x": 3.5 / 16, "4x": 4 / 16, "8x": 8 / 16, "16x": 1.0}
STRATEGIES = ("GPU-only", "NEO", "APEX")
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    name: str
    hardware: HardwareProfile
    model: ModelConfig
    prompt: int


def settings() -> list[Setting]:
    llama_3 = json.loads(
        (HERE.parent / "recipes" / "throughput" / "shapes" / "llama-3.1-8b" / "config.json").read_text()
    )
    a10g, llama_3 = shipped_profile("a10g"), config_of_hf(llama_3)
    found = [
        Setting(
            f"A10G, host {name}",
            a10g.scaled(
                cpu_decode_attention=share, dram_bytes_per_s=share, cpu_memory_bytes=max(share, min(HOSTS.values()))
            ),
            llama_3,
            PROMPT,
        )
        for name, share in HOSTS.items()
    ]
    return [*found, Setting("T4", shipped_profile("t4"), config_of_hf(LLAMA_2), 200)]


def around(mean: int) -> Lengths:
    """NEO's synthetic lengths: from 0.9 to 1.1 of the mean."""
    return Lengths(tuple(round(mean * (0.9 + 0.02 * i)) for i in range(11)))


def gains(setting: Setting, output_len: int, rows: int) -> dict[str, Any]:
    """Simulated throughput of each strategy over that of the GPU alone, less 1; None where there is no such plan."""
    outputs = around(output_len)
    workload = Workload(rows, around(setting.prompt), outputs, max(outputs.values))
    given = {"admission": "continuous", "process_bytes": 700 << 20, "disk_memory": 0, "max_model_len": 4096}
    problem = problem_of(setting.hardware, setting.model, workload, dtype="float16", **given)
    seconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for strategy in WITH_GPU:
        if strategy.name not in STRATEGIES:
            continue
        try:
            predicted = best_plan(strategy, problem).prediction
            seconds[strategy.name] = predicted.total_s - predicted.startup_s
        except (NotApplicable, InputError) as error:
            reasons[strategy.name] = str(error)
    alone = seconds.get("GPU-only")
    over = {name: alone / own - 1 if alone else None for name, own in seconds.items() if name != "GPU-only"}
    return {"setting": setting.name, "output_len": output_len, "seconds": seconds, "gains": over, "reasons": reasons}


def markdown(found: list[dict[str, Any]]) -> str:
    """A table for each way, with a row for each setting and a column for each output length."""
    lines = []
    names = list(dict.fromkeys(entry["setting"] for entry in found))
    lens = sorted({entry["output_len"] for entry in found})
    for way in STRATEGIES[1:]:
        lines += [
            "",
            f"| {way} over GPU-only | {' | '.join(f'{n} tokens' for n in lens)} |",
            "|---" + "|---:" * len(lens) + "|",
        ]
        for name in names:
            cells = {entry["output_len"]: entry["gains"].get(way) for entry in found if entry["setting"] == name}
            shown = ("-" if cells.get(n) is None else f"{cells[n]:+.0%}" for n in lens)
            lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="show the tables of the file that is there")
    parser.add_argument("--only", help="settings whose name has this; nothing is written")
    parser.add_argument("--rows", type=int, default=ROWS)
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(RESULT.read_text())["cells"]))
        return
    found = []
    for setting in settings():
        if args.only and args.only not in setting.name:
            continue
        for output_len in OUTPUT_LENS:
            found.append(gains(setting, output_len, args.rows))
            shown = {way: None if gain is None else f"{gain:+.1%}" for way, gain in found[-1]["gains"].items()}
            print(f"{setting.name}, {output_len} tokens: {shown} {found[-1]['reasons']}", flush=True)
    print(markdown(found))
    if not args.only:
        from recording import write

        write(RESULT, {"rows": args.rows, "cells": found})


if __name__ == "__main__":
    main()
