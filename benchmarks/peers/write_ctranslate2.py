"""Writes a Hugging Face directory as CTranslate2's own files, with weights in bfloat16.

python write_ctranslate2.py DIRECTORY OUTPUT
"""

from __future__ import annotations

import sys

from ctranslate2.converters import TransformersConverter

if __name__ == "__main__":
    TransformersConverter(sys.argv[1], low_cpu_mem_usage=True).convert(sys.argv[2], quantization="bfloat16")
