"""FlexGen's table 3, four hosts with a T4 each against one: what our planner finds for the stages of a pipeline.

A stage is planned as a model with a quarter of the layers (section 4.4). Four blocks are in flight, each at another stage: the stage's
memory holds the KV of all of them, and its sweeps are over one. Sweeps follow each other as `job.pipeline_time` has it.

    python benchmarks/flexgen_pipeline.py              # the table, as Markdown
    python benchmarks/flexgen_pipeline.py --write      # into docs/flexgen_check.md and benchmarks/results/flexgen_pipeline.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from flexgen_check import budgets_of, inputs_of, opt_config, read_cells

from batchgen.core.errors import InputError
from batchgen.core.workload import Workload
from batchgen.planner.costs import job_seconds
from batchgen.planner.phases import phases_of
from batchgen.planner.pipeline_time import answer_times_s
from batchgen.planner.placement import Placement
from batchgen.planner.problem import FLEXGEN, Problem
from batchgen.planner.search import Candidate, search
from batchgen.profiler.shipped import shipped_profile

HERE = Path(__file__).parent
PROMPT, OUTPUT, STAGES = 512, 32, 4
LINK_BYTES_PER_S = 1e9  # what 10 Gbit/s between hosts have room for
# Table 3: generated tokens/s of one and of four GPUs, over all of the time and over decoding alone.
MEASURED = {
    "6.7B": ((25.26, 201.12), (38.28, 764.65)),
    "30B": ((7.32, 23.61), (11.52, 48.94)),
    "175B": ((0.69, 2.33), (0.83, 3.86)),
}
KINDS = ("generation", "decoding")
# Sequences of one block that are tried.
BLOCKS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 144, 192, 256)


@dataclass(frozen=True)
class Rates:
    """Generated tokens/s, of all the time and of decoding; block: sequences of one sweep; parts of weights and KV, from 0 to 1."""

    block: int
    generation: float
    decoding: float
    weights_on_gpu: float
    kv_on_cpu: float
    kv_on_disk: float


def rates_over(model: str, stages: int, block: int) -> Rates:
    """Rates with blocks of so many sequences, one for each stage. Raises InputError where they do not fit."""
    hardware, config = shipped_profile("t4"), opt_config(model)
    problem = Problem(
        hardware=hardware,
        model=config.first_layers(config.num_layers // stages),
        workload=Workload.uniform(stages * block, PROMPT, OUTPUT),
        budgets=budgets_of(hardware),
        compute_format="float16",
        weight_formats=("float16",),
        kv_formats=("float16",),
        admissions=("static",),
        runtime=FLEXGEN,
        kv_block_size=1,
        max_num_seqs=stages * block,
        max_num_batched_tokens=stages * block * PROMPT,  # all prompts of a block go through in one sweep
    )
    planned = search(problem)
    prompts_s, token_s = sweep_seconds(planned, stages)
    send_s = np.array([block * n * config.hidden_size * 2 / LINK_BYTES_PER_S for n in (PROMPT, 1)])
    seconds = np.array([prompts_s, token_s])
    steps = np.repeat([0, 1], [stages, stages * (OUTPUT - 1)])  # prompts of every block, then a token of each in turn
    own_s = np.stack([seconds[steps], send_s[steps]] * stages, axis=1)[:, :-1]  # the last stage sends nothing on
    ends_s = answer_times_s([max(0, i - stages + 1) for i in range(len(steps))], own_s)
    decoding_s = ends_s[-1] - ends_s[stages - 1]
    at = planned.counts.placement(planned.inputs)
    return rates_of(block, stages * block, ends_s[-1], decoding_s, at)


def rates_of(block: int, sequences: int, total_s: float, decoding_s: float, at: Placement) -> Rates:
    return Rates(
        block=block,
        generation=sequences * OUTPUT / total_s,
        decoding=sequences * (OUTPUT - 1) / decoding_s,
        weights_on_gpu=at.w_gpu,
        kv_on_cpu=at.kv_cpu,
        kv_on_disk=at.kv_disk,
    )


def sweep_seconds(planned: Candidate, stages: int) -> tuple[float, float]:
    """Seconds of a stage for the prompts of one block, and for a token of each of its sequences."""
    block = planned.inputs.max_num_seqs // stages
    inputs = replace(
        planned.inputs,
        workload=Workload.uniform(block, PROMPT, OUTPUT),
        max_num_seqs=block,
        num_gpu_batches=-(-planned.inputs.num_gpu_batches // stages),
        max_num_batched_tokens=block * PROMPT,
    )
    at = planned.counts.placement(planned.inputs)
    phases = phases_of(inputs.workload, "static", block, float(inputs.max_num_batched_tokens))
    prompts, decoding = ([p for p in phases if bool(p.prefill_tokens) == has] for has in (True, False))
    return job_seconds(inputs, prompts, at), job_seconds(inputs, decoding, at) / (OUTPUT - 1)


def tried_rates(model: str, stages: int) -> list[Rates]:
    """Those of all blocks that fit."""
    found = []
    for block in BLOCKS:
        try:
            found.append(rates_over(model, stages, block))
        except InputError:
            break
    return found


def fastest(tried: list[Rates]) -> Rates:
    """Those of the block with which the whole job is the fastest."""
    return max(tried, key=lambda rates: rates.generation)


def paper_rates(model: str) -> Rates:
    """Of one host, with the policy that the paper prints for it in table 15."""
    cell = next(c for c in read_cells() if (c.table, c.model) == (15, model) and not c.compressed)
    inputs, phases, at = inputs_of(cell)
    decoding_s = job_seconds(inputs, [phase for phase in phases if not phase.prefill_tokens], at)
    return rates_of(cell.max_num_seqs, cell.max_num_seqs, job_seconds(inputs, phases, at), decoding_s, at)


def compare() -> list[dict]:
    """A row for each model: measured rates of one host and of four, and those predicted."""
    rows = []
    for model, (generation, decoding) in MEASURED.items():
        one, four = (tried_rates(model, stages) for stages in (1, STAGES))
        rows.append(
            {
                "model": model,
                "measured": {"generation": generation, "decoding": decoding},
                "one, policy of the paper": asdict(paper_rates(model)),
                "one": asdict(fastest(one)),
                "four": asdict(fastest(four)),
                "four, every block": [asdict(rates) for rates in four],
            }
        )
    return rows


def scaling(row: dict) -> dict[str, tuple[float, float]]:
    """How many times the rates of one host four have: measured, and predicted with our plans for both."""
    return {
        kind: (row["measured"][kind][1] / row["measured"][kind][0], row["four"][kind] / row["one"][kind])
        for kind in KINDS
    }


def markdown(rows: list[dict]) -> str:
    lines = [
        "| model | hosts | block | generation, measured | predicted | error | decoding, measured | predicted | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        for hosts, number in (("one, policy of the paper", 0), ("one", 0), ("four", 1)):
            found, cells = row[hosts], []
            for kind in KINDS:
                measured = row["measured"][kind][number]
                cells.append(f"{measured:g} | {found[kind]:.3g} | {found[kind] / measured - 1:+.0%}")
            lines.append(f"| {row['model']} | {hosts} | {found['block']} | {' | '.join(cells)} |")
        ratios = (f"{a:.2f} times | {b:.2f} times | {b / a - 1:+.0%}" for a, b in scaling(row).values())
        lines.append(f"| {row['model']} | four over one | | {' | '.join(ratios)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="replace the table in docs/flexgen_check.md, and the JSON")
    write = parser.parse_args().write
    rows = compare()
    print(markdown(rows))
    if write:
        page = HERE.parent / "docs" / "flexgen_check.md"
        before, _, after = page.read_text().split("<!-- four -->\n")
        page.write_text(f"{before}<!-- four -->\n{markdown(rows)}\n<!-- four -->\n{after}")
        (HERE / "results" / "flexgen_pipeline.json").write_text(
            json.dumps({"hardware": "t4", "models": rows}, indent=2) + "\n"
        )
