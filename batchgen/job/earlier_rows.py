"""The fingerprint that an output's earlier rows were made with, for choices that a run leaves as they are."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from batchgen.core.errors import BatchgenError
from batchgen.output.manifest import Manifest
from batchgen.output.run_directory import MANIFEST, SHARE_FOLDER, run_directory, target_path
from batchgen.share.files import DirectoryFiles
from batchgen.share.run import SharedJob


def earlier_fingerprint(output: Path) -> dict[str, Any] | None:
    """The fingerprint of the job that an output belongs to; None where it belongs to none.

    Args:
        output: The output file.
    """
    directory = run_directory(target_path(output))
    held: SharedJob | Manifest | None = None
    with contextlib.suppress(BatchgenError, OSError):  # which opening the output reports
        held = SharedJob.read(DirectoryFiles(directory / SHARE_FOLDER)) or Manifest.read(directory / MANIFEST)
    return None if held is None else held.fingerprint
