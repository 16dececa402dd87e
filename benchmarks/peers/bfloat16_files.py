"""A quantised GGUF's weights rounded to bfloat16, in the files that the peers read: all engines compute the same. And the same
weights in 8 bits (Q8_0), for engines that multiply those."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_gguf(source: Path, path: Path, kind: str = "BF16") -> Path:
    """Writes the GGUF `source` with its matrices in bfloat16, unless it is there already. kind: "F16" for the same numbers where a
    reader knows no bfloat16, "Q8_0" for the same in 8 bits. Returns the file."""
    import gguf
    import numpy as np

    if path.exists():
        return path
    bf16, as_kind = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(source)
    architecture, file_type = "general.architecture", "general.file_type"
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, reader.fields[architecture].contents())
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in (architecture, file_type):
            item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item_type)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)
    return path


def write_directory(source: Path, path: Path, dtype: str = "bfloat16") -> Path:
    """Writes the GGUF `source` as a Hugging Face directory in that dtype, unless it is there already. Returns it."""
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
