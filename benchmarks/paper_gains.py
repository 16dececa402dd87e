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
from typing import Any

from paper_settings import HOSTS, OUTPUT_LENS, ROWS, Setting, a10g, sweeps_s, t4
from paper_settings import STRATEGIES as NAMED
from recording import result_path, write

from batchgen.core.errors import InputError
from batchgen.planner.strategies import NotApplicable

STRATEGIES = ("GPU-only", "NEO", "APEX")


def settings(output_len: int) -> list[Setting]:
    """The machines with outputs of about so many tokens."""
    return [*(a10g(host, output_len) for host in HOSTS), t4(output_len)]


def gains(setting: Setting, output_len: int, rows: int) -> dict[str, Any]:
    """Simulated throughput of each strategy over that of the GPU alone, less 1; None where there is no such plan."""
    seconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name in STRATEGIES:
        try:
            seconds[name] = sweeps_s(setting.plan(NAMED[name], rows))
        except (NotApplicable, InputError) as error:
            reasons[name] = str(error)
    alone = seconds.get("GPU-only")
    over = {name: alone / taken_s - 1 if alone else None for name, taken_s in seconds.items() if name != "GPU-only"}
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
        print(markdown(json.loads(result_path("paper_gains").read_text())["cells"]))
        return
    found = []
    for of_lengths in zip(*map(settings, OUTPUT_LENS), strict=True):
        for setting, output_len in zip(of_lengths, OUTPUT_LENS, strict=True):
            if args.only and args.only not in setting.name:
                continue
            found.append(gains(setting, output_len, args.rows))
            shown = {way: None if gain is None else f"{gain:+.1%}" for way, gain in found[-1]["gains"].items()}
            print(f"{setting.name}, {output_len} tokens: {shown} {found[-1]['reasons']}", flush=True)
    print(markdown(found))
    if not args.only:
        write(result_path("paper_gains"), {"rows": args.rows, "cells": found})


if __name__ == "__main__":
    main()
