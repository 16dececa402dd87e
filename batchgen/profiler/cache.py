"""Measured profiles kept as files, so that a machine is measured before its first job and not again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.core.atomic_file import write_atomically
from batchgen.core.digest import json_sha256
from batchgen.core.direct_io import make_offload_dir
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile, read_profile
from batchgen.models.config import ModelConfig
from batchgen.profiler.calibration import calibrated
from batchgen.profiler.measure import add_dtypes, add_packed, check_measurable, identity, measure, sizes
from batchgen.profiler.overheads import measure_overheads
from batchgen.profiler.timing import FULL, Effort

# What makes two models' layers take the same time.
_SHAPE = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "gated_mlp")


@dataclass(frozen=True)
class Wanted:
    """The rates that jobs need.

    Attributes:
        device: that of the matrix products, "cpu" or "cuda".
        dtypes: those that models run in; the first one is what further formats are measured beside.
        formats: others that weights or KV may be stored in: "int4", "int8".
        model: rates of its layers alone, corrected by whole sweeps on a CPU; None: of models of any size.
        effort: how long to measure.
    """

    device: str
    dtypes: tuple[str, ...]
    formats: tuple[str, ...] = ()
    model: ModelConfig | None = None
    effort: Effort = FULL


def load_or_measure(
    wanted: Wanted, *, cache_dir: Path, offload_dir: Path, refresh: bool, notify: Callable[[str], None]
) -> HardwareProfile:
    """Return this machine's profile: rates from the cache as far as it has them, sizes as they are now.

    Args:
        wanted: the rates; those that are missing are measured and kept.
        cache_dir: where profiles are kept.
        offload_dir: the directory of the disk tier, made where it does not exist; its disk is measured.
        refresh: measure even what the cache has.
        notify: told what is measured, and of a cache that cannot be used.

    Raises:
        InputError: a device that is not there, an unknown dtype or an unusable offload_dir.
    """
    device, dtypes, how = (
        wanted.device,
        wanted.dtypes,
        {"notify": notify, "model": wanted.model, "effort": wanted.effort},
    )
    check_measurable(device, dtypes)
    offload_dir = make_offload_dir(offload_dir)
    path = profile_path(cache_dir, device, offload_dir, wanted.model, dtypes)
    profile = None if refresh else _cached(path, notify)
    if profile is None:
        overheads = measure_overheads(device)
        profile = measure(device=device, offload_dir=offload_dir, dtypes=dtypes, overheads=overheads, **how)
        if wanted.model is not None and device == "cpu":
            notify("measuring whole sweeps")
            profile = calibrated(profile, wanted.model, dtypes[0])
        _keep(profile, path, notify)
    elif missing := [dtype for dtype in dtypes if dtype not in profile.compute.gemm_flops_per_s]:
        profile = add_dtypes(profile, missing, **how)
        _keep(profile, path, notify)
    for packing in wanted.formats:
        if profile.compute.has_rates("decode_attention_bytes_per_s", packing):
            continue
        profile = add_packed(profile, dtypes[0], packing, **how)
        _keep(profile, path, notify)
    return replace(profile, **sizes(device, offload_dir))


def profile_path(
    cache_dir: Path, device: str, offload_dir: Path, model: ModelConfig | None = None, dtypes: Sequence[str] = ()
) -> Path:
    """The file of this machine's profile with this offload directory.

    Of models of any size in any dtype, or of layers like the model's in these dtypes.
    """
    shape = model and [*dtypes, *(getattr(model, name) for name in _SHAPE)]
    key = json_sha256([identity(device), str(offload_dir.resolve()), shape])
    return cache_dir / "profiles" / f"{device}-{key[:16]}.json"


def _cached(path: Path, notify: Callable[[str], None]) -> HardwareProfile | None:
    if not path.exists():
        return None
    try:
        return read_profile(path)
    except (InputError, TypeError, ValueError) as error:  # the last two: JSON of an altogether different kind
        notify(f"the kept profile {path} cannot be used and is measured again ({error})")
        return None


def _keep(profile: HardwareProfile, path: Path, notify: Callable[[str], None]) -> None:
    """Whole or not at all, whatever other processes write; the last one's stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(profile.to_json(), indent=1).encode(), contended=True)
    except OSError as error:
        notify(f"the profile cannot be kept in {path.parent} and will be measured again ({error.strerror})")
