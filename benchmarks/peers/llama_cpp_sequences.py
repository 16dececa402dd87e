"""Greedy decoding of many rows by llama.cpp, as many sequences in parallel as asked for; the weights are mapped from a
GGUF. Runs in an environment that has llama-cpp-python; nothing of batchgen is needed.

A row that ends makes way for the next one, whose prompt joins the others' next tokens. Writes JSON, see `main`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections import deque
from pathlib import Path

import llama_cpp
import numpy as np

_LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_LEAST_DECODES = 2
_REPACKED_FRAC = 0.8


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """For llama_log_set: errors only."""
    if level == _LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def memory_bytes() -> int:
    """What this process may use: of its control group, or of the machine."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    of_group = [
        line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line
    ]
    limits = [Path(f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes") for group in of_group]
    return min([total, *(int(limit.read_text()) for limit in limits if limit.exists())])


class Context:
    """A model and its KV cache for `sequences` rows of `row_tokens` tokens each.

    kv_unified: one cache for all sequences. A cache of its own for each is rounded up to 256 tokens, which may be
    several times what rows need, but attention then looks at no others.
    """

    def __init__(
        self, path: str, sequences: int, row_tokens: int, batch_tokens: int, threads: int, kv_unified: bool = True
    ) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        model_params.n_gpu_layers = 0
        # Weights that its kernels prefer in another order would be a second time in memory, which no kernel gives back.
        model_params.use_extra_bufts = Path(path).stat().st_size < _REPACKED_FRAC * memory_bytes()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * row_tokens
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_outputs_max = sequences  # capacity for logits of one token a sequence
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = kv_unified
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp cannot make a context of this size")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(batch_tokens, 0, 1)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """One pass over (token, position, sequence, whether its logits are wanted); returns the argmax, the next token,
        of those whose logits are."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode failed with {code}")
        wanted = [i for i, token in enumerate(tokens) if token[3]]
        return [int(self._logits(i).argmax()) for i in wanted]

    def copy(self, source: int, sequence: int) -> None:
        """Lets a sequence go on from where another one is."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, sequence, -1, -1)

    def forget(self, sequence: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _logits(self, i: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self._context, i)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))


def run(
    context: Context, prompts: list[list[int]], max_new_tokens: int, sequences: int, batch_tokens: int, until: float
) -> tuple[list[list[int]], list[dict]]:
    """(generated ids per row, [{"prompt_tokens", "generated_tokens", "seconds"} per pass]), stopping when all is done,
    or at time `until` if there were some passes without prompts by then, or else after those."""
    waiting, free = deque(range(len(prompts))), deque(range(sequences))
    running: dict[int, int] = {}  # sequence -> row
    generated: list[list[int]] = [[] for _ in prompts]
    passes: list[dict] = []
    while waiting or running:
        decodes = sum(not p["prompt_tokens"] for p in passes)
        if time.perf_counter() >= until and decodes >= _LEAST_DECODES:
            break
        tokens, rows, prompt_tokens = [], [], 0
        for sequence, row in running.items():
            position = len(prompts[row]) + len(generated[row]) - 1
            tokens.append((generated[row][-1], position, sequence, True))
            rows.append((sequence, row))
        while waiting and free and len(tokens) + len(prompts[waiting[0]]) <= batch_tokens:
            row, sequence = waiting.popleft(), free.popleft()
            last = len(prompts[row]) - 1
            tokens += [(token, i, sequence, i == last) for i, token in enumerate(prompts[row])]
            prompt_tokens += len(prompts[row])
            running[sequence] = row
            rows.append((sequence, row))
        started = time.perf_counter()
        ids = context.decode(tokens)
        passes.append(
            {"prompt_tokens": prompt_tokens, "generated_tokens": len(ids), "seconds": time.perf_counter() - started}
        )
        for (sequence, row), token in zip(rows, ids, strict=True):
            generated[row].append(token)
            if len(generated[row]) == max_new_tokens:
                context.forget(sequence)
                del running[sequence]
                free.append(sequence)
    return generated, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF")
    parser.add_argument("--prompts", required=True, help="JSON: a list of lists of token ids")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--batch-tokens", type=int, default=512, help="most tokens in one pass")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-s", type=float, required=True, help="stop after this time, loading not counted")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    with open(args.prompts) as file:
        prompts = json.load(file)
    llama_cpp.llama_log_set(log_errors, None)
    started = time.perf_counter()
    row_tokens = max(map(len, prompts)) + args.max_new_tokens
    batch_tokens = max(args.batch_tokens, args.sequences)
    context = Context(args.model, args.sequences, row_tokens, batch_tokens, args.threads)
    ready = time.perf_counter()
    generated, passes = run(context, prompts, args.max_new_tokens, args.sequences, batch_tokens, ready + args.limit_s)
    with open(args.output, "w") as file:
        json.dump(
            {
                "load_s": ready - started,
                "generation_s": time.perf_counter() - ready,
                "complete": all(len(ids) == args.max_new_tokens for ids in generated),
                "passes": passes,
                "generated": generated,
                "versions": {"llama-cpp-python": llama_cpp.__version__},
                "system": llama_cpp.llama_print_system_info().decode(),
            },
            file,
        )


if __name__ == "__main__":
    main()
