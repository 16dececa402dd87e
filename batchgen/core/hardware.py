"""The profile of a machine: measured rates and sizes, as a frozen value that is written as JSON."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.text_file import read_text
from batchgen.core.typed_json import parse_json

SIXTEEN_BIT = ("bfloat16", "float16")
HARDWARE_VARIABLE = "BATCHGEN_HARDWARE"  # of the environment: names a profile to plan with


@dataclass(frozen=True)
class Rates:
    """A rate as a function of sizes, measured at a grid of points.

    Attributes:
        axes: Names of the sizes, outermost first.
        points: A number where there are no axes; else pairs of size and points of the remaining axes, in ascending
            order.
            Between points the logarithm of the rate is linear in the logarithm of the size; beyond the ends it is
                constant.
    """

    axes: tuple[str, ...]
    points: Any

    def at(self, **sizes: float) -> float:
        """The rate at these sizes; sizes that are no axis of this table are ignored."""
        if not self.axes:
            rate: float = self.points
            return rate
        return _interpolate(self._table, [sizes[axis] for axis in self.axes], 0)

    @cached_property
    def _table(self) -> Any:
        return _with_logarithms(self.points, len(self.axes))

    def scaled(self, factor: float) -> Rates:
        """Rates that are `factor` times these."""
        return Rates(self.axes, _map_points(self.points, len(self.axes), lambda rate: rate * factor))

    def to_json(self) -> Any:
        return {"axes": list(self.axes), "points": self.points} if self.axes else self.points

    @classmethod
    def from_json(cls, value: Any, name: str, known_axes: tuple[str, ...]) -> Rates:
        """Read what `to_json` gives.

        Args:
            value: The value in the form that JSON has.
            name: Name of the field in messages.
            known_axes: Axes that may occur.

        Raises:
            InputError: A rate or size is no positive number, or an axis is not known.
        """
        if not isinstance(value, Mapping):
            return cls((), _positive(value, name))
        if not isinstance(value.get("axes"), list) or "points" not in value:
            raise InputError(f"hardware profile: {name} must be a number, or have axes and points")
        axes = tuple(value["axes"])
        if any(axis not in known_axes for axis in axes) or len(set(axes)) < len(axes):
            raise InputError(
                f"hardware profile: {name} has the axes {', '.join(map(str, axes))}; it may have"
                f" {', '.join(known_axes)}"
            )
        return cls(axes, _checked_points(value["points"], len(axes), name))


def _with_logarithms(points: Any, depth: int) -> Any:
    """Sizes, their logarithms, and the rate at each of them, or the same for the next axis."""
    if depth == 0:
        return points
    sizes = [x for x, _ in points]
    return sizes, [math.log(x) for x in sizes], [_with_logarithms(rest, depth - 1) for _, rest in points]


def _interpolate(table: Any, sizes: list[float], axis: int) -> float:
    """The rate between points, linear in the logarithms of both. A plan asks for some ten thousand of them."""
    if axis == len(sizes):
        rate: float = table
        return rate
    xs, logarithms, rows = table
    x = sizes[axis]
    right = bisect.bisect_left(xs, x)
    if right == 0 or right == len(xs) or x == xs[right]:
        return _interpolate(rows[min(right, len(xs) - 1)], sizes, axis + 1)
    low, high = _interpolate(rows[right - 1], sizes, axis + 1), _interpolate(rows[right], sizes, axis + 1)
    fraction: float = (math.log(x) - logarithms[right - 1]) / (logarithms[right] - logarithms[right - 1])
    between: float = low * (high / low) ** fraction
    return between


def _map_points(points: Any, depth: int, function: Callable[[float], float]) -> Any:
    if depth == 0:
        return function(points)
    return tuple((x, _map_points(rest, depth - 1, function)) for x, rest in points)


def _checked_points(points: Any, depth: int, name: str) -> Any:
    if depth == 0:
        return _positive(points, name)
    pairs = isinstance(points, (list, tuple)) and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in points)
    if not pairs or not points:
        raise InputError(f"hardware profile: {name} needs a list of [size, rate] pairs for each of its axes")
    sizes = [_positive(x, f"{name} (a size)") for x, _ in points]
    if any(a >= b for a, b in itertools.pairwise(sizes)):
        raise InputError(f"hardware profile: the sizes of {name} must ascend")
    return tuple((x, _checked_points(rest, depth - 1, name)) for x, (_, rest) in zip(sizes, points, strict=True))


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InputError(f"hardware profile: {name} must be a number above 0, not {value!r}")
    return value


# What each table of ComputeRates may be a function of.
_AXES = {
    "gemm_flops_per_s": ("width", "tokens"),
    "prefill_attention_flops_per_s": ("context",),
    "shared_attention_flops_per_s": ("context",),
    "decode_attention_bytes_per_s": ("group", "batch", "context"),
    "elementwise_bytes_per_s": ("tokens",),
}


# What a compute device does, as `HardwareProfile.scaled` names it: a slower one does all of it more slowly.
COMPUTE_RATES = (
    "gemm",
    "prefill_attention",
    "shared_attention",
    "decode_attention",
    "elementwise",
    "expand",
    "sampling_logits_per_s",
)


@dataclass(frozen=True)
class ComputeRates:
    """The rates of one compute device, by dtype ("bfloat16", "float32", ...; formats of packed weights and KV too).

    Attributes:
        gemm_flops_per_s: FLOP/s of matrix products by `width` (the weights' inner dimension) and `tokens`; keys are
            those of `dtypes.matmul_key`.
        prefill_attention_flops_per_s: FLOP/s of causal attention by `context` tokens; only visible keys count.
        shared_attention_flops_per_s: FLOP/s of the attention of many sequences to one shared prefix of `context`
            tokens; where there is none, it is as fast as prefill attention.
        decode_attention_bytes_per_s: Bytes/s of stored KV attended to, by `group` (query heads per KV head), `batch`
            (sequences) and `context` (tokens each).
        elementwise_bytes_per_s: Bytes/s of activations read and written by norms, rotary embedding, activation and
            adds.
        expand_bytes_per_s: Bytes/s of dequantized weights or KV made from 4 bits; None: not supported.
        step_overhead_s: Fixed seconds of one layer of one micro-batch.
        launch_overhead_s: Seconds of the host to launch one, ahead of a device that computes meanwhile.
        waking_overhead_s: Seconds that each computation takes longer where an emulated device sleeps before it.
    """

    gemm_flops_per_s: dict[str, Rates] = field(default_factory=dict)
    prefill_attention_flops_per_s: dict[str, Rates] = field(default_factory=dict)
    shared_attention_flops_per_s: dict[str, Rates] = field(default_factory=dict)
    decode_attention_bytes_per_s: dict[str, Rates] = field(default_factory=dict)
    elementwise_bytes_per_s: dict[str, Rates] = field(default_factory=dict)
    expand_bytes_per_s: float | None = None
    step_overhead_s: float = 0.0
    launch_overhead_s: float = 0.0
    waking_overhead_s: float = 0.0

    def rates(self, kind: str, dtype: str) -> Rates:
        """The rates of a kind for a format; the two 16-bit formats stand in for each other. Raises InputError."""
        table: dict[str, Rates] = getattr(self, kind)
        for name in _stand_ins(dtype):
            if name in table:
                return table[name]
        raise InputError(
            f"the hardware profile has no {kind} for {dtype} (it has {', '.join(table) or 'none'}):"
            " measure with `batchgen profile --refresh`, or choose another --dtype"
        )

    def has_rates(self, kind: str, dtype: str) -> bool:
        return any(name in getattr(self, kind) for name in _stand_ins(dtype))


def _stand_ins(dtype: str) -> tuple[str, ...]:
    return (dtype, *(SIXTEEN_BIT if dtype in SIXTEEN_BIT else ()))


@dataclass(frozen=True)
class HardwareProfile:
    """The rates and sizes of one machine; rates in bytes, FLOPs or items per second, sizes in bytes.

    Attributes:
        name: Name of the machine.
        cpu: Rates of the CPU.
        gpu: Rates of the GPU; None on a machine without one, as are h2d, d2h and gpu_memory_bytes.
        cpu_memory_bytes: Host memory that a job may use at most.
        gpu_memory_bytes: GPU memory that a job may use at most.
        disk_bytes: Disk space that a job may use at most.
        dram_bytes_per_s: Traffic of host memory, all of it together.
        disk_read_bytes_per_s: Rate of reading from disk.
        disk_write_bytes_per_s: Rate of writing to disk.
        load_bytes_per_s: Rate of loading weights from safetensors to where they belong, in bytes of the compute format.
        gguf_load_bytes_per_s: Rate of loading a quantized GGUF that is in the page cache, in the same bytes; None: as
            safetensors.
        first_touch_bytes_per_s: Rate of memory that is used for the first time, as KV pools are; None: as any memory.
        sampling_logits_per_s: Logits turned into tokens per second.
        h2d_bytes_per_s: Rate of the link from host to GPU.
        d2h_bytes_per_s: Rate of the link from GPU to host.
        link_overhead_s: Seconds of one copy to or from the GPU beside its bytes.
        sweep_overhead_s: Fixed seconds of one sweep (scheduling, packing).
        sequence_overhead_s: Seconds per sequence and sweep.
        row_overhead_s: Seconds per row (prompt in, text out).
        disk_read_overhead_s: Seconds of one read beside its bytes, with several in flight.
        disk_write_overhead_s: Seconds of one write beside its bytes, with several in flight.
        disk_cpu_overhead_s: Seconds that one request takes a core.
        shared_cores: True where the "gpu" is emulated by the CPU's cores: its compute and CPU attention take turns.
        copy_bytes_per_s: Rate of copies between memories that take those cores; None: they take none.
        all_reduce_bytes_per_s: Rate of adding up a tensor over ranks that share every layer, where the profile is of
            one rank's part; None: there is one rank.
        all_reduce_overhead_s: Seconds of one such sum beside its bytes.
        kernels: Kernel of each shape on the CPU, whose rates these are; empty: nothing was chosen.
        sources: Origin of each figure by field name; empty for a measured profile.
    """

    name: str
    cpu: ComputeRates
    gpu: ComputeRates | None
    cpu_memory_bytes: int
    disk_bytes: int
    dram_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    load_bytes_per_s: float
    sampling_logits_per_s: float
    gguf_load_bytes_per_s: float | None = None
    first_touch_bytes_per_s: float | None = None
    gpu_memory_bytes: int | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    sweep_overhead_s: float = 0.0
    sequence_overhead_s: float = 0.0
    row_overhead_s: float = 0.0
    disk_read_overhead_s: float = 0.0
    disk_write_overhead_s: float = 0.0
    disk_cpu_overhead_s: float = 0.0
    link_overhead_s: float = 0.0
    shared_cores: bool = False
    copy_bytes_per_s: float | None = None
    all_reduce_bytes_per_s: float | None = None
    all_reduce_overhead_s: float = 0.0
    kernels: KernelChoice = PROCESS_SET
    measured: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        needs_gpu = {n: getattr(self, n) for n in ("gpu_memory_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s")}
        for name, value in needs_gpu.items():
            if (value is None) != (self.gpu is None):
                state = "needs" if self.gpu else "without a gpu must not have"
                raise InputError(f"hardware profile {self.name!r} {state} {name}")
        for name in ("gemm_flops_per_s", "elementwise_bytes_per_s", "decode_attention_bytes_per_s"):
            if not getattr(self.compute, name):
                raise InputError(f"hardware profile {self.name!r} needs {'gpu' if self.gpu else 'cpu'}.{name}")

    @property
    def compute(self) -> ComputeRates:
        """The rates of the device that runs the matrix products: the GPU, or the CPU where there is none."""
        return self.gpu or self.cpu

    def scaled(self, **factors: float) -> HardwareProfile:
        """A machine with some rates or sizes multiplied: `profile.scaled(cpu_memory_bytes=2)` has twice the memory.

        Args:
            factors: Factors by name: any number of this class; "gemm", "prefill_attention", "shared_attention",
                "decode_attention", "elementwise" and "expand" for rates of the compute device; "cpu_decode_attention".
        """
        profile = self
        change: dict[str, Any]
        for name, factor in factors.items():
            if name == "cpu_decode_attention":
                profile = replace(profile, cpu=_scale_tables(profile.cpu, "decode_attention_bytes_per_s", factor))
            elif name in _COMPUTE_FIELDS:
                device = "gpu" if profile.gpu else "cpu"
                change = {device: _scale_tables(getattr(profile, device), _COMPUTE_FIELDS[name], factor)}
                profile = replace(profile, **change)
            else:
                value = getattr(profile, name) * factor
                change = {name: int(value) if name.endswith("_bytes") else value}
                profile = replace(profile, **change)
        return profile

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        devices = {name: values[name] and _compute_to_json(values[name]) for name in ("cpu", "gpu")}
        chosen = {"kernels": self.kernels.to_json()}
        if self.kernels == PROCESS_SET:  # as in files of versions that did not choose
            del values["kernels"], chosen["kernels"]
        return values | devices | chosen

    @classmethod
    def from_json(cls, values: Any) -> HardwareProfile:
        """Read what `to_json` gives. Raises InputError, naming the field, where one is missing, unknown or absurd."""
        if not isinstance(values, Mapping):
            raise InputError("a hardware profile is a JSON object: write one with `batchgen profile -o FILE`")
        _check_names(cls, values, "")
        if not isinstance(values["name"], str):
            raise InputError(f"hardware profile: name must be text, not {values['name']!r}")
        for name in ("measured", "sources"):
            if not isinstance(values.get(name, {}), Mapping):
                raise InputError(f"hardware profile: {name} must be an object")
        checked = dict(values)
        for f in fields(cls):
            if f.name not in values or f.name in ("name", "cpu", "gpu", "kernels", "measured", "sources"):
                continue
            value = values[f.name]
            if f.name == "shared_cores":
                if not isinstance(value, bool):
                    raise InputError(f"hardware profile: shared_cores must be true or false, not {value!r}")
            elif f.name.endswith("overhead_s"):
                checked[f.name] = _not_negative(value, f.name)
            elif value is not None or f.default is not None:
                checked[f.name] = _positive(value, f.name)
        checked["cpu"] = _compute_from_json(values["cpu"], "cpu")
        checked["gpu"] = None if values.get("gpu") is None else _compute_from_json(values["gpu"], "gpu")
        if "kernels" in values:
            checked["kernels"] = KernelChoice.from_json(values["kernels"])
        return cls(**checked)


_COMPUTE_FIELDS = {
    "gemm": "gemm_flops_per_s",
    "prefill_attention": "prefill_attention_flops_per_s",
    "shared_attention": "shared_attention_flops_per_s",
    "decode_attention": "decode_attention_bytes_per_s",
    "elementwise": "elementwise_bytes_per_s",
    "expand": "expand_bytes_per_s",
}


def _scale_tables(rates: ComputeRates, name: str, factor: float) -> ComputeRates:
    value: Any = getattr(rates, name)
    if isinstance(value, dict):
        value = {key: table.scaled(factor) for key, table in value.items()}
    else:
        value = value and value * factor
    change: dict[str, Any] = {name: value}
    return replace(rates, **change)


def known(rate: float | None) -> float:
    """A rate that the machine must have: a GPU's where there is a GPU, or of dequantizing where int4 is allowed."""
    assert rate is not None
    return rate


def _check_names(cls: type[Any], values: Mapping[str, Any], prefix: str) -> None:
    own = {f.name: f for f in fields(cls)}
    for name in values:
        if name not in own:
            raise InputError(f"hardware profile: {prefix}{name} is no field of it")
    for name, f in own.items():
        has_default = f.default is not f.default_factory  # both are MISSING where there is none
        if name not in values and not has_default and name != "gpu":
            raise InputError(f"hardware profile: {prefix}{name} is missing")


def _not_negative(value: Any, name: str) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _positive(value, name)


def _compute_to_json(rates: ComputeRates) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return {key: table.to_json() for key, table in value.items()} if isinstance(value, dict) else value

    return {f.name: plain(getattr(rates, f.name)) for f in fields(rates)}


def _compute_from_json(values: Any, device: str) -> ComputeRates:
    if not isinstance(values, Mapping):
        raise InputError(f"hardware profile: {device} must be an object of rates")
    _check_names(ComputeRates, values, f"{device}.")
    checked: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{device}.{name}"
        if name.endswith("overhead_s"):
            checked[name] = _not_negative(value, full)
        elif name == "expand_bytes_per_s":
            checked[name] = None if value is None else _positive(value, full)
        elif not isinstance(value, Mapping):
            raise InputError(f"hardware profile: {full} must map dtypes to rates")
        else:
            checked[name] = {key: Rates.from_json(table, f"{full}.{key}", _AXES[name]) for key, table in value.items()}
    return ComputeRates(**checked)


def read_profile(path: str | Path) -> HardwareProfile:
    """A profile from a JSON file. Raises InputError."""
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise InputError(f"hardware profile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"hardware profile {path} is not valid JSON: {one_line(error)}") from error
    return HardwareProfile.from_json(values)
