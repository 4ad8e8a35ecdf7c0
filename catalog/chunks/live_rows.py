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

__all__ = ["Live", "LiveRows"]


class Live(NamedTuple):
    """Rows, and their bytes as they are stored."""

    rows: int
    size_bytes: int


class _Span(NamedTuple):
    """Chunks whose ids overlap: ids first … last, rows and bytes stored, and the widest row's."""

    first: int
    last: int
    rows: int
    size_bytes: int
    widest: float

    def joined(self, other: _Span) -> _Span:
        return _Span(
            self.first,
            max(self.last, other.last),
            self.rows + other.rows,
            self.size_bytes + other.size_bytes,
            max(self.widest, other.widest),
        )

    @property
    def live(self) -> Live:
        rows = min(self.rows, self.last - self.first + 1)
        return Live(rows, min(self.size_bytes, math.ceil(rows * self.widest)))


class LiveRows:
    """The most rows that can be live of chunks to which more are added, and their bytes at most.

    Where spans of ids overlap, there are at most as many live rows as ids, and at most as many as
    stored; each takes at most what a row of the widest of those chunks takes. What is added brings
    at most what it stores.
    """

    def __init__(self) -> None:
        self._spans: dict[int, list[_Span]] = {}
        self._of_table: dict[int, Live] = {}
        self._most = Live(0, 0)

    @property
    def most(self) -> Live:
        """Of all that was added."""
        return self._most

    def add(self, entries: Iterable[ChunkEntry]) -> None:
        """Take in chunks of rows, of any tables and links; others are left out."""
        added: dict[int, list[_Span]] = {}
        for entry in entries:
            table, rows, first, last = entry.table, entry.row_count, entry.first_row, entry.last_row
            if table is None or rows is None or first is None or last is None:
                continue
            span = _Span(first, last, rows, entry.bytes, entry.bytes / rows)
            added.setdefault(table, []).append(span)
        most_rows, most_bytes = self._most
        for table, spans in added.items():
            joined = _joined([*self._spans.get(table, ()), *spans])
            before = self._of_table.get(table, Live(0, 0))
            lives = [span.live for span in joined]
            live = Live(
                min(sum(one.rows for one in lives), before.rows + sum(one.rows for one in spans)),
                min(
                    sum(one.size_bytes for one in lives),
                    before.size_bytes + sum(one.size_bytes for one in spans),
                ),
            )
            most_rows += live.rows - before.rows
            most_bytes += live.size_bytes - before.size_bytes
            self._spans[table], self._of_table[table] = joined, live
        self._most = Live(most_rows, most_bytes)


def _joined(spans: list[_Span]) -> list[_Span]:
    """Those that overlap as one, in the order of their ids."""
    joined: list[_Span] = []
    for span in sorted(spans):
        if joined and span.first <= joined[-1].last:
            joined[-1] = joined[-1].joined(span)
        else:
            joined.append(span)
    return joined
