"""Draw the prompt and output lengths that the benchmarks replay from the Azure LLM inference trace.

    python benchmarks/make_azure_sample.py AzureLLMInferenceTrace_conv.csv [--rows 512] [--seed 0] [-o FILE]

The sample is `random.Random(seed).sample(rows, 512)` over the trace in file order, in the order drawn and not
clipped: its first n rows are themselves a random sample. Standard library only.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from pathlib import Path

COLUMNS = ("ContextTokens", "GeneratedTokens")
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "data" / "azure_conv_sample.csv"


def draw(trace: Path, rows: int, seed: int) -> list[tuple[int, int]]:
    """`rows` pairs (context tokens, generated tokens). Raises ValueError where the trace has no such rows."""
    with trace.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if not set(COLUMNS) <= set(reader.fieldnames or ()):
            raise ValueError(f"{trace} is not the Azure LLM inference trace: no columns {', '.join(COLUMNS)}")
        lengths = [(int(row[COLUMNS[0]]), int(row[COLUMNS[1]])) for row in reader]
    if not 1 <= rows <= len(lengths):
        raise ValueError(f"--rows {rows}: {trace} has {len(lengths)} rows")
    return random.Random(seed).sample(lengths, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT_OUTPUT)
    args = parser.parse_args()
    try:
        sample = draw(args.trace, args.rows, args.seed)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *sample])
    except (OSError, ValueError) as error:
        sys.exit(f"make_azure_sample: {error}")
    print(f"{args.output}: {len(sample)} of the trace's rows")


if __name__ == "__main__":
    main()
