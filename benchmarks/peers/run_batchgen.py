"""The job by batchgen's Engine, with everything in memory. Settings: those of Engine."""

from __future__ import annotations

import atexit

from runner import Generate, Job, Row, main

import batchgen


def load(job: Job) -> tuple[Generate, dict]:
    engine = batchgen.Engine(job.model, dtype="bfloat16", share_prefixes=job.share_prefixes, **job.settings)
    atexit.register(engine.close)

    def generate(rows: list[Row]) -> list[list[int]]:
        requests = [
            batchgen.Request(ids, batchgen.SamplingParams(max_tokens=count, ignore_eos=True)) for ids, count in rows
        ]
        generated: list[list[int]] = [[] for _ in rows]
        for completion in engine.generate(requests):
            if completion.error:
                raise SystemExit(f"row {completion.index}: {completion.error}")
            generated[completion.index] = list(completion.samples[0].token_ids)
        return generated

    policy = engine.policy
    return generate, {
        "dtype": policy.weight_format,
        "kv_format": policy.kv_format,
        "max_num_seqs": policy.max_num_seqs,
        "max_num_batched_tokens": policy.max_num_batched_tokens,
        "share_prefixes": policy.share_prefixes,
    }


if __name__ == "__main__":
    main(load, ["batchgen", "torch"])
