"""The function `batchgen.run`: a table or files through a model, in Python."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from batchgen.core.errors import JobStopped
from batchgen.core.request import SamplingParams
from batchgen.job.option_table import check_names, options_of
from batchgen.job.options import JobOptions
from batchgen.job.run_options import RunOptions
from batchgen.job.step_tables import steps_of

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from typing_extensions import Unpack


@overload
def run(model: str, input: Any, output: str | Path, **options: Unpack[RunOptions]) -> dict[str, Any]: ...
@overload
def run(
    model: str,
    input: datasets.Dataset | datasets.IterableDataset | datasets.DatasetDict | datasets.IterableDatasetDict,
    output: None = None,
    **options: Unpack[RunOptions],
) -> datasets.Dataset: ...
@overload
def run(  # type: ignore[overload-cannot-match]  # mypy knows no types of `datasets`
    model: str, input: Any, output: None = None, **options: Unpack[RunOptions]
) -> pa.Table: ...
def run(model: str, input: Any, output: str | Path | None = None, **options: Any) -> Any:
    """Run every row of a table or of files through a model.

    After an interruption the same call goes on.

    Args:
        model: A Hugging Face directory or hub id, a .gguf file, a weight store, or "demo".
        input: A list of texts or of dicts (rows), a dict of columns, an Arrow table or stream, a DataFrame of pandas or
            Polars, a DuckDB relation or any other object with `__arrow_c_stream__`, a dataset of the library
            `datasets`, or a path: a file, glob or directory, as `batchgen run --input` takes it.
        output: A .parquet, .jsonl, .csv or .arrow file. None: the rows are returned.
        **options: Options of the command line, with underscores, and fields of `SamplingParams`: `RunOptions` has all.
            Nothing is printed unless `progress` is given.

    Returns:
        Without `output`, the input's columns and the job's, as a `datasets.Dataset` for a dataset, or else a
        `pyarrow.Table`, mapped into memory from a file in the cache directory. That is deleted when it was not used for
        a week, or others need its space. With `output`, or for a dry run, the report, as `--report` writes it.

    Raises:
        JobStopped: `max_time` has ended a job without `output`. With `output`, the report says so.
        TooManyFailed: More rows failed than `max_failed` allows, or all of them; its `report` is the report.
        BatchgenError: The job cannot be run or completed.
        TypeError: There is no such option.
    """
    from batchgen.job.start import runner_of

    check_names("run", options, [*RunOptions.__annotations__])
    sampling = SamplingParams(**{name: options.pop(name) for name in SamplingParams.names() if name in options})
    steps = steps_of(options.pop("steps", None) or ())
    job = JobOptions(model, input, output, sampling=sampling, steps=steps, **{**_DEFAULTS, **options})
    report = runner_of(job)(job)
    if output is not None or report["state"] == "dry run":
        return report
    if report["state"] == "stopped":
        left = "some" if report["rows_left"] is None else f"{report['rows_left']:,}"
        raise JobStopped(f"stopped by max_time with {left} rows left: the same call goes on from there")
    return _read(report["output"], input, options.get("split"))


def _read(path: str, input: Any, split: str | None) -> Any:
    """The output of a job as a table that is mapped into memory: a `datasets.Dataset` for an input that is one."""
    from batchgen.dataset.readers.datasets import is_datasets_object

    if is_datasets_object(input):
        import datasets

        split = split or getattr(input, "split", None)
        return datasets.Dataset.from_file(path, split=split and datasets.Split(str(split)))
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(path)).read_all()


_DEFAULTS = {"progress": "none"}  # where they differ from those of the command line


def _signature() -> inspect.Signature:
    """The signature of `run` with each option by its name, for `help` and for notebooks."""
    parameters = list(inspect.signature(run).parameters.values())[:-1]
    defaults = {option.name: option.default for option in options_of("run")} | {"steps": ()} | _DEFAULTS
    for name, kind in RunOptions.__annotations__.items():
        keyword, annotation = inspect.Parameter.KEYWORD_ONLY, kind.__forward_arg__
        parameters.append(inspect.Parameter(name, keyword, default=defaults[name], annotation=annotation))
    return inspect.Signature(parameters, return_annotation="pa.Table | datasets.Dataset | dict[str, Any]")


def _options_text() -> str:
    """The names of all options with their help."""
    help_texts = {option.name: option.help or "" for option in options_of("run")}
    return "\n".join(
        textwrap.fill(f"{name}: {help_texts[name]}", 110, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name in RunOptions.__annotations__
        if name in help_texts
    )


run.__signature__ = _signature()  # type: ignore[attr-defined]
run.__doc__ = f"{run.__doc__}\n    Options:\n{_options_text()}\n    "
