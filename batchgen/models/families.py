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
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "PhimoeForCausalLM": "phimoe",
    "PhiMoEForCausalLM": "phimoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
# Encoders, whose tokens attend to all of their text: they give hidden states.
ENCODERS = {
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "RobertaModel": "roberta",
    "RobertaForMaskedLM": "roberta",
    "RobertaForSequenceClassification": "roberta",
    "XLMRobertaModel": "xlm-roberta",
    "XLMRobertaForMaskedLM": "xlm-roberta",
    "XLMRobertaForSequenceClassification": "xlm-roberta",
    "CamembertModel": "camembert",
    "CamembertForMaskedLM": "camembert",
    "CamembertForSequenceClassification": "camembert",
    "DistilBertModel": "distilbert",
    "DistilBertForMaskedLM": "distilbert",
    "DistilBertForSequenceClassification": "distilbert",
    "ModernBertModel": "modernbert",
    "ModernBertForMaskedLM": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
    "NomicBertModel": "nomic_bert",
    "NomicBertForMaskedLM": "nomic_bert",
    "NomicBertForSequenceClassification": "nomic_bert",
    "GteModel": "gte",
    "GteForMaskedLM": "gte",
    "GteForSequenceClassification": "gte",
}
# Families of encoders with the layers of BERT; of these, those with the files of RoBERTa.
ROBERTAS = ("roberta", "xlm-roberta", "camembert")
BERTS = ("bert", "distilbert", *ROBERTAS)
# Families of encoders with BERT's norms, rotary positions, and a gate in the MLP.
ROTARY_BERTS = ("nomic_bert", "gte")
# Families whose second text of a pair has tokens of another type.
TYPED_PAIRS = ("bert", "nomic_bert", "gte")
# Families whose files have queries, keys and values in one matrix, and those that have gate and up projection in one.
FUSED_QKV = ("phi3", "modernbert", *ROTARY_BERTS)
FUSED_MLPS = ("phi3", "modernbert", "gte")
# Families whose positions are learned, and whose MLP has no gate.
LEARNED_POSITIONS = ("opt", *BERTS)
# Families with norms around attention and MLP.
GEMMA = ("gemma2", "gemma3")
GEMMA4 = ("gemma4", "gemma4_unified")
# Families without norms before attention and MLP: their outputs are normed.
OUTPUT_NORMS = ("olmo2", "olmo3")
# Families with Gated DeltaNet layers, whose attention has an output gate and rotates a part of each head.
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
# Families with gated short convolutions.
SHORT_CONVS = ("lfm2", "lfm2_moe")
# Families that norm the queries and keys of each head, and those that norm all heads' together.
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", *GEMMA4, *SHORT_CONVS, *DELTA_NETS)
PROJECTION_NORMS = ("olmo2", "olmo3", "olmoe")
# Families whose files have all experts of a layer in one tensor, and gate and up in one, and that have shared experts
# without a gate.
GRANITE_MIXTURES = ("granitemoe", "granitemoeshared", "granitemoehybrid")
# Families whose checkpoints hold the weights of norms less one.
NORMS_LESS_ONE = (*GEMMA, *DELTA_NETS)
# Families with LayerNorm, whose norms have biases.
LAYER_NORMS = ("opt", "phimoe", "modernbert", *BERTS, *ROTARY_BERTS)
# Families with a mixture of experts: what a config.json calls their number, and the width of each.
MIXTURES = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen2_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "lfm2_moe": ("num_experts", "moe_intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size"),
    "phimoe": ("num_local_experts", "intermediate_size"),
    **dict.fromkeys(GRANITE_MIXTURES, ("num_local_experts", "intermediate_size")),
    "qwen3_next": ("num_experts", "moe_intermediate_size"),
    "qwen3_5_moe": ("num_experts", "moe_intermediate_size"),
}
QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe")
