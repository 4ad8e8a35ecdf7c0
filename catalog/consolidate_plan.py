"""What a consolidation would read, write and free, and whether it pays (format §6.8 C1, C2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Final, Self

import zstandard

from recpoint.catalog.chain import PassedOver, resolve_chain
from recpoint.catalog.lineage import ManifestName, Representation
from recpoint.catalog.live_rows import Live, most_live
from recpoint.catalog.persist_plan import CHUNK_BYTES
from recpoint.catalog.row_moves import BUFFERED_BYTES
from recpoint.catalog.run import Run
from recpoint.catalog.seen_rows import SECTION_ROWS, sections_touched
from recpoint.catalog.validations import Doubts
from recpoint.errors import ChainError, CommitConflict, SettingsError
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.records import pack_record

__all__ = [
    "ConsolidationPlan",
    "ConsolidationTriggers",
    "TablesPart",
    "plan_consolidation",
    "read_sources",
    "writer",
]

#: Raised with every change of which chunks come out of the same sources.
_LAYOUT: Final = 2

#: Bytes to read for a part of several tables; a larger table is a part of its own.
_PART_BYTES: Final = 512 << 20


@dataclass(frozen=True, kw_only=True)
class ConsolidationTriggers:
    """From when on a consolidation pays; each is reason enough.

    Attributes:
        links: manifests that a restore reads: each costs requests, whatever its size.
        restore_ratio: bytes that a restore reads now, for one that it would read afterwards.
        dead_share: share of the stored rows that newer ones have replaced; what retention can
            free.
    """

    links: int = 16
    restore_ratio: float = 1.5
    dead_share: float = 0.5

    @classmethod
    def chosen(
        cls,
        *,
        links: int | None = None,
        restore_ratio: float | None = None,
        dead_share: float | None = None,
    ) -> Self:
        """Those that are given, and the defaults of the others.

        Raises:
            SettingsError: one is out of its range.
        """
        given: dict[str, Any] = {"links": links, "restore_ratio": restore_ratio}
        given["dead_share"] = dead_share
        return replace(cls(), **{name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        for name, least in (("links", 2), ("restore_ratio", 1), ("dead_share", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise SettingsError(
                    name, found=str(value), expected=f"{least} or more", next_step="correct it"
                )


@dataclass(frozen=True)
class TablesPart:
    """Tables, by index, that one step merges; independent of the other parts."""

    index: int
    tables: tuple[int, ...]
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class ConsolidationPlan:
    """What a consolidation would do. Made by reading manifests alone; plain values, so it pickles.

    Attributes:
        target: the representation to make.
        attempt: under which its chunks lie: follows from the sources (format §6.8 C2).
        sources: what is merged, oldest first; empty when there is nothing to do.
        parts: the work on rows, in steps.
        links_before, links_after: manifests that a restore reads.
        read_bytes: of the sources' rows and of the newest state. A chunk counts once for each
            section of a large table (`seen_rows.SECTION_ROWS`) that it may hold rows of; less is
            read where newer links turn out to hold every row.
        state_bytes: of these those of the state and the samples.
        write_bytes: into a full: its rows at the mean size of those stored; into an increment: at
            most, since which rows two links share follows from their ends only (`live_rows`).
        write_rows: rows in the chunks to be written; of an increment, too, at most.
        frees_bytes: of the sources, once retention lets all of them go.
        restore_bytes_before, restore_bytes_after: that a restore reads; after as for
            `write_bytes`.
        stored_rows: in the sources.
        dead_rows: of those, that newer ones have replaced; None if not known before reading.
        pays: whether a trigger is reached.
        reason: which one, or why there is nothing to do.
        passed_over: damaged manifests that a shorter chain would have used.
    """

    target: Representation
    attempt: str = ""
    sources: tuple[Representation, ...] = ()
    parts: tuple[TablesPart, ...] = ()
    links_before: int
    links_after: int
    read_bytes: int = 0
    state_bytes: int = 0
    write_bytes: int = 0
    write_rows: int = 0
    frees_bytes: int = 0
    restore_bytes_before: int
    restore_bytes_after: int
    stored_rows: int = 0
    dead_rows: int | None = None
    pays: bool = False
    reason: str
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def needed(self) -> bool:
        """Whether there is anything to merge."""
        return bool(self.sources)

    @property
    def dead_share(self) -> float | None:
        """Dead rows among those stored; None if not known before reading."""
        if self.dead_rows is None or not self.stored_rows:
            return None
        return self.dead_rows / self.stored_rows


def plan_consolidation(
    run: Run,
    name: ManifestName,
    *,
    links: int | None = None,
    triggers: ConsolidationTriggers | None = None,
    avoid: Sequence[PassedOver] = (),
) -> ConsolidationPlan:
    """Find out what consolidating a checkpoint would do; nothing is changed. The first step.

    Args:
        run: the run.
        name: the checkpoint.
        links: merge its newest `links` manifests into one increment; None, or all there are: the
            whole chain into a full.
        triggers: from when on it pays; the defaults if None.
        avoid: manifests to do without: they name chunks that were found damaged, which a plan
            does not look at.

    Raises:
        SettingsError: fewer than 2 links.
        CommitConflict: a damaged consolidated manifest is in the way.
        ObjectNotFound, ChainError, FormatError: the checkpoint's chain is damaged, or a validation
            says so: once its rows are among others, nothing would tell them apart.
        StoreError: the store cannot be read.
    """
    if links is not None and links < 2:
        raise SettingsError(
            "links", found=str(links), expected="2 or more", next_step="leave it out for a full"
        )
    chain = resolve_chain(run, name, avoid=[one.key for one in avoid])
    passed_over = (*avoid, *chain.passed_over)
    doubt = Doubts(run, validated_only=False).about(name)
    if doubt is not None:
        raise ChainError(
            Representation(name).key,
            found=doubt,
            expected="a checkpoint that a reader takes unasked",
            next_step=f"consolidate an older one; or: recpoint validate {run.url} --step "
            f"{name.step} --level full, which may prove it good",
        )
    manifests = chain.manifests
    into_full = links is None or links >= len(manifests)
    merged = manifests if into_full else manifests[len(manifests) - (links or 0) :]
    before = sum(_row_bytes(manifests)) + _state_bytes(chain.newest)
    target = Representation(name, "full")
    parent = merged[0].parent
    if not into_full and parent is not None:
        target = Representation(name, "after", parent.step)
    if len(merged) < 2:
        return ConsolidationPlan(
            target=target,
            links_before=len(manifests),
            links_after=len(manifests),
            restore_bytes_before=before,
            restore_bytes_after=before,
            reason="a full restores it already",
            passed_over=passed_over,
        )
    for damaged in passed_over:
        if damaged.key == target.key:
            raise CommitConflict(
                target.key,
                found=f"a damaged manifest, or one of damaged chunks ({damaged.error})",
                expected="none, or a good one",
                next_step="remove it, or consolidate another checkpoint",
            )
    plan = _planned(run, target, manifests, merged, triggers or ConsolidationTriggers())
    return replace(plan, passed_over=passed_over)


def _planned(
    run: Run,
    target: Representation,
    manifests: Sequence[Manifest],
    merged: Sequence[Manifest],
    triggers: ConsolidationTriggers,
) -> ConsolidationPlan:
    newest = merged[-1]
    parts = _parts(merged)
    stored_rows = sum(entry.row_count or 0 for manifest in merged for entry in manifest.chunks)
    dead_rows: int | None = None
    written = most_live(entry for manifest in merged for entry in manifest.chunks)
    if target.form == "full":
        written = Live(sum(spec.rows for spec in newest.tables), _rows_of_a_full(merged))
        dead_rows = stored_rows - written.rows
    state = _state_bytes(newest)
    rest = manifests[: len(manifests) - len(merged)]
    before = sum(_row_bytes(manifests)) + state
    after = sum(_row_bytes(rest)) + written.size_bytes + state
    links_before, links_after = len(manifests), len(rest) + 1
    reasons = [f"a restore reads {links_before} manifests"] * (links_before >= triggers.links)
    if after and before / after >= triggers.restore_ratio:
        reasons.append(f"a restore reads {before / after:.2f} times what it has to")
    if dead_rows is not None and stored_rows and dead_rows / stored_rows >= triggers.dead_share:
        reasons.append(f"{dead_rows / stored_rows:.0%} of the stored rows are dead")
    return ConsolidationPlan(
        target=target,
        attempt=_attempt(run, target, newest.attempt, [_digest(one) for one in merged]),
        sources=tuple(Representation.of(manifest) for manifest in merged),
        parts=parts,
        links_before=links_before,
        links_after=links_after,
        read_bytes=sum(part.read_bytes for part in parts) + state,
        state_bytes=state,
        write_bytes=written.size_bytes + state,
        write_rows=written.rows,
        frees_bytes=sum(manifest.stored_bytes for manifest in merged),
        restore_bytes_before=before,
        restore_bytes_after=after,
        stored_rows=stored_rows,
        dead_rows=dead_rows,
        pays=bool(reasons),
        reason="; ".join(reasons) or "no trigger is reached",
    )


def read_sources(run: Run, plan: ConsolidationPlan, *, tables: Collection[int]) -> list[Manifest]:
    """The manifests that a plan merges, oldest first, and that they are still those.

    One at a time is in memory whole, since each may name millions of chunks.

    Args:
        run: the run.
        plan: of `plan_consolidation`.
        tables: of chunks of rows they keep those of these tables, by index, and no others.

    Raises:
        ObjectNotFound: one has been let go of since.
        ChainError: one is another than it was; make a new plan.
        FormatError: one is damaged.
    """
    wanted = frozenset(tables)
    read = [_read_source(run, one, wanted) for one in plan.sources]
    sources = [manifest for manifest, _ in read]
    digests = [digest for _, digest in read]
    if _attempt(run, plan.target, sources[-1].attempt, digests) != plan.attempt:
        raise ChainError(
            plan.target.key,
            found="other manifests, or another version of recpoint, than the plan was made with",
            expected="the same",
            next_step="make a new plan",
        )
    return sources


def _read_source(run: Run, source: Representation, tables: frozenset[int]) -> tuple[Manifest, str]:
    """A manifest that names no rows but those of some tables, and the digest of all of it."""
    whole = run.read_manifest(source)
    kept = tuple(entry for entry in whole.chunks if entry.table is None or entry.table in tables)
    return whole.model_copy(update={"chunks": kept}), _digest(whole)


@cache
def writer() -> str:
    """What a consolidated manifest says of who wrote it."""
    return f"recpoint {version('recpoint')}"


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(pack_record(manifest)).hexdigest()


def _attempt(run: Run, target: Representation, attempt: str, digests: Sequence[str]) -> str:
    """Everything that the bytes of the chunks follow from, in 128 bits (format §6.8 C2).

    Args:
        run: the run.
        target: the representation to make.
        attempt: the checkpoint's own.
        digests: of the sources, oldest first.
    """
    made_of = [
        "recpoint/consolidation",
        [_LAYOUT, CHUNK_BYTES, BUFFERED_BYTES, SECTION_ROWS],
        [writer(), ".".join(map(str, zstandard.ZSTD_VERSION))],
        [run.id, target.key, attempt],
        list(digests),
    ]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


def _row_bytes(manifests: Sequence[Manifest]) -> list[int]:
    return [
        sum(entry.bytes for entry in manifest.chunks if _is_rows(entry)) for manifest in manifests
    ]


def _state_bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.chunks if not _is_rows(entry))


def _is_rows(entry: ChunkEntry) -> bool:
    return entry.table is not None


def _rows_of_a_full(merged: Sequence[Manifest]) -> int:
    """Bytes of every table's rows at the mean size of those stored."""
    sizes = [0] * len(merged[-1].tables)
    rows = [0] * len(sizes)
    for manifest in merged:
        for entry in manifest.chunks:
            if entry.table is not None:
                sizes[entry.table] += entry.bytes
                rows[entry.table] += entry.row_count or 0
    specs = merged[-1].tables
    return sum(
        size * spec.rows // max(1, stored)
        for size, spec, stored in zip(sizes, specs, rows, strict=True)
    )


def _parts(merged: Sequence[Manifest]) -> tuple[TablesPart, ...]:
    specs = merged[-1].tables
    entries = [entry for manifest in merged for entry in manifest.chunks]
    stored = [0] * len(specs)
    for entry in entries:
        if entry.table is not None:
            stored[entry.table] += entry.row_count or 0
    sizes = [0] * len(specs)
    for entry in entries:
        table, first, last = entry.table, entry.first_row, entry.last_row
        if table is None or first is None or last is None:
            continue
        rows = specs[table].rows
        sizes[table] += entry.bytes * sections_touched(
            first, last, rows=rows, stored_rows=stored[table]
        )
    parts: list[TablesPart] = []
    tables: list[int] = []
    total = 0
    for table, size in enumerate(sizes):
        if not size:
            continue  # an increment without rows of it
        if tables and total + size > _PART_BYTES:
            parts.append(TablesPart(len(parts), tuple(tables), total))
            tables, total = [], 0
        tables.append(table)
        total += size
    if tables:
        parts.append(TablesPart(len(parts), tuple(tables), total))
    return tuple(parts)
