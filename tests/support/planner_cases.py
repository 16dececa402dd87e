"""Machines and models for planner tests, in round numbers."""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.hardware import ComputeRates, HardwareProfile, Rates
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.models.state_layers import DeltaNet
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.search_space import search_space
from batchgen.profiler.shipped import shipped_profile

GIB = 1 << 30


def constant(rate: float) -> Rates:
    return Rates((), rate)


def gpu_box(**changes) -> HardwareProfile:
    """A small GPU with a slow bus, a host with some memory, and a disk."""
    gpu = ComputeRates(
        gemm_flops_per_s={"float16": Rates(("tokens",), ((1, 2e11), (64, 1e13), (1024, 4e13)))},
        prefill_attention_flops_per_s={"float16": constant(1e13)},
        decode_attention_bytes_per_s={"float16": constant(2e11), "int5": constant(1e11)},
        elementwise_bytes_per_s={"float16": constant(3e11)},
        expand_bytes_per_s=1e11,
        step_overhead_s=5e-5,
    )
    values = {
        "name": "gpu box",
        "gpu": gpu,
        "cpu": ComputeRates(decode_attention_bytes_per_s={"float16": constant(2e10), "int5": constant(1.5e10)}),
        "gpu_memory_bytes": 12 * GIB,
        "cpu_memory_bytes": 48 * GIB,
        "disk_bytes": 500 * GIB,
        "dram_bytes_per_s": 5e10,
        "disk_read_bytes_per_s": 3e9,
        "disk_write_bytes_per_s": 2e9,
        "load_bytes_per_s": 2e9,
        "sampling_logits_per_s": 1e10,
        "h2d_bytes_per_s": 1.2e10,
        "d2h_bytes_per_s": 1.2e10,
        "sweep_overhead_s": 2e-3,
        "sequence_overhead_s": 1e-5,
    }
    return HardwareProfile(**(values | changes))


def cpu_box(**changes) -> HardwareProfile:
    """No GPU."""
    cpu = ComputeRates(
        gemm_flops_per_s={"float16": Rates(("tokens",), ((1, 2e10), (64, 6e11), (1024, 1e12)))},
        prefill_attention_flops_per_s={"float16": constant(2e11)},
        decode_attention_bytes_per_s={"float16": constant(1.5e10), "int5": constant(1e10)},
        elementwise_bytes_per_s={"float16": constant(2e10)},
        expand_bytes_per_s=1e10,
        step_overhead_s=5e-5,
    )
    values = {
        "name": "cpu box",
        "gpu": None,
        "cpu": cpu,
        "cpu_memory_bytes": 32 * GIB,
        "disk_bytes": 500 * GIB,
        "dram_bytes_per_s": 4e10,
        "disk_read_bytes_per_s": 3e9,
        "disk_write_bytes_per_s": 2e9,
        "load_bytes_per_s": 2e9,
        "sampling_logits_per_s": 3e9,
        "sweep_overhead_s": 1e-3,
        "sequence_overhead_s": 1e-5,
    }
    return HardwareProfile(**(values | changes))


def opt(hidden: int, layers: int, heads: int) -> ModelConfig:
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


def llama_8b() -> ModelConfig:
    """Llama-3.1-8B's shape."""
    return config_of_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "torch_dtype": "float16",
        }
    )


def gpt_oss_20b() -> ModelConfig:
    """gpt-oss-20b's shape: every second layer sees 128 tokens."""
    return config_of_hf(
        {
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
        }
    )


def gemma3_27b() -> ModelConfig:
    """Gemma 3 27B's shape: of six layers, five see 1024 tokens."""
    return config_of_hf(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": 5376,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "intermediate_size": 21504,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 168,
        }
    )


def budgets(hardware: HardwareProfile) -> dict[str, int]:
    sizes = {"gpu": hardware.gpu_memory_bytes, "cpu": hardware.cpu_memory_bytes, "disk": hardware.disk_bytes}
    return {tier: size for tier, size in sizes.items() if size is not None}


def inputs_of_batches(hardware: HardwareProfile, model: ModelConfig, num_gpu_batches: int, **held) -> CostInputs:
    """The cost model's inputs for 64 sequences in so many micro-batches, in float16, with further fields of Problem."""
    problem = Problem(
        hardware=hardware,
        model=model,
        workload=Workload.uniform(64, 200, 8),
        budgets=budgets(hardware),
        compute_format="float16",
        weight_formats=("float16",),
        kv_formats=("float16",),
        max_num_seqs=64,
        num_gpu_batches=num_gpu_batches,
        admissions=("continuous",),
        **held,
    )
    return next(iter(search_space(problem)))[0]


def llama_with_two_head_sizes() -> ModelConfig:
    """Eight layers, of which two see all tokens with larger heads, and the last three reuse KV (as Gemma 4's do)."""
    return replace(
        llama_8b(),
        num_layers=8,
        windows=(512, 512, None, 512, 512, 512, 512, None),
        global_head_dim=256,
        global_kv_heads=4,
        shared_kv_layers=3,
    )


def qwen36_35b_a3b() -> ModelConfig:
    """Qwen3.6-35B-A3B's shape: of four layers, three keep a state."""
    layers = 40
    qwen3 = config_of_hf(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
        }
    )
    return replace(
        qwen3,
        shared_expert_size=512,
        state=DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4),
        state_layers=tuple(j for j in range(layers) if j % 4 != 3),
    )


CARDS = ("a100", "a10g", "h100", "h200", "rtx3090")
MIXTURE = config_of_hf(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 6,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
        "vocab_size": 8000, "num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 6144,
    }
)  # fmt: skip


def inputs(name="h100", model=None, **changes) -> CostInputs:
    """Inputs of a small job with int4 weights, of Llama-3.1-8B unless another model is given, on a card or a CPU."""
    hardware = cpu_box() if name == "cpu" else shipped_profile(name)
    fields = {
        "hardware": hardware, "model": model or llama_8b(), "workload": Workload.uniform(8, 1, 16),
        "compute_format": "bfloat16", "weight_format": "int4", "kv_format": "bfloat16", "admission": "continuous",
        "max_num_seqs": 8, "num_gpu_batches": 1, "max_num_batched_tokens": 512, "kv_block_size": 16,
        "budgets": budgets(hardware), "process_bytes": 0,
    }  # fmt: skip
    return CostInputs(**fields | changes)
