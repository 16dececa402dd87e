"""A worker on a shared output in a process of its own, to be killed or stopped at any moment.

Adds the rows of the ranges that it claims, with pauses, and ends when the output is there. Prints "rows N" as it has
run N of them, and "complete" at the end. Arguments: output, number of rows, seed, seconds of a pause, lease in seconds.
"""

import random
import sys
import time

from fake_rows import FakeDataset, result_of

from batchgen.share.run import open_shared_run


def main(output: str, num_rows: str, seed: str, pause_s: str, lease_s: str) -> None:
    rng = random.Random(seed)
    dataset, ran = FakeDataset(int(num_rows)), 0
    with open_shared_run(output, {"job": "shared"}, rows=dataset.num_rows, lease_s=float(lease_s)) as run:
        if not run.complete:
            with run.writer(flush_interval_s=0.02) as writer:
                for rows in run.claims(40, lambda: False):
                    for row in rows or ():
                        writer.add(row, result_of(row, fail_every=13))
                        ran += 1
                        if rng.random() < 0.2:
                            time.sleep(float(pause_s))
            run.finish(dataset)
    print("rows", ran, flush=True)
    print("complete", run.totals["rows"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
