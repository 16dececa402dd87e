"""The job by CTranslate2's generator: batches of rows of about the same length.

On x86 CPUs CTranslate2 4.8 computes in float32, or with weights and tokens in 8 bits, which it makes as it loads. No
token ends a row: one that would is left out of the choice. Settings: batch_size, compute_type.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import ctranslate2
from runner import Generate, Job, Row, main


def load(job: Job) -> tuple[Generate, dict]:
    generator = ctranslate2.Generator(
        job.model,
        device="cpu",
        compute_type=job.settings["compute_type"],
        inter_threads=1,
        intra_threads=job.threads,
    )
    tokens = json.loads((Path(job.model) / "vocabulary.json").read_text())
    number_of = {token: number for number, token in enumerate(tokens)}

    def generate(rows: list[Row]) -> list[list[int]]:
        generated: list[list[int]] = [[] for _ in rows]
        order = sorted(range(len(rows)), key=lambda i: (rows[i][1], len(rows[i][0])))
        for count, numbers in groupby(order, key=lambda i: rows[i][1]):
            several = list(numbers)
            results = generator.generate_batch(
                [[tokens[token] for token in rows[i][0]] for i in several],
                max_batch_size=job.settings["batch_size"],
                min_length=count,
                max_length=count,
                sampling_topk=1,
                include_prompt_in_result=False,
            )
            for i, result in zip(several, results, strict=True):
                generated[i] = [number_of[token] for token in result.sequences[0]]
        return generated

    return generate, job.settings


if __name__ == "__main__":
    main(load, ["ctranslate2"])
