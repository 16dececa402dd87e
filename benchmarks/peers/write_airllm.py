"""Writes a Hugging Face directory with a file of each layer, as AirLLM reads it.

python write_airllm.py DIRECTORY OUTPUT
"""

from __future__ import annotations

import shutil
import sys

from airllm import AutoModel

if __name__ == "__main__":
    shutil.copytree(sys.argv[1], sys.argv[2])
    AutoModel.from_pretrained(sys.argv[2], device="cpu")
