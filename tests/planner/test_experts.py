"""What a plan assumes of the experts that a sweep touches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planner_cases import GIB, constant, cpu_box, gpu_box, opt

from batchgen.core.dtypes import FORMAT_BYTES, INT8, MIXED, NATIVE_FORMATS, block_format
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.core.routing import Routing
from batchgen.core.workload import Workload
from batchgen.models.hf.config import config_of_hf
from batchgen.planner.bound import lower_bound_s
from batchgen.planner.costs import job_seconds, layer_lanes, moved_bytes, phase_matmul_s
from batchgen.planner.experts import break_even_tokens, on_demand_tokens
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Counts
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.search import search
from batchgen.planner.sizes import expert_bytes
from batchgen.planner.step_seconds import experts_touched

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "moe_intermediate_size": 32,
}


def mixture(num_experts, k):
    fields = {"num_experts": num_experts, "num_experts_per_tok": k, "intermediate_size": 32}
    return config_of_hf({"architectures": ["Qwen3MoeForCausalLM"], **SIZES, **fields})


@pytest.mark.parametrize(
    ("num_experts", "k", "percents"),  # of 8, 32 and 64 tokens
    [
        (8, 2, (90, 100, 100)),
        (32, 4, (66, 99, 100)),
        (128, 8, (40, 87, 98)),
        (128, 4, (22, 64, 87)),
        (4, 4, (100,) * 3),
    ],
)
def test_few_tokens_touch_some_experts_and_many_all(num_experts, k, percents):
    model = mixture(num_experts, k)
    assert experts_touched(model, 1, Routing()) == pytest.approx(k)
    found = [100 * experts_touched(model, tokens, Routing()) / num_experts for tokens in (8, 32, 64)]
    assert found == pytest.approx(percents, abs=0.6)


def test_tokens_that_are_alike_touch_fewer():
    model = mixture(128, 8)
    alike, same = Routing(0.5), Routing(0.0)
    for tokens in (0.5, 1, 4, 64):
        assert experts_touched(model, tokens, alike) == pytest.approx(
            experts_touched(model, tokens**0.5 if tokens > 1 else tokens, Routing())
        )
    assert experts_touched(model, 64, same) == pytest.approx(8)


@pytest.mark.parametrize("fields", [{"exponent": -0.1}, {"exponent": 1.1}, {"imbalance": 0.9}])
def test_routing_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        Routing(**fields)


@pytest.mark.parametrize("weight_format", ["float16", "int4", INT8, *(f for f in NATIVE_FORMATS if f != MIXED)])
def test_an_expert_has_its_bytes_in_every_format(weight_format):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512}
    sizes = SIZES | {"hidden_size": 512, "num_attention_heads": 8, "moe_intermediate_size": 512}
    model = config_of_hf({"architectures": ["Qwen3MoeForCausalLM"], **sizes, **fields})
    values = 3 * 512 * 512  # gate, up, down
    found = sum(expert_bytes(model, "float32", weight_format).values())
    assert values * FORMAT_BYTES[block_format(weight_format)] == pytest.approx(found, rel=0.1)


def test_products_of_experts_have_the_rate_of_their_tokens():
    """With weights read once for all tokens that meet them, the time is that of the experts touched."""
    model = mixture(32, 4)
    rates = SimpleNamespace(at=lambda *, width, tokens: 1e9 * tokens)  # the same time for any number of tokens
    s = SimpleNamespace(
        model=model, num_gpu_batches=1, balance=None, workload=Workload.uniform(1, 1, 1), weight_format="float32",
        compute_format="float32", main_format="float32",
        rates=SimpleNamespace(has_rates=lambda *_: INT8 in _, rates=lambda *_: rates),
    )  # fmt: skip
    rest = model.matmul_params_per_layer - 4 * model.expert_params
    for tokens in (1, 3, 8, 100):
        experts = experts_touched(model, tokens, Routing()) * model.expert_params
        assert phase_matmul_s(s, SimpleNamespace(tokens=tokens)) == pytest.approx(2 * (rest + experts) / 1e9)


def test_a_gpu_multiplies_with_the_experts_that_tokens_are_routed_to():
    """As many more to choose from change nothing, but that each has fewer tokens."""
    phase = Phase(1, 0, 0, 4096, 1)
    few, many = (
        inputs(mixture(count, 4), gpu_box(), budgets={"gpu": GIB, "cpu": 8 * GIB, "disk": 0}) for count in (8, 128)
    )
    assert few.on_gpu and many.on_gpu
    rates = few.rates.rates("gemm_flops_per_s", "float16")
    params = 4 * few.model.expert_params
    for s, tokens in ((few, 2048), (many, 128)):
        rest = 2 * (s.model.matmul_params_per_layer - params) * 4096 / rates.at(width=64, tokens=4096)
        experts = 2 * params * 4096 / rates.at(width=64, tokens=tokens)
        assert phase_matmul_s(s, phase) == pytest.approx(rest + experts)


def test_a_stage_of_dense_layers_alone_has_no_experts():
    """Of a mixture whose first layers are dense."""
    stage = replace(mixture(32, 4), dense_layers=(0, 1), dense_size=64).stage(0, 2)
    assert stage.num_experts and not stage.expert_layers
    assert expert_bytes(stage, "float16", "float16") == {}
    assert inputs(stage).all_expert_bytes == 0


def test_the_busiest_expert_has_the_rate_of_its_own_tokens():
    """Products take longer where tokens are spread unevenly: few rows take as long as reading their weights."""
    model = mixture(32, 4)
    even, uneven = (
        inputs(model, workload=replace(Workload.uniform(8, 1, 16), routing=Routing(1, imbalance)))
        for imbalance in (1, 3)
    )
    phase = Phase(1, 0, 0, 64, 1)  # about 8 tokens for each expert, or 24 and 7.5
    rates, touched = even.rates.rates("gemm_flops_per_s", "float16"), experts_touched(model, 64, Routing())
    parts = ((3 * 256 / touched, 1), ((256 - 3 * 256 / touched) / (touched - 1), touched - 1))
    seconds = [count * 2 * tokens * model.expert_params / rates.at(width=64, tokens=tokens) for tokens, count in parts]
    rest = phase_matmul_s(even, phase) - 2 * 256 * model.expert_params / rates.at(width=64, tokens=256 / touched)
    assert phase_matmul_s(uneven, phase) == pytest.approx(rest + sum(seconds))
    one = Phase(1, 0, 0, 1, 1)
    assert phase_matmul_s(uneven, one) == pytest.approx(phase_matmul_s(even, one)), "a token goes to each expert once"


def inputs(model, hardware=None, **changes):
    fields = {
        "hardware": hardware or cpu_box(), "model": model, "workload": Workload.uniform(8, 1, 16),
        "compute_format": "float16", "weight_format": "float16", "kv_format": "float16", "admission": "continuous",
        "max_num_seqs": 8, "num_gpu_batches": 1, "max_num_batched_tokens": 512, "kv_block_size": 16,
        "budgets": {"cpu": 8 * GIB, "disk": 0}, "process_bytes": 0,
    }  # fmt: skip
    return CostInputs(**fields | changes)


def everywhere(model, *counts):
    return dict.fromkeys(model.layer_tensors, counts)


def placed(s, weight_layers):
    return Counts(weight_layers, {"cpu": s.max_num_seqs}, (0, 1), 0).placement(s)


def most_tokens(s, weight_layers):
    return on_demand_tokens(s, placed(s, weight_layers))


QWEN_30B = config_of_hf(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "vocab_size": 8000, "num_experts": 128,
        "num_experts_per_tok": 8, "intermediate_size": 6144,
    }
)  # fmt: skip


def test_experts_are_read_on_demand_where_that_is_sooner():
    on_disk = everywhere(QWEN_30B, 0, 0, 6)
    found = most_tokens(inputs(QWEN_30B), on_disk)
    assert 1 < found < 64
    slow, fast = (most_tokens(inputs(QWEN_30B, cpu_box(disk_read_bytes_per_s=r)), on_disk) for r in (1e9, 1e11))
    assert min(slow, found) > fast, "with a fast disk, all have been read before products end"
    requests = cpu_box(disk_read_overhead_s=1e-3)
    assert most_tokens(inputs(QWEN_30B, requests), on_disk) < found
    alike = replace(Workload.uniform(8, 1, 16), routing=Routing(0.7))
    assert most_tokens(inputs(QWEN_30B, workload=alike), on_disk) > found, "fewer experts have to be read"


@pytest.mark.parametrize("weight_format", ["float16", "int4"])
def test_never_where_there_is_nothing_to_choose_from(weight_format):
    formats = {"weight_format": weight_format}
    dense = opt(2048, 6, 32)
    assert most_tokens(inputs(dense, **formats), everywhere(dense, 0, 0, 6)) == 0
    assert most_tokens(inputs(QWEN_30B, **formats), everywhere(QWEN_30B, 0, 6, 0)) == 0
    no_experts = everywhere(QWEN_30B, 0, 6, 0) | {"qkv": (0, 0, 6), "out": (0, 0, 6)}
    assert most_tokens(inputs(QWEN_30B, **formats), no_experts) == 0
    assert most_tokens(inputs(QWEN_30B, gpu_box(), **formats), everywhere(QWEN_30B, 0, 0, 6)) == 0


def test_sweeps_of_few_tokens_read_what_all_need_and_the_experts_touched():
    s = inputs(QWEN_30B, on_demand_tokens=8)
    experts = 128 * 3 * 2048 * 768 * 2
    for on_disk, part in ((6, 1.0), (3, 0.5)):
        at = placed(s, everywhere(QWEN_30B, 0, 6 - on_disk, on_disk))
        for tokens, touched in ((1, 8), (8, experts_touched(QWEN_30B, 8, Routing())), (9, 128)):
            read = moved_bytes(s, Phase(1, 0, 0, tokens, 5), at)["disk_read"]
            assert read == pytest.approx(part * (s.layer_bytes - experts * (1 - touched / 128)))


@pytest.mark.parametrize("weight_format", ["float16", "int4"])
def test_experts_are_read_after_the_router_and_before_what_waits_for_them(weight_format):
    """Neither products nor the disk go on meanwhile; of 4-bit experts only those that were read are dequantized."""
    box = cpu_box(dram_bytes_per_s=1e18)  # for which it does not matter what the disk brings
    whole, some = (inputs(QWEN_30B, box, weight_format=weight_format, on_demand_tokens=tokens) for tokens in (0, 8))
    at, phase = placed(some, everywhere(QWEN_30B, 0, 0, 6)), Phase(1, 0, 0, 4, 5)
    all_lanes, lanes = (layer_lanes(s, phase, at) for s in (whole, some))
    skipped = 1 - experts_touched(QWEN_30B, 4, Routing()) / 128
    disk = some.hardware.disk_read_bytes_per_s
    experts_s = some.all_expert_bytes * (1 - skipped) / disk
    assert all_lanes["disk_read"] - lanes["disk_read"] == pytest.approx(some.all_expert_bytes * skipped / disk)
    assert lanes["chain_experts"] == pytest.approx(lanes["compute"] + experts_s)
    assert lanes["chain_dense"] > lanes["disk_read"]
    assert lanes["compute"] == pytest.approx(all_lanes["compute"]), "experts without tokens are never dequantized"
    assert max(lanes.values()) < max(all_lanes.values())


@pytest.mark.parametrize("on_disk", [0, 6])
def test_of_4_bit_experts_those_touched_are_dequantized(on_disk):
    s = inputs(QWEN_30B, weight_format="int4")
    at = placed(s, everywhere(QWEN_30B, 0, 6 - on_disk, on_disk))
    few, many = (layer_lanes(s, Phase(1, 0, 0, tokens, 5), at)["compute"] for tokens in (1, 1000))
    experts_s = 2 * 3 * 128 * 2048 * 768 / s.rates.expand_bytes_per_s
    products = [phase_matmul_s(s, Phase(1, 0, 0, tokens, 5)) for tokens in (1, 1000)]
    assert many - few > experts_s * (1 - 8 / 128) and few - products[0] < experts_s / 4


def test_a_plan_counts_on_reading_experts_on_demand():
    """Its time is that of its own rule, and less than if all were read."""
    problem = Problem(
        hardware=cpu_box(), model=QWEN_30B, workload=Workload.uniform(4, 8, 32), budgets={"cpu": 4 * GIB, "disk": 0},
        compute_format="float16", weight_formats=("float16",), kv_formats=("float16",),
        kv_block_size=DEFAULT_KV_BLOCK_SIZE, process_bytes=1 << 29,
    )  # fmt: skip
    found = search(problem)
    s, at = found.inputs, found.counts.placement(found.inputs)
    assert s.on_demand_tokens == on_demand_tokens(s, at) >= 4
    assert found.seconds == pytest.approx(job_seconds(s, found.phases, at))
    assert found.seconds < 0.6 * job_seconds(replace(s, on_demand_tokens=0), found.phases, at)
    assert found.relaxed.seconds <= found.seconds * (1 + 1e-4)
    assert lower_bound_s(s, found.phases) <= found.relaxed.seconds


def test_mixtures_need_more_tokens_for_products_to_take_as_long_as_reading():
    """By as much as they have more weights than a token is multiplied with."""
    rates = cpu_box().compute
    rates = replace(
        rates, gemm_flops_per_s={"float16": constant(1e12)}, elementwise_bytes_per_s={"float16": constant(1e30)}
    )
    needed = {}
    for k in (4, 32):
        s = inputs(mixture(32, k), cpu_box(cpu=rates))
        needed[k] = break_even_tokens(s, s.layer_bytes / 3e9)
        flops = 2 * needed[k] * s.model.matmul_params_per_layer
        assert flops / 1e12 >= s.layer_bytes / 3e9 > flops / 1e12 * (needed[k] - 1) / needed[k]
    weights = [mixture(32, k).matmul_params_per_layer for k in (4, 32)]
    assert needed[4] / needed[32] == pytest.approx(weights[1] / weights[0], rel=2 / needed[32])
    assert break_even_tokens(s, 0.0) == 0
