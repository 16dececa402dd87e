"""Random configurations of every family.

Each is refused by the name of a key, or its model gives transformers' log-probabilities.

tests/support/config_draws.py draws them key by key. Models run in fp32 and through the whole engine.

    python benchmarks/random_configs.py --draws 500 --seed 0
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers
from config_draws import MARGIN, MODELS, draws_of
from recording import result_path, write
from tiny_tokenizers import make_tiny_tokenizer

RESULT = result_path("random_configs")


def run(draws: int, seed: int, work_dir: Path) -> dict[str, Any]:
    """Tries so many configurations, as many of each family, whose first seed is `seed`."""
    tokenizer = work_dir / "tokenizer"
    tokenizer.mkdir()
    make_tiny_tokenizer(tokenizer)
    found: dict[str, Any] = {
        "transformers": transformers.__version__, "seed": seed, "margin": MARGIN, "draws": draws,
        "models": {}, "refused_by_transformers_too": 0, "largest_difference": 0.0, "wrong": [],
    }  # fmt: skip
    keys: Counter[str] = Counter()
    for number, model in enumerate(MODELS):
        count = draws // len(MODELS) + (number < draws % len(MODELS))
        kinds: Counter[str] = Counter(equal=0, refused=0)
        for given, outcome in draws_of(model, seed, count, work_dir / "model", tokenizer):
            kinds[outcome.kind] += 1
            if outcome.kind == "refused":
                keys[outcome.key] += 1
                found["refused_by_transformers_too"] += outcome.by_transformers
            elif outcome.kind == "equal":
                found["largest_difference"] = max(found["largest_difference"], outcome.difference)
            else:
                reason = outcome.reason.replace(str(work_dir), "")
                found["wrong"].append({"model": model, "seed": given.seed, "odd": given.odd, "what": reason})
                print(f"{model} {given.seed}: {reason}", flush=True)
        found["models"][model] = dict(kinds)
        print(f"{model}: {dict(kinds)}", flush=True)
    return {**found, "refused_keys": dict(keys.most_common())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gc.freeze()  # an engine collects garbage, in which modules need not be looked through
    with tempfile.TemporaryDirectory() as work_dir:
        found = run(args.draws, args.seed, Path(work_dir))
    write(args.output, found)
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
