"""An engine in this process that answers requests for HELM's own runner.

Each of the runner's threads asks for one request at a time. The engine runs the requests that wait at the same time
together.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.helm.rows import GENERATE, SCORE, Row
from batchgen.job.option_table import names_of

_engines: dict[str, LiveEngine] = {}
_making = Lock()


def live_engine(options: Mapping[str, Any]) -> LiveEngine:
    """The engine of this process with given options; HELM's threads may each make a client of one deployment."""
    key = json.dumps(options, sort_keys=True, default=str)
    with _making:
        if key not in _engines:
            _engines[key] = LiveEngine(options)
        return _engines[key]


class LiveEngine:
    """An engine that loads its model when the first rows come.

    Args:
        options: "model", "seed" and further options of `batchgen.Engine`.

    Raises:
        InputError: An option is for jobs only.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        known = {*names_of("engine"), "seed"}
        for name in options:
            if name not in known:
                raise InputError(
                    f"{name} is an option of jobs: leave it out of model_deployments.yaml, or run with"
                    " --runner-class-name batchgen.helm.runner.BatchgenRunner"
                )
        self._seed = options.get("seed", SamplingParams.seed)
        self._options = {name: value for name, value in options.items() if name != "seed"}
        self._engine: Any = None
        self._turn, self._lock = Lock(), Lock()
        self._waiting: list[tuple[Sequence[Row], Future]] = []

    def answer(self, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
        """The results of rows by row id, in the form of `results.Results`. Several threads may call this at once.

        Args:
            rows: Rows to generate or score.

        Raises:
            BatchgenError: The model cannot be loaded or run.
        """
        future: Future = Future()
        with self._lock:
            self._waiting.append((rows, future))
        with self._turn:  # the first thread runs all waiting rows; the others find theirs done
            with self._lock:
                waiting, self._waiting = self._waiting, []
            if waiting:
                self._run(waiting)
        return future.result()

    def _run(self, waiting: list[tuple[Sequence[Row], Future]]) -> None:
        try:
            unique = {row.id: row for rows, _ in waiting for row in rows}
            results = self._results(unique.values())
            for _, future in waiting:
                future.set_result(results)
        except BaseException as error:
            for _, future in waiting:
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _results(self, rows) -> dict[str, dict[str, Any]]:
        from batchgen.core.request import Request, ScoreRequest
        from batchgen.engine.engine import Engine

        if self._engine is None:
            self._engine = Engine(**self._options)
            weakref.finalize(self, self._engine.close)
        results = {}
        to_generate = [
            Request(
                row.prompt, SamplingParams(**row.sampling, logprobs=0, seed=self._seed), row.id, reasoning_apart=False
            )
            for row in rows
            if row.kind == GENERATE
        ]
        for completion in self._engine.generate(to_generate):
            results[completion.id] = {"error": completion.error}
            for sample in completion.samples:
                reported = {"text": sample.text, "finish_reason": sample.finish_reason}
                results[completion.id] |= {**reported, "logprobs": _positions(sample.logprobs)}
        to_score = [ScoreRequest(row.prompt[:1], (row.prompt[1:],), row.id) for row in rows if row.kind == SCORE]
        for scored in self._engine.score(to_score):
            results[scored.id] = {"error": scored.error}
            for score in scored.scores:
                results[scored.id] |= {"logprobs": _positions(score.tokens)}
        return results


def _positions(tokens) -> list[dict[str, Any]]:
    return [{"token": token.chosen.token, "logprob": token.chosen.logprob} for token in tokens]
