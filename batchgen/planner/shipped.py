"""The old name of `batchgen.profiler.shipped`."""

from batchgen.profiler.shipped import shipped_profile, shipped_profiles

__all__ = ["shipped_profile", "shipped_profiles"]
