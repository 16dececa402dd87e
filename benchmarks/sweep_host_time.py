"""CPU milliseconds of the host for a sweep with a card, beside another checkout's. No card is needed.

    python benchmarks/sweep_host_time.py --other ../batchgen-before

The card is played (`tests/support/played_card.py`), and its kernels do nothing, so what is left is the host's time:
scheduling, packing, launching, sampling and taking results. The model has 32 layers of 256 columns and is all on the
card. Rows have 32 tokens and get 8 to 39, so a tenth of the rows in flight end in a sweep, and as many prompts enter.
Each run is a process of its own, the checkouts in turn. Time is that of the launching thread, without what a real
driver would add (some 2 ms in a sweep that launches its layers one by one).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from random_model import make_model
from recording import result_path, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

_SHAPE = {
    "num_hidden_layers": 32,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, (8, 39)
# Runs in either checkout. Kernels that do nothing choose no token, so token 5 is put in their place. A sweep begins
# where the one before it has ended; those count that have nearly all sequences, once a tenth of the rows is done.
_RUN = """
import json, random, sys, time
import batchgen
from batchgen.runtime import sampler
model, rows, seqs, prompt_tokens, least, most = sys.argv[1], *map(int, sys.argv[2:])
sampler.Sampled.tokens = lambda self, five=sampler.SampledToken(5): [five] * len(self.on_host)
draw, times, last = random.Random(0), [], None
sampling = {n: batchgen.SamplingParams(max_tokens=n, ignore_eos=True) for n in range(least, most + 1)}
requests = [
    batchgen.Request([draw.randrange(1, 1024) for _ in range(prompt_tokens)], sampling[draw.randint(least, most)])
    for _ in range(rows)
]
with batchgen.Engine(model, device="cuda", gpu_memory="8GiB", max_num_seqs=seqs) as engine:
    def after_sweep(stats):
        global last
        now = time.thread_time()
        if last and done > rows // 10 and len(engine.in_flight().context) > 0.9 * seqs:
            times.append((now - last[0], stats.prefilled_tokens > last[1]))
        last = time.thread_time(), stats.prefilled_tokens
    done = 0
    for _ in engine.generate(requests, on_sweep=after_sweep):
        done += 1
print(json.dumps(times))
"""


def sweep_times(checkout: Path, model: Path, rows: int, seqs: int) -> list[tuple[float, bool]]:
    """CPU seconds of each sweep in a checkout, and whether prompts were in it."""
    import played_card

    venv = played_card.venvs()[0]
    environment = played_card.environment(venv, kernels=0, empty=1, at_once=1, counts=0, compile=1)
    environment["PYTHONPATH"] = environment["PYTHONPATH"].replace(str(ROOT) + ":", f"{checkout}:", 1)
    numbers = map(str, (rows, seqs, _PROMPT_TOKENS, *_OUTPUT_TOKENS))
    done = subprocess.run(
        [played_card.python(venv), "-c", _RUN, model, *numbers],
        cwd=checkout,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    times: list[tuple[float, bool]] = json.loads(done.stdout.splitlines()[-1])
    return times


def summary(times: list[tuple[float, bool]]) -> dict[str, float | int]:
    """Milliseconds of sweeps: the mean and the median of all, and the median of those with prompts."""
    all_ms, prompts_ms = [1e3 * s for s, _ in times], [1e3 * s for s, has_prompts in times if has_prompts]
    return {
        "sweeps": len(all_ms),
        "with_prompts": len(prompts_ms),
        "mean_ms": statistics.fmean(all_ms),
        "median_ms": statistics.median(all_ms),
        "median_ms_with_prompts": statistics.median(prompts_ms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=result_path("sweep_host_time"))
    args = parser.parse_args()
    import played_card

    if why := played_card.missing():
        parser.error(why)
    checkouts = {"this": ROOT} | ({"other": args.other.resolve()} if args.other else {})
    rounds: dict[str, dict[str, list[dict]]] = {side: {} for side in checkouts}
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", **_SHAPE)
        for _ in range(args.rounds):
            for side, checkout in checkouts.items():
                for seqs in args.sequences:
                    measured = summary(sweep_times(checkout, model, args.rows, seqs))
                    rounds[side].setdefault(str(seqs), []).append(measured)
                    print(f"{side}, {seqs} sequences: {measured}", flush=True)
    best = {
        side: {seqs: min(measured, key=lambda m: m["mean_ms"]) for seqs, measured in by_seqs.items()}
        for side, by_seqs in rounds.items()
    }
    write(args.output, {"least_of_rounds": best, "rounds": rounds})


if __name__ == "__main__":
    main()
