"""Words for the message that refuses a model: the supported family that is nearest to it, and what it is itself."""

from __future__ import annotations

import re
from collections.abc import Iterable

from batchgen.models.families import ENCODERS

# Begin of a name in lower case, without other characters than letters and digits -> the family that is nearest.
_NEAREST = {
    "llama4": "llama",
    "mllama": "llama",
    "codellama": "llama",
    "arcee": "llama",
    "helium": "llama",
    "stablelm": "llama",
    "exaone": "llama",
    "internlm": "llama",
    "deepseek": "qwen3_moe",
    "glm4moe": "qwen3_moe",
    "glm4vmoe": "qwen3_moe",
    "glmmoe": "qwen3_moe",
    "glmdsa": "qwen3_moe",
    "glm": "qwen3",
    "chatglm": "qwen3",
    "kimi": "qwen3_moe",
    "kimilinear": "qwen3_next",
    "longcat": "qwen3_moe",
    "dots1": "qwen3_moe",
    "mimov2": "qwen3_moe",
    "minimax": "qwen3_moe",
    "dbrx": "mixtral",
    "jetmoe": "granitemoe",
    "mistral4": "qwen3_moe",
    "pixtral": "mistral",
    "gemma": "gemma3",
    "gemma3n": "gemma4",
    "recurrentgemma": "gemma3",
    "paligemma": "gemma3",
    "t5gemma": "gemma3",
    "vaultgemma": "gemma2",
    "phi": "phi3",
    "smolvlm": "smollm3",
    "bamba": "granitemoehybrid",
    "olmohybrid": "qwen3_5",
    "olmo35hybrid": "qwen3_5",
    "flexolmo": "olmoe",
    "olmo": "olmo2",
    "gptoss": "gpt_oss",
    "opt": "opt",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "qwen3omnimoe": "qwen3_moe",
    "qwen": "qwen3",
    "seed": "seed_oss",
}
# Parts of names of models whose layers keep a state, and of mixtures of experts.
_STATES = ("mamba", "jamba", "zamba", "rwkv", "xlstm", "nemotronh", "falconh1", "plamo2", "linear", "hybrid", "lfm")
_MIXTURES = ("moe", "mixture", "experts")
# Parts of names of models with an encoder beside the decoder, and of those that are an encoder alone.
_WITH_ENCODER = ("t5", "bart", "pegasus", "marian", "whisper", "m2m100", "prophetnet", "seamless", "moonshine")
_ENCODERS = ("bert", "electra", "t5encoder", "clip", "siglip", "wav2vec", "embedding", "xlnet", "mpnet", "newmodel")


def nearest_family(name: str, families: Iterable[str]) -> str:
    """The family that is nearest to a model by the name of its class or of its architecture.

    Args:
        name: Name of a class in transformers, of a `model_type`, or of an architecture of GGUFs.
        families: Names of the supported families.
    """
    known = tuple(families)
    plain = _plain(name)
    begins = [begin for begin in _NEAREST if plain.startswith(begin) and _NEAREST[begin] in known]
    begins += [family for family in known if plain.startswith(family.replace("_", ""))]
    if begins:
        longest = max(begins, key=len)
        return _NEAREST.get(longest, longest)
    if any(part in plain for part in _STATES):
        return _first(("qwen3_next", "qwen3"), known)
    return _first(("qwen3_moe" if any(part in plain for part in _MIXTURES) else "llama",), known)


def not_a_decoder(name: str) -> str:
    """Words for a model that generates no text, or not by a decoder alone, with "; " at their end; else nothing.

    Args:
        name: Name of a class in transformers, of a `model_type`, or of an architecture of GGUFs.
    """
    plain = _plain(name)
    if any(part in plain for part in _ENCODERS):
        known = ", ".join(dict.fromkeys(ENCODERS.values()))
        return f"it is an encoder, which generates no text (encoders that give vectors: {known}); "
    if any(part in plain for part in _WITH_ENCODER):
        return "it has an encoder beside its decoder; "
    return ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _first(wanted: tuple[str, ...], known: tuple[str, ...]) -> str:
    return next((family for family in wanted if family in known), known[0])
