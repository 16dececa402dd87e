"""A Hugging Face directory of Llama-3.2-3B's shape, or a smaller one, with random weights.

It is written in pieces of a few tens of megabytes. Token i is the word "wI", so a prompt is text and token ids at once,
and what was generated can be read back from text.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from pathlib import Path
from typing import Any

LLAMA_3B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    # No token ends a text: every row generates as much as it is asked for, in every engine.
    "bos_token_id": None,
    "eos_token_id": None,
}
_SHARD_BYTES = 1 << 30
_PIECE_NUMBERS = 8 << 20


def make_model(path: Path | str, *, seed: int = 0, **changes: Any) -> Path:
    """Writes the model to a directory, unless it is there already, and returns the directory.

    Args:
        changes: keys of config.json that differ from LLAMA_3B, such as num_hidden_layers.
    """
    path, config = Path(path), LLAMA_3B | changes
    config_file = path / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) == config:
        return path
    path.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    write_shards(path, tensor_shapes(config), config["initializer_range"], seed)
    write_word_tokenizer(path, config["vocab_size"])
    config_file.write_text(json.dumps(config, indent=2) + "\n")  # last: it says that the model is whole
    return path


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, in the order of use; the output matrix is the embedding."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def prompt_ids(rows: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts, as token ids."""
    draw = random.Random(seed)
    return [[draw.randrange(1, vocab_size) for _ in range(length)] for _ in range(rows)]


def prompt_text(ids: list[int]) -> str:
    """The text that the model's tokenizer turns into these token ids."""
    return " ".join(f"w{i}" for i in ids)


def write_shards(path: Path, tensors: dict[str, tuple[int, ...]], std: float, seed: int) -> None:
    """Writes safetensors files of random bfloat16 weights to a directory, with their index.

    Args:
        tensors: shape of each tensor.
        std: standard deviation of the numbers of matrices; vectors are one.
    """
    shards = _shards(tensors)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(path / name, shard, std, seed)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(2 * math.prod(shape) for shard in shards for shape in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """The tensors, in files of about _SHARD_BYTES."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if shards[-1] and 2 * sum(map(math.prod, [*shards[-1].values(), shape])) > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    return shards


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], std: float, seed: int) -> None:
    """A safetensors file of random bfloat16 weights: matrices are drawn, norms are one."""
    import torch

    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            # Each tensor has its own stream, so that a model of fewer layers has the same first ones.
            draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            count = math.prod(shape)
            for first in range(0, count, _PIECE_NUMBERS):
                numbers = torch.empty(min(_PIECE_NUMBERS, count - first))
                numbers = numbers.fill_(1) if len(shape) == 1 else numbers.normal_(0, std, generator=draw)
                file.write(numbers.bfloat16().view(torch.int16).numpy())


def write_word_tokenizer(path: Path, vocab_size: int) -> None:
    """Writes the tokenizer whose token i is the word "wI"."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")
