"""Rows of NEO's, APEX's and Pie's figures: how much faster one strategy is than another, planned and simulated.

A strategy's time is the simulated time of its best plan. Machines are shipped profiles; lengths are those of the
papers, or of the part of the Azure trace that is with the benchmarks.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flexgen_check import opt_config
from paper_row import PaperRow

from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.workload import Lengths, Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.problem import problem_of
from batchgen.planner.strategies import WITH_GPU, NotApplicable
from batchgen.planner.strategy_times import best_plan
from batchgen.profiler.shipped import shipped_profile

HERE = Path(__file__).parent
OVER = "throughput over {}"
ROWS, PROMPT = 2000, 1000
OUTPUT_LENS = (50, 100, 200, 400, 800)
GIB = 1 << 30
# Parts of the CPU of g5.16xlarge, which is the shipped profile; 2x has nearly the bandwidth of 4x (NEO section 5.5).
HOSTS = {"2x": 3.5 / 16, "4x": 4 / 16, "8x": 8 / 16, "16x": 1.0}
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip
# Mean tokens of prompts and outputs (Kwon et al., 2023, figure 11).
SHAREGPT, ALPACA = (161, 338), (19, 58)

_PLANNED_WELL = (
    "the GPU alone is planned as well as it can be here, with continuous admission and chunked prompts, so less is left"
    " to gain"
)
_DECIDED_ONCE = "how many sequences the CPU attends to is planned once for the job, while NEO chooses in each sweep"
_OTHER_LENGTHS = "the paper's requests arrive one after the other; here all rows are there, which helps the GPU alone"


@dataclass(frozen=True, eq=False)  # known by identity: it is a key of caches
class Setting:
    """A machine, a model and the lengths of a job.

    Attributes:
        name: The setting in words.
        hardware: The machine.
        model: The model's configuration.
        prompts: Lengths of prompts.
        outputs: Lengths of outputs.
        gpu_memory: Bytes of GPU memory that a plan may use; None: all.
        rows: Number of rows.
    """

    name: str
    hardware: HardwareProfile
    model: ModelConfig
    prompts: Lengths
    outputs: Lengths
    gpu_memory: int | None = None
    rows: int = ROWS

    def seconds(self, strategy: str) -> float | None:
        """Seconds of all sweeps under the best plan of a strategy; None where it does not apply."""
        workload = Workload(self.rows, self.prompts, self.outputs, max(self.outputs.values))
        problem = problem_of(
            self.hardware,
            self.model,
            workload,
            dtype="float16",
            admission="continuous",
            gpu_memory=self.gpu_memory,
            process_bytes=GIB,
            max_model_len=max(self.prompts.values) + max(self.outputs.values),
        )
        chosen = next(known for known in WITH_GPU if known.name == strategy)
        try:
            predicted = best_plan(chosen, problem).prediction
        except (NotApplicable, InputError):
            return None
        return predicted.total_s - predicted.startup_s


def around(mean: int) -> Lengths:
    """NEO's synthetic lengths: from 0.9 to 1.1 of the mean."""
    return Lengths(tuple(round(mean * (0.9 + 0.02 * i)) for i in range(11)))


def _row(paper: str, item: str, setting: str, unit: str, published: float, gain: float | None, why: str) -> PaperRow:
    row = PaperRow(paper, item, setting, unit, 1 + published, gain, why)
    return replace(row, reason="") if row.is_close else row


@cache
def a10g(host: str, output_len: int) -> Setting:
    """NEO's machines with an A10G: Llama-3.1-8B beside hosts of four sizes, prompts of about 1,000 tokens."""
    share = HOSTS[host]
    hardware = shipped_profile("a10g").scaled(
        cpu_decode_attention=share, dram_bytes_per_s=share, cpu_memory_bytes=max(share, min(HOSTS.values()))
    )
    return Setting(f"A10G, host {host}", hardware, llama_3(), around(PROMPT), around(output_len))


@cache
def t4(output_len: int) -> Setting:
    """NEO's and APEX's machine with a T4: Llama-2-7B, short prompts such as those of summaries to compare."""
    return Setting("T4", shipped_profile("t4"), config_of_hf(LLAMA_2), around(200), around(output_len))


def llama_3() -> ModelConfig:
    """Llama-3.1-8B."""
    shape = HERE.parent / "recipes" / "throughput" / "shapes" / "llama-3.1-8b" / "config.json"
    return config_of_hf(json.loads(shape.read_text()))


@cache
def faster(setting: Setting, strategy: str, than: str) -> float | None:
    """How many times as fast a strategy is as another one; None where either does not apply."""
    own, other = _seconds(setting, strategy), _seconds(setting, than)
    return None if own is None or other is None else other / own


@cache
def _seconds(setting: Setting, strategy: str) -> float | None:
    return setting.seconds(strategy)


def _best(gains: Iterator[float | None]) -> float | None:
    return max((gain for gain in gains if gain is not None), default=None)


def neo_rows() -> Iterator[PaperRow]:
    """Figures 9 and 10a: the highest gain over all output lengths, where a sweep may go back to the GPU alone."""
    unit = OVER.format("GPU-only")
    for host, published in {"2x": 0.122, "4x": 0.133, "8x": 0.297, "16x": 0.793}.items():
        best = _best(faster(a10g(host, n), "NEO", "GPU-only") for n in OUTPUT_LENS)
        yield _row("NEO", "figure 10a", f"A10G, host {host}, best output length", unit, published, best, _DECIDED_ONCE)
    best = _best(faster(a10g("4x", n), "NEO", "GPU-only") for n in OUTPUT_LENS)
    yield _row("NEO", "figure 9", "A10G, best output length", unit, 0.26, best, _PLANNED_WELL)
    best = _best(faster(t4(n), "NEO", "GPU-only") for n in OUTPUT_LENS)
    why = "their GPU-only engine keeps few sequences on a T4; here the same memory holds more, in chunks of prompts"
    yield _row("NEO", "figure 9", "T4, best output length", unit, 7.5, best, why)


def apex_rows() -> Iterator[PaperRow]:
    """Figures 5 and 7."""
    conversation = _azure()
    for than, published in {"NEO": 0.13, "GPU-only": 0.11}.items():
        name = "A10G, host 16x, Azure conversation"
        gain = faster(conversation, "APEX", than)
        yield _row("APEX", "figure 5b", name, OVER.format(than), published, gain, _OTHER_LENGTHS)
    for than, published in {"NEO": 0.71, "GPU-only": 0.96}.items():
        best = _best(faster(t4(n), "APEX", than) for n in OUTPUT_LENS)
        yield _row("APEX", "figure 5a", "T4, best output length", OVER.format(than), published, best, _PLANNED_WELL)
    for output_len, published in {100: 0.05, 200: 0.05, 400: 0.22, 800: 0.37}.items():
        gain = faster(a10g("16x", output_len), "APEX", "NEO")
        name = f"A10G, host 16x, outputs of {output_len}"
        why = "NEO's two batches have as many sequences as fit, where CPU attention is as fast as here"
        yield _row("APEX", "figure 7", name, OVER.format("NEO"), published, gain, why)


def _azure() -> Setting:
    with (HERE / "data" / "azure_conv_sample.csv").open() as file:
        rows = list(csv.DictReader(file))
    prompts, outputs = (
        Lengths.of(max(1, int(row[name])) for row in rows) for name in ("ContextTokens", "GeneratedTokens")
    )
    whole = a10g("16x", 200)
    return replace(whole, name="A10G, Azure conversation", prompts=prompts, outputs=outputs)


def pie_rows() -> Iterator[PaperRow]:
    """Figures 6, 7 and 10, on a GH200 whose GPU has so many GB for KV beside the weights."""
    why = "requests of theirs arrive at a rate, and preempted ones are computed again; here admission is projected"
    for model, data, published in (("30B", "ShareGPT", 0.86), ("30B", "Alpaca", 0.58), ("13B", "ShareGPT", 0.54)):
        best = _best(faster(_gh200(model, data, kv_gb), "Pie", "GPU-only") for kv_gb in (3, 7))
        setting = f"GH200, OPT-{model}, {data}, 3 or 7 GB of KV"
        yield _row("Pie", "figure 6", setting, OVER.format("GPU-only"), published, best, why)
    for data, published in (("Alpaca", 0.5), ("ShareGPT", 0.9)):
        best = _best(faster(_gh200("13B", data, kv_gb), "Pie", "GPU-only") for kv_gb in (3, 6, 12))
        setting = f"GH200, OPT-13B, {data}, 3 to 12 GB of KV"
        yield _row("Pie", "figure 7", setting, OVER.format("GPU-only"), published, best, why)
    why = "FlexGen's strategy runs on the same runtime here, without padding, and its best policy keeps the weights"
    for data, published in (("Alpaca", 6.8), ("ShareGPT", 8.4)):
        gain = faster(_gh200("30B", data, 7), "Pie", "FlexGen")
        setting = f"GH200, OPT-30B, {data}, 7 GB of KV"
        yield _row("Pie", "figure 10", setting, OVER.format("FlexGen"), published, gain, why)


@cache
def _gh200(model: str, data: str, kv_gb: int) -> Setting:
    config = opt_config(model)
    prompt, output = SHAREGPT if data == "ShareGPT" else ALPACA
    # What activations and buffers take beside weights and KV: about a GB.
    memory = 2 * config.held_params + (kv_gb + 1) * 10**9
    return Setting(
        f"GH200, OPT-{model}, {data}, {kv_gb} GB of KV", shipped_profile("gh200"), config,
        around(prompt), around(output), gpu_memory=memory,
    )  # fmt: skip
