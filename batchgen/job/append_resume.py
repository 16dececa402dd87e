"""Append-resume: a job that goes on from the rows of a smaller one, `--limit 5` before, or an input that has grown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchgen.job.source import RequestSource


def appended_to(source: RequestSource) -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """A function that tells whether an earlier job's rows, made with the same settings, begin this job's rows.

    It takes two fingerprints, that of the earlier job and that of this one.

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
