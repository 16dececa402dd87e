"""The client of a HELM deployment that batchgen answers, for `model_deployments.yaml` and any HELM runner."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from helm.clients.client import CachingClient
from helm.common.cache import CacheConfig
from helm.common.request import ErrorFlags, GeneratedOutput, Request, RequestResult, Token, wrap_request_time
from helm.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from helm.tokenizers.tokenizer import Tokenizer

from batchgen.core.digest import json_sha256
from batchgen.core.errors import InputError, RowError
from batchgen.helm.jobs import IN_PROCESS, Jobs
from batchgen.helm.live import LiveEngine, live_engine
from batchgen.helm.rows import Answer, Wanted, answers, wanted
from batchgen.helm.tokenizer import PromptTokens
from batchgen.job.option_table import options_of

ENGINE_VARIABLE = "BATCHGEN_HELM_ENGINE"


class BatchgenClient(CachingClient):
    """The client of a HELM deployment whose requests batchgen answers.

    With `BatchgenRunner`, jobs answer all requests beforehand, and the client looks the answers up. With any other
    runner, an engine in this process answers the requests of all of HELM's threads (helm-run -n) together.

    Args:
        cache_config: HELM's cache.
        tokenizer: HELM's tokenizer of the deployment.
        model: The model, as `batchgen run --model` takes it.
        apply_chat_template: Whether prompts go through the model's chat template; None: if it has one, as HELM's
            Hugging Face client decides.
        engine: "in-process"; the path of the batchgen program of another environment; or "files", with which job files
            are only written, for runs elsewhere. None: $BATCHGEN_HELM_ENGINE, else "in-process".
        **options: Options of `batchgen run`, with underscores (dtype, cpu_memory, max_time, ...).

    Raises:
        InputError: The tokenizer is of an unknown kind.
    """

    def __init__(
        self,
        cache_config: CacheConfig,
        tokenizer: Tokenizer,
        model: str,
        apply_chat_template: bool | None = None,
        engine: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cache_config)
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise InputError(
                f"the tokenizer of model {model} must be batchgen.helm.tokenizer.BatchgenTokenizer or HELM's"
                f" HuggingFaceTokenizer, not {type(tokenizer).__name__}: see tokenizer_configs.yaml"
            )
        self._tokens = PromptTokens(tokenizer)
        self._chat = self._tokens.has_chat_template if apply_chat_template is None else apply_chat_template
        self._engine = engine or os.environ.get(ENGINE_VARIABLE) or IN_PROCESS
        self._options = {"model": model, **options}
        self._jobs: Jobs | None = None
        self._live: LiveEngine | None = None

    def prefetch(self, requests: Iterable[Request], folder: Path) -> None:
        """Run jobs that answer all given requests without an answer.

        Args:
            requests: All requests of the deployment. Requests that cannot be run are skipped; `make_request` reports
                why.
            folder: Directory of the jobs.

        Raises:
            JobStopped: A job is not complete.
            BatchgenError: A job failed.
        """
        if self._jobs is None:
            self._jobs = Jobs(folder / self._identity(), self._options, self._engine)
        self._jobs.answer(row for want in map(self._wanted_or_none, requests) if want for row in want.rows)

    def make_request(self, request: Request) -> RequestResult:
        try:
            want = wanted(request, self._tokens, self._chat)
            return self._look_up(want) if self._jobs else self._ask(want)
        except RowError as error:
            return RequestResult(
                success=False,
                cached=False,
                error=f"batchgen: {error}",
                error_flags=ErrorFlags(is_retriable=False, is_fatal=True),  # else HELM scores an empty answer
                completions=[],
                embedding=[],
            )

    def _wanted_or_none(self, request: Request) -> Wanted | None:
        try:
            return wanted(request, self._tokens, self._chat)
        except RowError:
            return None

    def _look_up(self, want: Wanted) -> RequestResult:
        assert self._jobs is not None
        answered_before, results = self._jobs.found, self._jobs.results
        timings = [timing for row in want.rows if (timing := results.timing(row.id))]
        timing = max(timings, key=lambda t: t.wall_s, default=None)
        return RequestResult(
            success=True,
            cached=all(row.id in answered_before for row in want.rows),
            completions=_completions(answers(want, results)),
            embedding=[],
            request_time=timing and timing.wall_s / timing.rows,
            batch_size=timing and timing.rows,
            batch_request_time=timing and timing.wall_s,
        )

    def _ask(self, want: Wanted) -> RequestResult:
        """The result of a request, from HELM's cache or else from batchgen; HELM's cache keeps it for the next run."""
        if self._live is None:
            if self._engine != IN_PROCESS:
                raise InputError(
                    f"the engine is {self._engine}: only BatchgenRunner runs jobs there (helm-run --runner-class-name"
                    " batchgen.helm.runner.BatchgenRunner)"
                )
            self._live = live_engine(self._options)

        live = self._live

        def compute() -> dict[str, Any]:
            return {"answers": [asdict(answer) for answer in answers(want, live.answer(want.rows))]}

        rows = [row.id for row in want.generated]
        key = {**self._options, "rows": rows, "echo": want.prompt_ids, "n": want.num_completions}
        response, cached = self.cache.get(key, wrap_request_time(compute))
        return RequestResult(
            success=True,
            cached=cached,
            completions=_completions([Answer(**answer) for answer in response["answers"]]),
            embedding=[],
            request_time=response["request_time"],
            request_datetime=response["request_datetime"],
        )

    def _identity(self) -> str:
        """Name of the folder for jobs with these options: a hash of the options that decide results."""
        deciding = [option.name for option in options_of("helm") if option.decides_results]
        identity = {name: self._options.get(name) for name in deciding}
        return json_sha256(identity)[:16]


def _completions(found: list[Answer]) -> list[GeneratedOutput]:
    return [
        GeneratedOutput(
            text=answer.text,
            logprob=sum(logprob for _, logprob in answer.tokens),
            tokens=[Token(text=text, logprob=logprob) for text, logprob in answer.tokens],
            finish_reason={"reason": answer.finish_reason},
        )
        for answer in found
    ]
