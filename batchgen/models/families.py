"""The families of supported models, by the name of their class in transformers."""

from __future__ import annotations

ARCHITECTURES = {
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
# Families with norms around attention and MLP, whose checkpoints hold the weights of norms less one.
GEMMA = ("gemma2", "gemma3")
# Families without norms before attention and MLP: their outputs are normed.
OUTPUT_NORMS = ("olmo2", "olmo3")
# Families that norm the queries and keys of each head, and those that norm all heads' together.
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3")
PROJECTION_NORMS = ("olmo2", "olmo3")
# Families with a mixture of experts: what a config.json calls their number, and the width of each.
MIXTURES = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen2_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
}
QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe")
