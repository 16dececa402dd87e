"""`make gpu-check` to its end on a card that is played on the CPU, each part made small.

    python tests/support/played_card.py benchmarks/gpu_played.py --results DIR [--parts NAME,NAME]

Tests and smoke checks have kernels that are played. What measures has kernels that do nothing, models of two layers,
and large copies that move nothing. So its times mean nothing; what it calls, reads and writes is that of a real card.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import gpu_check
from gpu_parts import PARTS, SHAPES, Part

LAYERS = 2
_LIMIT_S = 900  # of a part: it has the CPU for everything
_EMPTY = {"PLAYED_CUDA_KERNELS": "0", "PLAYED_CUDA_EMPTY": "1"}


def playable() -> list[str]:
    """The parts that need no other program than Python, and no engine but batchgen."""
    left_out = ("build", "offload", "FlashInfer compiled")
    return [name for name, part in PARTS.items() if not part.programs and name not in left_out]


def made_small(part: Part, shapes: Path) -> Part:
    """The part with few rows and layers, on a played card."""
    command = tuple(_shrunk(word, shapes) if word.startswith(SHAPES) else word for word in part.command)
    is_measured = not part.is_tests and "benchmarks/gpu_smoke.py" not in command
    environment = {**part.environment, **(_EMPTY if is_measured else {})}
    return replace(part, command=(*command, *part.small), limit_s=_LIMIT_S, environment=environment)


def _shrunk(shape: str, shapes: Path) -> str:
    config = json.loads(Path(shape, "config.json").read_text())
    folder = shapes / Path(shape).name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchgen-played-") as folder:
        names = args.parts or playable()
        PARTS.update({name: made_small(PARTS[name], Path(folder)) for name in names})
        check = gpu_check.Check(args.results, Path(folder) / "work")
        check.run([(name,) for name in names])
    wrong = [name for name in names if not check.result["parts"][name]["outcome"].startswith(("ok", "not run"))]
    sys.exit(f"gpu_played: not ok: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
