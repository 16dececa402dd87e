"""The output of a job whose options name none: a file beside the input, in the input's format."""

from __future__ import annotations

import glob
import os

from batchgen.core.errors import InputError
from batchgen.core.units import parse_shard
from batchgen.dataset.files import find_files, format_of, is_saved_dataset, stem_of
from batchgen.dataset.output_names import MARK
from batchgen.dataset.storage import is_url
from batchgen.job.destination import STANDARD_OUTPUT
from batchgen.job.options import JobOptions
from batchgen.job.standard_input import STANDARD_INPUT

_EXTENSIONS = {"jsonl": ".jsonl", "openai": ".jsonl", "csv": ".csv"}  # of all other formats: Parquet


def default_output(options: JobOptions) -> str:
    """The output of a job: `data.out.parquet` for `data.parquet`.

    It lies beside the input, and for an input at a URL or of the hub in the working directory. A directory or glob
    gives the name of the directory. Outputs of splits and shards have these in their names. Rows from standard input go
    to standard output.

    Args:
        options: The job's options, with the name of an input.
    """
    if options.input == STANDARD_INPUT:
        return STANDARD_OUTPUT
    name = os.path.expanduser(os.fspath(options.input))
    folder, stem = _place(name)
    parts = [stem, *([options.split] if options.split else [])]
    if options.shard:
        parts.append("shard-{}-of-{}".format(*parse_shard(options.shard)))
    return os.path.join(folder, f"{'.'.join(parts)}{MARK}{_EXTENSIONS.get(_format(name, options) or '', '.parquet')}")


def _place(name: str) -> tuple[str, str]:
    """The directory of an input's output, "" for the working directory, and the beginning of the output's name."""
    if is_url(name):
        place = _literal(name.partition("?")[0].rstrip("/"))  # without its query, which may have a signature
        return "", stem_of(os.path.basename(place).rpartition("@")[2])
    if not os.path.exists(name) and not glob.has_magic(name):  # of the hub, or an error
        return "", stem_of(os.path.basename(name))
    if os.path.isfile(name):
        return os.path.dirname(name), stem_of(os.path.basename(name))
    read = os.path.normpath(_literal(name))
    if os.path.abspath(read) == os.getcwd():
        return "", os.path.basename(os.getcwd()) or "all"
    if os.path.basename(read) in ("", os.pardir):
        read = os.path.abspath(read)
    return os.path.dirname(read), os.path.basename(read) or "all"


def _literal(name: str) -> str:
    """The directory in which a glob begins; a name that is no glob as it is."""
    while glob.has_magic(name):
        name = os.path.dirname(name)
    return name or os.curdir


def _format(name: str, options: JobOptions) -> str | None:
    """The format of an input's files by their names; None: unknown, or an error that opening the input raises."""
    if options.input_format is not None or (os.path.isfile(name) and not is_url(name)):
        return options.input_format or format_of(name)
    if is_saved_dataset(name):
        return "datasets"
    try:
        return format_of(find_files(name, None).paths[0])
    except InputError:
        return None
