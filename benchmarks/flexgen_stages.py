"""FlexGen's table 3: four machines with a T4 each, whose stages the search plans, beside one machine.

A stage is a model with a quarter of the layers (section 4.4). Four blocks are in flight, each at another stage, so a
stage's memory holds the KV of all four, while each of its sweeps is over one. The stages are equally long: prompts fill
the pipeline once, and then every stage is at work all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexgen_check import Cell, inputs_of, problem_of, read_cells

from batchgen.core.errors import InputError
from batchgen.core.workload import Workload
from batchgen.planner.costs import job_seconds
from batchgen.planner.phases import Phase, phases_of
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.search import Candidate, search

PROMPT, OUTPUT, STAGES = 512, 32, 4
LINK_BYTES_PER_S = 1e9  # what 10 Gbit/s between hosts have room for
# Sequences of one block that are tried.
BLOCKS = (8, 16, 24, 32, 48, 64, 96, 144, 192, 256)


def decoding_rate(model: str) -> float:
    """Tokens/s of decoding alone on one machine, under the policy that the paper prints for it in table 15."""
    cell = next(c for c in read_cells() if (c.table, c.model, c.compressed) == (15, model, False))
    inputs, phases, at = inputs_of(cell)
    return cell.max_num_seqs * (OUTPUT - 1) / _decoding_s(inputs, phases, at)


def rates_over_stages(model: str) -> tuple[float, float]:
    """Generated tokens/s of four machines, over all of the time and over decoding alone, with the best block."""
    return max(_rates_of_blocks(model))


def _rates_of_blocks(model: str) -> Iterator[tuple[float, float]]:
    for block in BLOCKS:
        cell = Cell(3, "t4", model, PROMPT, OUTPUT, 0.0, (STAGES * block, 1, 0, 0, 0, 0, 0, 0))
        problem = problem_of(cell)
        stage = problem.model.first_layers(problem.model.num_layers // STAGES)
        fixed = {"max_num_seqs": STAGES * block, "max_num_batched_tokens": STAGES * block * PROMPT}
        try:
            planned = search(replace(problem, model=stage, **fixed))
        except InputError:
            return  # larger blocks need more memory still
        yield _rates(planned, block)


def _rates(planned: Candidate, block: int) -> tuple[float, float]:
    """Generated tokens/s of stages that have such a plan, over all of the time and over decoding alone."""
    inputs = replace(
        planned.inputs,
        workload=Workload.uniform(block, PROMPT, OUTPUT),
        max_num_seqs=block,
        num_gpu_batches=-(-planned.inputs.num_gpu_batches // STAGES),
        max_num_batched_tokens=block * PROMPT,
    )
    at = planned.counts.placement(planned.inputs)
    phases = phases_of(inputs.workload, "static", block, float(inputs.max_num_batched_tokens))
    token_s = _decoding_s(inputs, phases, at) / (OUTPUT - 1)
    prompts_s = job_seconds(inputs, phases, at) - token_s * (OUTPUT - 1)
    hidden_bytes = 2 * inputs.model.hidden_size * block
    prompts_s = max(prompts_s, PROMPT * hidden_bytes / LINK_BYTES_PER_S)
    token_s = max(token_s, hidden_bytes / LINK_BYTES_PER_S)
    decoding_s = token_s * STAGES * (OUTPUT - 1)
    filling_s = prompts_s * (2 * STAGES - 1)
    seqs = STAGES * block
    return seqs * OUTPUT / (filling_s + decoding_s), seqs * (OUTPUT - 1) / decoding_s


def _decoding_s(inputs: CostInputs, phases: Sequence[Phase], at: Placement) -> float:
    return job_seconds(inputs, [phase for phase in phases if not phase.prefill_tokens], at)
