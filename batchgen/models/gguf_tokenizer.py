"""A GGUF's key-value pairs in a small file of their own, for transformers to make a tokenizer of."""

from __future__ import annotations

import struct
from pathlib import Path

# Of gpt-oss transformers 5 cannot read these with numpy 2, and a tokenizer does not need them.
_LEFT_OUT = ".rope.scaling."


def is_needed(metadata: dict) -> bool:
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
