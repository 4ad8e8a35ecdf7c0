"""Writes bytes, times, durations and counts as people read them, the same wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

__all__ = [
    "bytes_of",
    "bytes_text",
    "cache_text",
    "copied_text",
    "counted",
    "duration_text",
    "stripes_text",
    "time_text",
    "widths_text",
]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def bytes_text(count: int) -> str:
    """Bytes in the unit, a power of 1000, that leaves one to three digits before the point."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def bytes_of(text: str) -> int:
    """Return the bytes that a text such as `64MB`, `1.5 GB` or `500` says; units are of 1000.

    Raises:
        ValueError: it is no number with such a unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    units = [unit.lower() for unit in _UNITS]
    unit = "" if match is None else (match[2].lower() or "b")
    if match is None or unit not in units:
        raise ValueError(f"{text!r} is no size such as 64MB; units are {', '.join(_UNITS)}")
    unit_bytes: int = 1000 ** units.index(unit)
    return round(float(match[1]) * unit_bytes)


def time_text(milliseconds: int) -> str:
    """A time of a record, in UTC; a time that no calendar has as its number."""
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: float) -> str:
    """A duration with its unit."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def counted(count: int, noun: str) -> str:
    """How many there are of something, in the singular where there is one."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


class _CacheCounts(Protocol):
    """What `cache_text` reads of `format.manifest.CacheUse`."""

    hits: int
    misses: int
    fetched_rows: int
    fetched_bytes: int
    written_rows: int
    written_bytes: int
    wait_us: int
    window: int


def cache_text(use: _CacheCounts) -> str:
    """What a cache did between two checkpoints."""
    ids = use.hits + use.misses
    share = use.hits / ids if ids else 1.0
    return (
        f"cache: {share:.2%} of {counted(ids, 'id')} found, "
        f"{counted(use.fetched_rows, 'row')} fetched ({bytes_text(use.fetched_bytes)}), "
        f"{use.written_rows:,} written back ({bytes_text(use.written_bytes)}), waited "
        f"{duration_text(use.wait_us / 1e6)}, {counted(use.window, 'batch')} ahead"
    )


def stripes_text(fits: int, unknown: int) -> str:
    """How many stripes of embedding servers had the parity that they should have."""
    text = f"{fits:,} on embedding servers fit their parity"
    return f"{text}, {unknown:,} could not be compared" if unknown else text


def widths_text(mean_bits: float, row_shares: Sequence[tuple[str, float]]) -> str:
    """How many bits a stored value has, and the share of the rows in each width.

    Args:
        mean_bits: of a value.
        row_shares: the share of the rows in each width: bits of a code, or words.
    """
    shares = ", ".join(
        f"{share:.1%} {f'in {word}' if word.isdigit() else word}" for word, share in row_shares
    )
    return f"{mean_bits:.2f} bits a value (of the rows, {shares})"


def copied_text(rows_before: int, rows_in_stall: int) -> str:
    """How many of the rows that a checkpoint copied were copied before its stall."""
    rows = rows_before + rows_in_stall
    share = rows_before / rows if rows else 0.0
    return f"{share:.1%} of {counted(rows, 'row')} copied before the stall"
