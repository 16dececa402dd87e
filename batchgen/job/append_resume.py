"""Append-resume: a job goes on from the finished rows of a smaller job, whose input begins this job's input.

The smaller job had a lower `--limit`, or the input has grown since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchgen.job.source import RequestSource


def appended_to(source: RequestSource) -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """A function that tells whether the finished rows of an earlier job are the first rows of this job.

    The function takes the fingerprint of the earlier job and that of this job. It returns true where all settings are
    equal and the input of the earlier job begins this job's input.

    Args:
        source: This job's input.
    """
    return lambda was, now: _begins_with(was, now, source)


def _begins_with(was: dict[str, Any], now: dict[str, Any], source: RequestSource) -> bool:
    changed = {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}
    if not changed <= {"input", "rows"}:
        return False
    limit_was, limit_now = was["rows"]["limit"], now["rows"]["limit"]
    if {**was["rows"], "limit": None} != {**now["rows"], "limit": None} or now["rows"]["shard"] is not None:
        return False
    if limit_now is not None and (limit_was is None or limit_was > limit_now):
        return False
    # Types of JSON columns are inferred from all rows: more rows may change them, and with them a prompt.
    types_was, types_now = was["input"]["columns"], now["input"]["columns"]
    same = not types_was or all(types_was.get(name) == types_now.get(name) for name in source.reads)
    return same and source.dataset.begins_with(was["input"])
