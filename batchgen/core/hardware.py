"""The profile of a machine: measured rates and sizes, as a frozen value that is written as JSON."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.knowledge import Knowledge
from batchgen.core.text_file import read_text
from batchgen.core.typed_json import parse_json

SIXTEEN_BIT = ("bfloat16", "float16")
HARDWARE_VARIABLE = "BATCHGEN_HARDWARE"  # of the environment: names a profile to plan with


@dataclass(frozen=True)
class Rates:
    """A rate as a function of sizes, measured at the points of a grid.

    The logarithm of the rate is interpolated linearly in the logarithm of each size. Beyond the first and the last
    point the rate is constant.

    Attributes:
        axes: Names of the sizes, outermost first, such as ("width", "tokens").
        points: The rate as a number where `axes` is empty. Else pairs (size on the first axis, points of the remaining
            axes), in ascending order of size.
    """

    axes: tuple[str, ...]
    points: Any

    def at(self, **sizes: float) -> float:
        """The interpolated rate at the given sizes, by axis name. Names that are not in `axes` are ignored."""
        if not self.axes:
            rate: float = self.points
            return rate
        return _interpolate(self._table, [sizes[axis] for axis in self.axes], 0)

    @cached_property
    def _table(self) -> Any:
        return _with_logarithms(self.points, len(self.axes))

    def scaled(self, factor: float) -> Rates:
        """A copy in which every rate is multiplied by `factor`."""
        return Rates(self.axes, _map_points(self.points, len(self.axes), lambda rate: rate * factor))

    def slowed(self, slowing: Callable[[float], float]) -> Rates:
        """A copy in which work of every size on the last axis takes longer by a factor.

        Args:
            slowing: Function from the size to the factor on its seconds; a constant rate is one for any size, however
                large.
        """
        if not self.axes:
            return self.scaled(1 / slowing(math.inf))
        if len(self.axes) == 1:
            return Rates(self.axes, tuple((size, rate / slowing(size)) for size, rate in self.points))
        inner = ((size, Rates(self.axes[1:], points).slowed(slowing).points) for size, points in self.points)
        return Rates(self.axes, tuple(inner))

    def to_json(self) -> Any:
        return {"axes": list(self.axes), "points": self.points} if self.axes else self.points

    @classmethod
    def from_json(cls, value: Any, name: str, known_axes: tuple[str, ...]) -> Rates:
        """Read rates from the JSON value that `to_json` writes.

        Args:
            value: The decoded JSON value.
            name: The name of the field, for error messages.
            known_axes: The names of axes that are allowed.

        Raises:
            InputError: A rate or size is not a positive number, or an axis has an unknown name.
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
    """The points of a grid with the logarithm of each size, precomputed for `_interpolate`.

    Args:
        points: A rate, or pairs (size, points of the next axis).
        depth: Number of axes of these points.
    """
    if depth == 0:
        return points
    sizes = [x for x, _ in points]
    return sizes, [math.log(x) for x in sizes], [_with_logarithms(rest, depth - 1) for _, rest in points]


def _interpolate(table: Any, sizes: list[float], axis: int) -> float:
    """The rate at the given sizes, interpolated linearly in the logarithms of rate and size.

    Planning a job calls this function some ten thousand times.

    Args:
        table: The value that `_with_logarithms` returns.
        sizes: A size for each axis, outermost first.
        axis: The axis to interpolate on; 0 is the outermost.
    """
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
    "state_update_bytes_per_s": ("batch",),
    "state_prefill_flops_per_s": ("context",),
    "elementwise_bytes_per_s": ("tokens",),
}


# What a compute device does, as `HardwareProfile.scaled` names it: a slower one does all of it more slowly.
COMPUTE_RATES = (
    "gemm",
    "prefill_attention",
    "shared_attention",
    "decode_attention",
    "state_update",
    "state_prefill",
    "elementwise",
    "expand",
    "sampling_logits_per_s",
)


@dataclass(frozen=True)
class ComputeRates:
    """The measured rates of one compute device, most of them by number format.

    Formats are the keys of the mappings: a dtype such as "bfloat16", or a format of quantized weights or KV.

    Attributes:
        gemm_flops_per_s: FLOP/s of matrix products, by `width` (inner dimension of the weights) and `tokens`. Keys are
            those of `dtypes.matmul_key` and `dtypes.packed_matmul_key`.
        prefill_attention_flops_per_s: FLOP/s of causal attention in prefill, by `context` (tokens). FLOPs of masked
            keys are not counted.
        shared_attention_flops_per_s: FLOP/s of attention of many sequences to one shared prefix, by `context` (tokens
            of the prefix). Where a format is missing, the rate of prefill attention is used.
        decode_attention_bytes_per_s: Bytes of stored KV that decode attention reads per second, by `group` (query heads
            per KV head), `batch` (sequences) and `context` (tokens of each sequence).
        state_update_bytes_per_s: Bytes of states that are read and written per second where each sequence has one
            token, by `batch` (sequences), for each format of states. Where a format is missing, a CPU counts as fast as
            host memory, and an accelerator as in decode attention.
        state_prefill_flops_per_s: FLOP/s of states' updates by the chunks of prompts (`ops.state_chunks`), by `context`
            (tokens of the prompt). Where a format is missing, the rate of fp32 matrix products is used, or that of
            prefill attention.
        elementwise_bytes_per_s: Bytes of activations read and written per second by normalization, rotary embedding,
            activation functions and additions.
        expand_bytes_per_s: Bytes of dequantized weights or KV produced per second from 4-bit values; None: the device
            does not support that.
        step_overhead_s: Constant seconds of one layer of one micro-batch.
        launch_overhead_s: Seconds that the host takes to launch one layer of one micro-batch, while the device computes
            earlier ones.
        waking_overhead_s: Extra seconds of a computation for which an emulated device must first wake up.
    """

    gemm_flops_per_s: dict[str, Rates] = field(default_factory=dict)
    prefill_attention_flops_per_s: dict[str, Rates] = field(default_factory=dict)
    shared_attention_flops_per_s: dict[str, Rates] = field(default_factory=dict)
    decode_attention_bytes_per_s: dict[str, Rates] = field(default_factory=dict)
    state_update_bytes_per_s: dict[str, Rates] = field(default_factory=dict)
    state_prefill_flops_per_s: dict[str, Rates] = field(default_factory=dict)
    elementwise_bytes_per_s: dict[str, Rates] = field(default_factory=dict)
    expand_bytes_per_s: float | None = None
    step_overhead_s: float = 0.0
    launch_overhead_s: float = 0.0
    waking_overhead_s: float = 0.0

    def rates(self, kind: str, dtype: str) -> Rates:
        """The rates of one kind of work for one number format. Raises InputError where the profile has none.

        "float16" and "bfloat16" rates are used for each other.

        Args:
            kind: The name of a mapping of this class, such as "gemm_flops_per_s".
            dtype: The number format, a key of that mapping.
        """
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


@cache
def _stand_ins(name: str) -> tuple[str, ...]:
    """Keys of a table that may stand for this one: the key itself, and the same with another dtype of 16 bits."""
    weights, _, dtype = name.rpartition(" ")  # of products with packed weights, the format of these comes first
    if dtype in SIXTEEN_BIT:
        return (name, *(f"{weights} {other}".lstrip() for other in SIXTEEN_BIT))
    return (name,)


@dataclass(frozen=True)
class HardwareProfile:
    """The measured rates and sizes of one machine: bytes, FLOPs or items per second, and bytes.

    Attributes:
        name: Name of the machine.
        cpu: Rates of the CPU.
        gpu: Rates of the GPU. It is None on a machine without a GPU, and so are the h2d and d2h rates and
            `gpu_memory_bytes`.
        cpu_memory_bytes: The most host memory that a job may use.
        gpu_memory_bytes: The most GPU memory that a job may use.
        disk_bytes: The most disk space that a job may use.
        dram_bytes_per_s: Rate of host memory, reads and writes of all cores together.
        disk_read_bytes_per_s: Rate of reads from disk.
        disk_write_bytes_per_s: Rate of writes to disk.
        load_bytes_per_s: Rate at which weights are loaded from safetensors files to their tiers, in bytes of the
            compute format.
        gguf_load_bytes_per_s: Rate at which weights are loaded from a quantized GGUF file in the page cache, in bytes
            of the compute format; None: `load_bytes_per_s` is used.
        first_touch_bytes_per_s: Rate of writes to new memory, such as a new KV pool; None: as fast as other memory.
        sampling_logits_per_s: Logits that sampling processes per second.
        h2d_bytes_per_s: Rate of the link from host to GPU.
        d2h_bytes_per_s: Rate of the link from GPU to host.
        link_overhead_s: Constant seconds of one copy to or from the GPU, besides those of its bytes.
        sweep_overhead_s: Constant seconds of one sweep (scheduling and packing).
        batch_overhead_s: Constant seconds of each micro-batch of a sweep beyond the first.
        sequence_overhead_s: Seconds per sequence and sweep.
        issue_overhead_s: Seconds in which the thread that computes hands a Step to another lane.
        row_overhead_s: Seconds per row, from reading its text to the part file with its result.
        disk_read_overhead_s: Constant seconds of one read, besides those of its bytes, with several reads in flight.
        disk_write_overhead_s: Constant seconds of one write, besides those of its bytes, with several writes in flight.
        disk_cpu_overhead_s: Seconds of a CPU core that one read or write takes.
        disk_call_overhead_s: Constant seconds of one call with reads or writes, besides those of each, while all cores
            compute.
        shared_cores: True where the "gpu" is emulated on the CPU's cores: its compute and CPU attention take turns.
        copy_bytes_per_s: Rate of copies between tiers that occupy the shared cores; None: copies occupy no core.
        all_reduce_bytes_per_s: Rate of summing a tensor over all ranks (tensor parallelism); the profile is then that
            of one rank's share of the machine. None: there is one rank.
        all_reduce_overhead_s: Constant seconds of one such sum, besides those of its bytes.
        kernels: The CPU kernel of each shape for which the rates were measured; empty: no kernel was chosen.
        sources: The origin of each figure, by field name; empty for a measured profile.
        knowledge: Knowledge of how certain the rates are; None for a given profile. A profile's file does not have it.
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
    batch_overhead_s: float = 0.0
    sequence_overhead_s: float = 0.0
    issue_overhead_s: float = 0.0
    row_overhead_s: float = 0.0
    disk_read_overhead_s: float = 0.0
    disk_write_overhead_s: float = 0.0
    disk_cpu_overhead_s: float = 0.0
    disk_call_overhead_s: float = 0.0
    link_overhead_s: float = 0.0
    shared_cores: bool = False
    copy_bytes_per_s: float | None = None
    all_reduce_bytes_per_s: float | None = None
    all_reduce_overhead_s: float = 0.0
    kernels: KernelChoice = PROCESS_SET
    measured: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    knowledge: Knowledge | None = None

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
        """A copy with some rates or sizes multiplied: `profile.scaled(cpu_memory_bytes=2)` has twice the memory.

        Args:
            factors: Factors by name. A name is a numeric field of this class; or "gemm", "prefill_attention",
                "shared_attention", "decode_attention", "state_update", "state_prefill", "elementwise" or "expand" for a
                rate of the device that runs the matrix products; or "cpu_decode_attention".
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
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "knowledge"}
        devices = {name: values[name] and _compute_to_json(values[name]) for name in ("cpu", "gpu")}
        chosen = {"kernels": self.kernels.to_json()}
        if self.kernels == PROCESS_SET:  # as in files of versions that did not choose
            del values["kernels"], chosen["kernels"]
        return values | devices | chosen

    @classmethod
    def from_json(cls, values: Any) -> HardwareProfile:
        """Read a profile from the JSON value that `to_json` writes.

        Raises:
            InputError: A field is missing, unknown or out of range; the message names the field.
        """
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
    "state_update": "state_update_bytes_per_s",
    "state_prefill": "state_prefill_flops_per_s",
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
    """A rate that must not be None, such as a GPU's rate on a machine with a GPU."""
    assert rate is not None
    return rate


def _check_names(cls: type[Any], values: Mapping[str, Any], prefix: str) -> None:
    own = {f.name: f for f in fields(cls) if f.name != "knowledge"}
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
    """Read a hardware profile from a JSON file. Raises InputError."""
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise InputError(f"hardware profile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"hardware profile {path} is not valid JSON: {one_line(error)}") from error
    return HardwareProfile.from_json(values)
