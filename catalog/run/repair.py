"""Finds what a run has lost (manifests, generation records, its line) and puts records back."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple, Self

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.pins import pinned_text
from recpoint.catalog.run.run import RejectionWatch, Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import FormatError, NothingToRestore, ObjectNotFound, SettingsError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    CHUNKS_PREFIX,
    CONSOLIDATED_KEY,
    EXPIRED_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    METRIC_KEY,
    PIN_KEY,
    PUBLICATION_KEY,
    VALIDATION_KEY,
    AttemptName,
    ManifestName,
    generation_in_key,
    parse_chunk_key,
)
from recpoint.format.record_kinds import GENERATION, PART
from recpoint.format.records import CheckpointRef, GenerationRecord

__all__ = [
    "Link",
    "LostManifests",
    "left_by_going_back",
    "line_to_go_on",
    "manifests_gone",
    "relink",
    "superseded_alone",
    "superseded_text",
    "why_gone",
]


# Checkpoints whose manifests are gone though a restore needs them: lost, not let go (format §6.5).
#
# How the two are told apart. Retention deletes a manifest only when what stands on it has gone
# before it, or has a chain without it (format §6.4, delete order, rule 1). So where a
# checkpoint is there, none of its manifests leads to a full, and the parent of one has no manifest,
# that one was lost. Its checkpoint is whole again once it is put back, unless somebody has removed
# the chunks until then.
# Where all are gone, no manifest tells what another needs: everything stays (`manifests_gone`).


class Link(NamedTuple):
    """What one manifest says of its place in a chain.

    Attributes:
        checkpoint: that it represents.
        parent: what must be read before it; None for a full.
        base: the full its chain starts from; None for a full.
        taken_after: the parent of the checkpoint as it was taken, where this is a consolidation;
            else `parent`.
    """

    checkpoint: AttemptName
    parent: AttemptName | None
    base: AttemptName | None
    taken_after: AttemptName | None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """The link that a manifest is."""
        return cls(
            _attempt(manifest.ref),
            None if manifest.parent is None else _attempt(manifest.parent),
            None if manifest.base is None else _attempt(manifest.base),
            None if manifest.links.parent is None else _attempt(manifest.links.parent),
        )


class _Gap(NamedTuple):
    """A part of a chain in which manifests are missing, from the base to the last link."""

    first: AttemptName
    last: AttemptName

    def has(self, name: ManifestName) -> bool:
        # Steps ascend along a chain, and no parent is of a later generation (format §4,
        # invariant 4).
        return (
            self.first.step <= name.step <= self.last.step
            and self.first.generation <= name.generation <= self.last.generation
        )


class LostManifests:
    """What no manifest names any more and is needed all the same.

    Args:
        links: of all manifests that there are, in any order.
        pins: names of the pins of each pinned checkpoint, whether it is there or not: retention
            deletes none that is pinned.
        gone: what says that all manifests are gone (`why_gone`); else empty.
    """

    def __init__(
        self,
        links: Iterable[Link] = (),
        pins: Mapping[ManifestName, Sequence[str]] | None = None,
        *,
        gone: str = "",
    ) -> None:
        self._gone = gone
        by_name: dict[ManifestName, list[Link]] = {}
        for link in links:
            by_name.setdefault(_name(link.checkpoint), []).append(link)
        self._there = by_name.keys()
        self._pins = pins or {}
        #: Each with the newest checkpoint that does not restore without it.
        self._missing: dict[AttemptName, ManifestName] = {}
        self._gaps: dict[_Gap, ManifestName] = {}
        attempts = {link.checkpoint for same in by_name.values() for link in same}
        whole: set[AttemptName] = set()
        for name in sorted(by_name):  # a parent's step is lower
            good = [link for link in by_name[name] if link.parent is None or link.parent in whole]
            whole.update(link.checkpoint for link in good)
            if not good:
                for link in by_name[name]:
                    self._note(name, link, attempts)
        self._missing_names = {_name(lost): by for lost, by in self._missing.items()}

    def _note(self, name: ManifestName, link: Link, attempts: set[AttemptName]) -> None:
        if link.parent is None or link.parent in attempts:
            return  # it is there; what is missing, its own chain tells
        self._missing[link.parent] = name
        # What the parent stood on, its manifest alone has told.
        if link.base is not None:
            self._gaps[_Gap(link.base, max(link.parent, link.taken_after or link.parent))] = name

    def why_needed(self, name: ManifestName, attempt: str | None = None) -> str:
        """Why what is left of a checkpoint has to stay; empty: nothing of the run needs it.

        Args:
            name: the checkpoint.
            attempt: of it, as chunks are of one; None: what is asked for is of any.
        """
        if self._gone:
            return self._gone
        exact = None if attempt is None else self._missing.get(AttemptName(*name, attempt))
        if exact is None and name in self._there:
            return ""  # beside the manifests of a checkpoint nothing else of it is needed
        by = exact or self._missing_names.get(name)
        if by is not None:
            return f"{name} is needed by {by}, and its manifest is gone"
        if name in self._pins:
            return f"{name} is {pinned_text(self._pins[name])}, and its manifest is gone"
        for gap, needs in self._gaps.items():
            if gap.has(name):
                return f"{name} may be of the chain of {needs}, of which manifests are gone"
        return ""


def _attempt(ref: CheckpointRef) -> AttemptName:
    return AttemptName(ref.step, ref.generation, ref.attempt)


def _name(attempt: AttemptName) -> ManifestName:
    return ManifestName(attempt.step, attempt.generation)


# Whether all manifests are gone of a run that had some: moved away, or not copied yet (§6.5).
#
# A run whose first checkpoint was never committed has no manifest either, and what is there of it
# are orphans. What tells the two apart is written only once there is a manifest; or it is chunks of
# a second checkpoint of the newest trainer, since an agent stores its jobs one after another: what
# was stored of the first was committed, unless it was rejected, or waits for other ranks.


#: Where nothing is before the first manifest.
_AFTER_THE_FIRST: Final = (
    CONSOLIDATED_KEY.prefix,
    VALIDATION_KEY.prefix,
    PUBLICATION_KEY.prefix,
    PIN_KEY.prefix,
    METRIC_KEY.prefix,
    EXPIRED_KEY.prefix,
)


def why_gone(run: Run, there: Mapping[ManifestName, Sequence[Representation]]) -> str:
    """What says that there were manifests, where no checkpoint has its own; else empty.

    Costs nothing where there is one: retention leaves the newest checkpoint its own (format §6.6).

    Args:
        run: the run.
        there: of `Run.representations`.

    Raises:
        StoreError: the store cannot be read.
    """
    if any(one.form == "own" for one in chain.from_iterable(there.values())):
        return ""
    sign = next(_signs(run), "")
    return sign and f"{sign}, and nothing is under {MANIFEST_KEY.prefix} any more"


def _signs(run: Run) -> Iterator[str]:
    for prefix in _AFTER_THE_FIRST:
        for info in run.store.list(prefix):
            if generation_in_key(info.key) or PUBLICATION_KEY.parse(info.key):
                yield f"{info.key} is there"
    for number in run.generation_numbers():
        key = GENERATION_KEY.of(number)
        try:
            restored = run.generation(number).restored
        except ObjectNotFound:
            continue
        except FormatError:
            yield f"{key} cannot be read, and may go on from a checkpoint"
            continue
        if restored is not None:
            yield f"{key} goes on from step {restored.step} (generation {restored.generation})"
    yield from _followed(run)


def _followed(run: Run) -> Iterator[str]:
    """The newest generation, if an agent has stored of a later step after one of it.

    What is of an earlier one alone may have been stored in vain: its trainer had been replaced.
    """
    generation = max(run.generation_numbers(), default=0)
    stored: set[AttemptName] = set()
    for info in run.store.list(CHUNKS_PREFIX):
        attempt = parse_chunk_key(info.key)
        if attempt is not None and attempt.generation >= generation:
            stored.add(attempt)
    if len(stored) < 2:
        return
    for part in run.records(PART).names():
        stored.discard(part.checkpoint)
    for of_rank in RejectionWatch(run).refresh():
        refs = [one.checkpoint for one in of_rank.newest]
        stored.difference_update(AttemptName(ref.step, ref.generation, ref.attempt) for ref in refs)
        if of_rank.count > len(refs) and all(ref.generation >= generation for ref in refs):
            # Those before them may have been rejected, too.
            first = min(ref.step for ref in refs)
            stored = {attempt for attempt in stored if attempt.step > first}
    steps = sorted({attempt.step for attempt in stored})
    if len(steps) > 1:
        yield (
            f"chunks of {len(steps)} checkpoints of the newest generation are there, of steps "
            f"{steps[0]} … {steps[-1]}"
        )


# Making a lost generation record anew, from what a person knows of it (format §5).


def relink(
    run: Run,
    generation: int,
    restored: ManifestName | None,
    *,
    never_committed: bool = False,
) -> GenerationRecord:
    """Create the record of a generation whose own is lost.

    Nothing is replaced. The record says nothing of where its trainer ran, since nobody knows.

    Args:
        run: the run.
        generation: it has no record, and something in the store names it or a later one.
        restored: the checkpoint that its trainer went on from; None: from nothing.
        never_committed: it may also be the one right after the newest that anything names: its
            record was lost before its first checkpoint. No earlier trainer commits after that.

    Raises:
        SettingsError: it has a record, also one that cannot be read; or nothing names it; or its
            checkpoints cannot have come from `restored`.
        NothingToRestore: there is no checkpoint `restored`.
        FormatError: the manifest of `restored` is damaged.
        StoreError: the store refuses, or cannot be reached.
    """
    key = GENERATION_KEY.of(generation)
    newest = max((generation_in_key(info.key) or 0 for info in run.store.list()), default=0)
    if generation > newest + 1 or (generation > newest and not never_committed):
        raise _unknown(key, generation, newest)
    if generation in run.generation_numbers():
        raise _there(run, generation)
    stands_on = _stands_on(run, generation)
    if stands_on is not None and (restored is None or restored.step < stands_on.step):
        raise _refused(
            key,
            f"{restored or 'nothing'} to go on from, but an increment of its own on {stands_on}",
            "a checkpoint of that step or a later one",
        )
    record = GenerationRecord(
        run=run.id,
        generation=generation,
        token=secrets.token_hex(16),
        restored=None if restored is None else _reference(run, generation, restored),
        host="",
        pid=0,
        created_ms=now_ms(),
    )
    if run.records(GENERATION).create(record, generation) == "other":
        raise _there(run, generation)
    return record


def _reference(run: Run, generation: int, restored: ManifestName) -> CheckpointRef:
    if restored.generation >= generation:
        raise _refused(
            GENERATION_KEY.of(generation), f"{restored} to go on from", "an earlier generation's"
        )
    steps = [name.step for name in run.manifest_names() if name.generation == generation]
    if restored.step > min(steps, default=restored.step):
        raise _refused(
            GENERATION_KEY.of(generation),
            f"{restored} to go on from, but a checkpoint of its own at step {min(steps)}",
            "a checkpoint of that step or an earlier one",
        )
    try:
        return run.manifest(*restored).ref
    except ObjectNotFound as error:
        raise NothingToRestore(
            f"{run.url}, {restored}",
            found="no manifest",
            expected="the checkpoint that the trainer went on from; if that is gone, the newest "
            "before it that is left",
            next_step=f"recpoint list {run.url} --all",
        ) from error


def _stands_on(run: Run, generation: int) -> ManifestName | None:
    """What its first checkpoint is an increment on, of an earlier trainer; None: nobody knows."""
    names = run.manifest_names()
    own = [name for name in names if name.generation == generation]
    try:
        parent = run.manifest(*min(own)).parent if own else None
    except (FormatError, ObjectNotFound):
        return None
    if parent is None or parent.generation >= generation:
        return None
    name = ManifestName(parent.step, parent.generation)
    return name if name in names else None  # gone: the newest before it is what can be said


def _unknown(key: str, generation: int, newest: int) -> SettingsError:
    named = f"generation {newest} is the newest that anything here names" if newest else "none"
    said = f"recpoint relink URL {generation} --never-committed"
    return SettingsError(
        key,
        found=f"no trace of that generation; {named}",
        expected="one that something in the store names",
        next_step=f"correct the number; {said} if that trainer was started and had not committed "
        f"anything: no earlier one commits after that"
        if generation == newest + 1
        else "correct the number",
    )


def _there(run: Run, generation: int) -> SettingsError:
    key, none = GENERATION_KEY.of(generation), "none, since one is never replaced"
    record = run.read_generations([generation])[generation]
    if not isinstance(record, FormatError):
        return _refused(key, "a generation record", none)
    return SettingsError(
        key,
        found=f"a generation record that cannot be used: {record.found}",
        expected=none,
        next_step="put it back from a backup; or, if there is none, move it out of the run and run "
        "this again",
    )


def _refused(key: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        key, found=found, expected=expected, next_step="recpoint check URL says what is lost"
    )


# Where a run has checkpoints and none of them counts (format §5): what to say of it.


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
