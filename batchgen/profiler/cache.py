"""Measured profiles kept as files, so that a machine is measured before its first job and not again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from batchgen.core.atomic_file import write_atomically
from batchgen.core.digest import json_sha256
from batchgen.core.direct_io import make_offload_dir
from batchgen.core.dtypes import INT4
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile, read_profile
from batchgen.models.config import ModelConfig
from batchgen.profiler.measure import Overheads, add_dtypes, add_int4, check_measurable, identity, measure, sizes
from batchgen.profiler.timing import FULL, Effort

# What makes two models' layers take the same time.
_SHAPE = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "gated_mlp")


def load_or_measure(
    cache_dir: Path,
    *,
    device: str,
    offload_dir: Path,
    dtypes: Sequence[str],
    formats: Sequence[str] = (),
    refresh: bool,
    measure_overheads: Callable[[str], Overheads],
    notify: Callable[[str], None],
    model: ModelConfig | None = None,
    calibrate: Callable[[HardwareProfile], HardwareProfile] | None = None,
    effort: Effort = FULL,
) -> HardwareProfile:
    """This machine's profile, with these dtypes: rates from the cache as far as it has them, sizes as they are now.

    formats: further ones that weights or KV may be stored in: "int4". model: a profile for its layers, kept by itself;
    None: one for models of any size. calibrate: has the last word on a profile just measured. refresh: measure even so. measure_overheads: called with the device where the whole profile is measured.
    notify: told what is measured, and of a cache that cannot be used. Raises InputError as `measure` does.
    """
    check_measurable(device, dtypes)
    offload_dir = make_offload_dir(offload_dir)
    path = profile_path(cache_dir, device, offload_dir, model, dtypes)
    profile = None if refresh else _cached(path, notify)
    if profile is None:
        overheads = measure_overheads(device)
        profile = measure(
            device=device,
            offload_dir=offload_dir,
            dtypes=dtypes,
            overheads=overheads,
            notify=notify,
            model=model,
            effort=effort,
        )
        if calibrate is not None:
            notify("measuring whole sweeps")
            profile = calibrate(profile)
        _keep(profile, path, notify)
    elif missing := [dtype for dtype in dtypes if dtype not in profile.compute.gemm_flops_per_s]:
        profile = add_dtypes(profile, missing, notify=notify, model=model, effort=effort)
        _keep(profile, path, notify)
    if INT4 in formats and profile.compute.expand_bytes_per_s is None:
        profile = add_int4(profile, dtypes[0], notify=notify, model=model, effort=effort)
        _keep(profile, path, notify)
    return replace(profile, **sizes(device, offload_dir))


def profile_path(
    cache_dir: Path, device: str, offload_dir: Path, model: ModelConfig | None = None, dtypes: Sequence[str] = ()
) -> Path:
    """The file of the profile of this machine, as it is now, with this offload directory: for models of any size in any
    dtype, or for layers like the model's in these."""
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
