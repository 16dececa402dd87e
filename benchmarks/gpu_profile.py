"""Measures this machine's hardware profile with its GPU, for models of any size.

It is written as JSON, which `--hardware FILE` of plans reads.

    python benchmarks/gpu_profile.py --output profile.json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.profiler.measure import check_measurable, measure
from batchgen.profiler.overheads import measure_overheads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        check_measurable("cuda", (args.dtype,))
        with tempfile.TemporaryDirectory() as folder:
            profile = measure(
                device="cuda", offload_dir=Path(folder), dtypes=(args.dtype,), overheads=measure_overheads("cuda"),
            )  # fmt: skip
    except InputError as error:
        sys.exit(f"gpu_profile: {error}")
    values = profile.to_json()
    args.output.write_text(json.dumps(values, indent=1) + "\n")
    print(f"summary: launching a layer takes {values['gpu']['launch_overhead_s'] * 1e6:.0f} us")


if __name__ == "__main__":
    main()
