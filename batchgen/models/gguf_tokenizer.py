"""What transformers needs to make a tokenizer of a GGUF's key-value pairs, and what it leaves out of them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# Of gpt-oss transformers 5 cannot read these with numpy 2, and a tokenizer does not need them.
_LEFT_OUT = ".rope.scaling."


# Byte-level vocabularies as Llama 3's: a word that is a token needs no merges, and a text begins with BOS unless the file says no.
_LIKE_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3")


def mend(hf: PreTrainedTokenizerFast, metadata: dict) -> None:
    """Have transformers' tokenizer heed what it leaves out of a GGUF. metadata: of `headers.GgufHeader`."""
    kind, stated = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind == "llama" and metadata.get("tokenizer.ggml.add_space_prefix") is False:
        _leave_out_space_prefix(hf.backend_tokenizer)
    if kind == "gpt2" and stated in _LIKE_LLAMA_3:
        hf.backend_tokenizer.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in metadata and hf.bos_token_id is not None:
            _begin_with_bos(hf)


def _begin_with_bos(hf: PreTrainedTokenizerFast) -> None:
    from tokenizers import processors

    hf.add_bos_token = True  # is saved with it
    bos = hf.bos_token
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, hf.bos_token_id)]
    )


def _leave_out_space_prefix(tokenizer: Tokenizer) -> None:
    """Of a SentencePiece tokenizer, which takes texts as they are then."""
    from tokenizers import decoders, normalizers

    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def needs_pairs(metadata: dict) -> bool:
    """Whether transformers cannot read the file itself. metadata: of `headers.GgufHeader`."""
    return any(key.startswith("gpt-oss.rope.scaling.") for key in metadata)


def write_pairs(source: Path, target: Path) -> None:
    """Write a GGUF with the pairs of another one, but for scaling of rotary positions, and without tensors. Raises OSError."""
    from gguf import GGUFReader

    fields = GGUFReader(source).fields
    kept = [field for key, field in fields.items() if not key.startswith("GGUF.") and _LEFT_OUT not in key]
    with target.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(kept)))
        for field in kept:
            for part in field.parts:
                out.write(part.tobytes())
