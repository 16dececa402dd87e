"""What transformers needs to make a tokenizer of a GGUF's key-value pairs, and what it leaves out of them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Of gpt-oss transformers 5 cannot read these with numpy 2, and a tokenizer does not need them.
_LEFT_OUT = ".rope.scaling."


def has_no_space_prefix(metadata: dict) -> bool:
    """Whether no space is put before a text's first word, by a SentencePiece vocabulary. metadata: of `headers.GgufHeader`."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return sentencepiece and metadata.get("tokenizer.ggml.add_space_prefix") is False


def leave_out_space_prefix(tokenizer: Tokenizer) -> None:
    """Have a SentencePiece tokenizer take texts as they are; transformers heeds `add_space_prefix` for no family but Gemma."""
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
