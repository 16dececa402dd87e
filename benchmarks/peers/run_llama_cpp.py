"""The job by llama.cpp's batched decoding: next tokens of all sequences, then pieces of prompts up to the batch's size.

Where prompts begin alike, what they share is computed once, in a sequence of its own that the others copy, as its
example `parallel` does: without copying, as all sequences then have one cache. Settings: sequences, batch_tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import llama_cpp
from llama_cpp_sequences import Context, log_errors
from runner import Generate, Job, Row, main


@dataclass
class _Running:
    """A row in a sequence. fed: tokens whose KV is there, or will be after this pass."""

    row: int
    tokens: list[int]
    prompt_tokens: int
    count: int
    fed: int
    generated: list[int] = field(default_factory=list)


def load(job: Job) -> tuple[Generate, dict]:
    llama_cpp.llama_log_set(log_errors, None)
    sequences = min(job.settings["sequences"], len(job.rows))
    batch_tokens = max(job.settings["batch_tokens"], sequences)
    shared, shared_sequence = job.common_prefix, sequences
    context = Context(
        job.model, sequences + bool(shared), job.longest, batch_tokens, job.threads, kv_unified=bool(shared)
    )

    def generate(rows: list[Row]) -> list[list[int]]:
        prefix = shared if rows is job.rows else 0
        for first in range(0, prefix, batch_tokens):
            piece = range(first, min(first + batch_tokens, prefix))
            context.decode([(rows[0][0][i], i, shared_sequence, False) for i in piece])
        waiting, free = deque(range(len(rows))), deque(range(sequences))
        running: dict[int, _Running] = {}
        generated: list[list[int]] = [[] for _ in rows]
        while waiting or running:
            while waiting and free:
                row, sequence = waiting.popleft(), free.popleft()
                ids, count = rows[row]
                running[sequence] = _Running(row, list(ids), len(ids), count, prefix)
                if prefix:
                    context.copy(shared_sequence, sequence)
            batch: list[tuple[int, int, int, bool]] = []
            drawn: list[int] = []
            # Rows that need their next token come first, then prompts in the order of the input.
            for sequence, state in sorted(running.items(), key=lambda item: (not item[1].generated, item[1].row)):
                piece = range(state.fed, min(len(state.tokens), state.fed + batch_tokens - len(batch)))
                last = len(state.tokens) - 1
                batch += [(state.tokens[i], i, sequence, i == last) for i in piece]
                state.fed += len(piece)
                if piece and piece[-1] == last:
                    drawn.append(sequence)
            for sequence, token in zip(drawn, context.decode(batch), strict=True):
                state = running[sequence]
                state.tokens.append(token)
                state.generated.append(token)
                if len(state.generated) == state.count:
                    generated[state.row] = state.generated
                    context.forget(sequence)
                    del running[sequence]
                    free.append(sequence)
        return generated

    return generate, job.settings | {
        "sequences": sequences,
        "batch_tokens": batch_tokens,
        "kv_cache": "float16",
        "kv_unified": bool(shared),
        "flash_attention": True,
        "shared_prefix": shared,
        "system": llama_cpp.llama_print_system_info().decode(),
    }


if __name__ == "__main__":
    main(load, ["llama-cpp-python"])
