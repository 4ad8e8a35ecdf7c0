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
from typing import Final, Literal

from recpoint.catalog.chunks.chunk_reader import check_stored, read_chunk
from recpoint.catalog.chunks.chunk_source import StoreChunks
from recpoint.catalog.consolidation.consolidate_plan import ConsolidationPlan, read_sources, writer
from recpoint.catalog.consolidation.consolidate_rows import merge_part
from recpoint.catalog.consolidation.consolidate_upload import Uploads, moved_chunk
from recpoint.catalog.records.leases import reading
from recpoint.catalog.runs.commit import manifest_bytes
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.chunks_there import not_there, stored_sizes
from recpoint.catalog.stores.elapsed import host_seconds, now_ms
from recpoint.errors import (
    CommitConflict,
    FormatError,
    MissingLink,
    ObjectNotFound,
)
from recpoint.format.manifest import ChunkEntry, Manifest, Quantizer, StandsFor
from recpoint.format.naming import ManifestName, attempt_prefix, parse_chunk_key
from recpoint.format.record_kinds import CONSOLIDATED

__all__ = ["Consolidated", "commit_consolidation", "consolidate"]

#: What was seen so long ago is looked at again before the manifest is created: a process may have
#: stood still in between, also while the host slept.
_LOOK_AGAIN_SECONDS: Final = 60.0
_LOOKS: Final = 3

#: A chunk that was so old as the manifest was created may have been too old for a sweep that began
#: before; that removes nothing more half of the other time after it has looked.
_OLD_MS: Final = 30 * 60 * 1000
_SWEEPS_END_SECONDS: Final = 20.0

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
    if there is None or _has_gap(run, plan, there):
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
    if there is not None and not _has_gap(run, plan, there):
        return "already", there
    sources = read_sources(run, plan, tables=())
    manifest = _manifest(plan, sources, [*entries, *_copy_state(run, plan, sources[-1])])
    data = manifest_bytes(manifest, next_step="nothing: the chain that it has restores it")
    _look_last(run, manifest, attempt_prefix(*plan.target.name, plan.attempt))
    key, target = plan.target.key, plan.target
    if run.records(CONSOLIDATED).create_packed(data, *target.name, target.after) == "created":
        _make_sure(run, plan, manifest)
        return "created", manifest
    there = _already(run, plan)
    if there is None:
        raise MissingLink(
            key, found="no manifest", expected="one just created", next_step="try again"
        )
    _make_sure(run, plan, there)
    return "already", there


def _copy_state(run: Run, plan: ConsolidationPlan, newest: Manifest) -> tuple[ChunkEntry, ...]:
    # Last, and written whatever is there: on a local disk this makes the directory durable, with
    # all that an earlier call had put into it (format §6.8 C4).
    prefix = attempt_prefix(*plan.target.name, plan.attempt)
    with Uploads(run.store, prefix, trust=False) as uploads:
        for entry in newest.chunks:
            if entry.content == "rows":
                continue
            try:
                chunk = read_chunk(StoreChunks(run.store), newest, entry)
            except (FormatError, ObjectNotFound):
                if entry.content == "sample":
                    continue  # no restore needs it (format §3.6)
                raise
            uploads.put(*moved_chunk(chunk, entry, plan.attempt))
        return uploads.finish()


def _make_sure(run: Run, plan: ConsolidationPlan, there: Manifest) -> None:
    """Write what a sweep has removed since it was looked at: from now on none does (C6)."""
    if _may_be_swept(run, plan, there):
        time.sleep(_SWEEPS_END_SECONDS)
    if not _has_gap(run, plan, there):
        return
    for part in plan.parts:
        merge_part(run, plan, part)
    _copy_state(run, plan, read_sources(run, plan, tables=())[-1])
    _check_all_there(run, there, attempt_prefix(*plan.target.name, plan.attempt))


def _may_be_swept(run: Run, plan: ConsolidationPlan, there: Manifest) -> bool:
    """Whether a sweep that looked before the manifest was there may have found chunks too old."""
    prefix, _, _ = there.chunks[0].key.rpartition("/")
    created = [info.modified_ms for info in run.store.list(plan.target.key)]
    chunks = [info.modified_ms for info in run.store.list(f"{prefix}/")]
    return bool(created and chunks) and max(created) - min(chunks) >= _OLD_MS


def _has_gap(run: Run, plan: ConsolidationPlan, there: Manifest) -> bool:
    """Whether chunks of the manifest under the plan's key are missing that the plan can write."""
    attempt = parse_chunk_key(there.chunks[0].key)
    assert attempt is not None  # ChunkEntry lets no other key through
    missing = not_there(run.store, attempt_prefix(*attempt), there.chunks)
    if missing and attempt.attempt != plan.attempt:
        raise CommitConflict(
            plan.target.key,
            found=f"a manifest of other sources, of which {missing[0].key} is missing",
            expected="none, or one of which all chunks are there",
            next_step="remove it, or consolidate another checkpoint",
        )
    return bool(missing)


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
        "committed_ms": now_ms(),
        "dirty_rows": sum(entry.row_count or 0 for entry in entries),
        "writer": writer(),
    }
    fields = {name: getattr(newest, name) for name in Manifest.model_fields}
    return Manifest.model_validate(fields | changes)


def _look_last(run: Run, manifest: Manifest, prefix: str) -> None:
    """All that C5 asks for, seen right before the manifest is created."""
    for _ in range(_LOOKS):
        began_seconds = host_seconds()
        _check_all_there(run, manifest, prefix)
        _check_still_wanted(run, manifest)
        if host_seconds() - began_seconds < _LOOK_AGAIN_SECONDS:
            return


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
