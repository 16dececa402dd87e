"""A model of Llama-3.2-3B's shape with random weights, as a Hugging Face directory and as a GGUF of the same weights.

Both are written in pieces: neither needs memory for more than a few tens of megabytes of weights. Token i is the word
"wI", so a prompt is text and token ids at once, and what was generated can be read back from text.

    python benchmarks/random_model.py DIRECTORY --gguf FILE
    python benchmarks/random_model.py DIRECTORY --layers 2      # a small one
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_model(path: Path | str, *, seed: int = 0, **changes: Any) -> Path:
    """Writes the model to a directory, unless it is there already. changes: keys of config.json that differ from
    LLAMA_3B, such as num_hidden_layers. Returns the directory."""
    path, config = Path(path), LLAMA_3B | changes
    config_file = path / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) == config:
        return path
    path.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    shards = _shards(tensor_shapes(config))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(path / name, shard, config["initializer_range"], seed)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(2 * math.prod(shape) for shard in shards for shape in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    _write_tokenizer(path, config["vocab_size"])
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


def write_gguf(model: Path | str, path: Path | str) -> Path:
    """Writes the directory's weights as a GGUF in bfloat16 (norms in float32, as llama.cpp wants them), unless it is
    there already. It has no tokenizer: prompts are token ids. Returns the file."""
    import gguf

    model, path = Path(model), Path(path)
    if path.exists() and path.stat().st_mtime >= (model / "config.json").stat().st_mtime:
        return path
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads, head = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    bf16, f32 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32
    tensors = [(_gguf_name(name), name, values) for name, values in _read_tensors(model)]
    for gguf_name, _, values in tensors:
        number_bytes, kind = (4, f32) if values.ndim == 1 else (2, bf16)
        writer.add_tensor_info(gguf_name, values.shape, np.dtype(np.float16), values.size * number_bytes, kind)
    factors = _rope_factors(config)
    writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, name, values in tensors:
        if values.ndim == 1:
            values = (values.astype(np.uint32) << 16).view(np.float32)  # bfloat16 is the upper half of a float32
        elif "q_proj" in name or "k_proj" in name:
            values = _interleave_rotary(values, kv_heads if "k_proj" in name else heads)
        writer.write_tensor_data(values)
    writer.write_tensor_data(factors)
    writer.close()
    os.replace(partial, path)
    return path


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


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")


def _read_tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bfloat16 bits as uint16, mapped from the file) of every tensor."""
    weight_map = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in dict.fromkeys(weight_map.values()):
        with (model / shard).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__")
        for name, info in header.items():
            offset = 8 + size + info["data_offsets"][0]
            yield name, np.memmap(model / shard, np.uint16, "r", offset, tuple(info["shape"]))


def _gguf_name(name: str) -> str:
    if name in ("model.embed_tokens.weight", "model.norm.weight"):
        return {"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _interleave_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order: the two numbers that rotate together lie side by side,
    where Hugging Face has them half a head apart."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _rope_factors(config: dict[str, Any]) -> np.ndarray:
    """What each rotary frequency is divided by under llama3 scaling: `rope_freqs` of a GGUF."""
    from batchgen.models.hf.config import config_of_hf
    from batchgen.models.rope import RopeConfig

    rope, head = config_of_hf(config).rope, config["head_dim"]
    plain = np.array(RopeConfig(rope.theta).inv_freq(head))
    return (plain / np.array(rope.inv_freq(head))).astype(np.float32)  # [head_dim / 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, help="write this file too")
    parser.add_argument("--layers", type=int, default=LLAMA_3B["num_hidden_layers"])
    parser.add_argument("--vocab-size", type=int, default=LLAMA_3B["vocab_size"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_model(args.directory, seed=args.seed, num_hidden_layers=args.layers, vocab_size=args.vocab_size)
    if args.gguf:
        write_gguf(args.directory, args.gguf)


if __name__ == "__main__":
    main()
