"""The hardware profile that the user names in place of what is measured: a file, or one that ships with the package."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.core.hardware import HARDWARE_VARIABLE, HardwareProfile, read_profile
from batchgen.profiler.shipped import shipped_profile, shipped_profiles


def given_hardware(name: str | None) -> HardwareProfile | None:
    """The profile that the user names; None: none is named.

    Args:
        name: A file, or the name of a profile that ships with the package; None: the one that $BATCHGEN_HARDWARE names.

    Raises:
        InputError: There is no such profile.
    """
    origin = "--hardware"
    if name is None:
        name, origin = os.environ.get(HARDWARE_VARIABLE, ""), f"${HARDWARE_VARIABLE}"
    if not name:
        return None
    if name in shipped_profiles():
        return shipped_profile(name)
    if not Path(name).exists():
        known = ", ".join(shipped_profiles())
        raise InputError(f"{origin} {name}: no such file, and none of the shipped profiles ({known})")
    return read_profile(name)


def given_for_run(name: str | None, on_card: bool) -> HardwareProfile | None:
    """The profile that the user names for a job that runs on this machine; None: none is named.

    Args:
        name: The profile, as `given_hardware` takes it.
        on_card: Whether the job runs on a GPU.

    Raises:
        InputError: There is no such profile, or it is not one of a machine with the job's device.
    """
    given = given_hardware(name)
    if given is None:
        return None
    if given.gpu is not None and not on_card:
        raise InputError(
            f"{given.name} has a GPU, jobs run on the CPU here: leave out --hardware; `batchgen plan` takes it"
        )
    if given.gpu is None and on_card:
        raise InputError(
            f"{given.name} has no GPU, and jobs run on one here: leave out --hardware, or give --device cpu"
        )
    return given


def shipped_cards() -> list[str]:
    """Names of the shipped profiles of machines with a GPU, sorted."""
    return [name for name in shipped_profiles() if shipped_profile(name).gpu is not None]
