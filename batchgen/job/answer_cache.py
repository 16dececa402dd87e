"""`--cache`: answers of earlier jobs, by the model, the tokens of a prompt and all that decides what follows them.

Identical rows within a job are another matter (`deduplication.py`): these wait for a result that is not there yet, need
no tokens and no disk, and are found without the option.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchgen._version import __version__
from batchgen.core.request import Answer, Completion, Request
from batchgen.core.typed_json import parse_json, read_typed
from batchgen.core.units import size_bytes
from batchgen.engine.preparation import Preparation
from batchgen.job.job import Job
from batchgen.job.source import RequestSource
from batchgen.models.tokenizers.tokenizer import Tokenizer
from batchgen.ops.instruction_set import instruction_set
from batchgen.output.answer_store import AnswerStore
from batchgen.output.run_directory import Run

logger = logging.getLogger(__name__)

# What of a job's fingerprint decides an answer beside the request's own tokens and sampling parameters.
_OF_MODEL = ("model", "tokenizer", "dtype", "formats", "reasoning")
_MOST_WAITING = 256  # computed answers, which are written together
_LONGEST_WAIT_S = 5.0


class AnswerCache:
    """The answers that jobs of the same model share.

    Attributes:
        rows: Rows of this job whose answers were known.
    """

    def __init__(self, store: AnswerStore, fingerprint: dict[str, Any]) -> None:
        """Look up and keep answers of a model.

        Args:
            store: The store of answers, of any models.
            fingerprint: Fingerprint of the job.
        """
        identity = {name: fingerprint.get(name) for name in _OF_MODEL}
        identity |= {"version": __version__, "instruction_set": instruction_set()}
        self._model = json.dumps(identity, sort_keys=True).encode()
        self._store = store
        self._waiting: dict[bytes, bytes] = {}
        self._written_s = time.monotonic()
        self.rows = 0

    @classmethod
    def of(cls, job: Job, fingerprint: dict[str, Any]) -> AnswerCache | None:
        """The cache that a job's options name; None: they name none. Raises InputError."""
        if job.options.cache is None:
            return None
        return cls(AnswerStore(Path(job.options.cache), size_bytes(job.options.cache_size)), fingerprint)

    def known(self, digests: list[bytes]) -> dict[bytes, Answer]:
        """Look up answers by the digests of requests."""
        keys = {self._key(digest): digest for digest in digests}
        answers: dict[bytes, Answer] = {}
        for key, content in self._store.get(keys).items():
            try:
                answers[keys[key]] = read_typed(Answer, parse_json(content))
            except ValueError:  # a number that JSON has not
                continue
        return answers

    def add(self, completion: Completion) -> None:
        """Count a completion whose answer was known, and keep the answer of one that was computed."""
        if completion.error is not None:
            return
        if not completion.digest:
            self.rows += bool(completion.prompts)  # the result of a filter has none
        elif self._key(completion.digest) not in self._waiting:
            answer = json.dumps(asdict(completion.answer), ensure_ascii=False, separators=(",", ":"))
            self._waiting[self._key(completion.digest)] = answer.encode(errors="replace")
        now_s = time.monotonic()
        if len(self._waiting) >= _MOST_WAITING or now_s - self._written_s > _LONGEST_WAIT_S:
            self._flush()
            self._written_s = now_s

    def close(self) -> None:
        """Write all answers, and close the store."""
        self._flush()
        self._store.close()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._store.put(waiting)

    def _key(self, digest: bytes) -> bytes:
        return blake2b(self._model + digest, digest_size=16).digest()


def answered(
    cache: AnswerCache, job: Job, source: RequestSource, tokenizer: Tokenizer, state: Run
) -> Iterator[Completion | None]:
    """Look up the rows of a job that are left, before its model is loaded.

    Args:
        cache: The answers of earlier jobs.
        job: The job.
        source: The job's input.
        tokenizer: The model's tokenizer.
        state: The job's run directory.

    Yields:
        For each row its Completion; None: it has to be computed.
    """
    preparation = Preparation(
        tokenizer,
        job.config.vocab_size,
        job.context,
        job.options.sampling,
        job.options.on_overlong,
        known=cache.known,
    )
    requests = (request for request in source.requests(state.done_rows) if isinstance(request, Request))
    for prepared in preparation.prepare(requests):
        yield None if prepared.error is not None else prepared.completion()
