"""Opens a run: its record, generations, manifests, rejections and end, and taking the run over."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, ParamSpec, Self, TypeVar

from recpoint.catalog.run.lineage import Representation, by_checkpoint, live_line, restarts
from recpoint.catalog.store.contract import ObjectInfo, Store, now_ms
from recpoint.catalog.store.records import Records
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import (
    ForeignObject,
    FormatError,
    NothingToRestore,
    ObjectNotFound,
    RecpointError,
    RunRecordLost,
    StoreError,
    StoreUnavailable,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    FEW_OF_A_GENERATION,
    GENERATION_KEY,
    MAX_GENERATION,
    RUN_KEY,
    ManifestName,
    generation_in_key,
)
from recpoint.format.record_kinds import (
    CONSOLIDATED,
    END,
    GENERATION,
    MANIFEST,
    REJECTIONS,
    RUN,
    AnyKind,
    RecordKind,
)
from recpoint.format.records import (
    CheckpointRef,
    EndRecord,
    GenerationRecord,
    RunRecord,
    StoredRecord,
)
from recpoint.format.rejections import MAX_REJECTIONS, Rejection, Rejections
from recpoint.interrupts import start_thread

__all__ = [
    "RejectionWatch",
    "Run",
    "leave_rejection",
    "read_end",
    "read_run_record",
    "remake_run_record",
    "tell_ended",
]


# `run.json`: reading it, making it, and making it anew where it was lost (format §6.1, write
# order, rule 1).


#: Generation records first: there are few, and each start of a trainer makes one.
_TELLING: tuple[AnyKind, ...] = (GENERATION, MANIFEST, CONSOLIDATED)


def read_run_record(store: Store) -> RunRecord:
    """What makes this URL a run (format §6.3, read order, rule 1).

    Raises:
        NothingToRestore: there is none: no run.
        RunRecordLost: there is one, which has lost it.
        FormatError: it is damaged or of an unknown version.
    """
    record = _found(store)
    if record is None:
        raise NothingToRestore(
            store.url,
            found=f"no {RUN_KEY}",
            expected="the URL of a run that a trainer has started",
            next_step="correct the URL; or start the trainer, which makes the run",
        )
    return record


def create_run_record(store: Store) -> RunRecord:
    """The one that is there, or a new one where there is no run.

    A new id beside what another run has left would make all of that foreign, for good.

    Raises:
        RunRecordLost: there is none, but objects of a run are there.
        FormatError: it is damaged or of an unknown version.
    """
    record = _found(store)
    return _created(store, secrets.token_hex(16)) if record is None else record


def remake_run_record(store: Store) -> tuple[RunRecord, int]:
    """Make it anew with the id that the run's records have; also how many of them have it.

    Raises:
        ForeignObject: there is one already; or there are records of several runs.
        NothingToRestore: nothing tells the id.
    """
    try:
        there = Records(store, RUN, run=None).read()
    except ObjectNotFound:
        pass
    else:
        raise ForeignObject(
            f"{store.url}/{RUN_KEY}",
            found=f"that of run {there.run}",
            expected="none: it is made anew where it was lost",
            next_step=f"recpoint check {store.url}",
        )
    ids: list[str] = []
    for kind, key in _keys(store):
        # Every generation record; of manifests, which are many, the first that tells.
        if not ids or kind is GENERATION:
            run = _id_in(store, kind, key)
            ids += [] if run is None else [run]
    if len(set(ids)) > 1:
        raise ForeignObject(
            f"{store.url}/{RUN_KEY}",
            found=f"records of {len(set(ids))} runs: {', '.join(sorted(set(ids)))}",
            expected="those of one",
            next_step="find out which do not belong here, and move them away",
        )
    if not ids:
        raise NothingToRestore(
            store.url,
            found="no generation record or manifest that can be read, and tells the run's id",
            expected="one at least",
            next_step="correct the URL; or put run.json back from a backup",
        )
    return _created(store, ids[0]), len(ids)


def _found(store: Store) -> RunRecord | None:
    """None: there is no run at all.

    Raises:
        RunRecordLost: there is one, and its record is lost.
    """
    for looked_twice in (False, True):
        try:
            return Records(store, RUN, run=None).read()
        except ObjectNotFound:
            telling = next(_keys(store), None)
        if telling is None:
            return None
        if looked_twice:  # else it may have been made between the two, before what was found
            kind, key = telling
            run = _id_in(store, kind, key)
            raise RunRecordLost(
                f"{store.url}/{RUN_KEY}",
                found=f"none, but {key}" + (f" of run {run}" if run else ", which is damaged too"),
                expected="the record that says which run this is: without it nothing here is known "
                "to belong together",
                next_step=f"put {RUN_KEY} back from a backup; or, if there is none, make it anew "
                f"from what the others say: recpoint bring-back {store.url}",
            )
    raise AssertionError("unreachable")


def _keys(store: Store) -> Iterator[tuple[AnyKind, str]]:
    """Of the records that tell the id of their run."""
    for kind in _TELLING:
        for _, info in Records(store, kind, run=None).listed():
            yield kind, info.key


def _id_in(store: Store, kind: AnyKind, key: str) -> str | None:
    try:
        return str(Records(store, kind, run=None).read_key(key).run)
    except (FormatError, ObjectNotFound):
        return None


def _created(store: Store, run: str) -> RunRecord:
    record, records = RunRecord(run=run, created_ms=now_ms()), Records(store, RUN, run=None)
    return record if records.create(record) == "created" else records.read()


# A run: its record, its generations, its manifests, and taking it over (format §4, §5, §6.1).


P = ParamSpec("P")
NameT = TypeVar("NameT")
RecordT = TypeVar("RecordT", bound=StoredRecord)

_CLAIM_TRIES = 100


class Run:
    """One training job's catalog. Instances may be used from several threads.

    Generation records never change once they exist, so an instance reads each of them once.
    """

    def __init__(self, store: Store, record: RunRecord) -> None:
        self.store = store
        self.record = record
        self._generations: dict[int, GenerationRecord] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.store, self.record)

    @property
    def id(self) -> str:
        """The run's random id, 32 hexadecimal digits; in every object of the run."""
        return self.record.run

    @property
    def url(self) -> str:
        """The run URL, without credentials."""
        return self.store.url

    @classmethod
    def open(cls, store: Store) -> Self:
        """The run that is there (format §6.3, read order, rule 1).

        Raises:
            NothingToRestore: there is no run under this URL.
            RunRecordLost: there is one, which has lost `run.json`.
            FormatError: `run.json` is damaged or of an unknown version.
        """
        return cls(store, read_run_record(store))

    @classmethod
    def create(cls, store: Store) -> Self:
        """The run that is there, or a new one when there is none.

        This is rule 1 of the write order (format §6.1).

        Raises:
            StoreUnsupported: the store does not honour create-only writes (format §6.2).
            RunRecordLost: there is no `run.json`, but objects of a run are there.
            FormatError: there is a `run.json`, and it is damaged.
        """
        store.probe()
        return cls(store, create_run_record(store))

    def records(self, kind: RecordKind[P, NameT, RecordT]) -> Records[P, NameT, RecordT]:
        """The records of one kind that the run has."""
        return Records(self.store, kind, run=self.id)

    # --- generations ---------------------------------------------------------------------------

    def generation_numbers(self) -> list[int]:
        """Numbers of all generations that have a record, ascending; one listing, no reads."""
        return sorted(self.records(GENERATION).names())

    def generation(self, number: int) -> GenerationRecord:
        """The record of one generation.

        Raises:
            FormatError: it is damaged, or of another run; nobody may guess what it said.
            ObjectNotFound: there is none.
        """
        with self._lock:
            known = self._generations.get(number)
        if known is not None:
            return known
        record = self.records(GENERATION).read(number)
        with self._lock:
            self._generations[number] = record
        return record

    def generations(self) -> list[GenerationRecord]:
        """Every generation record, ascending; the errors of `generation` for the first bad one."""
        read = self.read_generations(self.generation_numbers())
        for outcome in read.values():
            if isinstance(outcome, RecpointError):
                raise outcome
        return [outcome for outcome in read.values() if isinstance(outcome, GenerationRecord)]

    def read_generations(
        self, numbers: Iterable[int]
    ) -> dict[int, GenerationRecord | FormatError | ObjectNotFound]:
        """Read several records at once; a record that cannot be used comes as its error."""

        def read(number: int) -> GenerationRecord | FormatError | ObjectNotFound:
            try:
                return self.generation(number)
            except (FormatError, ObjectNotFound) as error:
                return error

        wanted = list(numbers)
        with ReadScheduler.of_records() as reads:
            return dict(zip(wanted, reads.results(wanted, read), strict=True))

    # --- manifests -----------------------------------------------------------------------------

    def manifest_names(self) -> list[ManifestName]:
        """All checkpoints there are, live or superseded, ascending; two listings, no reads."""
        return list(self.representations())

    def representations(self) -> dict[ManifestName, list[Representation]]:
        """Every manifest there is, by checkpoint, ascending; of each those that read least first.

        Two listings, no reads.
        """
        # In this order: a checkpoint whose own manifest is removed in between has been
        # consolidated before, and is found by the second listing (format §6.3, read order, rule 3).
        own = [Representation(name) for name in self.records(MANIFEST).names()]
        return by_checkpoint([*own, *self._consolidated()])

    def consolidated(
        self, *, of: ManifestName | None = None
    ) -> dict[ManifestName, list[Representation]]:
        """The consolidated manifests alone, as `representations`, or those of one; one listing."""
        return by_checkpoint(self._consolidated(*(of or ())))

    def _consolidated(self, *of: int) -> list[Representation]:
        return [
            Representation(
                ManifestName(name.step, name.generation),
                "full" if name.after is None else "after",
                name.after,
            )
            for name in self.records(CONSOLIDATED).names(*of)
        ]

    def live_line(self, *, before: int | None = None) -> list[ManifestName]:
        """The checkpoints that count, newest first (format §5).

        Args:
            before: leave out this generation and all later ones: the line its trainer started on.

        Raises:
            FormatError: a generation record on the way is damaged; its key is the subject.
            GenerationRecordLost: one is not there: on the way, or of checkpoints that would be the
                newest.
        """
        numbers, names = self.generation_numbers(), self.manifest_names()
        if before is not None:
            numbers = [number for number in numbers if number < before]
            names = [name for name in names if name.generation < before]
        return self.line_of(numbers, names)

    def line_of(self, numbers: Sequence[int], names: Iterable[ManifestName]) -> list[ManifestName]:
        """As `live_line`, of generations and checkpoints that have been listed, in this order.

        A checkpoint of a generation that was not listed is of a trainer that has started since,
        and counts; or the record is lost, and nobody knows what counts if it may be the newest.
        """
        there = list(names)
        unlisted = {name.generation for name in there}.difference(numbers)
        read = self.read_generations([*numbers, *sorted(unlisted)])
        usable = {
            number: record
            for number, record in read.items()
            if isinstance(record, GenerationRecord)
        }
        try:
            return live_line(max(read, default=0), usable, there)
        except RecpointError as error:
            # A record that is there but unreadable is the better thing to tell about.
            for number, outcome in read.items():
                if error.subject == GENERATION_KEY.of(number) and isinstance(outcome, FormatError):
                    raise outcome from error
            raise

    def lost_generations(self, mentioned: Iterable[int], *, listed: Collection[int]) -> list[int]:
        """Which of the generations that something in the store names have no record, ascending.

        Args:
            mentioned: what keys name.
            listed: `generation_numbers`, listed before or with those keys; what is not among them
                is asked for.
        """
        read = self.read_generations(sorted(set(mentioned).difference(listed)))
        return [number for number, found in read.items() if isinstance(found, ObjectNotFound)]

    def restarts(self, newest: int) -> int:
        """See `lineage.restarts`: of the line that generation `newest` is on."""
        numbers = [number for number in self.generation_numbers() if number <= newest]
        read = self.read_generations(numbers)
        return restarts(newest, {n: r for n, r in read.items() if isinstance(r, GenerationRecord)})

    def superseded(self) -> list[ManifestName]:
        """Checkpoints that are not on the live line, newest first; see `live_line` for errors."""
        numbers, names = self.generation_numbers(), self.manifest_names()
        live = set(self.line_of(numbers, names))
        return [name for name in reversed(names) if name not in live]

    def manifest(self, step: int, generation: int) -> Manifest:
        """A checkpoint's own manifest; where that is gone or damaged, a consolidated one.

        Raises:
            ObjectNotFound: there is no such checkpoint.
            FormatError: none of its manifests is good; what is wrong with the first of them.
        """
        name = ManifestName(step, generation)
        try:
            return self.read_manifest(Representation(name))
        except (ObjectNotFound, FormatError) as error:
            first = error
        left = self._consolidated(step, generation)
        for representation in sorted(left, key=lambda one: one.cost):
            try:
                return self.read_manifest(representation)
            except ObjectNotFound:
                continue  # let go of since it was listed
            except FormatError as error:
                if isinstance(first, ObjectNotFound):
                    first = error  # there is such a checkpoint
        raise first

    def read_manifest(self, representation: Representation) -> Manifest:
        """One manifest, fully checked.

        Raises:
            ObjectNotFound: there is none.
            FormatError: it is damaged, or says it is another one than its key says.
        """
        return self.records(representation.kind).read_key(representation.key)

    # --- taking over ---------------------------------------------------------------------------

    def claim(self, restored: CheckpointRef | None, *, above: int = 0) -> GenerationRecord:
        """Take the run over: create the next generation record (format §6.1, write order, rule 1).

        From then on no earlier trainer can commit. Two trainers that claim at once get different
        numbers; the later number owns the run. The number is above all that anything in the store
        names, chunks aside, so that it is never that of an earlier trainer whose record is lost.

        Args:
            restored: the checkpoint the trainer goes on from; None: from nothing.
            above: the highest generation that something outside the store is of, as a staged job:
                what an earlier trainer has staged is not to be committed as this one's.

        Raises:
            GenerationRecordLost: that of the generation of `restored`, or of one before it on its
                line: going on from there, no live line could be followed.
            FormatError: one of these records is damaged.
            ForeignObject: something names the highest number that there can be.
            StoreUnavailable: so many trainers are claiming that no number was to be had.
            StoreError: the store refuses, or cannot be reached.
        """
        if restored is not None:
            # The line that this trainer is about to be on, to its beginning.
            numbers = [n for n in self.generation_numbers() if n <= restored.generation]
            self.line_of(numbers, [ManifestName(restored.step, restored.generation)])
        # Of every kind but the chunks, which are thousands a checkpoint: those of one may be gone.
        taken = max(
            (
                (generation_in_key(info.key) or 0, info.key)
                for prefix in FEW_OF_A_GENERATION
                for info in self.store.list(prefix)
            ),
            default=(0, ""),
        )
        for _ in range(_CLAIM_TRIES):
            number = max([taken[0], above, *self.generation_numbers()[-1:]]) + 1
            if number > MAX_GENERATION:
                in_store = taken[0] == MAX_GENERATION
                raise ForeignObject(
                    taken[1] if in_store else f"what is staged on this host of {self.url}",
                    found=f"generation {number - 1}, the highest that there can be",
                    expected="a generation that a trainer has been",
                    next_step="find out what wrote it, and remove it from "
                    + (self.url if in_store else "the staging area"),
                )
            record = GenerationRecord(
                run=self.id,
                generation=number,
                token=secrets.token_hex(16),
                restored=restored,
                host=socket.gethostname()[:255],
                pid=os.getpid(),
                created_ms=now_ms(),
            )
            # The token in the bytes makes them ours and nobody else's.
            if self.records(GENERATION).create(record, number) != "other":
                with self._lock:
                    self._generations[record.generation] = record
                return record
        raise StoreUnavailable(
            f"{self.url}/{GENERATION_KEY.prefix}",
            found=f"{_CLAIM_TRIES} numbers in a row taken by other trainers",
            expected="one trainer at a time starting on a run",
            next_step="stop what keeps starting trainers on this run, and try again",
        )

    def committed_meanwhile(
        self, record: GenerationRecord, *, seen: ManifestName | None
    ) -> ManifestName | None:
        """What an earlier trainer still committed before `record` fenced it off, if anything.

        Args:
            record: the claim of this trainer.
            seen: the newest checkpoint of the live line when the trainer chose what to restore.

        Returns:
            The newest checkpoint of the line that `record` took over, when it is neither the one
            seen nor the one restored; None when nothing was missed.
        """
        line = self.live_line(before=record.generation)
        restored = record.restored
        if not line or line[0] == seen:
            return None
        if restored and line[0] == (restored.step, restored.generation):
            return None
        return line[0]

    def claim_from_newest(
        self, restore: Callable[[int | None], CheckpointRef | None], *, above: int = 0
    ) -> GenerationRecord:
        """Restore and claim so that no commit falls in between unnoticed.

        This is rule 1 of the write order (format §6.1).

        Not for a trainer that was told which step to restore: what others commit meanwhile is
        then left behind on purpose, and `claim` is all it needs.

        Args:
            restore: restores the newest usable checkpoint of `live_line(before=...)` of its
                argument; returns its reference, None when there is none. It is called once more
                with this claim's number when a checkpoint was committed since the first look.
            above: see `claim`.
        """
        line = self.live_line()
        record = self.claim(restore(None), above=above)
        newer = self.committed_meanwhile(record, seen=line[0] if line else None)
        if newer is None:
            return record
        # The trainers before `record` can start no further commit, so that this look is the last.
        again = restore(record.generation)
        return record if again == record.restored else self.claim(again, above=above)


# The word of a trainer that it has ended by itself: silence is then no trouble (format §5).


_log = logging.getLogger("recpoint")

#: How long the end of training waits for a store to take this word; nothing depends on it.
_WAIT_SECONDS = 10.0


def tell_ended(
    run: Run, generation: int, *, step: int, reason: Literal["finished", "terminated"]
) -> None:
    """Write the end record of a generation, replacing its earlier one.

    Waits for the store a few seconds at most; what goes wrong is logged and never raised.

    Args:
        run: the run.
        generation: of the trainer that ends.
        step: batches that are worth keeping.
        reason: `finished`: the training script is done; `terminated`: somebody sent SIGTERM.
    """
    record = EndRecord(
        run=run.id,
        generation=generation,
        step=step,
        reason=reason,
        ended_ms=now_ms(),
    )

    def write() -> None:
        try:
            run.records(END).put(record, generation)
        except StoreError as error:
            _log.info("no word in the store that training has ended: %s", error)

    # A daemon: a store that hangs must not keep the process.
    writing = threading.Thread(target=write, name="recpoint-end", daemon=True)
    try:
        start_thread(writing)
    except RuntimeError as error:  # python's: can't start new thread
        _log.info("no word in the store that training has ended: %s", error)
        return
    writing.join(_WAIT_SECONDS)


def read_end(run: Run, generation: int) -> EndRecord | None:
    """What the trainer of a generation said at its end; None: nothing.

    Raises:
        FormatError: the record is damaged, or another's.
        StoreError: it cannot be read.
    """
    try:
        return run.records(END).read(generation)
    except ObjectNotFound:
        return None


# Checkpoints that an agent has rejected, left in the store for people (format §7).


_LOG = logging.getLogger("recpoint.persist")

#: So many ranks' records are looked at, those that were written last.
_MOST_RANKS = 100


def leave_rejection(run: Run, rank: int, rejection: Rejection) -> None:
    """Add a rejection to those of its rank; a store that refuses is logged, not raised.

    A rank has one agent at a time. Where two write at once one rejection is lost, to people only.

    Args:
        run: the run that the checkpoint was meant for.
        rank: whose job it was.
        rejection: what was rejected, and why.
    """
    try:
        try:
            before = run.records(REJECTIONS).read(rank)
        except (FormatError, ObjectNotFound):
            newest: tuple[Rejection, ...] = ()
            count = 0
        else:
            newest, count = before.newest, before.count
        if rejection in newest:
            return  # an agent was killed after this, and answers the job again
        record = Rejections(
            run=run.id,
            rank=rank,
            count=min(count + 1, 10**9),
            newest=(rejection, *newest)[:MAX_REJECTIONS],
            host=socket.gethostname()[:255],
            pid=os.getpid(),
        )
        run.records(REJECTIONS).put(record, rank)
    except RecpointError as error:
        # Nothing depends on it: the trainer has its answer, and the agent's log says the same.
        _LOG.info("a rejection is not left in the store: %s", error)


class RejectionWatch:
    """Reads a run's rejections again and again, each record once.

    Args:
        run: the run.

    Attributes:
        damaged: why some records cannot be read.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[ObjectInfo, Rejections | FormatError] = {}
        self.damaged: tuple[FormatError, ...] = ()

    def refresh(self) -> list[Rejections]:
        """What is there now, of each rank.

        Raises:
            StoreError: the store cannot be read.
        """
        records = self._run.records(REJECTIONS)
        infos = [info for _, info in records.listed()]
        now: dict[ObjectInfo, Rejections | FormatError] = {}
        for info in _written_last(infos):
            known = self._seen.get(info)
            try:
                now[info] = records.read_key(info.key) if known is None else known
            except FormatError as error:
                now[info] = error
            except ObjectNotFound:
                continue
        self._seen = now
        self.damaged = tuple(one for one in now.values() if isinstance(one, FormatError))
        return [one for one in now.values() if isinstance(one, Rejections)]


def _written_last(infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(infos, key=lambda info: (-info.modified_ms, info.key))[:_MOST_RANKS]
