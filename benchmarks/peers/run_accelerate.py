"""The job by transformers' generate() with Accelerate's offloading: layers that do not fit in memory come from disk.

Settings: batch_size, memory_bytes (of the whole process), beside_bytes (of it, for all but the weights).
"""

from __future__ import annotations

import tempfile

import torch
from padded_generation import generate_padded
from runner import Generate, Job, Row, main
from transformers import AutoModelForCausalLM

_LEAST_BYTES = 32 << 20  # of weights in memory, for one layer at a time


def load(job: Job) -> tuple[Generate, dict]:
    torch.set_num_threads(job.threads)
    folder = tempfile.mkdtemp(prefix="offload-", dir=job.settings.get("folder"))
    weights_bytes = max(_LEAST_BYTES, job.settings["memory_bytes"] - job.settings["beside_bytes"])
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": weights_bytes}, offload_folder=folder
    ).eval()
    model.generation_config.eos_token_id = None  # no token ends a row

    def generate(rows: list[Row]) -> list[list[int]]:
        return generate_padded(model, rows, job.settings["batch_size"])

    on_disk = sum(place == "disk" for place in getattr(model, "hf_device_map", {}).values())
    settings = {name: value for name, value in job.settings.items() if name != "folder"}
    return generate, settings | {"dtype": "bfloat16", "modules_on_disk": on_disk}


if __name__ == "__main__":
    main(load, ["accelerate", "transformers", "torch"])
