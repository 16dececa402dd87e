"""Vocabularies as GGUFs have them, as key-value pairs and as files of nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import gguf

from batchgen.models.files import ModelFiles

RECORDED = json.loads((Path(__file__).parents[1] / "models" / "llama_cpp_ids.json").read_text())
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6


def pairs_of(**values):
    return {
        f"tokenizer.ggml.{key}": tuple(v) if isinstance(v, list) else v for key, v in values.items() if v is not None
    }


def byte_level(pre="gpt-2", **changes):
    tokens = RECORDED["tokens"]
    special = {"<|end|>": CONTROL, "<s>": CONTROL, "</s>": CONTROL, "<tool>": USER_DEFINED}
    stated = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": RECORDED["merges"],
        "token_type": [special.get(token, 1) for token in tokens],
        "bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>"),
    }  # fmt: skip
    return pairs_of(**(stated | changes))


def of_characters(name="gemma4", **changes):
    """The recorded vocabulary of characters, which a file names by its model or by its pre-tokenizer."""
    recorded = RECORDED["characters"]
    stated = {key: recorded[key] for key in ("tokens", "merges", "token_type")}
    ids = {f"{key}_token_id": stated["tokens"].index(f"<{key}>") for key in ("bos", "eos")}
    named = {"model": "gemma4"} if name == "gemma4" else {"model": "gpt2", "pre": name}
    return pairs_of(**(named | stated | ids | {"add_bos_token": True} | changes))


def sentencepiece(rng, characters, count, **changes):
    """A vocabulary at random: tokens of several characters, most made of shorter ones, with scores of their own."""
    special = {
        "<unk>": UNKNOWN,
        "<s>": CONTROL,
        "</s>": CONTROL,
        "<|end|>": CONTROL,
        "<tool>": USER_DEFINED,
        "\n\n": USER_DEFINED,
    }
    special |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    parts, made = ["▁", *characters], dict.fromkeys("▁" * n for n in (2, 3, 4, 8))
    while len(made) < count:
        token = rng.choice(parts) + rng.choice(parts)
        if len(token) < 9:
            made[token] = None
            parts.append(token)
    tokens = list(dict.fromkeys([*special, *made, "▁", *characters]))
    scores = [-float(i) for i in range(len(tokens))]
    rng.shuffle(scores)
    scores = [-1e9 if len(t) > 1 and not t.strip("▁") else score for t, score in zip(tokens, scores, strict=True)]
    stated = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": [special.get(token, 1) for token in tokens],
    }  # fmt: skip
    return pairs_of(**(stated | changes))


def write(path, pairs):
    """A GGUF of nothing but these pairs."""
    writer = gguf.GGUFWriter(str(path), "llama")
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, tuple: writer.add_array}
    for key, value in pairs.items():
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(path, "gguf", path.name)
