"""Writes a manifest with its pages, and reads it back whole (format §4.1, §6.1 rule 6, §6.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from pydantic import ValidationError

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.records import Records, read_checked
from recpoint.catalog.store.scheduler import ReadScheduler, WriteBudget, WriteScheduler
from recpoint.errors import (
    DigestMismatch,
    MalformedObject,
    ObjectNotFound,
    RecordTooLarge,
    UnsupportedVersion,
)
from recpoint.format.manifest import MAX_CHUNKS, Manifest, StoredPage
from recpoint.format.manifest_root import ManifestRoot, Page, PageEntry
from recpoint.format.paging import PackedManifest, pack_manifest, page_digest, whole_manifest
from recpoint.format.record_kinds import PAGE
from recpoint.format.records import MAX_RECORD_BYTES

__all__ = ["packed_manifest", "read_manifest", "read_pages", "write_pages"]

#: Pages that are written at once, over all runs of this process.
_PAGE_WRITES: Final = WriteBudget(8)


def packed_manifest(manifest: Manifest, *, next_step: str) -> PackedManifest:
    """Return a manifest as it is stored.

    Args:
        manifest: the manifest.
        next_step: what a person can do if it is too large.

    Raises:
        RecordTooLarge: it has more chunks, or a larger record, than a reader accepts (format §4).
    """
    key, chunks_text = Representation.of(manifest).key, f"{len(manifest.chunks):,} chunks"
    if len(manifest.chunks) > MAX_CHUNKS:
        raise RecordTooLarge(
            key,
            found=f"a manifest of {chunks_text}",
            expected=f"at most {MAX_CHUNKS:,}, which readers hold in memory",
            next_step=next_step,
        )
    try:
        return pack_manifest(manifest)
    except ValueError as error:
        raise RecordTooLarge(
            key,
            found=f"a manifest of {chunks_text}: {error!s:.200}",
            expected=f"a root and pages of at most {MAX_RECORD_BYTES} bytes each",
            next_step=next_step,
        ) from error


def write_pages(store: Store, packed: PackedManifest) -> None:
    """Write the pages of a manifest; MUST have succeeded before its root is created.

    A page's key follows from its bytes, so whoever writes it again writes the same.

    Raises:
        StoreError: the store refuses, or cannot be reached.
    """
    if not packed.pages:
        return
    with WriteScheduler(_PAGE_WRITES) as writes:
        for page, data in packed.pages:
            writes.begin(writes.reserve(page.bytes), partial(store.put, page.key, data))
        writes.finish()


def read_manifest(store: Store, representation: Representation, *, run: str) -> Manifest:
    """Return a manifest with all its chunks, fully checked.

    Args:
        store: where the run lies.
        representation: which manifest.
        run: the id of the run.

    Raises:
        ObjectNotFound: there is no such manifest.
        FormatError: the manifest or one of its pages is damaged or missing, or it belongs under
            another key.
        UnsupportedVersion: it has more chunks than this release holds in memory.
        StoreError: it cannot be read.
    """
    records = Records(store, representation.kind, run=run)
    record = records.read_key(representation.key)
    if isinstance(record, Manifest):
        return record
    assert isinstance(record, ManifestRoot)  # a record of this kind is one of the two
    if record.chunks > MAX_CHUNKS:
        raise UnsupportedVersion(
            representation.key,
            found=f"a manifest of {record.chunks:,} chunks",
            expected=f"at most {MAX_CHUNKS:,}, which this release holds in memory",
            next_step="pip install --upgrade recpoint",
        )
    try:
        pages = read_pages(store, record)
    except ObjectNotFound as error:
        # A sweep may have removed the page after retention deleted the manifest; then this raises.
        records.read_key(representation.key)
        raise _missing(error.subject, representation) from error
    try:
        return whole_manifest(record, pages)
    except ValidationError as error:
        fault = str(error.errors(include_url=False, include_input=False)[0]["msg"])
        raise MalformedObject(
            representation.key,
            found=f"pages that make up no manifest: {fault:.200}",
            expected="chunks as format §4 asks of one manifest",
            next_step=PAGE.when_damaged(representation.key, store.url),
        ) from error


def _missing(page: str, representation: Representation) -> MalformedObject:
    return MalformedObject(
        page,
        found=f"no such page, which {representation.key} names",
        expected="each page of a manifest that is there",
        next_step=PAGE.when_damaged(page),
    )


def read_pages(
    store: Store,
    root: ManifestRoot,
    wanted: Callable[[PageEntry], bool] = lambda entry: True,
) -> list[tuple[StoredPage, Page]]:
    """Return pages of a manifest, those that name pages first, several read at once.

    Args:
        store: where the run lies.
        root: the root of the manifest.
        wanted: says of an entry whether its page, and what is below it, is wanted.

    Raises:
        ObjectNotFound: a page is missing.
        FormatError: a page is damaged, or is not what its entry says.
        StoreError: a page cannot be read.
    """

    def read(entry: PageEntry) -> tuple[StoredPage, Page]:
        return StoredPage(root.page_key(entry), entry.bytes), _read_page(store, root, entry)

    def read_all(entries: Iterable[PageEntry]) -> list[tuple[StoredPage, Page]]:
        return list(reads.results([entry for entry in entries if wanted(entry)], read))

    with ReadScheduler.of_records() as reads:
        first = read_all(root.pages)
        below = read_all(entry for _, page in first for entry in page.pages)
    return first + below


def _read_page(store: Store, root: ManifestRoot, entry: PageEntry) -> Page:
    key = root.page_key(entry)
    next_step = PAGE.when_damaged(key, store.url)

    def parse(data: bytes) -> Page:
        digest = page_digest(data)
        if len(data) != entry.bytes or digest != entry.page:
            raise DigestMismatch(
                key,
                found=f"{len(data)} bytes with digest {digest}",
                expected=f"{entry.bytes} bytes with digest {entry.page}",
                next_step=next_step,
            )
        page = PAGE.unpack(data, key, run=root.run, url=store.url)
        if page.entry(page=entry.page, bytes_=entry.bytes) != entry:
            raise MalformedObject(
                key,
                found="a page with other parts, rows or chunks than its entry says",
                expected="what the entry that names it says is below it",
                next_step=next_step,
            )
        return page

    return read_checked(store, key, max_bytes=entry.bytes, parse=parse)
