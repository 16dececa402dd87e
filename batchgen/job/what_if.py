"""`plan --what-if`: the plan for a machine with some changed sizes or rates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.units import parse_bytes
from batchgen.job.job import Job

_SIZES = {"gpu-memory": "gpu_memory_bytes", "cpu-memory": "cpu_memory_bytes", "disk-memory": "disk_bytes"}
_RATES = {
    "h2d": "h2d_bytes_per_s",
    "d2h": "d2h_bytes_per_s",
    "disk-read": "disk_read_bytes_per_s",
    "disk-write": "disk_write_bytes_per_s",
    "dram": "dram_bytes_per_s",
}


def what_if(job: Job, hardware: HardwareProfile, changes: Mapping[str, str]) -> tuple[Job, HardwareProfile]:
    """A job and its machine with some changed sizes or rates. A changed memory size is also the job's budget.

    Args:
        job: The job.
        hardware: The hardware profile of one process's part of the machine.
        changes: Changes by name: {"gpu-memory": "48GiB", "cpu-memory": "+64GiB", "disk-read": "7GB/s", "h2d": "x2"}.

    Raises:
        InputError: The machine has no such size or rate, or a value cannot be read.
    """
    for name, text in changes.items():
        if name not in _SIZES | _RATES:
            raise InputError(f"--what-if {name}: give one of {', '.join(_SIZES | _RATES)}, as in gpu-memory=48GiB")
        field = (_SIZES | _RATES)[name]
        if getattr(hardware, field) is None:
            raise InputError(f"--what-if {name}: {hardware.name} has no GPU; --hardware gives a machine that has one")
        changed = _change(name, text)
        if name in _SIZES:
            option = name.replace("-", "_")
            budget = job.process_memory[option]
            relative = text.startswith(("+", "x"))
            if budget is not None or not relative:  # else the budget follows from the machine, as it did
                processes = 1 if name == "gpu-memory" else job.of_host
                size = int(changed(budget or 0)) * processes
                job = replace(job, **{option: size})  # type: ignore[arg-type]
        change: dict[str, Any] = {field: changed(getattr(hardware, field))}
        hardware = replace(hardware, **change)
    return job, hardware


def _change(name: str, text: str) -> Callable[[float], float]:
    """A function that applies a change such as "+64GiB" or "x2" to a number of bytes or of bytes per second.

    Args:
        name: Name of the changed size or rate.
        text: The change.

    Raises:
        InputError: The change cannot be read.
    """
    if factor := re.fullmatch(r"x\s*([0-9]*\.?[0-9]+)", text):
        times = float(factor[1])
        if times <= 0:
            raise InputError(f"--what-if {name}={text} must be above 0")
        return lambda value: type(value)(value * times)
    example = "25GB/s" if name in _RATES else "48GiB"
    kind = "rate" if name in _RATES else "size"
    forms = f"give --what-if {name}={example}, {name}=+{example} or {name}=x2"
    parts = re.fullmatch(r"(\+?)([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)(/s)?", text)
    if parts is None:
        raise InputError(f"{text!r} is not a {kind}: {forms}")
    sign, number, unit, per_s = parts.groups()
    if float(number) <= 0:
        raise InputError(f"--what-if {name}={text} must be above 0")
    if per_s and name in _SIZES:
        raise InputError(f"--what-if {name}={text} is a rate, not a size: {forms}")
    if not unit:
        raise InputError(f"--what-if {name}={text} has no unit: {forms}")
    if unit[0].isupper() and unit.endswith("b"):
        raise InputError(f"--what-if {name}={text} is in bits, not bytes: {forms}")
    try:
        count = parse_bytes(number + unit)
    except InputError:
        raise InputError(f"{text!r} is not a {kind}: {forms}") from None
    return (lambda value: value + count) if sign else (lambda value: count)
