"""What a consolidation would read, write and free, and whether it pays (format §6.8 C1, C2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Final, Literal, Self

import zstandard

from recpoint.catalog.chunks.seen_rows import SECTION_ROWS, kept_by_ids, sections_touched
from recpoint.catalog.consolidation.merge_sizes import MergeSizes, merge_sizes
from recpoint.catalog.consolidation.row_moves import BUFFERED_BYTES
from recpoint.catalog.persist.plan import CHUNK_BYTES
from recpoint.catalog.records.validations import Doubts
from recpoint.catalog.runs.chain import Chain, PassedOver, resolve_chain
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.errors import ChainError, CommitConflict, SettingsError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.records import pack_record

__all__ = [
    "ConsolidationPlan",
    "ConsolidationTriggers",
    "TablesPart",
    "Trigger",
    "chain_to_merge",
    "plan_consolidation",
    "plan_merge_of",
    "read_sources",
    "writer",
]

#: Raised with every change of which chunks come out of the same sources.
_LAYOUT: Final = 2

#: Bytes to read for a part of several tables; a larger table is a part of its own.
_PART_BYTES: Final = 512 << 20


Trigger = Literal["links", "restore_ratio", "dead_share"]


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

    def reached(self, merge: MergeSizes) -> dict[Trigger, str]:
        """Those that a chain has reached, by what a merge of it would gain, and in words."""
        found: dict[Trigger, str] = {}
        if merge.links_before >= self.links:
            found["links"] = f"a restore reads {merge.links_before} manifests"
        before, after = merge.restore_bytes_before, merge.restore_bytes_after
        if after and before / after >= self.restore_ratio:
            found["restore_ratio"] = f"a restore reads {before / after:.2f} times what it has to"
        dead, stored = merge.dead_rows, merge.merged_rows
        if dead is not None and stored and dead / stored >= self.dead_share:
            found["dead_share"] = f"{dead / stored:.0%} of the stored rows are dead"
        return found

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
        links_before, links_after, read_bytes, write_bytes, write_rows, restore_bytes_before,
            restore_bytes_after: see `MergeSizes`.
        state_bytes: of `read_bytes` those of the state and the samples.
        frees_bytes: of the sources, once retention lets all of them go.
        stored_rows: in the sources.
        dead_rows: of those, that newer ones have replaced; None if not known before reading.
        pays: whether a trigger is reached.
        reason: which one, or why there is nothing to do.
        passed_over: damaged manifests that a shorter chain would have used.
        merges: everything that the chain allows, this plan among it; see `merge_sizes`.
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
    merges: tuple[MergeSizes, ...] = ()

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
    chain = chain_to_merge(run, name, avoid=avoid)
    return plan_merge_of(run, chain, links=links, triggers=triggers or ConsolidationTriggers())


def chain_to_merge(run: Run, name: ManifestName, *, avoid: Sequence[PassedOver] = ()) -> Chain:
    """The chain that a plan is made of; see `plan_consolidation` for arguments and errors."""
    chain = resolve_chain(run, name, avoid=[one.key for one in avoid])
    doubt = Doubts(run, validated_only=False).about(name)
    if doubt is not None:
        raise ChainError(
            Representation(name).key,
            found=doubt,
            expected="a checkpoint that a reader takes unasked",
            next_step=f"consolidate an older one; or: recpoint validate {run.url} --step "
            f"{name.step} --level full, which may prove it good",
        )
    return replace(chain, passed_over=(*avoid, *chain.passed_over))


def plan_merge_of(
    run: Run, chain: Chain, *, links: int | None, triggers: ConsolidationTriggers
) -> ConsolidationPlan:
    """The plan for one merge of a chain; see `plan_consolidation`.

    Args:
        run: the run.
        chain: of `chain_to_merge`.
        links: 2 or more, or None.
        triggers: from when on it pays.

    Raises:
        CommitConflict: a damaged consolidated manifest is in the way.
    """
    manifests = chain.manifests
    newest = chain.newest
    name = ManifestName(newest.step, newest.generation)
    merges = merge_sizes(manifests)
    if not merges:
        return ConsolidationPlan(
            target=Representation(name, "full"),
            links_before=1,
            links_after=1,
            restore_bytes_before=newest.stored_bytes,
            restore_bytes_after=newest.stored_bytes,
            reason="a full restores it already",
            passed_over=chain.passed_over,
        )
    sizes = merges[-1 if links is None or links >= len(manifests) else links - 2]
    merged = manifests[len(manifests) - sizes.merged :]
    target = Representation(name, "full")
    parent = merged[0].parent
    if not sizes.into_full and parent is not None:
        target = Representation(name, "after", parent.step)
    for damaged in chain.passed_over:
        if damaged.key == target.key:
            raise CommitConflict(
                target.key,
                found=f"a damaged manifest, or one of damaged chunks ({damaged.error})",
                expected="none, or a good one",
                next_step="remove it, or consolidate another checkpoint",
            )
    reasons = triggers.reached(sizes).values()
    return ConsolidationPlan(
        target=target,
        attempt=_attempt(run, target, newest.attempt, [_digest(one) for one in merged]),
        sources=tuple(Representation.of(manifest) for manifest in merged),
        parts=_parts(merged),
        links_before=sizes.links_before,
        links_after=sizes.links_after,
        read_bytes=sizes.read_bytes,
        state_bytes=sum(entry.bytes for entry in newest.chunks if entry.table is None),
        write_bytes=sizes.write_bytes,
        write_rows=sizes.write_rows,
        frees_bytes=sum(manifest.stored_bytes for manifest in merged),
        restore_bytes_before=sizes.restore_bytes_before,
        restore_bytes_after=sizes.restore_bytes_after,
        stored_rows=sizes.merged_rows,
        dead_rows=sizes.dead_rows,
        pays=bool(reasons),
        reason="; ".join(reasons) or "no trigger is reached",
        passed_over=chain.passed_over,
        merges=merges,
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
        by_ids = kept_by_ids(specs[table].rows, stored[table])
        sizes[table] += entry.bytes * (1 if by_ids else sections_touched(first, last))
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
