"""Batchgen on Ray Data: a class for `Dataset.map_batches`, jobs from Parquet to Parquet, and a processor.

The package needs the extra `ray`.
"""

from batchgen import TYPE_CHECKING

if TYPE_CHECKING:
    from batchgen.ray.generate import Generate
    from batchgen.ray.job import run
    from batchgen.ray.plans import cluster_plans
    from batchgen.ray.processor import ProcessorConfig, build_processor

__all__ = ["Generate", "ProcessorConfig", "build_processor", "cluster_plans", "run"]

# Module of each name, imported at its first use: Ray's processes that read files import this package too, and need no
# torch.
_MODULES = {
    "Generate": "generate",
    "ProcessorConfig": "processor",
    "build_processor": "processor",
    "cluster_plans": "plans",
    "run": "job",
}


def __getattr__(name: str):
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"batchgen.ray.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
