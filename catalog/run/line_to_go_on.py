"""Finds the line to go on with in a run that has checkpoints of which none counts (format §5)."""

from __future__ import annotations

from collections.abc import Sequence

from recpoint.catalog.run.gone_manifests import why_gone
from recpoint.catalog.run.run import Run
from recpoint.errors import NothingToRestore
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.records import GenerationRecord

__all__ = [
    "left_by_going_back",
    "line_to_go_on",
    "manifests_gone",
    "superseded_alone",
    "superseded_text",
]


def line_to_go_on(
    run: Run, *, before: int | None = None, partial: bool = False
) -> list[ManifestName]:
    """Return the live line, newest first; empty only if training may begin from nothing unasked.

    A start from nothing that ended before its first checkpoint leaves an empty live line. Another
    start from nothing would then silently leave all training behind. The same holds if all
    manifests are gone, as with a missing mount or an unfinished copy. Both are errors.

    Args:
        run: the run to take over.
        before: see `Run.live_line`.
        partial: only parts of a checkpoint are wanted; the error then proposes another call.

    Raises:
        NothingToRestore: no checkpoint counts, but there are superseded ones, or there were some.
        FormatError, GenerationRecordLost: see `Run.live_line`.
        StoreError: the store cannot be read.
    """
    line = run.live_line(before=before)
    if line:
        return line
    superseded = superseded_alone(run, before=before)
    if not superseded:
        if gone := manifests_gone(run):
            raise gone
        return line
    newest = _newest(superseded)
    named = f"step={newest.step}, generation={newest.generation}"
    call = f"restore({named}, partial=...)" if partial else f"restore({named})"
    raise NothingToRestore(
        run.url,
        found=f"no checkpoint that counts, because the newest start began from nothing and ended "
        f"before its first checkpoint; {superseded_text(superseded)}",
        expected="a checkpoint to go on from, or a request to begin from nothing",
        next_step=f"{call} in one start {'loads parts of' if partial else 'goes on from'} that "
        f"one, restore(fresh=True) begins from nothing; recpoint list {run.url} --all lists them",
    )


def manifests_gone(run: Run) -> NothingToRestore | None:
    """Return the error for a run that had checkpoints and whose manifests are all gone, or None.

    Raises:
        StoreError: the store cannot be read.
    """
    # Looked at twice, because a first checkpoint may be committed right after the first listing.
    why = why_gone(run, run.representations()) and why_gone(run, run.representations())
    if not why:
        return None
    return NothingToRestore(
        run.url,
        found=f"no checkpoint, but {why}",
        expected=f"the manifests of the stored checkpoints, under {MANIFEST_KEY.prefix}",
        next_step="put them back from a replica or an older version of the bucket, or let the copy "
        "that brings them end; if nothing of this run is wanted, restore(fresh=True) of a trainer "
        f"begins from nothing; recpoint check {run.url} lists what is there",
    )


def left_by_going_back(run: Run, record: GenerationRecord) -> list[ManifestName]:
    """Return the checkpoints that stopped counting when a trainer restored an older checkpoint.

    These are all checkpoints that counted, if it restored one that did not count.

    Args:
        run: the run that the trainer took over.
        record: the trainer's generation record.

    Raises:
        FormatError, GenerationRecordLost: see `Run.live_line`.
    """
    if record.restored is None:
        return []
    kept = set(run.live_line(before=record.generation + 1))
    return [name for name in run.live_line(before=record.generation) if name not in kept]


def superseded_alone(run: Run, *, before: int | None = None) -> list[ManifestName]:
    """Return the superseded checkpoints of a run with an empty live line; otherwise nothing.

    Args, raises: see `line_to_go_on`.
    """
    names = [name for name in run.manifest_names() if before is None or name.generation < before]
    # The line is read after the names, so it has a first checkpoint that is committed meanwhile.
    return [] if not names or run.live_line(before=before) else names


def superseded_text(names: Sequence[ManifestName]) -> str:
    """Return how many checkpoints are superseded and which is the newest; at least one."""
    return f"{len(names)} superseded, the newest {_newest(names)}"


def _newest(names: Sequence[ManifestName]) -> ManifestName:
    """Return the checkpoint that was trained last; generations first, as steps may start anew."""
    return max(names, key=lambda name: (name.generation, name.step))
