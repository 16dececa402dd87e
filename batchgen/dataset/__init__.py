"""The input side of a job: whatever holds the rows, read as Arrow batches, and each row into a `Request`.

`open_dataset` (opening) finds the files and chooses a reader: Parquet, CSV, JSON lines or `datasets`. Every
reader streams, so that what is held in memory does not grow with the number of rows; each makes a `Source`,
over which `Dataset` lays `limit` and `shard`. Rows become requests in `prompts` (text columns, templates,
chat messages) or `openai_batch`; `openai_response` writes the answers to the latter.
"""

from batchgen.dataset.dataset import Dataset
from batchgen.dataset.opening import open_dataset
from batchgen.dataset.source import FORMATS

__all__ = ["FORMATS", "Dataset", "open_dataset"]
