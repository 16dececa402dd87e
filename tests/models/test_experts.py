"""A mixture of experts against float64, one token at a time."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from batchgen.models.experts import experts, route, split_experts
from batchgen.models.hf.config import config_of_hf
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "vocab_size": 8,
}


def mixture(num_experts, k, norm_topk=True, seed=0, **fields):
    config = config_of_hf(
        QWEN | {"num_experts": num_experts, "num_experts_per_tok": k, "norm_topk_prob": norm_topk} | fields
    )
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "router": (num_experts, hidden),
        "gate_up": (num_experts * 2 * inner, hidden),
        "down": (num_experts * hidden, inner),
    }
    if shared := config.shared_expert_size:
        shapes |= {"shared_gate": (1, hidden), "shared_gate_up": (2 * shared, hidden), "shared_down": (hidden, shared)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return config, tensors


def one_by_one(config, tensors, x):
    """In float64."""
    gate_up, down = (
        tensors[f"{name}.weight"].double().unflatten(0, (config.num_experts, -1)) for name in ("gate_up", "down")
    )
    out = []
    for token in x.double():
        probs = (tensors["router.weight"].double() @ token).softmax(-1)
        shares, chosen = probs.topk(config.experts_per_token)
        shares = shares / shares.sum() if config.norm_topk else shares
        made = []
        for e in chosen.tolist():
            gate, up = (gate_up[e] @ token).chunk(2)
            made.append(down[e] @ (F.silu(gate) * up))
        out.append(shares @ torch.stack(made) + shared_expert(config, tensors, token))
    return torch.stack(out)


def shared_expert(config, tensors, token):
    if not config.shared_expert_size:
        return 0
    weight, gate_up, down = (tensors[f"shared_{name}.weight"].double() for name in ("gate", "gate_up", "down"))
    gate, up = (gate_up @ token).chunk(2)
    return (weight @ token).sigmoid() * (down @ (F.silu(gate) * up))


@pytest.mark.parametrize(("num_experts", "k"), [(4, 1), (4, 4), (8, 2), (64, 8), (128, 8)])
@pytest.mark.parametrize("split", [True, False])
def test_tokens_go_through_their_experts(num_experts, k, split):
    config, tensors = mixture(num_experts, k, norm_topk=k != 4)
    weights = split_experts(config, tensors, 0) if split else tensors
    for tokens in (1, 3, 64):
        x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(tokens))
        got = experts(config, weights, x)
        torch.testing.assert_close(got.double(), one_by_one(config, tensors, x), atol=1e-5, rtol=1e-5)


def test_each_expert_multiplies_only_its_own_tokens_without_kernels_too(monkeypatch):
    config, tensors = mixture(64, 8)
    x = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(3))
    multiplied, linear = [], ops.linear

    def counted(rows, weight, *args, **options):
        if weight.shape[0] == 2 * config.intermediate_size:  # gates and up projections of one expert
            multiplied.append(len(rows))
        return linear(rows, weight, *args, **options)

    monkeypatch.setattr(ops, "linear", counted)
    experts(config, tensors, x)
    assert sum(multiplied) == 50 * 8 and 0 not in multiplied


@pytest.mark.parametrize("split", [True, False])
def test_all_tokens_go_through_the_shared_expert(split):
    fields = {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 56}
    config, tensors = mixture(8, 3, **fields)
    x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(3))
    got = experts(config, split_experts(config, tensors, 0) if split else tensors, x)
    torch.testing.assert_close(got.double(), one_by_one(config, tensors, x), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_those_beside_it():
    config, tensors = mixture(8, 3)
    weights = split_experts(config, tensors, 0)
    x = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(7))
    together = experts(config, weights, x)
    for rows in (slice(0, 1), slice(17, 18), slice(3, 40)):
        assert torch.equal(experts(config, weights, x[rows]), together[rows])


@pytest.mark.parametrize("favourite", [0, 3])
def test_one_expert_may_get_all_tokens_and_the_others_none(favourite):
    config, tensors = mixture(4, 1)
    tensors["router.weight"].zero_()
    tensors["router.weight"][favourite] = 1.0
    x = torch.rand(9, config.hidden_size, generator=torch.Generator().manual_seed(1)) + 0.1
    weights = split_experts(config, tensors, 0)
    assert (route(config, weights, x)[1] == favourite).all()
    torch.testing.assert_close(
        experts(config, weights, x).double(), one_by_one(config, tensors, x), atol=1e-5, rtol=1e-5
    )


def test_no_tokens_are_no_work():
    config, tensors = mixture(4, 2)
    x = torch.empty(0, config.hidden_size)
    assert experts(config, split_experts(config, tensors, 0), x).shape == x.shape


def test_inputs_of_all_experts_are_shown():
    config, tensors = mixture(4, 2)
    seen = {}
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    weights = split_experts(config, tensors, 0)
    experts(config, weights, x, lambda name, rows: seen.setdefault(name, rows.clone()))
    token_of_row, _, counts = kernels.sort_by_expert(route(config, weights, x)[1], 4)
    rows = x[token_of_row]
    inner = [
        ops.linear(
            some, weights[f"gate_up.{e}.weight"], weights.get(f"gate_up.{e}.bias"), activation=config.mlp_activation
        )
        for e, some in enumerate(rows.split(counts))
    ]
    assert seen.keys() == {"gate_up.weight", "down.weight"}
    assert torch.equal(seen["gate_up.weight"], rows) and torch.equal(seen["down.weight"], torch.cat(inner))


def test_bytes_follow_all_experts_and_flops_those_chosen():
    config = mixture(8, 2)[0]
    one = dataclasses.replace(config, num_experts=1, experts_per_token=1)
    more = config.params_per_layer - one.params_per_layer
    assert more == 7 * (config.expert_params + config.hidden_size)
    assert config.matmul_params_per_layer - one.matmul_params_per_layer == config.expert_params + 7 * config.hidden_size
    assert set(config.linear_shapes) >= {(48, 40), (40, 24)}


def test_layers_without_experts_count_the_weights_that_they_have():
    fields = {"num_hidden_layers": 3, "intermediate_size": 100, "mlp_only_layers": [1]}
    config, plain = mixture(8, 2, **fields)[0], mixture(8, 2, num_hidden_layers=3)[0]
    fewer = 8 * (plain.expert_params + plain.hidden_size) - 3 * 100 * 40
    assert (config.expert_layers, config.num_params) == (2, plain.num_params - fewer)
    # Each tensor of a layer is planned as large as the largest: of the MLP's those of the experts.
    assert (config.layer_tensors, config.layer_matrices) == (plain.layer_tensors, plain.layer_matrices)
    assert config.first_layers(1) == plain.first_layers(1)
    computed = 2 * (config.hidden_size * 8 + 2 * config.expert_params) + 3 * 100 * 40
    assert config.flops_per_token(1) - plain.flops_per_token(1) == 2 * (
        computed - 3 * (config.hidden_size * 8 + 2 * config.expert_params)
    )
