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
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
# Families with norms around attention and MLP, whose checkpoints hold the weights of norms less one.
GEMMA = ("gemma2", "gemma3")
# Families with norms around attention and MLP, whose checkpoints hold the weights of norms as they are.
GEMMA4 = ("gemma4", "gemma4_unified")
# Families with a mixture of experts: what a config.json calls their number, and the width of each.
MIXTURES = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen2_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
}
QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe")
