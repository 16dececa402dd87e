"""The settings of NEO's, APEX's and Pie's figures: machines, models and lengths, and strategies' times in them.

A strategy's time is the simulated time of its best plan. Machines are shipped profiles; lengths are those that the
papers print, or those of the parts of the Azure traces that are with the benchmarks.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flexgen_check import opt_config

from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan
from batchgen.core.workload import Lengths, Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.models.shard import Shard
from batchgen.planner.parallel import link_of, with_all_reduce
from batchgen.planner.problem import problem_of
from batchgen.planner.strategies import NEO, WITH_GPU, NotApplicable, Strategy
from batchgen.planner.strategy_times import best_plan
from batchgen.profiler.shipped import shipped_profile

HERE = Path(__file__).parent
ROWS, PROMPT = 2000, 1000
OUTPUT_LENS = (50, 100, 200, 400, 800)
GB, PROCESS_BYTES = 10**9, 700 << 20
# Parts of the CPU of g5.16xlarge, which is the shipped profile; 2x has nearly the bandwidth of 4x (NEO section 5.5).
HOSTS = {"2x": 3.5 / 16, "4x": 4 / 16, "8x": 8 / 16, "16x": 1.0}
# vLLM takes so much of a GPU by default, for weights, activations and KV.
VLLM_MEMORY_FRAC = 0.9
# NEO's form of FastDecode: the CPU attends to all sequences.
FASTDECODE = replace(NEO, name="FastDecode+", kv_placements=("cpu",))
STRATEGIES = {strategy.name: strategy for strategy in (*WITH_GPU, FASTDECODE)}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0,
}  # fmt: skip
_LLAMA_SHAPES = {  # hidden, layers, heads, KV heads, MLP, vocabulary
    "Llama-2-7B": (4096, 32, 32, 32, 11008, 32000),
    "Llama-13B": (5120, 40, 40, 40, 13824, 32000),
    "Llama-3.1-8B": (4096, 32, 32, 8, 14336, 128256),
    "Llama-3.1-70B": (8192, 80, 64, 8, 28672, 128256),
}
# Mean tokens of prompts and outputs (Kwon et al., 2023, figure 11).
DATA_SETS = {"ShareGPT": (161, 338), "Alpaca": (19, 58)}
# Summaries of 24 to 48 tokens of posts of at most 512 (Stiennon et al., 2020, appendix A), taken to be 350 on average.
OSC_PROMPT, OSC_OUTPUT = 350, 36


@dataclass(frozen=True, eq=False)  # known by identity: it is a key of caches
class Setting:
    """A machine, a model and the lengths of a job.

    Attributes:
        name: The setting in words.
        hardware: The machine, of one rank where there are several.
        model: The model's configuration, of one rank where there are several.
        prompts: Lengths of prompts.
        outputs: Lengths of outputs.
        gpu_memory: Bytes of GPU memory that a plan may use; None: all.
        most_seqs: The most sequences in flight; None leaves it to the plan.
    """

    name: str
    hardware: HardwareProfile
    model: ModelConfig
    prompts: Lengths
    outputs: Lengths
    gpu_memory: int | None = None
    most_seqs: int | None = None

    def plan(self, strategy: Strategy, rows: int = ROWS) -> Plan:
        """The best plan of a strategy. Raises NotApplicable and InputError."""
        workload = Workload(rows, self.prompts, self.outputs, max(self.outputs.values))
        problem = problem_of(
            self.hardware,
            self.model,
            workload,
            dtype="float16",
            admission="continuous",
            gpu_memory=self.gpu_memory,
            disk_memory=0,
            process_bytes=PROCESS_BYTES,
            max_model_len=max(self.prompts.values) + max(self.outputs.values),
        )
        most_seqs = min(problem.most_seqs, self.most_seqs or problem.most_seqs)
        return best_plan(strategy, replace(problem, most_seqs=most_seqs))


def around(mean: int) -> Lengths:
    """NEO's synthetic lengths: from 0.9 to 1.1 of the mean."""
    return Lengths(tuple(round(mean * (0.9 + 0.02 * i)) for i in range(11)))


@cache
def llama(name: str) -> ModelConfig:
    """The configuration of a Llama model."""
    hidden, layers, heads, kv_heads, mlp, vocabulary = _LLAMA_SHAPES[name]
    return config_of_hf(
        _LLAMA
        | {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": mlp, "vocab_size": vocabulary,
        }
    )  # fmt: skip


@cache
def a10g(host: str, output_len: int) -> Setting:
    """NEO's machines with an A10G: Llama-3.1-8B beside hosts of four sizes, prompts of about 1,000 tokens."""
    share = HOSTS[host]
    hardware = shipped_profile("a10g").scaled(
        cpu_decode_attention=share, dram_bytes_per_s=share, cpu_memory_bytes=max(share, min(HOSTS.values()))
    )
    return Setting(f"A10G, host {host}", hardware, llama("Llama-3.1-8B"), around(PROMPT), around(output_len))


@cache
def t4(output_len: int) -> Setting:
    """NEO's and APEX's machine with a T4: Llama-2-7B, prompts of about 200 tokens."""
    return Setting("T4", shipped_profile("t4"), llama("Llama-2-7B"), around(200), around(output_len))


@cache
def t4_of_vllm(output_len: int) -> Setting:
    """The T4 with as much memory as vLLM takes of it, and prompts of summaries to compare (OSC)."""
    whole = t4(output_len)
    memory = int(VLLM_MEMORY_FRAC * (whole.hardware.gpu_memory_bytes or 0))
    name = f"T4, {VLLM_MEMORY_FRAC:.0%} of its memory"
    return replace(whole, name=name, prompts=around(OSC_PROMPT), gpu_memory=memory)


@cache
def h100s(output_len: int) -> Setting:
    """A rank of NEO's two H100s: Llama-3.1-70B, prompts of about 2,000 tokens."""
    hardware = shipped_profile("h100")
    ranks = with_all_reduce(hardware, 2, link_of(hardware, None, gpus_of_a_host=True))
    model = Shard(0, 2, llama("Llama-3.1-70B")).config
    return Setting("2x H100", ranks, model, around(2 * PROMPT), around(output_len))


@cache
def azure(trace: str, host: str) -> Setting:
    """The A10G with lengths of an Azure trace: "conv", of conversations, or "code"."""
    return _with_trace(a10g(host, OUTPUT_LENS[0]), trace)


@cache
def azure_on_h100s() -> Setting:
    """Two H100s with lengths of the Azure trace of code."""
    return _with_trace(h100s(OUTPUT_LENS[0]), "code")


def _with_trace(setting: Setting, trace: str) -> Setting:
    with (HERE / "data" / f"azure_{trace}_sample.csv").open() as file:
        rows = list(csv.DictReader(file))
    prompts, outputs = (
        Lengths.of(max(1, int(row[name])) for row in rows) for name in ("ContextTokens", "GeneratedTokens")
    )
    return replace(setting, prompts=prompts, outputs=outputs)


@cache
def gh200(model: str, data: str, kv_gb: int) -> Setting:
    """Pie's GH200, whose GPU has so many GB for KV beside the weights."""
    config = opt_config(model.removeprefix("OPT-")) if model.startswith("OPT") else llama(model)
    prompt, output = DATA_SETS[data]
    # What activations and buffers take beside weights and KV: about a GB.
    memory = 2 * config.held_params + (kv_gb + 1) * GB
    name = f"GH200, {model}, {data}, {kv_gb} GB of KV"
    return Setting(name, shipped_profile("gh200"), config, around(prompt), around(output), memory)


@cache
def expanded(setting: Setting, times: float) -> Setting:
    """The setting with at most so many times as many sequences in flight as the GPU alone holds."""
    held = setting.plan(STRATEGIES["GPU-only"]).policy.max_num_seqs
    return replace(setting, most_seqs=int(times * held))


def sweeps_s(plan: Plan) -> float:
    """Seconds of a plan's sweeps."""
    return plan.prediction.total_s - plan.prediction.startup_s


@cache
def seconds(setting: Setting, strategy: str) -> float | None:
    """Seconds of a strategy's sweeps in a setting; None where it does not apply."""
    try:
        return sweeps_s(setting.plan(STRATEGIES[strategy]))
    except (NotApplicable, InputError):
        return None


def faster(setting: Setting, strategy: str, than: str) -> float | None:
    """How many times as fast a strategy is as another one; None where either does not apply."""
    taken_s, other_s = seconds(setting, strategy), seconds(setting, than)
    return None if taken_s is None or other_s is None else other_s / taken_s
