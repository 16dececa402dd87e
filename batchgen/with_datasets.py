"""The old name of `batchgen.hf_datasets`: in code that imports it, in pickles, and in the cache of `Dataset.map`."""

from batchgen.hf_datasets import MapFunction, run_dataset

__all__ = ["MapFunction", "run_dataset"]
