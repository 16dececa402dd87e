"""Rows of FlexGen's tables: its policies under its runtime as `flexgen_check.py` models it, and the search's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flexgen_check import HERE, Cell, FlexGenInputs, inputs_of, predict, problem_of, read_cells, short_of
from flexgen_stages import decoding_rate, rates_over_stages
from paper_row import PaperRow

from batchgen.core.errors import InputError
from batchgen.planner.costs import job_seconds, layer_lanes, moved_bytes
from batchgen.planner.linear import number
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import LANES, Allowed
from batchgen.planner.search import search

PAPER = "FlexGen"
TOKENS_PER_S = "generated tokens/s"
_IN_MEMORY = Allowed(weight_tiers=("gpu", "cpu"), kv_placements=("gpu", "cpu", "streamed"))

_PAGE_CACHE = "with the page cache on, a part of the reads came from memory: more than the stated disk can deliver"
_FEW_ROWS = "few sequences a sweep: what was measured is the launch of small kernels"
_FASTER_DISK = "with the page cache off too, their disk delivered weights faster than the stated 1.6 GB/s"
_FEWER_BATCHES = "the search's own policy dequantizes each layer for fewer GPU batches than theirs"
_DEQUANTIZED = "their code keeps a dequantized layer for longer than is modelled, or overlaps dequantizing with the bus"
_HOST_UNKNOWN = "the paper does not name the CPU and the SSD of this machine"
_SEQS_UNKNOWN = "the KV of the printed number of sequences is far more than the machine's memory"
_CPU_ATTENDS = "KV that streams is hidden behind products here, while their loads are in series with computation"
_TWO_RATES = "the two figures of the paper contradict each other at the stated disk rate"
_WORSE_POLICY = "for so few sequences the search puts more of the weights on the GPU than their policy does"
_OTHER_STAGES = "their policy for four machines is not printed; it is the search's own that is predicted"

_BREAKDOWN = {
    ("prefill", "compute"): "",
    (
        "prefill",
        "weights read",
    ): "one pass over the weights is modelled; why theirs takes longer is not known",
    ("prefill", "KV written"): "with the page cache on, a part of the writes had not reached the disk yet",
    (
        "decoding",
        "compute",
    ): "the CPU attends at the rate of their own cost model, less than this figure needs",
    ("decoding", "weights read"): _PAGE_CACHE,
    ("decoding", "KV read"): _PAGE_CACHE,
    ("decoding", "KV written"): "bytes alone are counted here, while each token's KV is a small write of its own",
}


def flexgen_rows() -> Iterator[PaperRow]:
    """All rows of FlexGen's tables."""
    content = json.loads((HERE / "flexgen_cells.json").read_text())
    yield from map(cell_row, read_cells())
    for entry in content["policies"]:
        yield from _policy_rows(entry)
    for name, points in content["frontiers"].items():
        yield from _frontier_rows(name, points)
    for entry in content["ablations"]:
        yield from ablation_rows(entry)
    yield from _breakdown_rows(content["breakdown"])
    for model, rates in content["four_gpus"].items():
        yield from stage_rows(model, rates)


def _setting(cell: Cell) -> str:
    size, batches, *percent = cell.policy
    disk = f", disk {cell.disk_read_bytes_per_s / 1e9:g} GB/s" if cell.disk_read_bytes_per_s else ""
    bits = ", 4-bit" if cell.compressed else ""
    note = f", {cell.note}" if cell.table == 24 else ""
    policy = f"{size}×{batches}, {' '.join(map(str, percent))}"
    return f"OPT-{cell.model}{bits}, {cell.prompt} + {cell.output}, {cell.machine}{disk}: {policy}{note}"


def cell_row(cell: Cell) -> PaperRow:
    """The row of one cell of the tables that have policies with their throughput."""
    return _row(f"table {cell.table}", _setting(cell), TOKENS_PER_S, cell.tokens_per_s, predict(cell), _reason(cell))


def _row(item: str, setting: str, unit: str, published: float | None, predicted: float | None, reason: str) -> PaperRow:
    """A row, with the reason only where the prediction is not close."""
    row = PaperRow(PAPER, item, setting, unit, published, predicted, reason)
    return replace(row, reason="") if row.is_close else row


def _reason(cell: Cell) -> str:
    """The reason why a prediction of a cell is not close, if it is not."""
    if cell.machine == "rtx3090":
        return _HOST_UNKNOWN
    if short_of(cell):
        return _SEQS_UNKNOWN
    if cell.compressed:
        return _DEQUANTIZED
    if cell.disk_read_bytes_per_s:
        return _TWO_RATES
    if cell.table == 21 and cell.model == "175B":
        return _FASTER_DISK
    return _PAGE_CACHE if "page cache on" in cell.note else _FEW_ROWS


def _policy_rows(entry: dict[str, Any]) -> Iterator[PaperRow]:
    """Rows of tables 21 and 22: throughput and latency of one policy for two models."""
    for model, rate in entry["tokens_per_s"].items():
        cell = Cell(21, "t4", model, 512, 32, rate or 0.0, tuple(entry["policy"]))
        predicted = None if short_of(cell) else predict(cell)
        yield _row("table 21", _setting(cell), TOKENS_PER_S, rate, predicted, _reason(cell))
        latency_s = predicted and cell.max_num_seqs * cell.output / predicted
        yield _row("table 22", _setting(cell), "s", entry["latency_s"][model], latency_s, _reason(cell))


def _frontier_rows(name: str, points: list[list[float]]) -> Iterator[PaperRow]:
    """Rows of tables 19 and 20, figure 1: the best policy of the search for a number of sequences."""
    model, _, bits = name.partition(", ")
    for seqs, rate, latency_s in points:
        size = int(seqs)
        cell = Cell(19, "t4", model, 512, 32, rate, (size, 1, 0, 0, 0, 0, 0, 0), compressed=bool(bits))
        problem = replace(problem_of(cell), max_num_seqs=size)
        if bits:
            problem = replace(problem, weight_formats=("int4",), kv_formats=("int4",))
        seconds = search(problem).seconds
        item, setting = f"table {19 if model == '175B' else 20}", f"OPT-{name}, 512 + 32, t4: {size} sequences"
        made = size * cell.output / seconds
        reason = _PAGE_CACHE if model == "175B" else _WORSE_POLICY
        if bits:
            reason = _DEQUANTIZED if made < rate else _FEWER_BATCHES
        yield _row(item, setting, TOKENS_PER_S, rate, made, reason)
        yield _row(item, setting, "s", latency_s, seconds, reason)


def ablation_rows(entry: dict[str, Any]) -> Iterator[PaperRow]:
    """Rows of tables 4 and 23: throughput without one technique."""
    without = entry["without"]
    for model in ("30B", "175B"):
        cell = next(c for c in read_cells() if (c.table, c.model, c.prompt, c.compressed) == (15, model, 512, False))
        setting = f"OPT-{model}, 512 + 32, t4: {without}"
        reason = _CPU_ATTENDS if without == "no CPU compute" and model == "30B" else _PAGE_CACHE
        if without == "DeepSpeed's policy":
            reason = _FEW_ROWS
        yield _row("table 23", setting, TOKENS_PER_S, entry[model], _without(cell, without), reason)


def _without(cell: Cell, technique: str) -> float | None:
    """Generated tokens/s of a cell without a technique; None: memory does not hold it."""
    of_model = {
        "no policy search": {"30B": (48, 3, 0, 100, 0, 100, 0, 100), "175B": (32, 1, 0, 50, 0, 0, 0, 100)},
        "DeepSpeed's policy": {"30B": (8, 1, 0, 100, 100, 0, 100, 0), "175B": (2, 1, 0, 0, 100, 0, 100, 0)},
    }
    cell = replace(cell, policy=of_model.get(technique, {}).get(cell.model, cell.policy))
    inputs, phases, at = inputs_of(cell)
    if technique == "no disk" and (at.w_disk or at.kv_disk):
        try:
            seconds = search(replace(problem_of(cell), allowed=_IN_MEMORY)).seconds
        except InputError:
            return None
        return cell.max_num_seqs * cell.output / seconds
    if technique == "no overlapping":
        inputs = replace(inputs, serial=LANES)
    if technique == "no CPU compute":
        inputs = replace(inputs, attends_disk_kv_on_cpu=False)
        at = replace(at, kv_cpu=0.0, kv_streamed=at.kv_streamed + at.kv_cpu)
    return cell.max_num_seqs * cell.output / job_seconds(inputs, phases, at)


def _breakdown_rows(published: dict[str, dict[str, float]]) -> Iterator[PaperRow]:
    """Rows of table 8: seconds of each kind of work in prefill and decoding, without overlap."""
    cell = next(c for c in read_cells() if c.table == 15 and c.model == "175B" and not c.compressed)
    inputs, phases, at = inputs_of(cell)
    for stage, kinds in published.items():
        of_stage = [phase for phase in phases if (phase.prefill_tokens > 0) == (stage == "prefill")]
        seconds = _seconds_by_kind(inputs, of_stage, at)
        for kind, published_s in kinds.items():
            if published_s:
                setting = f"OPT-175B, 512 + 32, t4: {stage}, {kind}"
                yield _row("table 8", setting, "s", published_s, seconds[kind], _BREAKDOWN[stage, kind])


def _seconds_by_kind(s: FlexGenInputs, phases: list[Phase], at: Placement) -> dict[str, float]:
    """Seconds of a job's phases by the kind of work; weights come from disk and over the bus."""
    seconds = dict.fromkeys(("compute", "weights read", "KV read", "KV written"), 0.0)
    nothing_kept = replace(at, kv_gpu=0, kv_cpu=0, kv_streamed=0, kv_disk=0, act_gpu=0, act_cpu=0)
    for phase in phases:
        layers = phase.sweeps * s.model.num_layers
        lanes = {name: number(value) for name, value in layer_lanes(s, phase, at).items()}
        weights = {name: number(value) for name, value in layer_lanes(s, phase, nothing_kept).items()}
        kv = moved_bytes(s, phase, replace(at, w_disk=0, experts_disk=0))
        seconds["compute"] += layers * (lanes["compute"] + lanes["cpu_attention"])
        seconds["weights read"] += layers * (weights["disk_read"] + weights["h2d"])
        seconds["KV read"] += layers * number(kv["disk_read"]) / s.hardware.disk_read_bytes_per_s
        seconds["KV written"] += layers * number(kv["disk_write"]) / s.hardware.disk_write_bytes_per_s
    return seconds


def stage_rows(model: str, published: dict[str, list[float]]) -> Iterator[PaperRow]:
    """Rows of table 3: decoding on one machine, and all of the time and decoding on four of them."""
    setting = f"OPT-{model}, 512 + 32, t4"
    alone, together = published["decoding"]
    rate = decoding_rate(model)
    yield _row("table 3", f"{setting}: decoding", "decoded tokens/s", alone, rate, _PAGE_CACHE)
    generation, decoding = rates_over_stages(model)
    yield _row("table 3", f"{setting} × 4", TOKENS_PER_S, published["generation"][1], generation, _OTHER_STAGES)
    yield _row("table 3", f"{setting} × 4: decoding", "decoded tokens/s", together, decoding, _OTHER_STAGES)
