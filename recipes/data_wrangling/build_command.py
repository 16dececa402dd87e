"""The command line of the scripts that make Parquet files and prompt templates from the raw text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def build_command(build: Callable[[Path, Path, str], list[Path]], description: str) -> None:
    """Calls build(source, output directory, split) as the command line says, and prints the paths that it wrote."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("source", type=Path, nargs="?", default=HERE / "data", help="folder of the raw text")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="test")
    parser.add_argument("--output-dir", type=Path, default=HERE)
    args = parser.parse_args()
    try:
        print("\n".join(str(path) for path in build(args.source, args.output_dir, args.split)))
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")
