"""What a plan assumes of the experts that a sweep touches."""

from types import SimpleNamespace

import pytest

from batchgen.core.dtypes import INT8
from batchgen.models.config import ModelConfig
from batchgen.planner.cost import experts_touched, linear_s

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


def test_products_of_experts_have_the_rate_of_their_tokens():
    """With weights read once for all tokens that meet them, the time is that of the experts touched."""
    model = mixture(32, 4)
    rates = SimpleNamespace(at=lambda *, width, tokens: 1e9 * tokens)  # the same time for any number of tokens
    s = SimpleNamespace(
        model=model, num_gpu_batches=1, weight_format="float32", compute_format="float32",
        rates=SimpleNamespace(has_rates=lambda *_: INT8 in _, rates=lambda *_: rates),
    )  # fmt: skip
    rest = model.matmul_params_per_layer - 4 * model.expert_params
    for tokens in (1, 3, 8, 100):
        experts = experts_touched(model, tokens) * model.expert_params
        assert linear_s(s, SimpleNamespace(tokens=tokens)) == pytest.approx(2 * (rest + experts) / 1e9)
