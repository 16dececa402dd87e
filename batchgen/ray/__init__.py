"""Ray Data: `Dataset.map_batches(batchgen.ray.Generate, ...)`, and `batchgen.ray.run` from Parquet to Parquet. Extra `ray`."""

from batchgen.ray.generate import Generate
from batchgen.ray.job import run

__all__ = ["Generate", "run"]
