"""Defines the root and the pages of a manifest that is too large for one record (format §4.1).

The root is the record under the manifest's key. It names pages; a page names chunks, or pages that
name chunks. Each entry of a page says what is below it, so that a reader of some rows or of some
ranks' state reads the pages that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import FailFast, Field, model_validator

from recpoint.format import naming
from recpoint.format.chunk_entries import MAX_CHUNK_BYTES, ChunkEntry
from recpoint.format.manifest import ManifestHead
from recpoint.format.quantizers import Quantizer
from recpoint.format.records import MAX_RECORD_BYTES, Generation, HexToken, Part, Step, StoredRecord
from recpoint.format.tables import MAX_TABLE_ROWS
from recpoint.format.version import PAGED_VERSION

__all__ = [
    "MAX_PAGED_CHUNKS",
    "MAX_PAGE_CHUNKS",
    "ManifestRoot",
    "Page",
    "PageEntry",
    "RowRange",
]

#: Bounds the chunks of a manifest in pages, and those that one page names.
MAX_PAGED_CHUNKS: Final = 10**9
MAX_PAGE_CHUNKS: Final = 100_000
_MAX_PAGES: Final = 100_000

_Part = Annotated[int, Field(ge=0, le=naming.MAX_RANK)]
_Chunks = Annotated[int, Field(ge=0, le=MAX_PAGED_CHUNKS)]
_Row = Annotated[int, Field(ge=0, lt=MAX_TABLE_ROWS)]
_Table = Annotated[int, Field(ge=0, le=naming.MAX_TABLE)]

#: The index of a table, and the first and the last row of it that chunks below may hold.
RowRange = Annotated[tuple[_Table, _Row, _Row], Field(strict=False)]


class PageEntry(Part):
    """Names a page, and says what is below it.

    Attributes:
        page: the first 32 hexadecimal digits of the sha-256 of its bytes, which its key has too.
        bytes: its length.
        pages: how many pages it names; 0: it names chunks.
        chunks: chunks below it, those of pages that it names included.
        chunk_bytes: bytes of these chunks.
        others: how many of them are state or samples.
        residuals: whether any of them has residuals.
        first_part, last_part: the least and the greatest `rank` of these chunks.
        rows: ranges that hold all rows of these chunks, one for each table that has any, ascending.
    """

    page: HexToken
    bytes: Annotated[int, Field(ge=1, le=MAX_RECORD_BYTES)]
    pages: Annotated[int, Field(ge=0, le=_MAX_PAGES)]
    chunks: Annotated[int, Field(ge=1, le=MAX_PAGED_CHUNKS)]
    chunk_bytes: Annotated[int, Field(ge=1, le=MAX_PAGED_CHUNKS * MAX_CHUNK_BYTES)]
    others: _Chunks
    residuals: bool
    first_part: _Part
    last_part: _Part
    rows: Annotated[tuple[RowRange, ...], Field(max_length=100_000, strict=False), FailFast()]

    @classmethod
    def of_chunks(cls, chunks: Sequence[ChunkEntry], *, page: str, bytes_: int) -> Self:
        """Return the entry of a page that names these chunks."""
        rows: dict[int, tuple[int, int]] = {}
        for chunk in chunks:
            if chunk.table is None or chunk.first_row is None or chunk.last_row is None:
                continue
            first, last = rows.get(chunk.table, (chunk.first_row, chunk.last_row))
            rows[chunk.table] = min(first, chunk.first_row), max(last, chunk.last_row)
        return cls(
            page=page,
            bytes=bytes_,
            pages=0,
            chunks=len(chunks),
            chunk_bytes=sum(chunk.bytes for chunk in chunks),
            others=sum(chunk.table is None for chunk in chunks),
            residuals=any(chunk.scheme == "residual" for chunk in chunks),
            first_part=min(chunk.rank for chunk in chunks),
            last_part=max(chunk.rank for chunk in chunks),
            rows=tuple((table, *rows[table]) for table in sorted(rows)),
        )

    @classmethod
    def of_pages(cls, entries: Sequence[PageEntry], *, page: str, bytes_: int) -> Self:
        """Return the entry of a page that names these pages."""
        rows: dict[int, tuple[int, int]] = {}
        for entry in entries:
            for table, first_row, last_row in entry.rows:
                first, last = rows.get(table, (first_row, last_row))
                rows[table] = min(first, first_row), max(last, last_row)
        return cls(
            page=page,
            bytes=bytes_,
            pages=len(entries),
            chunks=sum(entry.chunks for entry in entries),
            chunk_bytes=sum(entry.chunk_bytes for entry in entries),
            others=sum(entry.others for entry in entries),
            residuals=any(entry.residuals for entry in entries),
            first_part=min(entry.first_part for entry in entries),
            last_part=max(entry.last_part for entry in entries),
            rows=tuple((table, *rows[table]) for table in sorted(rows)),
        )


class Page(StoredRecord):
    """A page of a manifest: it names chunks, or pages that name chunks.

    `attempt` is that of the chunks: of the checkpoint, or of the consolidation.
    """

    format: Literal["recpoint/page"] = "recpoint/page"
    version: Literal[2] = PAGED_VERSION
    step: Step
    generation: Generation
    attempt: HexToken
    pages: Annotated[tuple[PageEntry, ...], Field(max_length=_MAX_PAGES, strict=False), FailFast()]
    chunks: Annotated[
        tuple[ChunkEntry, ...], Field(max_length=MAX_PAGE_CHUNKS, strict=False), FailFast()
    ]
    quantizers: Annotated[
        tuple[Quantizer, ...], Field(max_length=MAX_PAGE_CHUNKS, strict=False), FailFast()
    ]

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if bool(self.pages) == bool(self.chunks):
            raise ValueError("a page names either pages or chunks")
        if self.pages and self.quantizers:
            raise ValueError("a page that names pages has no quantizers")
        if any(entry.pages for entry in self.pages):
            raise ValueError("a page may name no page that names pages itself")
        prefix = naming.attempt_prefix(self.step, self.generation, self.attempt)
        for chunk in self.chunks:
            if not chunk.key.startswith(prefix):
                raise ValueError(f"{chunk.key} is not under {prefix}")
        return self

    def entry(self, *, page: str, bytes_: int) -> PageEntry:
        """Return the entry that names this page of so many bytes."""
        if self.pages:
            return PageEntry.of_pages(self.pages, page=page, bytes_=bytes_)
        return PageEntry.of_chunks(self.chunks, page=page, bytes_=bytes_)


class ManifestRoot(ManifestHead):
    """The record under the key of a manifest that is stored in pages.

    `chunk_attempt` is the attempt under whose prefix chunks and pages lie.
    """

    version: Literal[2] = PAGED_VERSION
    chunk_attempt: HexToken
    pages: Annotated[
        tuple[PageEntry, ...],
        Field(min_length=1, max_length=_MAX_PAGES, strict=False),
        FailFast(),
    ]

    @property
    def chunks(self) -> int:
        """How many chunks the pages name."""
        return sum(entry.chunks for entry in self.pages)

    @model_validator(mode="after")
    def _within(self) -> Self:
        if (self.chunk_attempt == self.attempt) != (self.stands_for is None):
            raise ValueError("chunks are of the attempt, but for those of a consolidation")
        if self.chunks > MAX_PAGED_CHUNKS:
            raise ValueError(f"{self.chunks} chunks, of at most {MAX_PAGED_CHUNKS}")
        for entry in self.pages:
            if not entry.first_part <= entry.last_part < self.parts:
                raise ValueError(f"parts {entry.first_part} to {entry.last_part} of {self.parts}")
            for table, first, last in entry.rows:
                if table >= len(self.tables) or not first <= last < self.tables[table].rows:
                    raise ValueError(f"rows {first} to {last} of table {table}")
        return self

    def page_key(self, entry: PageEntry) -> str:
        """Return the key of a page of this manifest."""
        return naming.PAGE_KEY.of(self.step, self.generation, self.chunk_attempt, entry.page)
