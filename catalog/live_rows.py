"""How many of the rows that chunks hold can be live, by what manifests say of them.

A row that several links hold is live in the newest of them, and dead in the others. Which rows they
share is in the chunks; but chunks hold no other ids than those between their first and last rows,
so that hot rows which lie together are known to be the same ones without a look at them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from recpoint.format.manifest import ChunkEntry

__all__ = ["Live", "most_live"]


class Live(NamedTuple):
    """Rows, and their bytes as they are stored."""

    rows: int
    size_bytes: int


def most_live(entries: Iterable[ChunkEntry]) -> Live:
    """The most rows that can be live, and the most bytes that they take.

    Where spans of ids overlap, there are at most as many live rows as ids, and at most as many as
    stored; each takes at most what a row of the widest of those chunks takes.

    Args:
        entries: chunks of rows, of any tables and links; others are left out.
    """
    by_table: dict[int, list[tuple[int, int, int, int]]] = {}
    for entry in entries:
        rows, first, last = entry.row_count, entry.first_row, entry.last_row
        if entry.table is None or rows is None or first is None or last is None:
            continue
        by_table.setdefault(entry.table, []).append((first, last, rows, entry.bytes))
    most_rows = most_bytes = 0
    for spans in by_table.values():
        spans.sort()
        at = 0
        while at < len(spans):
            start, end = spans[at][:2]
            stored = size = 0
            widest = 0.0
            while at < len(spans) and spans[at][0] <= end:
                _, last, rows, size_bytes = spans[at]
                end, stored, size = max(end, last), stored + rows, size + size_bytes
                widest = max(widest, size_bytes / rows)
                at += 1
            live = min(stored, end - start + 1)
            most_rows += live
            most_bytes += min(size, math.ceil(live * widest))
    return Live(most_rows, most_bytes)
