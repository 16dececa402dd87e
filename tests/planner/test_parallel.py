"""Shares of a host, links between processes, and all-reduces of ranks that run one model together."""

from dataclasses import replace

import pytest
from planner_cases import GIB, cpu_box, gpu_box

from batchgen.core.workload import Workload
from batchgen.models.hf.config import config_of_hf
from batchgen.models.shard import shard_of
from batchgen.planner.parallel import PROCESSES, Link, link_of, part_of_host, with_all_reduce
from batchgen.planner.problem import Problem
from batchgen.planner.search import search
from batchgen.planner.step_seconds import all_reduce_s

MODEL = config_of_hf(
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
    }
)  # fmt: skip


def found(hardware, model):
    """The plan of a block whose size is fixed, in more memory than it needs."""
    problem = Problem(
        hardware=hardware, model=model, workload=Workload.uniform(256, 512, 64), budgets={"cpu": 256 * GIB, "disk": 0},
        compute_format="float16", weight_formats=("float16",), kv_formats=("float16",), admissions=("static",),
        max_num_seqs=64, num_gpu_batches=1, max_num_batched_tokens=512,
    )  # fmt: skip
    return search(problem)


def seconds(hardware, model):
    return found(hardware, model).seconds


def search_inputs(hardware):
    return found(hardware, MODEL).inputs


def test_two_ranks_of_a_machine_take_as_long_as_one_and_their_all_reduces():
    box = cpu_box(cpu_memory_bytes=256 * GIB)
    without, half = part_of_host(box, 2, whole=True), shard_of(MODEL, 0, 2).config
    rank = with_all_reduce(without, 2, PROCESSES)
    # Half of each product and of the KV at half the rate; norms and the vocabulary are whole, and take twice as long.
    assert seconds(box, MODEL) <= seconds(without, half) * (1 + 1e-9)
    assert seconds(without, half) < seconds(rank, half)


def test_processes_share_what_is_the_hosts():
    box, gpus = cpu_box(), gpu_box()
    own = {"gpu": gpus.gpu, "h2d_bytes_per_s": 1.2e10, "d2h_bytes_per_s": 1.2e10, "sampling_logits_per_s": 1e10}
    for size in (2, 4):
        part = part_of_host(box, size, whole=True)
        for name in ("dram_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s", "sampling_logits_per_s"):
            assert getattr(part, name) == pytest.approx(getattr(box, name) / size), name
        assert part.cpu.rates("gemm_flops_per_s", "float16").at(tokens=64) == pytest.approx(6e11 / size)
        part = part_of_host(gpus, size, whole=True)
        assert {name: getattr(part, name) for name in own} == own, "a GPU and its bus are a process's own"
        assert part.cpu.rates("decode_attention_bytes_per_s", "float16").at() == pytest.approx(2e10 / size)
        assert part.dram_bytes_per_s == pytest.approx(5e10 / size)
    for hardware in (box, gpus):
        assert part_of_host(hardware, 1, whole=True) == hardware
        disk = {name: getattr(hardware, name) / 2 for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s")}
        assert part_of_host(hardware, 2, whole=False) == replace(hardware, **disk), "the disk alone is shared"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_an_all_reduce_takes_as_long_as_a_ring(size):
    """2 (N - 1) messages one after the other, each of the N-th part of the activations; two sums a layer."""
    link, tokens = Link(5e8, 1e-4), 96
    s = search_inputs(with_all_reduce(cpu_box(cpu_memory_bytes=256 * GIB), size, link))
    message_s = 1e-4 + tokens * 4096 * 2 / size / 5e8
    assert all_reduce_s(s, tokens) == pytest.approx(2 * 2 * (size - 1) * message_s)
    assert all_reduce_s(search_inputs(cpu_box(cpu_memory_bytes=256 * GIB)), tokens) == 0


def test_gpus_of_a_host_are_linked_by_their_bus_and_other_processes_by_a_fixed_rate():
    """GPUs of a host reach one another through its memory; all else is that between processes."""
    box, gpus = cpu_box(), gpu_box(d2h_bytes_per_s=5e9)
    assert link_of(gpus, None, gpus_of_a_host=True).bytes_per_s == 5e9
    for hardware in (box, gpus):
        assert link_of(hardware, None, gpus_of_a_host=False) == PROCESSES
        assert link_of(hardware, 3e9, gpus_of_a_host=False).bytes_per_s == 3e9
    assert link_of(gpus, 3e9, gpus_of_a_host=True).bytes_per_s == 3e9
    assert Link(1e9, 2e-4).send_s(5e6) == pytest.approx(5.2e-3)
