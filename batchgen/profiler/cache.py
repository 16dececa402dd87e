"""Cache of the profiles that `batchgen profile` has measured, in files; jobs on a GPU measure what is missing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.atomic_file import write_atomically
from batchgen.core.digest import json_sha256
from batchgen.core.direct_io import make_offload_dir
from batchgen.core.dtypes import BLOCK_FORMATS, INT4, INT8, matmul_key
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile, read_profile
from batchgen.core.machine import CpuTime
from batchgen.core.private_files import why_untrusted
from batchgen.models.config import ModelConfig
from batchgen.profiler.calibration import calibrated
from batchgen.profiler.contention import contention_reason
from batchgen.profiler.measure import (
    Overheads,
    add_dequantizing,
    add_dtypes,
    add_packed_kv,
    add_products,
    check_measurable,
    identity,
    measure,
    sizes,
)
from batchgen.profiler.overheads import measure_overheads
from batchgen.profiler.timing import FULL, Effort

logger = logging.getLogger(__name__)

TIME_S = 20.0  # for all rates, about, on two idle cores
# Keys of `HardwareProfile.measured`.
BUSY, _MACHINE = "busy", "machine"
# Fields of a model's configuration that decide the time of its layers: their number says whether caches hold them.
_SHAPE = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "gated_mlp")


@dataclass(frozen=True)
class Wanted:
    """The rates that a hardware profile must have for a job.

    Attributes:
        device: Device that runs the GEMMs, "cpu" or "cuda".
        dtypes: Compute dtypes. Rates of other weight and KV formats are measured with the first one.
        weight_formats: Formats of weights besides the compute dtype: "int4", "int8", one of `BLOCK_FORMATS`.
        kv_formats: Formats of KV besides the compute dtype, keys of `KV_CODE_BITS`.
        model: Model whose layers alone are measured, corrected by whole sweeps on a CPU; None: models of several usual
            sizes.
        effort: Grid points and time limits of the measurement.
        as_stored: Formats of weights that stream: their GEMMs are measured on weights as they are stored.
    """

    device: str
    dtypes: tuple[str, ...]
    weight_formats: tuple[str, ...] = ()
    kv_formats: tuple[str, ...] = ()
    model: ModelConfig | None = None
    effort: Effort = FULL
    as_stored: tuple[str, ...] = ()

    @property
    def dequantizes(self) -> bool:
        """True where weights may be stored in 4 bits and dequantized before GEMMs."""
        return INT4 in self.weight_formats

    @property
    def products(self) -> dict[str, tuple[str, bool]]:
        """The GEMM rates besides those of the compute dtype: (weight format, whether weights are as stored) by name."""
        multiplied = [(name, False) for name in self.weight_formats if name in (INT8, *BLOCK_FORMATS)]
        multiplied += [(name, True) for name in self.as_stored]
        return {
            matmul_key(name, self.dtypes[0], as_stored=as_stored): (name, as_stored) for name, as_stored in multiplied
        }


def recall(wanted: Wanted, *, cache_dir: Path, offload_dir: Path) -> HardwareProfile | None:
    """This machine's cached profile, with its memory and disk sizes measured now; None where rates are missing.

    Args:
        wanted: Rates that the profile must have.
        cache_dir: Directory with the cached profiles.
        offload_dir: Directory of the disk tier.

    Raises:
        InputError: The device is missing, a dtype is unknown or offload_dir is unusable.
    """
    check_measurable(wanted.device, wanted.dtypes)
    offload_dir = make_offload_dir(offload_dir)
    profile = _cached(path_of(wanted, cache_dir, offload_dir), quiet=True)
    if profile is None or _lacks(wanted, profile):
        return None
    return replace(profile, **sizes(wanted.device, offload_dir))


def load_or_measure(wanted: Wanted, *, cache_dir: Path, offload_dir: Path, refresh: bool) -> HardwareProfile:
    """This machine's profile: cached rates, newly measured ones where they are missing, and sizes as of now.

    New rates are cached. Where other work kept the machine busy during the measurement, this is logged and noted.

    Args:
        wanted: Rates that the profile must have.
        cache_dir: Directory with the cached profiles.
        offload_dir: Directory of the disk tier, made where it does not exist; its disk is measured.
        refresh: Whether cached rates are measured again.

    Raises:
        InputError: The device is missing, a dtype is unknown or offload_dir is unusable.
    """
    check_measurable(wanted.device, wanted.dtypes)
    offload_dir = make_offload_dir(offload_dir)
    path = path_of(wanted, cache_dir, offload_dir)
    kept = None if refresh else _cached(path)
    if kept is not None and not _lacks(wanted, kept):
        return replace(kept, **sizes(wanted.device, offload_dir))
    what = "models of any size" if wanted.model is None else "models of this shape"
    logger.info("measuring this machine once for %s in %s: about %g s", what, ", ".join(wanted.dtypes), TIME_S)
    wanted = replace(wanted, effort=replace(wanted.effort, until_s=time.perf_counter() + TIME_S))
    before = CpuTime.now()
    profile = _complete(wanted, kept, path, offload_dir, None if refresh else cache_dir)
    busy = contention_reason(before, CpuTime.now(), profile.measured.get("spread", 1.0))
    rest = {name: value for name, value in profile.measured.items() if name != BUSY}
    profile = replace(profile, measured=rest | ({BUSY: busy} if busy else {}))
    if busy:
        logger.warning("this machine was busy while it was measured (%s): --refresh measures again", busy)
    _keep(profile, path)
    return replace(profile, **sizes(wanted.device, offload_dir))


def _complete(
    wanted: Wanted,
    profile: HardwareProfile | None,
    path: Path,
    offload_dir: Path,
    cache_dir: Path | None,
) -> HardwareProfile:
    """Add the missing rates to a cached profile, or measure a new profile.

    Args:
        wanted: Rates that the profile must have.
        profile: The cached profile; None: there is none.
        path: The file of the profile.
        offload_dir: Directory of the disk tier.
        cache_dir: Directory with other profiles of this machine, whose rates of disk and memory are reused; None: they
            are measured.
    """
    device, dtypes, effort = wanted.device, wanted.dtypes, wanted.effort
    how: dict[str, Any] = {"model": wanted.model, "effort": effort}
    if profile is None:
        machine = _machine_key(device, offload_dir)
        like = _profile_of(machine, cache_dir)
        overheads = measure_overheads(device) if like is None else Overheads.of(like)
        profile = measure(
            device=device,
            offload_dir=offload_dir,
            dtypes=dtypes,
            overheads=overheads,
            like=like,
            **how,
        )
        profile = replace(profile, measured=profile.measured | {_MACHINE: machine})
        if wanted.model is not None and device == "cpu":
            logger.info("measuring whole sweeps")
            profile = calibrated(profile, wanted.model, dtypes[0], effort.until_s)
    elif missing := [dtype for dtype in dtypes if dtype not in profile.compute.gemm_flops_per_s]:
        profile = add_dtypes(profile, missing, **how)
    if wanted.weight_formats or wanted.kv_formats or wanted.as_stored:
        _keep(profile, path)
    for kv_format in wanted.kv_formats:
        if not profile.compute.has_rates("decode_attention_bytes_per_s", kv_format):
            profile = add_packed_kv(profile, dtypes[0], kv_format, **how)
    if wanted.dequantizes and profile.compute.expand_bytes_per_s is None:
        profile = add_dequantizing(profile, dtypes[0], **how)
    for key, (weight_format, as_stored) in wanted.products.items():
        if not profile.compute.has_rates("gemm_flops_per_s", key):
            profile = add_products(profile, dtypes[0], weight_format, as_stored=as_stored, **how)
    return profile


def _lacks(wanted: Wanted, profile: HardwareProfile) -> bool:
    """Tell whether a cached profile lacks any of the wanted rates."""
    rates = profile.compute
    if any(dtype not in rates.gemm_flops_per_s for dtype in wanted.dtypes):
        return True
    if any(not rates.has_rates("decode_attention_bytes_per_s", name) for name in wanted.kv_formats):
        return True
    if wanted.dequantizes and rates.expand_bytes_per_s is None:
        return True
    return any(not rates.has_rates("gemm_flops_per_s", key) for key in wanted.products)


def _profile_of(machine: str, cache_dir: Path | None) -> HardwareProfile | None:
    """Any cached profile of a machine that was measured without contention."""
    for path in sorted((cache_dir / "profiles").glob("*.json")) if cache_dir else ():
        profile = _cached(path, quiet=True)
        if profile is not None and profile.measured.get(_MACHINE) == machine and BUSY not in profile.measured:
            return profile
    return None


def _machine_key(device: str, offload_dir: Path) -> str:
    return json_sha256([identity(device), str(offload_dir.resolve())])[:16]


def profile_path(
    cache_dir: Path, device: str, offload_dir: Path, model: ModelConfig | None = None, dtypes: Sequence[str] = ()
) -> Path:
    """The cache file of this machine's profile.

    Args:
        cache_dir: The cache directory.
        device: "cpu" or "cuda".
        offload_dir: Directory of the disk tier.
        model: Model whose layers were measured; None: models of several usual sizes.
        dtypes: Compute dtypes of those layers.
    """
    shape = model and [*dtypes, *(getattr(model, name) for name in _SHAPE)]
    key = json_sha256([identity(device), str(offload_dir.resolve()), shape])
    return cache_dir / "profiles" / f"{device}-{key[:16]}.json"


def path_of(wanted: Wanted, cache_dir: Path, offload_dir: Path) -> Path:
    """The cache file of the profile that has these rates."""
    return profile_path(cache_dir, wanted.device, offload_dir, wanted.model, wanted.dtypes)


def _cached(path: Path, *, quiet: bool = False) -> HardwareProfile | None:
    """The profile in a file, or None; one that cannot be used is logged unless `quiet`."""
    if not path.exists():
        return None
    try:
        if reason := why_untrusted(path, path.parent.parent):
            raise InputError(reason)
        return read_profile(path)
    except (InputError, TypeError, ValueError) as error:  # the last two: JSON of an altogether different kind
        if not quiet:
            logger.warning("the kept profile %s cannot be used and is measured again (%s)", path, error)
        return None


def _keep(profile: HardwareProfile, path: Path) -> None:
    """Write a profile's file atomically. If several processes write it, the last one's profile remains."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(profile.to_json(), indent=1).encode(), contended=True, mode=0o600)
    except OSError as error:
        folder, reason = path.parent, error.strerror
        logger.warning("the profile cannot be kept in %s and will be measured again (%s)", folder, reason)
