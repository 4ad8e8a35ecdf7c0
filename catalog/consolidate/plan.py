"""Plans a consolidation and tells if it pays (format §6.8, consolidation order, rules 1, 2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Final, Literal, Self

import zstandard

from recpoint.catalog.consolidate.merge_sizes import MergeSizes, merge_sizes
from recpoint.catalog.consolidate.moves import BUFFERED_BYTES
from recpoint.catalog.persist.plan import CHUNK_BYTES
from recpoint.catalog.restore.rows import SECTION_ROWS, kept_by_ids, sections_touched
from recpoint.catalog.run.chain import Chain, PassedOver, resolve_chain
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts
from recpoint.errors import ChainError, CommitConflict, SettingsError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.paging import pack_manifest

__all__ = [
    "ConsolidationPlan",
    "ConsolidationTriggers",
    "TablesPart",
    "chain_to_merge",
    "newest_checkpoint",
    "plan_consolidation",
    "plan_merge_of",
    "read_sources",
    "writer",
]


#: Increased with every change of the chunks that the same sources yield.
_LAYOUT: Final = 2

#: Most bytes to read for a part of several tables; a larger table is a part of its own.
_PART_BYTES: Final = 512 << 20


Trigger = Literal["links", "restore_ratio", "dead_share"]


@dataclass(frozen=True, kw_only=True)
class ConsolidationTriggers:
    """The thresholds at which a consolidation pays; reaching any of them suffices.

    Attributes:
        links: number of manifests that a restore reads; each costs requests, whatever its size.
        restore_ratio: bytes that a restore reads now, divided by the bytes afterwards.
        dead_share: share of the stored rows that newer rows have replaced, which retention can
            free.

    Raises:
        SettingsError: a threshold is below its least value.
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
        """Return triggers with the given thresholds, and the defaults of the others.

        Raises:
            SettingsError: a threshold is below its least value.
        """
        settings: dict[str, Any] = {"links": links, "restore_ratio": restore_ratio}
        settings["dead_share"] = dead_share
        return replace(
            cls(), **{name: value for name, value in settings.items() if value is not None}
        )

    def reached(self, merge: MergeSizes) -> dict[Trigger, str]:
        """Return the triggers that a chain has reached, judged by a merge of it, each as text."""
        reasons: dict[Trigger, str] = {}
        if merge.links_before >= self.links:
            reasons["links"] = f"a restore reads {merge.links_before} manifests"
        bytes_before, bytes_after = merge.restore_bytes_before, merge.restore_bytes_after
        if bytes_after and bytes_before / bytes_after >= self.restore_ratio:
            reasons["restore_ratio"] = (
                f"a restore reads {bytes_before / bytes_after:.2f} times what it has to"
            )
        dead, stored = merge.dead_rows, merge.merged_rows
        if dead is not None and stored and dead / stored >= self.dead_share:
            reasons["dead_share"] = f"{dead / stored:.0%} of the stored rows are dead"
        return reasons

    def __post_init__(self) -> None:
        for name, least in (("links", 2), ("restore_ratio", 1), ("dead_share", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise SettingsError(
                    name,
                    found=str(value),
                    expected=f"{least} or more",
                    next_step="correct the trigger",
                )


@dataclass(frozen=True)
class TablesPart:
    """Tables, by index, that one step merges; independent of the other parts."""

    index: int
    tables: tuple[int, ...]
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class ConsolidationPlan:
    """What a consolidation would do, from manifests alone; it has plain values, so it pickles.

    Attributes:
        target: the representation to make.
        attempt: the attempt in its chunks' keys; it follows from the sources (format §6.8,
            consolidation order, rule 2).
        sources: the manifests to merge, oldest first; empty if there is nothing to do.
        parts: the work on rows, in steps.
        links_before, links_after, read_bytes, write_bytes, write_rows, restore_bytes_before,
            restore_bytes_after: see `MergeSizes`.
        state_bytes: the share of `read_bytes` that is state and samples.
        frees_bytes: bytes of the sources, which are freed after retention has deleted all of them.
        stored_rows: rows stored in the sources.
        dead_rows: number of these rows that newer ones have replaced; None if only reading chunks
            can tell.
        pays: whether a trigger is reached.
        is_held_back: whether a trigger is reached, and no merge is sure to have a manifest that
            readers accept.
        reason: the trigger, or why there is nothing to do.
        passed_over: damaged manifests that a shorter chain would have used.
        merges: all merges that the chain allows, this one included; see `merge_sizes`.
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
    is_held_back: bool = False
    reason: str
    passed_over: tuple[PassedOver, ...] = ()
    merges: tuple[MergeSizes, ...] = ()

    @property
    def needed(self) -> bool:
        """Whether there is anything to merge."""
        return bool(self.sources)

    @property
    def dead_share(self) -> float | None:
        """Share of dead rows in the stored rows; None if only reading chunks can tell."""
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
    """Plan the consolidation of a checkpoint, as the first step; nothing is changed.

    Args:
        run: the run.
        name: the checkpoint.
        links: merge the newest `links` manifests of its chain into one increment; None, or as many
            as the chain has or more: merge the whole chain into a full, or, if there are residuals,
            all increments into one.
        triggers: the thresholds at which it pays; None: the defaults.
        avoid: manifests not to use, because they name chunks that were found damaged; a plan does
            not read chunks.

    Raises:
        SettingsError: `links` is less than 2.
        CommitConflict: a damaged consolidated manifest is in the way.
        ObjectNotFound, ChainError, FormatError: the checkpoint's chain is damaged, or a validation
            says so. Its rows must not be merged with others, because nothing would tell them apart.
        StoreError: the store cannot be read.
    """
    if links is not None and links < 2:
        raise SettingsError(
            "links", found=str(links), expected="2 or more", next_step="leave it out for a full"
        )
    chain = chain_to_merge(run, name, avoid=avoid)
    return plan_merge_of(run, chain, links=links, triggers=triggers or ConsolidationTriggers())


def chain_to_merge(run: Run, name: ManifestName, *, avoid: Sequence[PassedOver] = ()) -> Chain:
    """Return the chain to make a plan of; see `plan_consolidation` for arguments and errors."""
    chain = resolve_chain(run, name, avoid=[damaged.key for damaged in avoid])
    doubt = Doubts(run, validated_only=False).about(name)
    if doubt is not None:
        raise ChainError(
            Representation(name).key,
            found=doubt,
            expected="a checkpoint that a restore takes without being told its step",
            next_step=f"consolidate an older one; or: recpoint validate {run.url} --step "
            f"{name.step} --level full, which may prove it good",
        )
    return replace(chain, passed_over=(*avoid, *chain.passed_over))


def plan_merge_of(
    run: Run, chain: Chain, *, links: int | None, triggers: ConsolidationTriggers
) -> ConsolidationPlan:
    """Return the plan for one merge of a chain; see `plan_consolidation`.

    Args:
        run: the run.
        chain: from `chain_to_merge`.
        links: 2 or more, or None.
        triggers: the thresholds at which it pays.

    Raises:
        CommitConflict: a damaged consolidated manifest is in the way.
    """
    manifests = chain.manifests
    newest = chain.newest
    name = ManifestName(newest.step, newest.generation)
    merges = merge_sizes(manifests)
    if not merges:
        stored_bytes = sum(manifest.stored_bytes for manifest in manifests)
        return ConsolidationPlan(
            target=Representation(name, "full"),
            links_before=len(manifests),
            links_after=len(manifests),
            restore_bytes_before=stored_bytes,
            restore_bytes_after=stored_bytes,
            reason="a full restores it already"
            if len(manifests) == 1
            else "one increment of residuals, which are not merged into a full, restores it",
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
                expected="no manifest, or a good one",
                next_step="remove it, or consolidate another checkpoint",
            )
    reasons = triggers.reached(sizes).values()
    return ConsolidationPlan(
        target=target,
        attempt=_attempt(run, target, newest.attempt, [_digest(source) for source in merged]),
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
    """Read the manifests that a plan merges, oldest first, and check that they have not changed.

    Only one at a time is whole in memory, because each may name millions of chunks.

    Args:
        run: the run.
        plan: from `plan_consolidation`.
        tables: indices of tables; the returned manifests keep only the row chunks of these.

    Raises:
        ObjectNotFound: a manifest has been deleted meanwhile.
        ChainError: a manifest has changed; make a new plan.
        FormatError: a manifest is damaged.
    """
    table_numbers = frozenset(tables)
    read = [_read_source(run, source, table_numbers) for source in plan.sources]
    sources = [manifest for manifest, _ in read]
    digests = [digest for _, digest in read]
    if _attempt(run, plan.target, sources[-1].attempt, digests) != plan.attempt:
        raise ChainError(
            plan.target.key,
            found="other manifests, or another version of recpoint, than the plan was made with",
            expected="the manifests and the version that the plan was made with",
            next_step="make a new plan",
        )
    return sources


def _read_source(run: Run, source: Representation, tables: frozenset[int]) -> tuple[Manifest, str]:
    """Read a manifest; return it with row chunks of `tables` only, and the digest of the whole."""
    whole = run.read_manifest(source)
    kept_entries = tuple(
        entry for entry in whole.chunks if entry.table is None or entry.table in tables
    )
    return whole.model_copy(update={"chunks": kept_entries}), _digest(whole)


@cache
def writer() -> str:
    """Return the `writer` field of a consolidated manifest."""
    return f"recpoint {version('recpoint')}"


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(pack_manifest(manifest).record).hexdigest()


def _attempt(run: Run, target: Representation, attempt: str, digests: Sequence[str]) -> str:
    """Return a 128-bit hash of everything that determines the bytes of the chunks, in hex.

    It is the attempt of the consolidation (format §6.8, consolidation order, rule 2).

    Args:
        run: the run.
        target: the representation to make.
        attempt: the checkpoint's own attempt.
        digests: SHA-256 digests of the sources in hex, oldest first.
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
            continue  # the sources have no rows of this table
        if tables and total + size > _PART_BYTES:
            parts.append(TablesPart(len(parts), tuple(tables), total))
            tables, total = [], 0
        tables.append(table)
        total += size
    if tables:
        parts.append(TablesPart(len(parts), tuple(tables), total))
    return tuple(parts)


def newest_checkpoint(run: Run) -> ManifestName | None:
    """Return the newest checkpoint of the live line, whose chain a restore would read."""
    return next(iter(run.live_line()), None)
