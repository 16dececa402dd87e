"""Sizes, durations and shards as people write them: "14GiB", "6h", "0/4"."""

from __future__ import annotations

import re

from batchgen.core.errors import InputError

_SIZE = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE |= {f"{p}b": v for p, v in list(_SIZE.items()) if p not in ("", "b")}
_SIZE |= {f"{p}{s}": 2**e for p, e in (("k", 10), ("m", 20), ("g", 30), ("t", 40)) for s in ("i", "ib")}
# Bytes.
GIB = 1 << 30
_DURATION = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Parse a size such as "14GiB" (2**30 each), "14GB" (10**9 each) or a plain number of bytes. Raises InputError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _SIZE:
        raise InputError(f"{text!r} is not a size: write it as 14GiB, 512MiB or 8GB")
    return int(float(match[1]) * _SIZE[match[2].lower()])


def size_bytes(value: int | str) -> int:
    """A size in bytes, from a number or from a text such as "14GiB". Raises InputError."""
    return parse_bytes(value) if isinstance(value, str) else int(value)


def parse_rate(text: str, flag: str) -> float:
    """Parse a rate such as "1.25GB/s" or "12GiB/s", in bytes/s. Raises InputError.

    Args:
        text: The rate.
        flag: Name of the command-line option, for error messages.
    """
    size, slash, second = text.partition("/")
    if (slash and second.strip() != "s") or "bit" in size:
        raise InputError(f"{flag} {text!r} is not a rate in bytes: write it as 1.25GB/s")
    try:
        rate = parse_bytes(size)
    except InputError as error:
        raise InputError(f"{flag} {text!r} is not a rate: write it as 1.25GB/s") from error
    if rate <= 0:
        raise InputError(f"{flag} must be above 0, not {text!r}")
    return float(rate)


def parse_seconds(text: str) -> float:
    """Parse a duration such as "6h", "90m", "1h30m", "45s" or a plain number of seconds. Raises InputError."""
    parts = re.findall(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)", text)
    joined = "".join(a + b for a, b in parts)
    if not parts or joined != re.sub(r"\s", "", text) or any(u.lower() not in _DURATION for _, u in parts):
        raise InputError(f"{text!r} is not a duration: write it as 6h, 90m, 1h30m or 45s")
    return sum(float(a) * _DURATION[u.lower()] for a, u in parts)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard "i/N", with i from 0 to N-1, into (i, N). Raises InputError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match or not 0 <= int(match[1]) < int(match[2]):
        raise InputError(f"--shard {text!r} is not i/N with i from 0 to N-1 (four machines: 0/4, 1/4, 2/4, 3/4)")
    return int(match[1]), int(match[2])


def format_bytes(count: float) -> str:
    """Format a size in bytes as "3.2 GiB", in the largest binary unit for which the number is at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_at_least(count: float) -> str:
    """Format a size in bytes in the largest binary unit, rounded up, so that the text names at least the size."""
    text = format_bytes(count)
    number, unit = text.split()
    step = 1 if unit == "B" else 0.1
    return text if parse_bytes(text) >= count else f"{float(number) + step:.{0 if step == 1 else 1}f} {unit}"


_MOST_HOURS = 72  # longer times are in days


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds as "48 s", "3 min 20 s", "6 h 05 min" or "9 days 6 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, secs = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {secs:02d} s"
    if minutes < _MOST_HOURS * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    days, hours = divmod(round(minutes / 60), 24)
    return f"{days} days {hours} h"
