"""Merging a checkpoint's chain into fewer manifests by moving stored rows (format §6.8).

The steps are functions of a run and plain values, so that a workflow engine can run each as a task:
`plan_consolidation`, then `merge_part` for each part of the plan, one after another since each
takes its share of memory, then `commit_consolidation`; meanwhile it holds a lease (`leases`).
`consolidate` does all of that by itself. Any step may be killed and called again, and so may the
whole: keys and bytes follow from the sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from recpoint.catalog.chunk_pool import ChunkPool
from recpoint.catalog.chunk_reader import check_entry, check_stored, read_chunk
from recpoint.catalog.chunks_there import stored_sizes
from recpoint.catalog.commit import manifest_bytes
from recpoint.catalog.consolidate_plan import (
    ConsolidationPlan,
    TablesPart,
    read_sources,
    writer,
)
from recpoint.catalog.consolidate_upload import Uploads, moved_chunk
from recpoint.catalog.create_only import create_or_read
from recpoint.catalog.leases import reading
from recpoint.catalog.lineage import ManifestName, Representation
from recpoint.catalog.row_coverage import RowCoverage
from recpoint.catalog.row_moves import ChunkBuilder, MovedRows, read_moved
from recpoint.catalog.run import Run
from recpoint.catalog.seen_rows import SeenIds, SeenRows, sections_of
from recpoint.errors import (
    CommitConflict,
    FormatError,
    MalformedObject,
    MissingLink,
    ObjectNotFound,
)
from recpoint.format.manifest import ChunkEntry, Manifest, Quantizer, StandsFor
from recpoint.format.naming import attempt_prefix
from recpoint.format.records import MAX_RECORD_BYTES

__all__ = ["Consolidated", "commit_consolidation", "consolidate", "merge_part"]

#: Chunks that are read at once, and those that may wait besides: each is in memory whole.
_READERS: Final = 2
_READ_AHEAD: Final = 1

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """What a consolidation did.

    Attributes:
        outcome: `"created"`: by this call; `"already"`: by an earlier one; `"not_needed"`: a full
            restores the checkpoint as it is.
        key: of the consolidated manifest; empty if there is none.
        read_bytes: of the sources' chunks.
        written_bytes, chunks: that the manifest names.
        seconds: that it took.
    """

    outcome: Literal["created", "already", "not_needed"]
    key: str
    read_bytes: int
    written_bytes: int
    chunks: int
    seconds: float


def consolidate(
    run: Run, plan: ConsolidationPlan, *, on_progress: Progress | None = None
) -> Consolidated:
    """Do what a plan says, all of its steps.

    Beside the size of one manifest, and for each source of its chunks of one part's tables, it
    takes less than 512 MB of memory, however large the tables are and however many ranks there are.
    Safe beside persists, restores, sweeps and other consolidations. Killed anywhere, a call with
    the same plan, or a new one of the same sources, goes on under the same keys.

    Args:
        run: the run.
        plan: of `plan_consolidation`.
        on_progress: called with bytes read so far and bytes to read, from this thread.

    Raises:
        ObjectNotFound, ChainError, FormatError: a source is damaged, or has been let go of since
            the plan was made; nothing is committed.
        CommitConflict: another manifest is under the key.
        StoreError: the store cannot be reached or refuses.
    """
    started = time.monotonic()
    if not plan.needed:
        return Consolidated(
            outcome="not_needed", key="", read_bytes=0, written_bytes=0, chunks=0, seconds=0.0
        )
    there = _already(run, plan)
    if there is None:
        entries: list[ChunkEntry] = []
        read = 0

        def account(bytes_read: int) -> None:
            nonlocal read
            read += bytes_read
            if on_progress is not None:
                on_progress(read, plan.read_bytes)

        # From retention, which may have begun to let go of the sources (format §6.6).
        with reading(run, purpose="consolidate", covers=[run.manifest(*plan.target.name).ref]):
            for part in plan.parts:
                entries += merge_part(run, plan, part, on_read=account)
            outcome, there = commit_consolidation(run, plan, entries)
    else:
        outcome, read = "already", 0
    return Consolidated(
        outcome=outcome,
        key=plan.target.key,
        read_bytes=read + plan.state_bytes if read else 0,
        written_bytes=there.stored_bytes,
        chunks=len(there.chunks),
        seconds=time.monotonic() - started,
    )


# --- rows ----------------------------------------------------------------------------------------


def merge_part(
    run: Run,
    plan: ConsolidationPlan,
    part: TablesPart,
    *,
    on_read: Callable[[int], None] | None = None,
) -> tuple[ChunkEntry, ...]:
    """Move the rows of some tables; their chunks are durable when it returns. A step of many.

    Args:
        run: the run.
        plan: of `plan_consolidation`.
        part: one of the plan's.
        on_read: called with the bytes of each chunk that was read, from this thread.

    Returns:
        What the manifest will say of the chunks.

    Raises:
        ObjectNotFound, ChainError, FormatError: a source is damaged or gone.
        StoreError: the store cannot be reached or refuses.
    """
    sources = read_sources(run, plan, tables=part.tables)
    prefix = attempt_prefix(*plan.target.name, plan.attempt)
    with (
        ChunkPool(_READERS, read_ahead=_READ_AHEAD) as pool,
        Uploads(run.store, prefix) as uploads,
    ):
        for table in part.tables:
            merging = _TableMerge(run, plan, sources, table, pool, uploads, on_read)
            merging.run()
        return uploads.finish()


class _TableMerge:
    """One table, from the newest source to the oldest; each row comes along once."""

    def __init__(
        self,
        run: Run,
        plan: ConsolidationPlan,
        sources: list[Manifest],
        table: int,
        pool: ChunkPool,
        uploads: Uploads,
        on_read: Callable[[int], None] | None,
    ) -> None:
        self._store = run.store
        self._spec = sources[-1].tables[table]
        self._target = plan.target
        self._links = [
            (manifest, sorted(entries, key=lambda entry: entry.key))
            for manifest in reversed(sources)
            if (entries := [entry for entry in manifest.chunks if entry.table == table])
        ]
        self._pool = pool
        self._builder = ChunkBuilder(sources[-1], plan.attempt, table, uploads.put)
        self._on_read = on_read

    def run(self) -> None:
        stored = [entry.row_count or 0 for _, entries in self._links for entry in entries]
        for manifest, entries in self._links:
            for entry in entries:
                check_entry(manifest, entry)
        for section, seen in sections_of(self._spec.rows, sum(stored)):
            self._section(section, seen or SeenRows(len(section)))
        self._builder.finish()

    def _section(self, section: range, seen: SeenRows | SeenIds) -> None:
        for manifest, entries in self._links:
            if seen.all:
                break  # what is older holds nothing that counts (format §6.3)
            wanted = [entry for entry in entries if _may_be_in(entry, section)]
            counts = [min(entry.row_count or 0, len(section)) for entry in wanted]
            coverage = RowCoverage(rows=len(section), row_counts=counts)
            read = partial(read_moved, self._store, manifest)
            for entry, outcome in self._pool.in_order(wanted, read):
                moved = outcome.result()
                if self._on_read is not None:
                    self._on_read(entry.bytes)
                self._take(moved, section, seen, coverage)
            coverage.finish(key=Representation.of(manifest).key, table=self._spec.name)
        if self._target.form == "full" and not seen.all:
            raise MalformedObject(
                Representation.of(self._links[-1][0]).key,
                found=f"a full that lacks rows of table {self._spec.name!r:.80}",
                expected="each row",
                next_step="restore an older checkpoint: recpoint list URL",
            )

    def _take(
        self,
        moved: MovedRows,
        section: range,
        seen: SeenRows | SeenIds,
        coverage: RowCoverage,
    ) -> None:
        rows, first = _within(moved, section)
        if not len(rows):
            return
        coverage.add(rows)
        positions = seen.claim(rows)
        self._builder.add(moved, first, first + len(rows), positions)


def _may_be_in(entry: ChunkEntry, section: range) -> bool:
    """By the ends that the manifest says, which a chunk has when it is read (format §6.3 R5)."""
    first, last = entry.first_row, entry.last_row
    assert first is not None and last is not None  # of a chunk of rows
    return first < section.stop and last >= section.start


def _within(moved: MovedRows, section: range) -> tuple[range | Tensor, int]:
    """The ids of a chunk's rows in a section, less the section's start; where they begin."""
    rows = moved.rows
    if isinstance(rows, range):
        first = max(rows.start, section.start)
        stop = max(first, min(rows.stop, section.stop))
        return range(first - section.start, stop - section.start), first - rows.start
    if rows[0] >= section.start and rows[-1] < section.stop:
        return (rows - section.start if section.start else rows), 0
    ends = torch.tensor([section.start, section.stop])
    first, stop = torch.searchsorted(rows, ends).tolist()
    return rows[first:stop] - section.start, first


# --- state and commit ----------------------------------------------------------------------------


def commit_consolidation(
    run: Run, plan: ConsolidationPlan, entries: Iterable[ChunkEntry]
) -> tuple[Literal["created", "already"], Manifest]:
    """Copy the checkpoint's state and create the consolidated manifest. The last step.

    Args:
        run: the run.
        plan: of `plan_consolidation`.
        entries: what `merge_part` returned for every part of the plan.

    Returns:
        `"created"` when this call made it exist, `"already"` when another had; and what is there.

    Raises:
        MissingLink: the checkpoint or its parent has been let go of.
        CommitConflict: what is under the key is another checkpoint's, or another attempt's.
        ObjectNotFound, ChainError, FormatError: a source or one of the new chunks is damaged.
        MalformedObject: the manifest would be too large.
        StoreError: the store cannot be reached or refuses.
    """
    there = _already(run, plan)
    if there is not None:
        return "already", there
    sources = read_sources(run, plan, tables=())
    prefix = attempt_prefix(*plan.target.name, plan.attempt)
    others = [entry for entry in sources[-1].chunks if entry.content != "rows"]
    # Last, and written whatever is there: on a local disk this makes the directory durable, with
    # all that an earlier call had put into it (format §6.8 C4).
    with Uploads(run.store, prefix, trust=False) as uploads:
        for entry in others:
            try:
                chunk = read_chunk(run.store, sources[-1], entry)
            except (FormatError, ObjectNotFound):
                if entry.content == "sample":
                    continue  # no restore needs it (format §3.6)
                raise
            uploads.put(*moved_chunk(chunk, entry, plan.attempt))
        copied = uploads.finish()
    manifest = _manifest(plan, sources, [*entries, *copied])
    data = manifest_bytes(manifest, next_step="nothing: the chain that it has restores it")
    _check_all_there(run, manifest, prefix)
    _check_still_wanted(run, manifest)
    key = plan.target.key
    if create_or_read(run.store, key, data, max_bytes=MAX_RECORD_BYTES) is None:
        return "created", manifest
    there = _already(run, plan)
    if there is None:
        raise MissingLink(
            key, found="no manifest", expected="one just created", next_step="try again"
        )
    return "already", there


def _already(run: Run, plan: ConsolidationPlan) -> Manifest | None:
    """The manifest under the plan's key, if it is of the same checkpoint."""
    try:
        there = run.read_manifest(plan.target)
    except ObjectNotFound:
        return None
    expected = run.manifest(*plan.target.name).attempt
    if there.attempt != expected:
        raise CommitConflict(
            plan.target.key,
            found=f"attempt {there.attempt}",
            expected=f"attempt {expected}",
            next_step="recpoint check URL: one of the two is not what a consolidation made",
        )
    return there


def _manifest(
    plan: ConsolidationPlan, sources: list[Manifest], entries: list[ChunkEntry]
) -> Manifest:
    newest, oldest = sources[-1], sources[0]
    links = newest.links
    if links.base is None or links.parent is None:
        raise ValueError(f"{newest.ref} is a full")
    quantizers: dict[tuple[int, int], Quantizer] = {}
    for source in sources:
        quantizers.update({(known.table, known.rank): known for known in source.quantizers})
    quantized_by = [source.quantized_by for source in sources if source.quantized_by]
    changes = {
        "kind": oldest.kind,
        "base": oldest.base,
        "parent": oldest.parent,
        "chain_length": oldest.chain_length,
        "stands_for": StandsFor(
            base=links.base, parent=links.parent, chain_length=links.chain_length
        ),
        "chunks": tuple(sorted(entries, key=lambda entry: entry.key)),
        "quantizers": tuple(quantizers[at] for at in sorted(quantizers)),
        "quantized_by": quantized_by[-1] if quantized_by else "",
        "state_bits": 16 if any(source.state_bits for source in sources) else None,
        "committed_ms": time.time_ns() // 1_000_000,
        "dirty_rows": sum(entry.row_count or 0 for entry in entries),
        "writer": writer(),
    }
    fields = {name: getattr(newest, name) for name in Manifest.model_fields}
    return Manifest.model_validate(fields | changes)


def _check_all_there(run: Run, manifest: Manifest, prefix: str) -> None:
    sizes = stored_sizes(run.store, prefix)
    for entry in manifest.chunks:
        check_stored(manifest, entry, sizes)


def _check_still_wanted(run: Run, manifest: Manifest) -> None:
    """That the checkpoint, and the parent that the manifest will need, still exist (C5)."""
    for ref in (manifest.ref, manifest.parent):
        if ref is None:
            continue
        name = ManifestName(ref.step, ref.generation)
        try:
            found = run.manifest(*name)
        except ObjectNotFound as error:
            raise MissingLink(
                Representation(name).key,
                found="no manifest any more",
                expected=f"{ref}, which is being consolidated or is the parent",
                next_step="nothing: what has been let go of is not consolidated",
            ) from error
        if found.ref != ref:
            raise CommitConflict(
                Representation(name).key,
                found=f"attempt {found.attempt}",
                expected=f"attempt {ref.attempt}",
                next_step="make a new plan",
            )
