"""`batchgen convert`: it writes a model's weights into a weight store."""

from __future__ import annotations

import time
from pathlib import Path

from batchgen.core.dtypes import weight_format_of
from batchgen.core.units import format_bytes, format_seconds
from batchgen.job.command_options import ConvertOptions
from batchgen.job.job import merged_line, resolve_job
from batchgen.job.options import JobOptions
from batchgen.job.progress import Progress
from batchgen.models.convert import convert
from batchgen.models.files import resolve_model, resolve_weights


def run_convert(options: ConvertOptions) -> str:
    """Write a model's weights into a weight store; returns the command's closing line. Raises BatchgenError."""
    with Progress(options.progress) as progress:
        return _converted(options, progress)


def _converted(options: ConvertOptions, progress: Progress) -> str:
    started_s = time.monotonic()
    files = resolve_model(options.model, options.lora)
    dtype = resolve_job(JobOptions(options.model, None, None, dtype=options.dtype), files).dtype
    weights = resolve_weights(files, options.weights)
    weight_format = weight_format_of(dtype, weights)
    progress.say(f"converting {files.name} to {dtype if weight_format == dtype else f'{weight_format} and {dtype}'}")
    if weight_format == dtype and (line := merged_line(files)) is not None:
        progress.say(line)
    with progress.layers() as on_layer:
        store = convert(
            files,
            Path(options.output),
            dtype=dtype,
            weights=weights,
            overwrite=options.overwrite,
            on_layer=on_layer,
        )
    return f"{format_bytes(store.num_bytes)} in {format_seconds(time.monotonic() - started_s)}: {store.path}"
