"""Divides a manifest into a root and pages, and puts it together again (format §4.1).

Pages follow the order of keys, by part and then by table, so that what one rank has stored is on
few pages. A page ends where a part ends once it has `LEAST_CHUNKS`, and anywhere at `MOST_CHUNKS`.
More than `ROOT_PAGES` pages are named by pages of their own, about as many as each of them names:
then the root, one such page and one page of chunks grow with the square root of the ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from recpoint.format import naming, records
from recpoint.format.chunk_entries import ChunkEntry
from recpoint.format.manifest import Manifest, ManifestHead, StoredPage
from recpoint.format.manifest_root import ManifestRoot, Page, PageEntry
from recpoint.format.quantizers import Quantizer
from recpoint.format.records import pack_record
from recpoint.format.version import FORMAT_VERSION

__all__ = [
    "MAX_MANIFEST_BYTES",
    "PackedManifest",
    "manifest_fits",
    "pack_manifest",
    "page_digest",
    "whole_manifest",
]

#: A manifest of at most so many chunks is one record, of about 1.1 MB.
ONE_RECORD_CHUNKS: Final = 4096
LEAST_CHUNKS: Final = 128
MOST_CHUNKS: Final = 4096
ROOT_PAGES: Final = 64
#: The most bytes of a manifest, its pages included: what readers hold in memory.
MAX_MANIFEST_BYTES: Final = 1 << 30

#: About the least bytes of a chunk's entry, of an entry of a page, and of the description of a
#: table; and the most of a table's rows in an entry of a page.
_CHUNK_BYTES: Final = 250
_PAGE_BYTES: Final = 256
_TABLE_BYTES: Final = 64
_ROWS_BYTES: Final = 48

#: What the head of a manifest has in both forms.
_HEAD: Final = tuple(name for name in ManifestHead.model_fields if name != "version")


class PackedManifest(NamedTuple):
    """A manifest as it is stored.

    Attributes:
        record: the bytes under the manifest's key.
        pages: the pages to be stored before it, each with its bytes; none: it is one record.
    """

    record: bytes
    pages: tuple[tuple[StoredPage, bytes], ...] = ()


def pack_manifest(manifest: Manifest) -> PackedManifest:
    """Return a manifest as it is stored; the same chunks and quantizers give the same pages.

    Raises:
        ValueError: a record, or all together, would be larger than readers accept.
    """
    if max(len(manifest.chunks), len(manifest.quantizers)) <= ONE_RECORD_CHUNKS:
        return PackedManifest(pack_record(manifest))
    name = naming.parse_chunk_key(manifest.chunks[0].key)
    assert name is not None  # ChunkEntry lets no other key through
    packed: list[tuple[StoredPage, bytes]] = []

    def store(
        *,
        pages: Sequence[PageEntry] = (),
        chunks: Sequence[ChunkEntry] = (),
        quantizers: Sequence[Quantizer] = (),
    ) -> PageEntry:
        page = Page(
            run=manifest.run,
            **name._asdict(),
            pages=tuple(pages),
            chunks=tuple(chunks),
            quantizers=tuple(quantizers),
        )
        data = pack_record(page)
        digest = page_digest(data)
        packed.append((StoredPage(naming.PAGE_KEY.of(*name, digest), len(data)), data))
        return page.entry(page=digest, bytes_=len(data))

    entries = [
        store(chunks=chunks, quantizers=quantizers)
        for chunks, quantizers in _with_quantizers(manifest)
    ]
    if len(entries) > ROOT_PAGES:
        each = math.isqrt(len(entries) - 1) + 1
        entries = [
            store(pages=entries[first : first + each]) for first in range(0, len(entries), each)
        ]
    root = ManifestRoot(
        **{field: getattr(manifest, field) for field in _HEAD},
        chunk_attempt=name.attempt,
        pages=tuple(entries),
    )
    total_bytes = sum(page.bytes for page, _ in packed)
    if total_bytes > MAX_MANIFEST_BYTES:
        raise ValueError(f"pages of {total_bytes} bytes; at most {MAX_MANIFEST_BYTES} are read")
    return PackedManifest(pack_record(root), tuple(packed))


def manifest_fits(entries_bytes: int, tables_bytes: int) -> bool:
    """Tell, before anything is staged, whether readers would accept a manifest.

    Args:
        entries_bytes: bytes of the entries of its chunks, and of its quantizers.
        tables_bytes: bytes that describe its tables.
    """
    total_bytes = entries_bytes + tables_bytes
    chunks = entries_bytes // _CHUNK_BYTES
    if chunks <= ONE_RECORD_CHUNKS:
        return total_bytes <= records.MAX_RECORD_BYTES
    pages = max(ROOT_PAGES, math.isqrt(chunks // LEAST_CHUNKS) + 1)
    rows_bytes = _ROWS_BYTES * min(chunks, pages * (tables_bytes // _TABLE_BYTES + 1))
    root_bytes = tables_bytes + pages * _PAGE_BYTES + rows_bytes
    return root_bytes <= records.MAX_RECORD_BYTES and total_bytes <= MAX_MANIFEST_BYTES


def page_digest(data: bytes) -> str:
    """Return the digest of a page's bytes that its key and its entry have."""
    return hashlib.sha256(data).hexdigest()[:32]


def whole_manifest(root: ManifestRoot, pages: Sequence[tuple[StoredPage, Page]]) -> Manifest:
    """Return the manifest of a root and all its pages; raises as `Manifest` does."""
    chunks = [chunk for _, page in pages for chunk in page.chunks]
    quantizers = [quantizer for _, page in pages for quantizer in page.quantizers]
    manifest = Manifest(
        **{field: getattr(root, field) for field in _HEAD},
        version=FORMAT_VERSION,
        chunks=tuple(sorted(chunks, key=lambda chunk: chunk.key)),
        quantizers=tuple(
            sorted(quantizers, key=lambda quantizer: (quantizer.table, quantizer.rank))
        ),
    )
    return manifest.read_from([stored for stored, _ in pages])


def _with_quantizers(
    manifest: Manifest,
) -> Iterator[tuple[list[ChunkEntry], list[Quantizer]]]:
    """Yield the chunks of each page, with the quantizers of the parts whose chunks end on it."""
    quantizers = sorted(manifest.quantizers, key=lambda one: (one.rank, one.table))
    groups = list(_groups(sorted(manifest.chunks, key=lambda chunk: chunk.key)))
    position = 0
    for number, chunks in enumerate(groups):
        stop = len(quantizers)
        if number + 1 < len(groups):
            next_part = groups[number + 1][0].rank
            stop = position
            while stop < len(quantizers) and quantizers[stop].rank < next_part:
                stop += 1
        of_page = sorted(quantizers[position:stop], key=lambda one: (one.table, one.rank))
        yield chunks, of_page
        position = stop


def _groups(chunks: Sequence[ChunkEntry]) -> Iterator[list[ChunkEntry]]:
    """Divide chunks, in the order of their keys, into those of each page."""
    group: list[ChunkEntry] = []
    for chunk in chunks:
        at_end = len(group) >= LEAST_CHUNKS and chunk.rank != group[-1].rank
        if at_end or len(group) >= MOST_CHUNKS:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group
