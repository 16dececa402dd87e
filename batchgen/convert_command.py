"""The `convert` command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from batchgen.convert import convert
from batchgen.loading import resolve_dtype
from batchgen.model_files import read_config, resolve_model
from batchgen.progress import Progress
from batchgen.units import format_bytes, format_seconds

_PLAIN_EVERY_S = 2.0


def run_convert(*, model: str, output: str, quantization: str, dtype: str, overwrite: bool, progress: str) -> str:
    """Converts; returns the line to end with. Raises BatchgenError."""
    started_s = time.monotonic()
    shown = Progress(progress)
    files = resolve_model(model, notify=shown.say)
    dtype = resolve_dtype(read_config(files), dtype)
    shown.say(f"converting {files.name} to {dtype if quantization == 'none' else f'{quantization} and {dtype}'}")
    on_layer, close = _layer_progress(shown, progress)
    try:
        store = convert(
            files, Path(output), dtype=dtype, quantization=quantization, overwrite=overwrite, on_layer=on_layer
        )
    finally:
        close()
    return f"{format_bytes(store.num_bytes)} in {format_seconds(time.monotonic() - started_s)}: {store.path}"


def _layer_progress(shown: Progress, style: str) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """Functions that show a layer done, and that end the showing: a bar on a terminal, else a line now and then."""
    if style == "auto" and sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(unit="layer", dynamic_ncols=True, leave=False)

        def draw(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return draw, bar.close
    said_s = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= _PLAIN_EVERY_S or done == total:
            said_s = time.monotonic()
            shown.say(f"{done} of {total} layers")

    return say, lambda: None
