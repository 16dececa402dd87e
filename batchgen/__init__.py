"""batchgen: a whole dataset through a language model, on one machine.

    import batchgen

    rows = [{"city": "Paris"}, {"city": "Rome"}]
    table = batchgen.run("demo", rows, prompt_template="The river of {{ city }} is the", max_tokens=8)
    print(table["text"])

`batchgen.run` is the command line's `batchgen run` for tables and for files, resumable. `batchgen.Engine` answers
requests one by one.
"""

from batchgen._version import __version__

TYPE_CHECKING = False  # as in typing, which takes longer to import than all that comes before a Ctrl-C is handled
if TYPE_CHECKING:
    from batchgen.api import run
    from batchgen.core.errors import BatchgenError, InputError, JobStopped, TooManyFailed
    from batchgen.core.request import (
        ChatOptions,
        Completion,
        ContinuationScore,
        PositionLogprobs,
        Prompt,
        Request,
        Sample,
        SamplingParams,
        Scored,
        ScoreRequest,
        TokenLogprob,
    )
    from batchgen.engine.engine import Engine
    from batchgen.hf_datasets import MapFunction
    from batchgen.job.run_options import RunOptions

__all__ = [
    "BatchgenError",
    "ChatOptions",
    "Completion",
    "ContinuationScore",
    "Engine",
    "InputError",
    "JobStopped",
    "MapFunction",
    "PositionLogprobs",
    "Prompt",
    "Request",
    "RunOptions",
    "Sample",
    "SamplingParams",
    "ScoreRequest",
    "Scored",
    "TokenLogprob",
    "TooManyFailed",
    "__version__",
    "run",
]

# The modules of the package's names, which are imported at first use: the command line must be able to take a Ctrl-C
# before, and --help must not wait for them.
_MODULES = {
    "batchgen.engine.engine": ("Engine",),
    "batchgen.core.errors": ("BatchgenError", "InputError", "JobStopped", "TooManyFailed"),
    "batchgen.api": ("run",),
    "batchgen.job.run_options": ("RunOptions",),
    "batchgen.core.request": (
        "ChatOptions", "Completion", "ContinuationScore", "PositionLogprobs", "Prompt", "Request", "Sample",
        "SamplingParams", "ScoreRequest", "Scored", "TokenLogprob",
    ),
    "batchgen.hf_datasets": ("MapFunction",),
}  # fmt: skip
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str):
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
