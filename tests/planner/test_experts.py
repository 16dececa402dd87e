"""What a plan assumes of the experts that a sweep touches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planner_cases import GIB, constant, cpu_box, gpu_box, opt

from batchgen.core.dtypes import FORMAT_BYTES, INT8, KEPT_FORMATS, MIXED, block_format
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.planner.cost import experts_touched, linear_s
from batchgen.planner.experts import break_even_tokens, expert_bytes, on_demand_tokens
from batchgen.planner.inputs import BATCHGEN, CostInputs

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "moe_intermediate_size": 32,
}


def mixture(num_experts, k):
    fields = {"num_experts": num_experts, "num_experts_per_tok": k, "intermediate_size": 32}
    return ModelConfig.from_hf({"architectures": ["Qwen3MoeForCausalLM"], **SIZES, **fields})


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
    assert experts_touched(model, 1) == pytest.approx(k)
    found = [100 * experts_touched(model, tokens) / num_experts for tokens in (8, 32, 64)]
    assert found == pytest.approx(percents, abs=0.6)


@pytest.mark.parametrize("weight_format", ["float16", "int4", INT8, *(f for f in KEPT_FORMATS if f != MIXED)])
def test_an_expert_has_its_bytes_in_every_format(weight_format):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512}
    sizes = SIZES | {"hidden_size": 512, "num_attention_heads": 8, "moe_intermediate_size": 512}
    model = ModelConfig.from_hf({"architectures": ["Qwen3MoeForCausalLM"], **sizes, **fields})
    values = 3 * 512 * 512  # gate, up, down
    found = sum(expert_bytes(model, "float32", weight_format).values())
    assert values * FORMAT_BYTES[block_format(weight_format)] == pytest.approx(found, rel=0.1)


def test_products_of_experts_have_the_rate_of_their_tokens():
    """With weights read once for all tokens that meet them, the time is that of the experts touched."""
    model = mixture(32, 4)
    rates = SimpleNamespace(at=lambda *, width, tokens: 1e9 * tokens)  # the same time for any number of tokens
    s = SimpleNamespace(
        model=model, num_gpu_batches=1, weight_format="float32", compute_format="float32", main_format="float32",
        rates=SimpleNamespace(has_rates=lambda *_: INT8 in _, rates=lambda *_: rates),
    )  # fmt: skip
    rest = model.matmul_params_per_layer - 4 * model.expert_params
    for tokens in (1, 3, 8, 100):
        experts = experts_touched(model, tokens) * model.expert_params
        assert linear_s(s, SimpleNamespace(tokens=tokens)) == pytest.approx(2 * (rest + experts) / 1e9)


def inputs(model, hardware=None, **changes):
    fields = {
        "hardware": hardware or cpu_box(), "model": model, "workload": Workload.uniform(8, 1, 16), "runtime": BATCHGEN,
        "compute_format": "float16", "weight_format": "float16", "kv_format": "float16", "admission": "continuous",
        "block_size": 8, "num_gpu_batches": 1, "max_num_batched_tokens": 512, "kv_block_size": 16,
        "budgets": {"cpu": 8 * GIB, "disk": 0}, "process_bytes": 0,
    }  # fmt: skip
    return CostInputs(**fields | changes)


def everywhere(model, *counts):
    return dict.fromkeys(model.layer_tensors, counts)


QWEN_30B = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "vocab_size": 8000, "num_experts": 128,
        "num_experts_per_tok": 8, "intermediate_size": 6144,
    }
)  # fmt: skip


def test_experts_are_read_on_demand_where_that_is_sooner():
    on_disk = everywhere(QWEN_30B, 0, 0, 6)
    found = on_demand_tokens(inputs(QWEN_30B), on_disk)
    assert 1 < found < 64
    slow, fast = (on_demand_tokens(inputs(QWEN_30B, cpu_box(disk_read_bytes_per_s=r)), on_disk) for r in (1e9, 1e11))
    assert slow >= found > fast, "with a fast disk, all have been read before products end"
    requests = cpu_box(disk_read_overhead_s=1e-3)
    assert on_demand_tokens(inputs(QWEN_30B, requests), on_disk) < found


@pytest.mark.parametrize("weight_format", ["float16", "int4"])
def test_never_where_there_is_nothing_to_choose_from(weight_format):
    formats = {"weight_format": weight_format}
    dense = opt(2048, 6, 32)
    assert on_demand_tokens(inputs(dense, **formats), everywhere(dense, 0, 0, 6)) == 0
    assert on_demand_tokens(inputs(QWEN_30B, **formats), everywhere(QWEN_30B, 0, 6, 0)) == 0
    no_experts = everywhere(QWEN_30B, 0, 6, 0) | {"qkv": (0, 0, 6), "out": (0, 0, 6)}
    assert on_demand_tokens(inputs(QWEN_30B, **formats), no_experts) == 0
    assert on_demand_tokens(inputs(QWEN_30B, gpu_box(), **formats), everywhere(QWEN_30B, 0, 0, 6)) == 0


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
