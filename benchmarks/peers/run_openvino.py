"""The job by OpenVINO GenAI's continuous batching.

Weights are in 16 bits, computing and KV in bfloat16. With `bits` of 8 it is as OpenVINO does by itself: weights and KV
in 8 bits, tokens quantized as they are multiplied.

It looks for a prompt's beginning among what is cached when the prompt comes: where prompts begin alike, one goes ahead
of the others. Settings: max_num_seqs, max_num_batched_tokens, cache_gb, bits.
"""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from runner import Generate, Job, Row, main


def load(job: Job) -> tuple[Generate, dict]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = job.settings["max_num_seqs"]
    scheduler.max_num_batched_tokens = job.settings["max_num_batched_tokens"]
    scheduler.cache_size = job.settings["cache_gb"]
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = job.share_prefixes
    in_bf16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    properties = {
        **(in_bf16 if job.settings["bits"] == 16 else {}),
        "PERFORMANCE_HINT": "LATENCY",  # one stream with all threads: requests are batched before they come to it
        "INFERENCE_NUM_THREADS": job.threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)

    def generate(rows: list[Row]) -> list[list[int]]:
        ids = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in rows]
        wanted = [openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True) for _, count in rows]
        ahead = 1 if job.share_prefixes else 0
        parts = [part for part in (slice(ahead), slice(ahead, None)) if ids[part]]
        results = [result for part in parts for result in pipeline.generate(ids[part], wanted[part])]
        return [result.m_generation_ids[0] for result in results]

    form = "GGUF" if job.model.endswith(".gguf") else "OpenVINO"
    weights = {16: f"float16 {form}", 8: f"Q8_0 {form}"}[job.settings["bits"]]
    return generate, job.settings | properties | {"prefix_caching": job.share_prefixes, "weights": weights}


if __name__ == "__main__":
    main(load, ["openvino-genai", "openvino"])
