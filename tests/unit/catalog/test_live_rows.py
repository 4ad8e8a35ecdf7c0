"""How many rows can be live, by the ends of their chunks alone."""

from __future__ import annotations

import pytest

from recpoint.catalog.restore.rows import Live, LiveRows
from recpoint.format.manifest import ChunkEntry
from recpoint.format.naming import row_chunk_key, state_chunk_key


def chunk(first: int, last: int, rows: int, size_bytes: int, *, table: int = 0) -> ChunkEntry:
    return ChunkEntry(
        key=row_chunk_key(1, 1, "a" * 32, rank=0, table=table, number=0),
        bytes=size_bytes,
        crc32c=0,
        content="rows",
        rank=0,
        table=table,
        row_count=rows,
        first_row=first,
        last_row=last,
        bits=32,
        scheme="exact",
    )


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], Live(0, 0)),
        # The same ids twice: there are no more than those.
        ([chunk(0, 9, 10, 100), chunk(0, 9, 10, 80)], Live(10, 100)),
        # Few among many ids: all may be others.
        ([chunk(0, 99, 10, 100), chunk(5, 80, 20, 200)], Live(30, 300)),
        # One after another, without an id in common.
        ([chunk(10, 19, 10, 70), chunk(0, 9, 10, 70)], Live(20, 140)),
        # Overlapping through a third one.
        ([chunk(0, 5, 6, 60), chunk(8, 9, 2, 20), chunk(4, 8, 5, 50)], Live(10, 100)),
        # Of another table they are other rows.
        ([chunk(0, 9, 10, 100), chunk(0, 9, 10, 100, table=1)], Live(20, 200)),
    ],
)
def test_what_spans_can_hold(chunks: list[ChunkEntry], expected: Live) -> None:
    live = LiveRows()
    live.add(chunks)
    assert live.most == expected


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        # Rows of other ids, then the same again.
        ([[chunk(0, 9, 10, 100)], [chunk(20, 29, 10, 100)], [chunk(0, 9, 10, 90)]], Live(20, 200)),
        # Ten ids that two links share, and then three somewhere among them and a hundred others.
        ([[chunk(0, 9, 10, 100)], [chunk(0, 9, 10, 100)], [chunk(5, 99, 3, 30)]], Live(13, 130)),
        # A link that says that its rows lie among the others brings none, in its wider bytes.
        ([[chunk(0, 9, 10, 100)], [chunk(2, 5, 4, 80)]], Live(10, 180)),
        ([[chunk(0, 9, 10, 100)], [chunk(0, 9, 10, 100, table=1)]], Live(20, 200)),
        ([[], [chunk(0, 9, 10, 100)], []], Live(10, 100)),
    ],
)
def test_what_each_link_adds(links: list[list[ChunkEntry]], expected: Live) -> None:
    live = LiveRows()
    for link in links:
        live.add(link)
    assert live.most == expected


def test_state_is_no_row() -> None:
    key = state_chunk_key(1, 1, "a" * 32, rank=0, number=0)
    state = ChunkEntry(key=key, bytes=9, crc32c=0, content="state", rank=0)
    live = LiveRows()
    live.add([state])
    assert live.most == Live(0, 0)
