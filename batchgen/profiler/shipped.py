"""The hardware profiles that ship with the package, for planning on machines that the user does not have.

Each is a JSON file in `profiles/` with the source of each number; docs/hardware_profiles.md explains them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources

from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile

_FOLDER = resources.files("batchgen.profiler") / "profiles"


def shipped_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


@lru_cache
def shipped_profile(name: str) -> HardwareProfile:
    """The shipped profile of this name. Raises InputError for an unknown name."""
    if name not in shipped_profiles():
        raise InputError(f"{name!r} is no shipped hardware profile: use one of {', '.join(shipped_profiles())}")
    return HardwareProfile.from_json(json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")))
