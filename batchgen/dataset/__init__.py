"""The input side of a job: datasets are read as Arrow batches, and each row becomes a `Request`.

`open_dataset` (opening) finds the files and chooses a reader: Parquet, CSV, JSON lines or `datasets`. Every reader
streams, so memory does not grow with the number of rows. A reader makes a `Source`; a `Dataset` applies `limit` and
`shard` to it. Rows become requests in `prompts` (text columns, templates, chat messages) or `openai_batch`, and
`openai_response` writes the results of the latter.
"""

from batchgen.dataset.dataset import Dataset
from batchgen.dataset.opening import open_dataset
from batchgen.dataset.source import FORMATS

__all__ = ["FORMATS", "Dataset", "open_dataset"]
