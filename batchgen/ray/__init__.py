"""Ray Data: `Dataset.map_batches(batchgen.ray.Generate, ...)`, `batchgen.ray.run` from Parquet to Parquet, and a processor as of `ray.data.llm`.

Extra `ray`.
"""

from batchgen.ray.generate import Generate
from batchgen.ray.job import run
from batchgen.ray.plans import cluster_plans
from batchgen.ray.processor import ProcessorConfig, build_processor

__all__ = ["Generate", "ProcessorConfig", "build_processor", "cluster_plans", "run"]
