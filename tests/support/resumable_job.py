"""A small job in a process of its own, to be killed at any moment.

Adds the rows that are left, out of order and with pauses, then joins slowly. Prints how many rows it found
done, and "complete" at the end. Arguments: output, number of rows, seed, seconds of a pause.
"""

import random
import sys
import time

from fake_rows import FakeDataset, result_of

from batchgen.output.run_directory import open_run


class SlowDataset(FakeDataset):
    def __init__(self, num_rows: int, pace_s: float) -> None:
        super().__init__(num_rows, rows_per_batch=50)
        self._pace_s = pace_s

    def batches(self, start_row: int = 0, batch_rows: int = 1024):
        for item in super().batches(start_row, batch_rows):
            time.sleep(self._pace_s)
            yield item


def main(output: str, num_rows: str, seed: str, pace_s: str) -> None:
    rng = random.Random(seed)
    dataset = SlowDataset(int(num_rows), float(pace_s))
    with open_run(output, {"job": "killed"}) as run:
        print("resumed", run.totals["rows"] if run.complete else run.rows_resumed, flush=True)
        if not run.complete:
            left = [row for row in range(dataset.num_rows) if row not in run.done_rows]
            left.sort(key=lambda row: row + rng.randrange(80))
            with run.writer(flush_interval_s=0.02) as writer:
                for row in left:
                    writer.add(row, result_of(row, fail_every=13))
                    if rng.random() < 0.2:
                        time.sleep(dataset._pace_s)
            run.finish(dataset)
    print("complete", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
