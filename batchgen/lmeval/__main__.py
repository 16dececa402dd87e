"""`python -m batchgen.lmeval`: lm_eval's command line with the model `batchgen` registered."""

from __future__ import annotations

import sys

from batchgen.core.interrupts import guarded, keep
from batchgen.core.screen import claim_standard_streams, say


def main() -> None:
    """Run `lm_eval` with the model `batchgen` registered; errors of batchgen print one line and set an exit code."""
    claim_standard_streams()
    with guarded():
        _evaluate()


def _evaluate() -> None:
    from batchgen.core.errors import BatchgenError
    from batchgen.core.installer import install_command

    try:
        import lm_eval.models  # noqa: F401 - lm_eval registers its own only where there are none yet
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        _end(f"{error}: {install_command('lm_eval>=0.4.13,<0.5')}", 2)
    if "batchgen" not in model_registry:  # a later lm_eval may find the entry point
        model_registry.register("batchgen", target="batchgen.lmeval.model:BatchgenLM")
    keep(lambda: "finished rows are saved, the same command goes on from there")
    try:
        cli_evaluate()
    except BatchgenError as error:
        _end(str(error), error.exit_code)


def _end(line: str, exit_code: int) -> None:
    say(f"batchgen: {line}")
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
