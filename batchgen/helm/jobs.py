"""Jobs that answer the rows of a HELM deployment.

A job runs in this process, by a program of another environment, or elsewhere from its files. A job that was interrupted
goes on from its finished rows. A row that any job has answered is not run again (`results` describes the files).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.atomic_file import written_atomically
from batchgen.core.errors import BatchgenError, InputError, JobStopped
from batchgen.core.screen import say
from batchgen.core.text import repair_surrogates
from batchgen.helm.results import ID_COLUMN, METADATA_KEY, OPTIONS, REPORT, REQUESTS, RESULTS, Results, read_requests
from batchgen.helm.rows import GENERATE, SCORE, Row
from batchgen.job.options import JobOptions

IN_PROCESS, FILES = "in-process", "files"  # where the engine is, if it is not the path of a batchgen program

_TOKENS = pa.list_(pa.int32())
_SCHEMAS = {
    GENERATE: pa.schema([(ID_COLUMN[GENERATE], pa.string()), ("prompt", pa.string()), ("sampling", pa.string())]),
    SCORE: pa.schema(
        [(ID_COLUMN[SCORE], pa.list_(pa.string())), ("context", _TOKENS), ("continuations", pa.list_(_TOKENS))]
    ),
}
_MOST_TOGETHER = 32  # prompts scored in one row


class Jobs:
    """The jobs of one HELM deployment, and their results.

    Args:
        folder: Directory of the jobs.
        options: Options of the jobs by name, "model" among them.
        engine: IN_PROCESS; the path of the batchgen program of another environment; or FILES, with which job files are
            only written, for runs elsewhere.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], engine: str = IN_PROCESS) -> None:
        self._folder = folder
        self._options = dict(options)
        self._engine = engine
        self.results = Results()
        self._unfinished: list[Path] = []
        for requests in sorted(folder.glob(f"*/{REQUESTS}")):
            if (requests.parent / RESULTS).exists():
                self.results.add(requests.parent)
            else:
                self._unfinished.append(requests.parent)
        self.found = frozenset(self.results)  # answered before this process began

    def answer(self, rows: Iterable[Row]) -> None:
        """Run all given rows that have no result yet.

        Unfinished jobs go on first, if all of their rows are among the given ones. Then a new job of each kind runs the
        other rows.

        Args:
            rows: Rows whose results are needed.

        Raises:
            JobStopped: Jobs must be run elsewhere, or a time limit has ended a job.
            BatchgenError: A job failed.
        """
        missing = {row.id: row for row in rows if row.id not in self.results}
        todo = []
        for job in self._unfinished:
            begun = {row_id for ids in read_requests(job)[1] for row_id in ids}
            if missing.keys() >= begun:
                todo.append(job)
                missing = {row_id: row for row_id, row in missing.items() if row_id not in begun}
        for kind in (GENERATE, SCORE):
            of_kind = [row for row in missing.values() if row.kind == kind]
            if of_kind:
                todo.append(self._write(kind, of_kind))
        for job in todo:
            (job / OPTIONS).write_text(_toml(self._options_of(job)))
        if todo and self._engine == FILES:
            raise JobStopped(_instructions(todo))
        for job in todo:
            say(f"batchgen: {len(read_requests(job)[1]):,} rows in {job}")
            self._run(job)
            self.results.add(job)
            self._unfinished = [other for other in self._unfinished if other != job]

    def _write(self, kind: str, rows: list[Row]) -> Path:
        """Write the request file of a new job atomically; returns the job's folder.

        Args:
            kind: GENERATE or SCORE.
            rows: The job's rows, all of this kind.
        """
        # Prompts with a common beginning stand together.
        rows = sorted(rows, key=lambda row: (json.dumps(row.prompt) if kind == GENERATE else row.prompt, row.id))
        digest = hashlib.sha256("".join(row.id for row in rows).encode()).hexdigest()[:16]
        job = self._folder / f"{kind}-{digest}"
        job.mkdir(parents=True, exist_ok=True)
        schema = _SCHEMAS[kind].with_metadata({METADATA_KEY: json.dumps(_own_options(kind, rows)).encode()})
        table = _to_score(rows) if kind == SCORE else [_to_generate(row) for row in rows]
        with written_atomically(job / REQUESTS) as file:
            pq.write_table(pa.Table.from_pylist(list(table), schema=schema), file)
        self._unfinished.append(job)
        return job

    def _options_of(self, job: Path) -> dict[str, Any]:
        model = self._options["model"]
        if Path(model).expanduser().exists():
            model = str(Path(model).expanduser().absolute())  # the job runs in its own folder
        files = {"input": REQUESTS, "output": RESULTS, "report": REPORT}
        # Each failed request is reported to HELM, which reads thoughts in the text.
        return {
            **self._options,
            "model": model,
            "max_failed": "100%",
            "reasoning_column": False,
            **files,
            **read_requests(job)[0],
        }

    def _run(self, job: Path) -> None:
        if self._engine == IN_PROCESS:
            import batchgen

            # Progress is shown, unlike that of other jobs from Python.
            options = {"progress": JobOptions.progress, **self._options_of(job)}
            options |= {name: str(job / options[name]) for name in ("input", "output", "report")}
            stopped = batchgen.run(**options)["state"] == "stopped"
        else:
            try:
                code = subprocess.run([self._engine, "run", "--config", OPTIONS], cwd=job).returncode
            except OSError as error:
                raise InputError(f"cannot start the engine {self._engine}: {error.strerror}") from error
            stopped = code == JobStopped.exit_code
            if code and not stopped:
                raise BatchgenError(f"the job in {job} ended with exit code {code}: what it says is above")
        if stopped:
            raise JobStopped("the time limit came first; finished rows are saved, the same command goes on from there")


def _own_options(kind: str, rows: list[Row]) -> dict[str, Any]:
    """The job options that depend on its rows."""
    shared = {"task": kind, "logprobs": 0}
    if kind == SCORE:
        return {**shared, "prompt_column": "context", "continuations_column": "continuations"}
    source = {"prompt_column": "prompt", "chat": False}
    if not isinstance(rows[0].prompt, str):
        source = {"messages_column": "prompt"}
    columns = {**source, "id_column": ID_COLUMN[kind], "sampling_column": "sampling"}
    return {**shared, **columns, "max_tokens": max(row.sampling["max_tokens"] for row in rows if row.sampling)}


def _to_score(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Rows of a score job's table, each for one or several prompts.

    Prompts that share half of their tokens, as the choices of a question do, become one row, so that the shared part is
    computed once.

    Args:
        rows: Rows to score, sorted by the tokens of their prompts.
    """
    together: list[Row] = []
    for row in rows:
        if together and (len(together) == _MOST_TOGETHER or not _alike(together[0].prompt, row.prompt)):
            yield _score_columns(together)
            together = []
        together.append(row)
    yield _score_columns(together)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    half = (max(len(a), len(b)) + 1) // 2
    return a[:half] == b[:half]


def _score_columns(rows: list[Row]) -> dict[str, Any]:
    ids, prompts = [row.id for row in rows], [row.prompt for row in rows]
    return {ID_COLUMN[SCORE]: ids, "context": prompts[0][:1], "continuations": [prompt[1:] for prompt in prompts]}


def _to_generate(row: Row) -> dict[str, Any]:
    prompt = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt)
    return {ID_COLUMN[GENERATE]: row.id, "prompt": repair_surrogates(prompt), "sampling": json.dumps(row.sampling)}


def _instructions(jobs: list[Path]) -> str:
    commands = [f"    (cd {job.absolute()} && batchgen run --config {OPTIONS})" for job in jobs]
    first = "the requests are written down. Run these jobs, here or where a copy of their folders is:"
    last = f"With {RESULTS} of each in its folder, the same helm-run command goes on."
    return "\n".join([first, *commands, last])


def _toml(options: Mapping[str, Any]) -> str:
    """Options as TOML, whose strings, numbers, booleans and lists are written as in JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
