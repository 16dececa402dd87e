"""Restaurant entries turned into JSON records, under a schema and without, in turns: validity and throughput.

    python benchmarks/structured_output.py

The rows under the schema come first and end where their records do; then the same prompts generate exactly as many
tokens, whatever these are. Seconds are those of generation by a freshly loaded engine; what loading takes is listed
beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jsonschema
import pyarrow.parquet as pq
from recording import result_path, write

import batchgen
from batchgen.core.request import Completion, Request, SamplingParams

HERE = Path(__file__).parent
ENTRIES = HERE.parent / "recipes" / "data_wrangling" / "fodors_zagats_test.parquet"
CUISINES = ["american", "asian", "californian", "french", "italian", "mexican", "seafood", "steakhouse", "other"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 60},
        "address": {"type": "string", "maxLength": 60},
        "city": {"type": "string", "maxLength": 30},
        "phone": {"type": "string", "pattern": "^[0-9]{3}-[0-9]{3}-[0-9]{4}$"},
        "cuisine": {"enum": CUISINES},
        "price_level": {"type": "integer", "minimum": 1, "maximum": 5},
        "takes_reservations": {"type": "boolean"},
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "address", "city", "phone", "cuisine", "price_level", "takes_reservations", "keywords"],
    "additionalProperties": False,
}
QUESTION = (
    "Write this restaurant entry as a JSON object with name, address, city, phone, cuisine (one of {cuisines}),"
    " price_level (1 to 5), takes_reservations and keywords.\n\n{entry}"
)
# More than any record takes: a token is at least a byte, and a character of its 230 in strings at most 12
# (\\ud83d\\ude00).
MAX_TOKENS = 3072
EXPECTED_TOKENS = 128  # for admission, which must not differ


def conversations(count: int) -> list[list[dict]]:
    """A conversation for each of the first different entries of the matching task's pairs."""
    table = pq.read_table(ENTRIES).to_pylist()
    fields = ("name", "addr", "city", "phone", "type")
    entries = dict.fromkeys(
        ", ".join(row[f"{side}_{field}"] or "" for field in fields) for row in table for side in ("left", "right")
    )
    texts = [QUESTION.format(cuisines=", ".join(CUISINES), entry=entry) for entry in list(entries)[:count]]
    return [[{"role": "user", "content": text}] for text in texts]


def generate(args: argparse.Namespace, requests: list[Request], sampling: SamplingParams) -> tuple[list, dict]:
    """Completions in order, and the time and statistics of the run."""
    with batchgen.Engine(
        args.model,
        dtype=args.dtype,
        cpu_memory=args.cpu_memory,
        sampling=sampling,
        max_num_seqs=args.max_num_seqs,
        expected_output_len=EXPECTED_TOKENS,
    ) as engine:
        started, started_cpu = time.perf_counter(), time.process_time()
        found: list[Completion] = sorted(engine.generate(requests), key=lambda c: c.index)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
        failed = [c.error for c in found if c.error]
        if failed:
            raise SystemExit(f"{len(failed)} rows failed: {failed[0]}")
        tokens = engine.stats.generated_tokens
        return found, {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "load_s": engine.parts.load_s,
            "generated_tokens": tokens,
            "generated_tokens_per_s": tokens / seconds,
            "sweeps": engine.stats.sweeps,
            "busy_s": engine.stats.busy_s,
        }


def is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cpu-memory")
    parser.add_argument("--output", type=Path, default=result_path("structured_output"))
    args = parser.parse_args()
    prompts = conversations(args.rows)
    bound = SamplingParams(max_tokens=MAX_TOKENS, temperature=args.temperature, json_schema=SCHEMA)
    runs: dict[str, list[dict]] = {"schema": [], "free": []}
    valid, ended, alike, first = 0, 0, [], None
    for turn in range(args.repeats):
        records, took = generate(args, [Request(prompt) for prompt in prompts], bound)
        runs["schema"].append(took)
        valid += sum(is_valid(c.text) for c in records)
        ended += sum(c.samples[0].finish_reason == "stop" for c in records)
        alike.append(sum(is_valid(c.text) and c.text == f.text for c, f in zip(records, first or records, strict=True)))
        first = first or records
        counts = [len(c.samples[0].token_ids) for c in records]
        free = [
            Request(prompt, SamplingParams(max_tokens=count, temperature=args.temperature, ignore_eos=True))
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        texts, took = generate(args, free, SamplingParams(max_tokens=max(counts)))
        runs["free"].append(took)
        rates = [runs[name][-1]["generated_tokens_per_s"] for name in runs]
        print(
            f"turn {turn}: {rates[0]:,.0f} generated tokens/s under the schema, {rates[1]:,.0f} without:"
            f" {rates[0] / rates[1]:.0%}; {sum(is_valid(c.text) for c in texts)} of those without are valid",
            flush=True,
        )
    rates = {name: statistics.median(run["generated_tokens_per_s"] for run in found) for name, found in runs.items()}
    tokens = sum(run["generated_tokens"] for run in runs["schema"])
    result = {
        "arguments": {k: v for k, v in vars(args).items() if k != "output"},
        "schema": SCHEMA,
        "rows": len(prompts) * args.repeats,
        "rows_valid": valid,
        "rows_ended_with_their_grammar": ended,
        "rows_like_in_the_first_turn": alike,
        "generated_tokens_per_row": {"mean": statistics.mean(counts), "longest": max(counts)},
        "median_generated_tokens_per_s": rates,
        "ratio": rates["schema"] / rates["free"],
        "ratios": [
            s["generated_tokens_per_s"] / f["generated_tokens_per_s"]
            for s, f in zip(runs["schema"], runs["free"], strict=True)
        ],
        "cpu_s_ratio": sum(run["cpu_s"] for run in runs["free"]) / sum(run["cpu_s"] for run in runs["schema"]),
        "microseconds_a_mask": 1e6 * sum(run["busy_s"]["masks"] for run in runs["schema"]) / tokens,
        "seconds_waited_for_masks": [run["busy_s"]["mask_wait"] for run in runs["schema"]],
        "runs": runs,
        "example": first[0].text,
    }
    write(args.output, result)
    print(
        f"{valid} of {result['rows']} rows valid; {result['ratio']:.0%} of the throughput without a schema;"
        f" a mask takes {result['microseconds_a_mask']:.0f} microseconds, of {runs['schema'][-1]['seconds']:.1f} s"
        f" {runs['schema'][-1]['busy_s']['mask_wait']:.2f} were waited for masks"
    )
    if valid < result["rows"]:
        raise SystemExit("rows are not valid")


if __name__ == "__main__":
    main()
