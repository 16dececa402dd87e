"""The cost model for FlexGen's runtime, and the cells of its tables: their policies on their machines.

Their policies are costed for their runtime (`FlexGenInputs`) on the placement their code makes of the printed
percentages: whole weight matrices, by the midpoint of each within its layer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.dtypes import FORMAT_BYTES, INT4
from batchgen.core.hardware import ComputeRates, HardwareProfile, Rates, known
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.costs import head_lanes, job_seconds, layer_lanes, moved_bytes
from batchgen.planner.linear import Linear
from batchgen.planner.memory import peak_bytes
from batchgen.planner.phases import Phase, phases_of
from batchgen.planner.placement import Amounts, Placement, Rounding, placement_of
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.search import Candidate, search
from batchgen.planner.step_seconds import dequantize_s
from batchgen.profiler.shipped import shipped_profile

HERE = Path(__file__).parent
GIB = 1 << 30
SHAPES = {
    "6.7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "30B": (7168, 48, 56),
    "175B": (12288, 96, 96),
}  # hidden, layers, heads

_layer_lanes, _head_lanes, _placement_of = (f.dispatch(CostInputs) for f in (layer_lanes, head_lanes, placement_of))


@dataclass(frozen=True)
class FlexGenInputs(CostInputs):
    """Inputs of the cost model for the runtime of FlexGen's released code, which dequantizes for every micro-batch.

    It starts loading a layer's weights with its first micro-batch, and its CPU attention keeps the launching thread
    busy meanwhile: the loads are not hidden, the rest is.

    Attributes:
        serial: Lanes that run by themselves, before the others.
        attends_disk_kv_on_cpu: True if the CPU attends to KV on disk, which does not go on to the GPU.
    """

    serial: tuple[str, ...] = ("h2d",)
    attends_disk_kv_on_cpu: bool = True


def in_series(lanes: dict[str, Linear], serial: tuple[str, ...]) -> dict[str, Linear]:
    """The lanes, and each of them that is not among the serial ones after all of these."""
    alone = sum(lanes[name] for name in serial if name in lanes)
    return lanes | {"alone": alone} | {f"{name} then": alone + s for name, s in lanes.items() if name not in serial}


@layer_lanes.register
def _(s: FlexGenInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Seconds of each lane for one layer of one sweep; nothing but the serial lanes waits for another one."""
    lanes = _layer_lanes(s, phase, at)
    if s.attends_disk_kv_on_cpu:
        kv = moved_bytes(s, phase, replace(at, w_disk=0, experts_disk=0))
        from_disk = {name: lanes[name] for name in ("disk_read", "disk_write", "disk")}
        at = replace(at, kv_cpu=at.kv_cpu + at.kv_disk, kv_disk=0)
        lanes = _layer_lanes(s, phase, at) | from_disk
        lanes["dram"] = lanes["dram"] + (kv["disk_read"] + kv["disk_write"]) * (1 / s.hardware.dram_bytes_per_s)
    chains = [name for name in lanes if name.startswith("chain")]
    lanes = {name: lane for name, lane in lanes.items() if name not in chains}
    if s.num_gpu_batches == 1 and "compute" not in s.serial:
        prompts = _layer_lanes(s, phase, replace(at, kv_gpu=0, kv_streamed=0, kv_disk=0))["compute"]
        lanes["chain"] = prompts + lanes["cpu_attention"]
    if "disk_read" in s.serial:
        del lanes["disk"]
    lanes["compute"] = lanes["compute"] + (s.num_gpu_batches - 1) * dequantize_s(s)
    return in_series(lanes, s.serial)


@head_lanes.register
def _(s: FlexGenInputs, phase: Phase, at: Placement) -> dict[str, Linear]:
    """Seconds of each lane for embeddings, logits and sampling."""
    return in_series(_head_lanes(s, phase, at), s.serial)


@placement_of.register
def _(s: FlexGenInputs, amounts: Amounts[Any], rounding: Rounding) -> Placement:
    """The fractions of a placement; KV on disk that the CPU attends to has half as many buffers, all in host memory."""
    if not s.attends_disk_kv_on_cpu:
        return _placement_of(s, amounts, rounding)
    on_disk = amounts.kv_seqs.get("disk", 0)
    placement = _placement_of(s, replace(amounts, kv_seqs={**amounts.kv_seqs, "disk": 0}), rounding)
    disk_blocks = rounding.least(s.batch_seqs, (on_disk, s.equal_parts)) * (s.longest_blocks / 2)
    return replace(placement, kv_disk=on_disk / s.swept_seqs, disk_blocks=disk_blocks)


@dataclass(frozen=True)
class DequantizedKVRates(Rates):
    """Bytes of 4-bit KV a second that are dequantized and then attended to; `points` are rates in the compute dtype."""

    dequantized_bytes_per_s: float
    element_bytes: float

    def at(self, **sizes: float) -> float:
        seconds = 1 / super().at(**sizes) + 1 / self.dequantized_bytes_per_s  # of a byte in the compute dtype
        return FORMAT_BYTES[INT4] / self.element_bytes / seconds


@dataclass(frozen=True)
class Cell:
    """One measurement of the paper. policy: GPU batch size, GPU batches, wg, wc, cg, cc, hg, hc in per cent."""

    table: int
    machine: str
    model: str
    prompt: int
    output: int
    tokens_per_s: float
    policy: tuple[int, ...]
    compressed: bool = False
    checked: bool = False
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    note: str = ""

    @property
    def max_num_seqs(self) -> int:
        return self.policy[0] * self.policy[1]


def read_cells() -> list[Cell]:
    cells = json.loads((HERE / "flexgen_cells.json").read_text())["cells"]
    return [Cell(**(cell | {"policy": tuple(cell["policy"])})) for cell in cells]


def opt_config(model: str) -> ModelConfig:
    hidden, layers, heads = SHAPES[model]
    return config_of_hf(
        {
            "architectures": ["OPTForCausalLM"],
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ffn_dim": 4 * hidden,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        }
    )


def hardware_of(cell: Cell) -> HardwareProfile:
    profile = shipped_profile(cell.machine)
    if cell.disk_read_bytes_per_s:
        profile = replace(
            profile,
            disk_read_bytes_per_s=cell.disk_read_bytes_per_s,
            disk_write_bytes_per_s=cell.disk_write_bytes_per_s,
        )
    return replace(profile, gpu=_dequantizing(profile.compute), cpu=_without_packed_kv(profile.cpu))


def _dequantizing(rates: ComputeRates) -> ComputeRates:
    """The rates with 4-bit KV dequantized before attention, whose kernels read the compute dtype alone."""
    tables = rates.decode_attention_bytes_per_s
    known_rates = rates.rates("decode_attention_bytes_per_s", "float16")
    dequantized = DequantizedKVRates(
        known_rates.axes, known_rates.points, known(rates.expand_bytes_per_s), FORMAT_BYTES["float16"]
    )
    return replace(rates, decode_attention_bytes_per_s={**tables, INT4: dequantized})


def _without_packed_kv(rates: ComputeRates) -> ComputeRates:
    """The rates of a CPU that does not attend to 4-bit KV."""
    tables = {name: table for name, table in rates.decode_attention_bytes_per_s.items() if name != INT4}
    return replace(rates, decode_attention_bytes_per_s=tables)


def midpoint_shares(percent_gpu: int, percent_cpu: int, groups: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """Parts of the weights on (GPU, CPU, disk) when whole matrices are placed by where their midpoint falls, each
    group of matrices by itself, in the order disk, CPU, GPU."""
    placed = [0.0, 0.0, 0.0]
    total = sum(sum(group) for group in groups)
    for group in groups:
        before = 0.0
        for size in group:
            middle = 100 * (before + size / 2) / sum(group)
            before += size
            disk = 100 - percent_gpu - percent_cpu
            # A midpoint on the border falls below it: biases follow their matrices.
            tier = 2 if disk and middle <= disk else 1 if middle <= disk + percent_cpu else 0
            placed[tier] += size / total
    return tuple(placed)


def inputs_of(cell: Cell) -> tuple[FlexGenInputs, tuple[Phase, ...], Placement]:
    """The paper's policy for one cell."""
    hardware, model = hardware_of(cell), opt_config(cell.model)
    workload = Workload.uniform(cell.max_num_seqs, cell.prompt, cell.output)
    number_format = "int4" if cell.compressed else "float16"
    inputs = FlexGenInputs(
        hardware=hardware,
        model=model,
        workload=workload,
        compute_format="float16",
        weight_format=number_format,
        kv_format=number_format,
        admission="static",
        max_num_seqs=cell.max_num_seqs,
        num_gpu_batches=cell.policy[1],
        max_num_batched_tokens=cell.max_num_seqs * cell.prompt,
        kv_block_size=1,
        budgets=budgets_of(hardware),
        process_bytes=0,
    )
    _, _, wg, wc, cg, cc, hg, hc = cell.policy
    # Attention: queries, keys, values, output, a quarter each; MLP: two halves, twice as large in all.
    w_gpu, w_cpu, w_disk = midpoint_shares(wg, wc, ((1, 1, 1, 1), (4, 4)))
    kv_cpu, kv_disk = cc / 100, (100 - cg - cc) / 100
    kv_streamed = kv_cpu if cell.compressed else 0.0
    longest = cell.policy[0] * inputs.longest_blocks
    placement = Placement(
        w_gpu, w_cpu, w_disk,
        # Compressed KV is never attended to on the CPU by FlexGen: it is streamed.
        cg / 100, kv_cpu - kv_streamed, kv_streamed, kv_disk,
        hg / 100, hc / 100, 1.0 if wg == 100 else 0.0, 0.0 if wg == 100 else 1.0, 1 - w_gpu, w_disk,
        kv_streamed * longest, kv_disk * longest / 2, float(kv_cpu > kv_streamed), float(hc > 0),
    )  # fmt: skip
    phases = phases_of(workload, "static", cell.max_num_seqs, float(inputs.max_num_batched_tokens))
    return inputs, phases, placement


def budgets_of(hardware: HardwareProfile) -> dict[str, int]:
    return {"gpu": hardware.gpu_memory_bytes, "cpu": hardware.cpu_memory_bytes, "disk": hardware.disk_bytes}


def predict(cell: Cell) -> float:
    """Generated tokens/s of the paper's policy."""
    inputs, phases, placement = inputs_of(cell)
    return cell.max_num_seqs * cell.output / job_seconds(inputs, phases, placement)


def problem_of(cell: Cell) -> Problem:
    """The same job on the same machine under the same runtime, the policy left open."""
    hardware = hardware_of(cell)
    formats = ("float16", "int4") if cell.compressed else ("float16",)
    return Problem(
        hardware=hardware,
        model=opt_config(cell.model),
        workload=Workload.uniform(cell.max_num_seqs, cell.prompt, cell.output),
        budgets=budgets_of(hardware),
        compute_format="float16",
        weight_formats=formats,
        kv_formats=formats,
        admissions=("static",),
        make_inputs=FlexGenInputs,
        kv_block_size=1,
    )


def own_plan(cell: Cell) -> Candidate:
    """What our search would do."""
    return search(problem_of(cell))


def short_of(cell: Cell) -> str:
    """Which tier the paper's own policy would not fit, as far as the model can tell."""
    inputs, _, placement = inputs_of(cell)
    over = {t: b / GIB for t, b in peak_bytes(inputs, placement).items() if b > 1.02 * inputs.budgets[t]}
    return ", ".join(f"{t} {gib:,.0f} GiB of {inputs.budgets[t] / GIB:,.0f}" for t, gib in over.items())
