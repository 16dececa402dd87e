"""What ranks that share every layer have of a machine, and what their sums take."""

from dataclasses import replace

import pytest
from planner_cases import GIB, cpu_box

from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.models.shard import shard_of
from batchgen.planner.ranks import rank_profile
from batchgen.planner.search import Problem, search
from batchgen.profiler.shipped import shipped_profile

MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "bos_token_id": 1, "eos_token_id": 2,
    }
)  # fmt: skip


def seconds(hardware, model):
    """Of a block whose size is fixed, in more memory than it needs."""
    problem = Problem(
        hardware=hardware, model=model, workload=Workload.uniform(256, 512, 64), budgets={"cpu": 256 * GIB, "disk": 0},
        compute_format="float16", weight_formats=("float16",), kv_formats=("float16",), admissions=("static",), block_size=64,
        num_gpu_batches=1, max_num_batched_tokens=512,
    )  # fmt: skip
    return search(problem).seconds


def test_two_ranks_of_a_machine_take_as_long_as_one_and_their_sums():
    box = cpu_box(cpu_memory_bytes=256 * GIB)
    rank, half = rank_profile(box, 2, whole=True), shard_of(MODEL, 0, 2).config
    without = replace(rank, sum_bytes_per_s=None, sum_overhead_s=0.0)
    # Half of each product and of the KV at half the rate; norms and the vocabulary are whole, and take twice as long.
    assert seconds(box, MODEL) <= seconds(without, half) * (1 + 1e-9)
    assert seconds(without, half) < seconds(rank, half)


def test_more_ranks_share_more_and_move_more():
    box = cpu_box(cpu_memory_bytes=256 * GIB)
    two, four = (rank_profile(box, size, whole=True) for size in (2, 4))
    assert four.disk_read_bytes_per_s == pytest.approx(box.disk_read_bytes_per_s / 4)
    assert four.dram_bytes_per_s == pytest.approx(box.dram_bytes_per_s / 4)
    assert four.cpu.rates("gemm_flops_per_s", "float16").at(tokens=64) == pytest.approx(6e11 / 4)
    assert two.sum_bytes_per_s / four.sum_bytes_per_s == pytest.approx((2 * 3 / 4) / (2 * 1 / 2))


def test_ranks_with_cards_of_their_own_share_the_host():
    box = shipped_profile("a100")
    rank = rank_profile(box, 2, whole=True)
    assert rank.gpu == box.gpu and rank.sum_bytes_per_s == box.h2d_bytes_per_s
    assert rank.dram_bytes_per_s == box.dram_bytes_per_s / 2


def test_a_profile_of_the_ranks_own_cores_stays():
    box = cpu_box(cpu_memory_bytes=256 * GIB)
    rank = rank_profile(box, 2, whole=False)
    disk = {name: getattr(box, name) / 2 for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s")}
    assert replace(rank, sum_bytes_per_s=None, sum_overhead_s=0.0) == replace(box, **disk), "the disk alone is shared"
