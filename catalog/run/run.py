"""The run: its record, its generations, its manifests, and its takeover (format §4, §5, §6.1)."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ParamSpec, Self, TypeVar

from recpoint.catalog.run.lineage import Representation, by_checkpoint, live_line, restarts
from recpoint.catalog.run.manifest_pages import read_manifest
from recpoint.catalog.run.run_record import create_run_record, read_run_record
from recpoint.catalog.store.contract import Store, now_ms
from recpoint.catalog.store.records import Records
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import (
    ForeignObject,
    FormatError,
    ObjectNotFound,
    RecpointError,
    StoreUnavailable,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    FEW_OF_A_GENERATION,
    GENERATION_KEY,
    MAX_GENERATION,
    ManifestName,
    generation_in_key,
)
from recpoint.format.record_kinds import CONSOLIDATED, GENERATION, MANIFEST, RecordKind
from recpoint.format.records import CheckpointRef, GenerationRecord, RunRecord, StoredRecord

__all__ = [
    "Run",
]


P = ParamSpec("P")
NameT = TypeVar("NameT")
RecordT = TypeVar("RecordT", bound=StoredRecord)
_CLAIM_TRIES = 100


class Run:
    """The catalog of one training job. Several threads may use one instance.

    Generation records never change, so an instance reads each of them once.
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
        """The run's random id, 32 hexadecimal digits; every object of the run holds it."""
        return self.record.run

    @property
    def url(self) -> str:
        """The run URL, without credentials."""
        return self.store.url

    @classmethod
    def open(cls, store: Store) -> Self:
        """Open an existing run (format §6.3, read order, rule 1).

        Raises:
            NothingToRestore: there is no run under this URL.
            RunRecordLost: there is a run that has lost `run.json`.
            FormatError: `run.json` is damaged or of an unknown version.
        """
        return cls(store, read_run_record(store))

    @classmethod
    def create(cls, store: Store) -> Self:
        """Open the run, or create it if there is none (format §6.1, write order, rule 1).

        Raises:
            StoreUnsupported: the store does not honour create-only writes (format §6.2).
            RunRecordLost: there is no `run.json`, but there are objects of a run.
            FormatError: `run.json` is damaged or of an unknown version.
        """
        store.probe()
        return cls(store, create_run_record(store))

    def records(self, kind: RecordKind[P, NameT, RecordT]) -> Records[P, NameT, RecordT]:
        """Return access to the run's records of one kind."""
        return Records(self.store, kind, run=self.id)

    def generation_numbers(self) -> list[int]:
        """Return the numbers of generations with a record, ascending; one listing, no reads."""
        return sorted(self.records(GENERATION).names())

    def generation(self, number: int) -> GenerationRecord:
        """Return the record of one generation.

        Raises:
            FormatError: it is damaged, or of another run; nothing may guess its contents.
            ObjectNotFound: there is no such record.
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
        """Return all generation records, ascending; raise as `generation` for a bad one."""
        read = self.read_generations(self.generation_numbers())
        for outcome in read.values():
            if isinstance(outcome, RecpointError):
                raise outcome
        return [outcome for outcome in read.values() if isinstance(outcome, GenerationRecord)]

    def read_generations(
        self, numbers: Iterable[int]
    ) -> dict[int, GenerationRecord | FormatError | ObjectNotFound]:
        """Read several records at once; the result holds the error of a record that is bad."""

        def read(number: int) -> GenerationRecord | FormatError | ObjectNotFound:
            try:
                return self.generation(number)
            except (FormatError, ObjectNotFound) as error:
                return error

        wanted = list(numbers)
        with ReadScheduler.of_records() as reads:
            return dict(zip(wanted, reads.results(wanted, read), strict=True))

    def manifest_names(self) -> list[ManifestName]:
        """Return all checkpoints, live or superseded, ascending; two listings, no reads."""
        return list(self.representations())

    def representations(self) -> dict[ManifestName, list[Representation]]:
        """Return every manifest by checkpoint, ascending; each checkpoint's cheapest comes first.

        Two listings, no reads.
        """
        # In this order, because a checkpoint whose own manifest is removed in between was
        # consolidated before, so the second listing finds it (format §6.3, read order, rule 3).
        own = [Representation(name) for name in self.records(MANIFEST).names()]
        return by_checkpoint([*own, *self._consolidated()])

    def consolidated(
        self, *, of: ManifestName | None = None
    ) -> dict[ManifestName, list[Representation]]:
        """As `representations`, but only consolidated manifests, of all checkpoints or of one.

        One listing, no reads.
        """
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
        """Return the checkpoints that count, newest first (format §5).

        Args:
            before: leave out this generation and all later ones; the result is the line on which
                the trainer of this generation started.

        Raises:
            FormatError: a generation record on the way is damaged; its key is the subject.
            GenerationRecordLost: a generation record is missing, on the way or of checkpoints that
                would be the newest.
        """
        numbers, names = self.generation_numbers(), self.manifest_names()
        if before is not None:
            numbers = [number for number in numbers if number < before]
            names = [name for name in names if name.generation < before]
        return self.line_of(numbers, names)

    def line_of(self, numbers: Sequence[int], names: Iterable[ManifestName]) -> list[ManifestName]:
        """As `live_line`, for generations and checkpoints that were listed, in this order.

        A checkpoint may belong to a generation that was not listed. Either a trainer has started
        meanwhile, and the checkpoint counts; or the generation's record is lost, and this raises if
        the generation may be the newest, because nobody knows what counts then.
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
            # If the record is there but damaged, its own error says more than "lost".
            for number, outcome in read.items():
                if error.subject == GENERATION_KEY.of(number) and isinstance(outcome, FormatError):
                    raise outcome from error
            raise

    def lost_generations(self, mentioned: Iterable[int], *, listed: Collection[int]) -> list[int]:
        """Return the generations that keys in the store name and that have no record, ascending.

        Args:
            mentioned: the generations that keys name.
            listed: `generation_numbers`, listed before these keys or with them; the records of
                other generations are read.
        """
        read = self.read_generations(sorted(set(mentioned).difference(listed)))
        return [number for number, found in read.items() if isinstance(found, ObjectNotFound)]

    def restarts(self, newest: int) -> int:
        """Return the restarts on the line of generation `newest`; see `lineage.restarts`."""
        numbers = [number for number in self.generation_numbers() if number <= newest]
        read = self.read_generations(numbers)
        return restarts(newest, {n: r for n, r in read.items() if isinstance(r, GenerationRecord)})

    def superseded(self) -> list[ManifestName]:
        """Return the checkpoints that are not on the live line, newest first; see `live_line`."""
        numbers, names = self.generation_numbers(), self.manifest_names()
        live = set(self.line_of(numbers, names))
        return [name for name in reversed(names) if name not in live]

    def manifest(self, step: int, generation: int) -> Manifest:
        """Return a checkpoint's own manifest, or a consolidated one if that is gone or damaged.

        Raises:
            ObjectNotFound: there is no such checkpoint.
            FormatError: none of its manifests is good; the error is about the first of them.
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
                continue  # deleted after the listing
            except FormatError as error:
                if isinstance(first, ObjectNotFound):
                    first = error  # the checkpoint exists, so "not found" would be wrong
        raise first

    def read_manifest(self, representation: Representation) -> Manifest:
        """Return one manifest, fully checked.

        Raises:
            ObjectNotFound: there is no such manifest.
            FormatError: the manifest or one of its pages is damaged, or it belongs under another
                key.
        """
        return read_manifest(self.store, representation, run=self.id)

    def claim(self, restored: CheckpointRef | None, *, above: int = 0) -> GenerationRecord:
        """Take the run over: create the next generation record (format §6.1, write order, rule 1).

        From then on no earlier trainer can commit. Two trainers that claim at once get different
        numbers; the higher number owns the run. The number is above every generation that anything
        in the store names, except chunks. So it is never the number of an earlier trainer whose
        record is lost.

        Args:
            restored: the checkpoint that the trainer goes on from; None: from nothing.
            above: the highest generation named outside the store, for instance by a staged job.
                Then a job of an earlier trainer is never committed as this trainer's.

        Raises:
            GenerationRecordLost: the record of the generation of `restored`, or of an earlier one
                on its line, is lost. After a claim no live line could be followed.
            FormatError: one of these records is damaged.
            ForeignObject: something names the highest possible number.
            StoreUnavailable: so many trainers claim at once that no number was free.
            StoreError: the store refuses, or cannot be reached.
        """
        if restored is not None:
            # Checks the line that this trainer will be on, back to its beginning.
            numbers = [n for n in self.generation_numbers() if n <= restored.generation]
            self.line_of(numbers, [ManifestName(restored.step, restored.generation)])
        # Chunks are not listed, because a checkpoint has thousands of them.
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
                    found=f"generation {number - 1}, the highest possible number",
                    expected="the generation of a real trainer",
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
            # `same` means our own record, because its bytes hold a random token.
            if self.records(GENERATION).create(record, number) != "other":
                with self._lock:
                    self._generations[record.generation] = record
                return record
        raise StoreUnavailable(
            f"{self.url}/{GENERATION_KEY.prefix}",
            found=f"{_CLAIM_TRIES} numbers in a row taken by other trainers",
            expected="one trainer at a time starting on a run",
            next_step="stop the process that keeps starting trainers on this run, and try again",
        )

    def committed_meanwhile(
        self, record: GenerationRecord, *, seen: ManifestName | None
    ) -> ManifestName | None:
        """Return a checkpoint that an earlier trainer committed before `record` fenced it off.

        Args:
            record: the claim of this trainer.
            seen: the newest checkpoint of the live line when this trainer chose what to restore.

        Returns:
            The newest checkpoint of the line that `record` took over, if it is neither `seen` nor
            the restored one; None if nothing was missed.
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
        """Restore and claim so that no commit in between is missed (§6.1, write order, rule 1).

        A trainer that was told which step to restore uses only `claim`, because it leaves later
        commits behind on purpose.

        Args:
            restore: restores the newest usable checkpoint of `live_line(before=ARGUMENT)` and
                returns its reference, or None if there is none. It is called with None, and once
                more with the number of the claim if a checkpoint was committed meanwhile.
            above: see `claim`.
        """
        line = self.live_line()
        record = self.claim(restore(None), above=above)
        newer = self.committed_meanwhile(record, seen=line[0] if line else None)
        if newer is None:
            return record
        # Trainers before `record` can start no further commit, so one more restore is enough.
        again = restore(record.generation)
        return record if again == record.restored else self.claim(again, above=above)
