"""Writes a GGUF as OpenVINO's own files, beside it, as OpenVINO GenAI converts it.

    python write_openvino.py FILE.gguf

The conversion of a small model takes half a minute, at every start if it is not kept.
"""

from __future__ import annotations

import sys

import openvino_genai

if __name__ == "__main__":
    openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
