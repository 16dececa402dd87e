"""The job by AirLLM: transformers' generate(), each layer read from the disk in each sweep.

Its layers are in files of their own, which `write_airllm.py` has written. Settings: batch_size.
"""

from __future__ import annotations

import torch
from airllm import AutoModel
from padded_generation import generate_padded
from runner import Generate, Job, Row, main


def load(job: Job) -> tuple[Generate, dict]:
    torch.set_num_threads(job.threads)
    model = AutoModel.from_pretrained(job.model, device="cpu", dtype=torch.bfloat16, max_seq_len=job.longest)
    model.generation_config.eos_token_id = None  # no token ends a row

    def generate(rows: list[Row]) -> list[list[int]]:
        return generate_padded(model, rows, job.settings["batch_size"])

    return generate, job.settings | {"dtype": "bfloat16"}


if __name__ == "__main__":
    main(load, ["airllm", "transformers", "torch"])
