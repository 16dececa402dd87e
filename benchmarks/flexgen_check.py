"""The cost model against FlexGen's published measurements: their policies on their machines, cell by cell.

    python benchmarks/flexgen_check.py              # the table, as Markdown
    python benchmarks/flexgen_check.py --write      # into docs/flexgen_check.md

Their policies are costed for their runtime (`problem.FLEXGEN`) on the placement their code makes of the printed
percentages: whole weight matrices, by the midpoint of each within its layer.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.core.hardware import HardwareProfile
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.costs import job_seconds
from batchgen.planner.memory import peak_bytes
from batchgen.planner.phases import Phase, phases_of
from batchgen.planner.placement import Placement
from batchgen.planner.problem import FLEXGEN, CostInputs, Problem, RuntimeModel
from batchgen.planner.search import Candidate, search
from batchgen.profiler.shipped import shipped_profile

HERE = Path(__file__).parent
GIB = 1 << 30
SHAPES = {"6.7B": (4096, 32, 32), "30B": (7168, 48, 56), "175B": (12288, 96, 96)}  # hidden, layers, heads


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
    return profile


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


def inputs_of(cell: Cell, runtime: RuntimeModel = FLEXGEN) -> tuple[CostInputs, tuple[Phase, ...], Placement]:
    """The paper's policy for one cell."""
    hardware, model = hardware_of(cell), opt_config(cell.model)
    workload = Workload.uniform(cell.max_num_seqs, cell.prompt, cell.output)
    number_format = "int4" if cell.compressed else "float16"
    inputs = CostInputs(
        hardware=hardware,
        model=model,
        workload=workload,
        runtime=runtime,
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
        kv_streamed * longest, kv_disk * longest, float(kv_cpu > kv_streamed), float(hc > 0),
    )  # fmt: skip
    phases = phases_of(workload, "static", cell.max_num_seqs, float(inputs.max_num_batched_tokens))
    return inputs, phases, placement


def budgets_of(hardware: HardwareProfile) -> dict[str, int]:
    return {"gpu": hardware.gpu_memory_bytes, "cpu": hardware.cpu_memory_bytes, "disk": hardware.disk_bytes}


def predict(cell: Cell, runtime: RuntimeModel = FLEXGEN) -> float:
    """Generated tokens/s of the paper's policy."""
    inputs, phases, placement = inputs_of(cell, runtime)
    return cell.max_num_seqs * cell.output / job_seconds(inputs, phases, placement)


def problem_of(cell: Cell, runtime: RuntimeModel = FLEXGEN) -> Problem:
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
        runtime=runtime,
        kv_block_size=1,
    )


def own_plan(cell: Cell, runtime: RuntimeModel = FLEXGEN) -> Candidate:
    """What our search would do."""
    return search(problem_of(cell, runtime))


def short_of(cell: Cell) -> str:
    """Which tier the paper's own policy would not fit, as far as the model can tell."""
    inputs, _, placement = inputs_of(cell)
    over = {t: b / GIB for t, b in peak_bytes(inputs, placement).items() if b > 1.02 * inputs.budgets[t]}
    return ", ".join(f"{t} {gib:,.0f} GiB of {inputs.budgets[t] / GIB:,.0f}" for t, gib in over.items())


def markdown(every: int = 1) -> str:
    """The table of docs/flexgen_check.md. every: 1 for all cells, 2 for every second one, and so on."""
    lines = [
        "| table | machine | model | in + out | policy | 4-bit | measured | predicted | error | own plan | note |",
        "|---|---|---|---|---|---|---:|---:|---:|---:|---|",
    ]
    for cell in read_cells()[::every]:
        rate = predict(cell)
        own = cell.max_num_seqs * cell.output / own_plan(cell).seconds
        size, batches, *percent = cell.policy
        short = short_of(cell)
        note = "; ".join(part for part in (cell.note, f"does not fit: {short}" if short else "") if part)
        machine = cell.machine + (
            f", disk {cell.disk_read_bytes_per_s / 1e9:g} GB/s" if cell.disk_read_bytes_per_s else ""
        )
        lines.append(
            f"| {cell.table}{' *' if cell.checked else ''} | {machine} | {cell.model} | {cell.prompt} + {cell.output} |"
            f" {size}×{batches}, {' '.join(map(str, percent))} | {'yes' if cell.compressed else ''} |"
            f" {cell.tokens_per_s:g} | {rate:.3g} | {rate / cell.tokens_per_s - 1:+.0%} | {own:.3g} | {note} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="replace the table in docs/flexgen_check.md")
    if not parser.parse_args().write:
        print(markdown())
    else:
        page = HERE.parent / "docs" / "flexgen_check.md"
        before, rest = page.read_text().split("<!-- table -->\n")[::2]
        page.write_text(f"{before}<!-- table -->\n{markdown()}\n<!-- table -->\n{rest}")
