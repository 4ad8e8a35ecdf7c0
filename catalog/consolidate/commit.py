"""Commits a consolidation: copies the checkpoint's state and creates the manifest (format §6.8)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Literal

from recpoint.catalog.consolidate.merge import Uploads, merge_part, moved_chunk
from recpoint.catalog.consolidate.plan import ConsolidationPlan, read_sources, writer
from recpoint.catalog.restore.chunks import StoreChunks, check_stored, read_chunk
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.manifest_pages import packed_manifest, write_pages
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.stored_chunks import not_there, stored_sizes
from recpoint.catalog.store.contract import host_seconds, now_ms
from recpoint.errors import CommitConflict, FormatError, MissingLink, ObjectNotFound
from recpoint.format.manifest import (
    CheckedStripes,
    ChunkEntry,
    Manifest,
    Quantizer,
    StandsFor,
    StoredPage,
    least_bits,
)
from recpoint.format.naming import ManifestName, attempt_prefix, parse_chunk_key
from recpoint.format.paging import pack_manifest
from recpoint.format.record_kinds import CONSOLIDATED

__all__ = [
    "committed_manifest",
    "has_gap",
    "commit_consolidation",
]


#: If the checks before the commit took longer than this, they are made again, because the process
#: may have stood still in between, also while the host slept.
_LOOK_AGAIN_SECONDS: Final = 60.0
_LOOKS: Final = 3
#: A chunk that was this old when the manifest was created may have been too old for a sweep that
#: began before. Such a sweep stops removing at half of the second time after its own look.
_OLD_MS: Final = 30 * 60 * 1000
_SWEEPS_END_SECONDS: Final = 20.0


def commit_consolidation(
    run: Run, plan: ConsolidationPlan, entries: Iterable[ChunkEntry]
) -> tuple[Literal["created", "already"], Manifest]:
    """Copy the checkpoint's state and create the consolidated manifest, as the last step.

    Args:
        run: the run.
        plan: from `plan_consolidation`.
        entries: the entries that `merge_part` returned for every part of the plan.

    Returns:
        `"created"` if this call created the manifest, `"already"` if another had; and the manifest.

    Raises:
        MissingLink: the checkpoint or its parent has been deleted.
        CommitConflict: the key has a manifest of another checkpoint or another attempt.
        ObjectNotFound, ChainError, FormatError: a source or one of the new chunks is damaged.
        MalformedObject: the manifest would be too large.
        StoreError: the store cannot be reached or refuses.
    """
    stored_manifest = committed_manifest(run, plan)
    if stored_manifest is not None and not has_gap(run, plan, stored_manifest):
        return "already", stored_manifest
    sources = read_sources(run, plan, tables=())
    manifest = _manifest(plan, sources, [*entries, *_copy_state(run, plan, sources[-1])])
    packed = packed_manifest(
        manifest, next_step="nothing: the chain that the checkpoint has restores it"
    )
    write_pages(run.store, packed)
    manifest.read_from([page for page, _ in packed.pages])
    _look_last(run, manifest, attempt_prefix(*plan.target.name, plan.attempt))
    key, target = plan.target.key, plan.target
    if (
        run.records(CONSOLIDATED).create_packed(packed.record, *target.name, target.after)
        == "created"
    ):
        _make_sure(run, plan, manifest)
        return "created", manifest
    stored_manifest = committed_manifest(run, plan)
    if stored_manifest is None:
        raise MissingLink(
            key,
            found="no manifest",
            expected="the manifest that another consolidation has just created",
            next_step="run the consolidation again",
        )
    _make_sure(run, plan, stored_manifest)
    return "already", stored_manifest


def _copy_state(run: Run, plan: ConsolidationPlan, newest: Manifest) -> tuple[ChunkEntry, ...]:
    # Always written, after everything else: on a local disk this makes the directory durable with
    # all chunks that an earlier call has put into it (format §6.8, consolidation order, rule 4).
    prefix = attempt_prefix(*plan.target.name, plan.attempt)
    with Uploads(run.store, prefix, trust=False) as uploads:
        for entry in newest.chunks:
            if entry.content == "rows":
                continue
            try:
                chunk = read_chunk(StoreChunks(run.store), newest, entry)
            except (FormatError, ObjectNotFound):
                if entry.content == "sample":
                    continue  # no restore needs samples (format §3.6)
                raise
            uploads.put(*moved_chunk(chunk, entry, plan.attempt))
        return uploads.finish()


def _make_sure(run: Run, plan: ConsolidationPlan, manifest: Manifest) -> None:
    """Write again what a sweep has removed since the checks (consolidation order, rule 6, §6.8).

    After this no sweep removes any of these chunks.
    """
    if _may_be_swept(run, plan, manifest):
        time.sleep(_SWEEPS_END_SECONDS)
    if not has_gap(run, plan, manifest):
        return
    for part in plan.parts:
        merge_part(run, plan, part)
    _copy_state(run, plan, read_sources(run, plan, tables=())[-1])
    write_pages(run.store, pack_manifest(manifest))
    _check_all_there(run, manifest, attempt_prefix(*plan.target.name, plan.attempt))


def _may_be_swept(run: Run, plan: ConsolidationPlan, manifest: Manifest) -> bool:
    """Tell whether a sweep that looked before the manifest existed may have removed old chunks."""
    prefix, _, _ = manifest.chunks[0].key.rpartition("/")
    created = [info.modified_ms for info in run.store.list(plan.target.key)]
    chunks = [info.modified_ms for info in run.store.list(f"{prefix}/")]
    return bool(created and chunks) and max(created) - min(chunks) >= _OLD_MS


def has_gap(run: Run, plan: ConsolidationPlan, manifest: Manifest) -> bool:
    """Tell whether chunks of the existing manifest are missing; the plan can write them again.

    Raises:
        CommitConflict: chunks are missing, but the manifest is of other sources than the plan's.
    """
    attempt = parse_chunk_key(manifest.chunks[0].key)
    assert attempt is not None  # ChunkEntry accepts only keys of chunks
    named: tuple[ChunkEntry | StoredPage, ...] = (*manifest.chunks, *manifest.pages)
    missing = not_there(run.store, attempt_prefix(*attempt), named)
    if missing and attempt.attempt != plan.attempt:
        raise CommitConflict(
            plan.target.key,
            found=f"a manifest of other sources, whose chunk {missing[0].key} is missing",
            expected="no manifest, or one whose chunks are all there",
            next_step="remove it, or consolidate another checkpoint",
        )
    return bool(missing)


def committed_manifest(run: Run, plan: ConsolidationPlan) -> Manifest | None:
    """Return the manifest under the plan's key; None if there is none.

    Raises:
        CommitConflict: the manifest is of another attempt.
    """
    try:
        manifest = run.read_manifest(plan.target)
    except ObjectNotFound:
        return None
    expected = run.manifest(*plan.target.name).attempt
    if manifest.attempt != expected:
        raise CommitConflict(
            plan.target.key,
            found=f"attempt {manifest.attempt}",
            expected=f"attempt {expected}",
            next_step="recpoint check URL; the two manifests contradict each other",
        )
    return manifest


def _manifest(
    plan: ConsolidationPlan, sources: list[Manifest], entries: list[ChunkEntry]
) -> Manifest:
    newest, oldest = sources[-1], sources[0]
    links = newest.links
    if links.base is None or links.parent is None:
        raise ValueError(f"{newest.ref} is a full")
    quantizers: dict[tuple[int, int], Quantizer] = {}
    for source in sources:
        quantizers.update(
            {(quantizer.table, quantizer.rank): quantizer for quantizer in source.quantizers}
        )
    quantized_by = [source.quantized_by for source in sources if source.quantized_by]
    changes = {
        "kind": oldest.kind,
        "base": oldest.base,
        "parent": oldest.parent,
        "chain_length": oldest.chain_length,
        # Chunks and quantizers keep the number of the part that they came with.
        "servers": max(source.servers or 0 for source in sources) or None,
        "stands_for": StandsFor(
            base=links.base, parent=links.parent, chain_length=links.chain_length
        ),
        "chunks": tuple(sorted(entries, key=lambda entry: entry.key)),
        "quantizers": tuple(quantizers[table_and_rank] for table_and_rank in sorted(quantizers)),
        "quantized_by": quantized_by[-1] if quantized_by else "",
        "state_bits": least_bits(source.state_bits for source in sources),
        "committed_ms": now_ms(),
        "stripes": CheckedStripes.joined(source.stripes for source in sources),
        "dirty_rows": sum(entry.row_count or 0 for entry in entries),
        "writer": writer(),
    }
    fields = {name: getattr(newest, name) for name in Manifest.model_fields}
    return Manifest.model_validate(fields | changes)


def _look_last(run: Run, manifest: Manifest, prefix: str) -> None:
    """Make the checks of consolidation order, rule 5 (format §6.8), right before the commit."""
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
    for page in (page for page in manifest.pages if sizes.get(page.key) != page.bytes):
        raise ObjectNotFound(
            page.key,
            found="no page of this length",
            expected=f"{page.bytes} bytes, as {Representation.of(manifest).key} will say",
            next_step="run the consolidation again",
        )


def _check_still_wanted(run: Run, manifest: Manifest) -> None:
    """Check that the checkpoint, and the parent that the manifest will need, still exist.

    Rule 5 of the consolidation order requires this (format §6.8).
    """
    for ref in (manifest.ref, manifest.parent):
        if ref is None:
            continue
        name = ManifestName(ref.step, ref.generation)
        try:
            current = run.manifest(*name)
        except ObjectNotFound as error:
            raise MissingLink(
                Representation(name).key,
                found="no manifest any more",
                expected=f"{ref}, which is being consolidated or is the parent",
                next_step="nothing: a checkpoint that was deleted is not consolidated",
            ) from error
        if current.ref != ref:
            raise CommitConflict(
                Representation(name).key,
                found=f"attempt {current.attempt}",
                expected=f"attempt {ref.attempt}",
                next_step="make a new plan",
            )
