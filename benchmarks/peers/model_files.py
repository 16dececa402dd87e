"""The demo model in other files: GGUFs of other formats, and a Hugging Face directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np

_ARCHITECTURE = "general.architecture"


@contextmanager
def gguf_like(source: gguf.GGUFReader, path: Path, changed: Iterable[str] = ()) -> Iterator[gguf.GGUFWriter]:
    """A writer of a GGUF with the fields of another one, without those that are changed; it is whole or not there."""
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, source.fields[_ARCHITECTURE].contents())
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name not in (_ARCHITECTURE, *changed):
            item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item_type)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)


def write_bfloat16_gguf(source: Path, path: Path, kind: str = "BF16") -> Path:
    """Writes a GGUF with its matrices rounded to bfloat16, unless it is there already, and returns the file.

    Args:
        kind: the format of the rounded numbers: "F16" where a reader knows no bfloat16, "Q8_0" for 8 bits.
    """
    if path.exists():
        return path
    bf16, as_kind = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(source)
    with gguf_like(reader, path, ["general.file_type"]) as writer:
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if values.ndim == 1:  # norms stay in float32, as llama.cpp wants them
                writer.add_tensor(tensor.name, values)
                continue
            values = gguf.quants.dequantize(gguf.quants.quantize(values, bf16), bf16)
            if kind == "F16":
                writer.add_tensor(tensor.name, values.astype(np.float16))
            else:
                writer.add_tensor(tensor.name, gguf.quants.quantize(values, as_kind), raw_dtype=as_kind)
    return path


def write_requantized_gguf(source: Path, path: Path, kind: str) -> Path:
    """Writes a GGUF with its layers' matrices in another format, unless it is there already, and returns the file."""
    if path.exists():
        return path
    reader, as_kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    with gguf_like(reader, path) as writer:
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
                numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, as_kind), raw_dtype=as_kind)
            else:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return path


def write_shaped_gguf(
    source: Path, path: Path, shape: dict[str, int], layers: int, blocks: Callable[[str, int, int], tuple]
) -> Path:
    """Writes a GGUF of another shape with the tokenizer of `source`, unless it is there already, and returns the file.

    Its table of embeddings is the output matrix.

    Args:
        shape: fields of the architecture, such as "embedding_length".
        blocks: (tensor's name, rows, columns) -> (blocks of the matrix, their type).
    """
    if path.exists():
        return path
    reader = gguf.GGUFReader(source)
    arch = reader.fields[_ARCHITECTURE].contents()
    changed = {f"{arch}.{key}": value for key, value in shape.items()} | {f"{arch}.block_count": layers}
    width, inner, head = shape["embedding_length"], shape["feed_forward_length"], shape["attention.key_length"]
    queries, keys = shape["attention.head_count"] * head, shape["attention.head_count_kv"] * head
    vocab = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    layer = {
        "attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, queries),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    matrices = {"token_embd": (vocab, width)}
    matrices |= {f"blk.{i}.{name}": size for i in range(layers) for name, size in layer.items()}
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(layers) for name in ("attn_norm", "ffn_norm"))]
    with gguf_like(reader, path, changed) as writer:
        for key, value in changed.items():
            writer.add_uint32(key, value)
        for name in norms:
            writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        for name, (rows, columns) in matrices.items():
            data, kind = blocks(name, rows, columns)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    return path


def write_directory(source: Path, path: Path, dtype: str = "bfloat16") -> Path:
    """Writes a GGUF as a Hugging Face directory in that dtype, unless it is there, and returns the directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if path.exists():
        return path
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    # What came out of a GGUF refuses to be saved: its weights go into a model that did not.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where), dtype=getattr(torch, dtype))
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(**where, dtype=model.dtype).state_dict())
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    partial.rename(path)
    return path
