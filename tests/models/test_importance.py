"""Mean squares of what each matrix is multiplied with, against transformers on the same tokens."""

import pytest
import torch

from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import resolve_model
from batchgen.models.importance import ChannelImportance, random_tokens

# Our matrices, and the modules of transformers whose inputs they share.
INPUTS = {
    "llama": {
        "qkv": "self_attn.q_proj",
        "out": "self_attn.o_proj",
        "gate_up": "mlp.gate_proj",
        "down": "mlp.down_proj",
    },
    # Whose attention has sinks and windows, or caps and windows. Inputs of gpt-oss's experts are none of a module.
    "gpt_oss": {"qkv": "self_attn.q_proj", "out": "self_attn.o_proj"},
    "gemma2": {
        "qkv": "self_attn.q_proj",
        "out": "self_attn.o_proj",
        "gate_up": "mlp.gate_proj",
        "down": "mlp.down_proj",
    },
    # Layers with attention, and those with a state.
    "qwen3_5": {
        "qkv": ("self_attn.q_proj", "linear_attn.in_proj_qkv"),
        "out": ("self_attn.o_proj", "linear_attn.out_proj"),
        "gate_up": "mlp.gate_proj",
        "down": "mlp.down_proj",
    },
    "opt": {"qkv": "self_attn.q_proj", "out": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
}


@pytest.mark.parametrize("family", INPUTS)
def test_the_inputs_of_every_matrix(tiny_models, family):
    path, model = tiny_models(family)
    seen = {}

    def watch(name):
        return lambda module, args: seen.__setitem__(name, args[0].flatten(0, -2).square().mean(0))

    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in linear]
    checkpoint = open_checkpoint(resolve_model(str(path)))
    tokens = random_tokens(checkpoint.config)
    with torch.inference_mode():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    embeddings, sinks = checkpoint.load_embeddings(torch.float32), checkpoint.load_sinks(torch.float32)
    measured = ChannelImportance(checkpoint.config, embeddings, tokens, sinks)
    for j in range(checkpoint.config.num_layers):
        found = measured.next_layer(checkpoint.load_layer(j, torch.float32))
        of_experts = {"gate_up.weight", "down.weight"} if checkpoint.config.num_experts else set()
        assert set(found) == {f"{name}.weight" for name in INPUTS[family]} | of_experts
        for name, modules in INPUTS[family].items():
            either = (modules,) if isinstance(modules, str) else modules
            (expected,) = (x for full, x in seen.items() if any(f"layers.{j}.{each}" in full for each in either))
            assert found[f"{name}.weight"].min() > 0
            # Channels that are never used are held above zero.
            torch.testing.assert_close(
                found[f"{name}.weight"], expected.clamp(min=1e-3 * expected.mean().item()), rtol=1e-3, atol=1e-7
            )


def test_activations_beyond_the_format_leave_all_channels_alike(tiny_models):
    checkpoint = open_checkpoint(resolve_model(str(tiny_models("llama")[0])))
    embeddings = {n: t * float("inf") for n, t in checkpoint.load_embeddings(torch.float32).items()}
    measured = ChannelImportance(checkpoint.config, embeddings, random_tokens(checkpoint.config))
    found = measured.next_layer(checkpoint.load_layer(0, torch.float32))
    assert all((importance == 1).all() for importance in found.values())
