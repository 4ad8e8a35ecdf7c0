"""Reading what a trainer recorded of its tables, for comparison (format §3.6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recpoint.catalog.chunks.chunk_reader import read_chunk
from recpoint.catalog.chunks.chunk_source import ChunkSource
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.errors import MalformedObject
from recpoint.format.chunk import Section, section_tensor
from recpoint.format.manifest import ChunkEntry, Manifest, TableSpec

__all__ = ["Sampled", "decode_samples", "read_samples"]

_NEXT_STEP = "none for restoring; a later checkpoint's sample may be good"


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Rows of one table, exactly as they were when a checkpoint was cut.

    Attributes:
        ids: int64 [n], ascending, without duplicates, inside the table.
        values: [n, dim], of the table's dtype.
        row_states: one [n, …] for each row state of the table.
        digests: of the rows that the checkpoint itself stores: ids, values, each row state; None
            where it stores none.
    """

    ids: Tensor
    values: Tensor
    row_states: tuple[Tensor, ...]
    digests: tuple[int, ...] | None


def read_samples(
    source: ChunkSource, manifest: Manifest, reads: ReadScheduler
) -> dict[int, Sampled]:
    """The samples of a checkpoint by the index of their table; tables may have none.

    Raises:
        ObjectNotFound: a chunk is missing.
        FormatError: one is damaged, or samples what is not there.
        StoreError: one could not be read.
    """
    entries = [entry for entry in manifest.chunks if entry.content == "sample"]
    read = reads.in_order(entries, lambda entry: read_chunk(source, manifest, entry))
    return decode_samples(manifest, ((entry, outcome.result().sections) for entry, outcome in read))


def decode_samples(
    manifest: Manifest, chunks: Iterable[tuple[ChunkEntry, dict[str, Section]]]
) -> dict[int, Sampled]:
    """The samples in sample chunks of a checkpoint, by the index of their table.

    Args:
        manifest: the checkpoint.
        chunks: its entries, each with the sections of the chunk, which were checked for form.

    Raises:
        FormatError: they sample what is not there.
    """
    found: dict[int, dict[int, Sampled]] = {}
    for entry, sections in chunks:
        for name in sections:
            _, table, part = name.split(".", 2)
            if part != "ids":
                continue
            spec = manifest.tables[int(table)]
            of_ranks = found.setdefault(int(table), {})
            if entry.rank in of_ranks:
                raise _malformed(entry.key, f"table {spec.name!r:.80} again", "each table once")
            of_ranks[entry.rank] = _sampled(entry.key, int(table), spec, sections)
    return {table: _of_all_ranks(manifest, table, found[table]) for table in sorted(found)}


def _of_all_ranks(manifest: Manifest, table: int, of_ranks: dict[int, Sampled]) -> Sampled:
    """One sample of a table: rows of all ranks, and the sums of their digests (format §3.6)."""
    storing = {entry.rank for entry in manifest.chunks if entry.table == table}
    known = [of_ranks[rank].digests for rank in storing if rank in of_ranks]
    recorded = [digests for digests in known if digests is not None]
    total = None
    if recorded and len(recorded) == len(storing):
        total = tuple(sum(of_rank) % 2**64 for of_rank in zip(*recorded, strict=True))
    if len(of_ranks) == 1:
        (sampled,) = of_ranks.values()
        return replace(sampled, digests=total if storing else sampled.digests)
    samples = list(of_ranks.values())
    ids = torch.cat([sampled.ids for sampled in samples])
    order = ids.argsort()
    ids = ids[order]
    if bool((ids[1:] == ids[:-1]).any()):
        spec = manifest.tables[table]
        key = Representation.of(manifest).key
        raise _malformed(key, f"a row of {spec.name!r:.80} in the samples of two ranks", "one")
    states = zip(*(sampled.row_states for sampled in samples), strict=True)
    return Sampled(
        ids=ids,
        values=torch.cat([sampled.values for sampled in samples])[order],
        row_states=tuple(torch.cat(state)[order] for state in states),
        digests=total,
    )


def _sampled(key: str, table: int, spec: TableSpec, sections: dict[str, Section]) -> Sampled:
    ids = section_tensor(sections[f"sample.{table}.ids"])
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= spec.rows:
        text = f"ids from {int(ids[0])} to {int(ids[-1])}, {'' if ascending else 'not '}ascending"
        raise _malformed(key, text, f"ascending ids below {spec.rows}")
    digests = sections.get(f"sample.{table}.digests")
    return Sampled(
        ids=ids,
        values=section_tensor(sections[f"sample.{table}.values"]),
        row_states=tuple(
            section_tensor(sections[f"sample.{table}.state.{k}"])
            for k in range(len(spec.row_states))
        ),
        digests=None
        if digests is None
        else tuple(digest % 2**64 for digest in section_tensor(digests).tolist()),
    )


def _malformed(key: str, found: str, expected: str) -> MalformedObject:
    return MalformedObject(key, found=found, expected=expected, next_step=_NEXT_STEP)
