"""Prefixes of which a job has many, each of some of its rows: what plans count, against one prefix of all rows."""

from dataclasses import replace

import pytest
from planner_cases import cpu_box, inputs, opt
from simulated import plan_of

from batchgen.core.errors import InputError
from batchgen.core.plan import Policy
from batchgen.core.workload import Workload
from batchgen.planner.costs import phase_decode_attention_s, phase_prefix_attention_s
from batchgen.planner.phases import Phase
from batchgen.planner.simulation import simulate_job

ONE = Workload.uniform(600, 200, 20, shared_prefix_len=100)


def test_a_prefix_of_all_rows_is_one_whatever_is_in_flight():
    assert ONE.prefix_len == 100
    assert [ONE.prefixes_of(seqs) for seqs in (0, 1, 64)] == [0, 1, 1]


def test_of_each_group_one_row_computes_the_prefix():
    groups = replace(ONE, prefix_seqs=5.0)
    assert groups.prefix_len == pytest.approx(125)
    assert groups.prefix_len * (1 - 1 / 5) == pytest.approx(ONE.shared_prefix_len)
    assert [groups.prefixes_of(seqs) for seqs in (0, 2, 40)] == [0, 1, 8]
    assert replace(ONE, prefix_seqs=1.6).prefix_len < ONE.prompt_len.mean


def test_a_prefix_of_one_row_is_refused():
    with pytest.raises(InputError, match="shared by more than one sequence"):
        replace(ONE, prefix_seqs=1.0)


def simulated_tokens(workload):
    """Tokens that a simulated job computes, on a CPU with everything in memory."""
    config = opt(256, 2, 4)
    policy = Policy(
        admission="continuous", gpu_batch_size=8, num_gpu_batches=1, max_num_batched_tokens=256, max_model_len=256,
        kv_block_size=16, kv_blocks={}, share_prefixes=True, weight_format="float16", kv_format="float16",
        weight_layers=dict.fromkeys(config.layer_tensors, (0, 2, 0)), head_tier="cpu", kv_seqs={"cpu": 8},
        activation_batches=(0, 1),
    )  # fmt: skip
    return simulate_job(plan_of(policy, workload, {"cpu": 4 << 30, "disk": 0}), config, cpu_box()).tokens


def test_a_simulated_job_computes_the_prefix_of_each_group_once():
    rows = Workload.uniform(96, 160, 1, shared_prefix_len=96)
    alone = simulated_tokens(replace(rows, shared_prefix_len=0.0))
    assert alone == 96 * 160
    assert simulated_tokens(rows) == 96 * 160 - 95 * 96
    groups = replace(rows, prefix_seqs=4.0)  # of 128 tokens
    assert simulated_tokens(groups) == 96 * 160 - 72 * 128


def test_prefixes_of_small_groups_are_read_by_each_sequence():
    """The attention of decoding sequences to prefixes: one for all takes least, and pairs save no reading."""
    formats = {"compute_format": "float16", "weight_format": "float16", "kv_format": "float16"}
    phase = Phase(1.0, 0.0, 0.0, 64.0, 180.0)

    def attention_s(prefix_seqs):
        part = 1.0 if prefix_seqs is None else 1 - 1 / prefix_seqs  # so that prefixes have 100 tokens each
        workload = replace(ONE, shared_prefix_len=100 * part, prefix_seqs=prefix_seqs)
        s = inputs("cpu", opt(256, 2, 4), workload=workload, max_num_seqs=64, **formats)
        return phase_decode_attention_s(s, phase, s.rates) + phase_prefix_attention_s(s, phase)

    assert attention_s(None) <= attention_s(16.0) < attention_s(2.0)
