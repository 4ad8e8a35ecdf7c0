"""Where a run has checkpoints and none of them counts (format §5): what to say of it."""

from __future__ import annotations

from collections.abc import Sequence

from recpoint.catalog.runs.manifests_gone import why_gone
from recpoint.catalog.runs.run import Run
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
    """The live line, newest first; empty only where training may begin from nothing unasked.

    A start that was to begin anew, and ended before its first checkpoint, leaves a line without
    any: beginning from nothing once more would leave all training behind, and nobody would know.
    So would it where all manifests are gone: a mount that is missing, a copy that has not ended.

    Args:
        run: that is to be taken over.
        before: see `Run.live_line`.
        partial: only parts of a checkpoint are wanted, for what the error proposes.

    Raises:
        NothingToRestore: none counts, but there are superseded ones, or there have been some.
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
        found=f"no checkpoint that counts, since the newest start began a line of its own and "
        f"ended before its first; {superseded_text(superseded)}",
        expected="one to go on from, or word that training begins from nothing",
        next_step=f"{call} in one start {'loads parts of' if partial else 'goes on from'} that "
        f"one, restore(fresh=True) begins from nothing; recpoint list {run.url} --all lists them",
    )


def manifests_gone(run: Run) -> NothingToRestore | None:
    """The error where something says that a run had checkpoints, and all its manifests are gone.

    Raises:
        StoreError: the store cannot be read.
    """
    # Looked at twice: the first of a run may be committed right after the manifests were listed.
    why = why_gone(run, run.representations()) and why_gone(run, run.representations())
    if not why:
        return None
    return NothingToRestore(
        run.url,
        found=f"no checkpoint, but {why}",
        expected=f"the manifests of what was stored here, under {MANIFEST_KEY.prefix}",
        next_step="put them back from a replica or an older version of the bucket, or let the copy "
        "that brings them end; where nothing of it is wanted, restore(fresh=True) of a trainer "
        f"begins from nothing; recpoint check {run.url} lists what is there",
    )


def left_by_going_back(run: Run, record: GenerationRecord) -> list[ManifestName]:
    """The checkpoints that counted, and do not since a trainer went back to an older one.

    All that counted, where it went on from one that did not.

    Args:
        run: that `record` has taken over.
        record: of that trainer.

    Raises:
        FormatError, GenerationRecordLost: see `Run.live_line`.
    """
    if record.restored is None:
        return []
    kept = set(run.live_line(before=record.generation + 1))
    return [name for name in run.live_line(before=record.generation) if name not in kept]


def superseded_alone(run: Run, *, before: int | None = None) -> list[ManifestName]:
    """The superseded checkpoints of a run on whose live line there is none; else nothing.

    Args, raises: see `line_to_go_on`.
    """
    names = [name for name in run.manifest_names() if before is None or name.generation < before]
    # The line after them: one that is committed meanwhile, the first of its line, is on it.
    return [] if not names or run.live_line(before=before) else names


def superseded_text(names: Sequence[ManifestName]) -> str:
    """How many, and which is the newest; at least one."""
    return f"{len(names)} superseded, the newest {_newest(names)}"


def _newest(names: Sequence[ManifestName]) -> ManifestName:
    """What was trained last: a later start counts its batches from nothing again."""
    return max(names, key=lambda name: (name.generation, name.step))
