"""The program of a rank that rank 0 has started: `python -m batchgen.distributed CORES`, CORES a JSON list."""

from __future__ import annotations

import json
import sys

from batchgen.distributed.launch import rank_of_environment
from batchgen.distributed.serve import serve

if __name__ == "__main__":
    place = rank_of_environment()
    if place is None:
        sys.exit("batchgen: this program is started by `batchgen run --tensor-parallel N`: run that")
    sys.exit(serve(place, cores=set(json.loads(sys.argv[1]))))
