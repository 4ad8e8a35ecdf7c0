"""Finds lost manifests, lost generation records and a lost live line, and puts records back."""

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


# Finds checkpoints whose manifests are lost although a restore needs them (format §6.5).
#
# A lost manifest differs from a manifest that retention deleted. Retention deletes a manifest only
# after every manifest that needs it is gone or has a chain without it (format §6.4, delete order,
# rule 1). So if a checkpoint has manifests, none of them leads to a full, and the parent of one has
# no manifest, then the parent's manifest was lost. Once it is put back, the parent is whole again,
# unless its chunks were removed meanwhile.
# If all manifests are gone, no manifest says what another needs, so everything stays
# (`manifests_gone`).


class Link(NamedTuple):
    """The place of one manifest in a chain.

    Attributes:
        checkpoint: the checkpoint that the manifest represents.
        parent: the checkpoint that must be read before it; None for a full.
        base: the full with which its chain starts; None for a full.
        taken_after: the parent of the checkpoint when it was taken, which a consolidation keeps;
            in other manifests the same as `parent`.
    """

    checkpoint: AttemptName
    parent: AttemptName | None
    base: AttemptName | None
    taken_after: AttemptName | None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Returns the link of a manifest."""
        return cls(
            _attempt(manifest.ref),
            None if manifest.parent is None else _attempt(manifest.parent),
            None if manifest.base is None else _attempt(manifest.base),
            None if manifest.links.parent is None else _attempt(manifest.links.parent),
        )


class _Gap(NamedTuple):
    """The part of a chain, from its base to its last link, in which manifests are missing."""

    first: AttemptName
    last: AttemptName

    def has(self, name: ManifestName) -> bool:
        # Steps ascend along a chain, and no parent has a later generation (format §4,
        # invariant 4).
        return (
            self.first.step <= name.step <= self.last.step
            and self.first.generation <= name.generation <= self.last.generation
        )


class LostManifests:
    """Knows the checkpoints that are needed although their manifests are lost.

    Args:
        links: the links of all manifests of the run, in any order.
        pins: names of the pins of each pinned checkpoint, existing or not; retention deletes no
            pinned checkpoint, so a missing one was lost.
        gone: the reason from `why_gone` if all manifests are gone; otherwise empty.
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
        #: Lost checkpoints, each with the newest checkpoint that does not restore without it.
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
            return  # the parent has a manifest; its own chain shows what is missing
        self._missing[link.parent] = name
        # Only the lost manifest said what the parent needs, so anything before it may be needed.
        if link.base is not None:
            self._gaps[_Gap(link.base, max(link.parent, link.taken_after or link.parent))] = name

    def why_needed(self, name: ManifestName, attempt: str | None = None) -> str:
        """Returns why the remains of a checkpoint must stay; empty: nothing in the run needs them.

        Args:
            name: the checkpoint.
            attempt: the attempt that the remains belong to, as for chunks; None: any attempt.
        """
        if self._gone:
            return self._gone
        exact = None if attempt is None else self._missing.get(AttemptName(*name, attempt))
        if exact is None and name in self._there:
            return ""  # the checkpoint has manifests, so nothing of other attempts is needed
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


# Finds out whether a run had manifests that are all gone: moved away, or not copied yet (format
# §6.5).
#
# A run whose first checkpoint was never committed has no manifest either, and its chunks are
# orphans. Two signs show that there were manifests. The first is an object that is written only
# after a manifest. The second is chunks of a second checkpoint of the newest trainer: an agent
# stores its jobs one after another, so the first checkpoint was committed, unless it was rejected
# or waits for other ranks.


#: Prefixes under which nothing is written before the first manifest.
_AFTER_THE_FIRST: Final = (
    CONSOLIDATED_KEY.prefix,
    VALIDATION_KEY.prefix,
    PUBLICATION_KEY.prefix,
    PIN_KEY.prefix,
    METRIC_KEY.prefix,
    EXPIRED_KEY.prefix,
)


def why_gone(run: Run, there: Mapping[ManifestName, Sequence[Representation]]) -> str:
    """Returns a sign that the run had manifests, if no checkpoint has its own now; else empty.

    Costs nothing if a checkpoint has its own manifest; retention never deletes the own manifest of
    the newest checkpoint (format §6.6).

    Args:
        run: the run.
        there: the result of `Run.representations`.

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
    """Yields a sign if an agent has stored chunks of two checkpoints of the newest generation.

    Chunks of earlier generations are no sign: their trainers were replaced, so the agent may have
    stored chunks of a checkpoint that could not be committed.
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
            # The record has only the newest rejections; earlier checkpoints may be rejected too.
            first = min(ref.step for ref in refs)
            stored = {attempt for attempt in stored if attempt.step > first}
    steps = sorted({attempt.step for attempt in stored})
    if len(steps) > 1:
        yield (
            f"chunks of {len(steps)} checkpoints of the newest generation are there, of steps "
            f"{steps[0]} … {steps[-1]}"
        )


# Creates a lost generation record again, from what a person knows about it (format §5).


def relink(
    run: Run,
    generation: int,
    restored: ManifestName | None,
    *,
    never_committed: bool = False,
) -> GenerationRecord:
    """Create the record of a generation whose own record is lost; nothing is replaced.

    The new record has an empty host and pid 0, because nobody knows where the trainer ran.

    Args:
        run: the run.
        generation: has no record, and something in the store names it or a later generation.
        restored: the checkpoint that its trainer restored; None: it began from nothing.
        never_committed: also accept the generation right after the newest that anything names,
            because its record was lost before its first checkpoint. No earlier trainer can commit
            after that.

    Raises:
        SettingsError: the generation has a record, readable or not; or nothing names it; or its
            checkpoints cannot follow from `restored`.
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
            f"{restored or 'nothing'} as restored, but its first increment has parent {stands_on}",
            "a restored checkpoint of that step or a later one",
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
            GENERATION_KEY.of(generation),
            f"{restored} as restored",
            "a checkpoint of an earlier generation",
        )
    steps = [name.step for name in run.manifest_names() if name.generation == generation]
    if restored.step > min(steps, default=restored.step):
        raise _refused(
            GENERATION_KEY.of(generation),
            f"{restored} as restored, but its own first checkpoint at step {min(steps)}",
            "a restored checkpoint of that step or an earlier one",
        )
    try:
        return run.manifest(*restored).ref
    except ObjectNotFound as error:
        raise NothingToRestore(
            f"{run.url}, {restored}",
            found="no manifest",
            expected="the checkpoint that the trainer restored; if it is gone, the newest one left "
            "before it",
            next_step=f"recpoint list {run.url} --all",
        ) from error


def _stands_on(run: Run, generation: int) -> ManifestName | None:
    """Returns the parent of its first checkpoint, if an earlier trainer's and there; else None."""
    names = run.manifest_names()
    own = [name for name in names if name.generation == generation]
    try:
        parent = run.manifest(*min(own)).parent if own else None
    except (FormatError, ObjectNotFound):
        return None
    if parent is None or parent.generation >= generation:
        return None
    name = ManifestName(parent.step, parent.generation)
    return name if name in names else None  # if it is gone, a person names the newest before it


def _unknown(key: str, generation: int, newest: int) -> SettingsError:
    named = f"generation {newest} is the newest named here" if newest else "no generation is named"
    said = f"recpoint relink URL {generation} --never-committed"
    return SettingsError(
        key,
        found=f"no trace of that generation; {named}",
        expected="a generation that something in the store names",
        next_step=f"correct the number; or, if that trainer was started and committed nothing: "
        f"{said} (no earlier trainer can commit after that), with --step of the checkpoint that it "
        "went on from, or with --from-nothing"
        if generation == newest + 1
        else "correct the number",
    )


def _there(run: Run, generation: int) -> SettingsError:
    key, none = GENERATION_KEY.of(generation), "no record, because a record is never replaced"
    record = run.read_generations([generation])[generation]
    if not isinstance(record, FormatError):
        return _refused(key, "a generation record", none)
    return SettingsError(
        key,
        found=f"a generation record that cannot be used: {record.found}",
        expected=none,
        next_step="put it back from a backup; if there is none, move it out of the run and run "
        "this command again",
    )


def _refused(key: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        key, found=found, expected=expected, next_step="recpoint check URL says what is lost"
    )


# Runs that have checkpoints of which none counts (format §5).


def line_to_go_on(
    run: Run, *, before: int | None = None, partial: bool = False
) -> list[ManifestName]:
    """Returns the live line, newest first; empty only if training may begin from nothing unasked.

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
    """Returns the error for a run that had checkpoints and whose manifests are all gone, or None.

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
    """Returns the checkpoints that stopped counting when a trainer restored an older checkpoint.

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
    """Returns the superseded checkpoints of a run with an empty live line; otherwise nothing.

    Args, raises: see `line_to_go_on`.
    """
    names = [name for name in run.manifest_names() if before is None or name.generation < before]
    # The line is read after the names, so it has a first checkpoint that is committed meanwhile.
    return [] if not names or run.live_line(before=before) else names


def superseded_text(names: Sequence[ManifestName]) -> str:
    """Returns how many checkpoints are superseded and which is the newest; at least one."""
    return f"{len(names)} superseded, the newest {_newest(names)}"


def _newest(names: Sequence[ManifestName]) -> ManifestName:
    """Returns the checkpoint that was trained last; generations first, as steps may start anew."""
    return max(names, key=lambda name: (name.generation, name.step))
