"""Collects from the catalog what went wrong with a run, and what retention is about to remove."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from recpoint.catalog.overview.overview import Age, CheckpointFacts, ExpiringManifest, Failure
from recpoint.catalog.persist.ranks import first_part, missing_text, parts_text
from recpoint.catalog.run.deletions import TAKE_OVER_SECONDS, read_deletion
from recpoint.catalog.run.ends import read_end
from recpoint.catalog.run.lineage import next_step_of_lost
from recpoint.catalog.run.rejections import RejectionWatch
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Verdict
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.catalog.store.run_url import naming_run
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import (
    CheckpointCancelled,
    FormatError,
    ObjectNotFound,
    RecpointError,
    StaleWriter,
)
from recpoint.format.naming import (
    DELETION_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    AttemptName,
    ManifestName,
    ValidationName,
)
from recpoint.format.record_kinds import MARK, PART, PLAN, VALIDATION
from recpoint.format.records import EndRecord
from recpoint.format.retention_records import Plan
from recpoint.format.validation import ValidationRecord

__all__ = ["Troubles"]


#: Most failures reported of each kind, the newest.
_TOLD = 20

#: Most marks read at each refresh; the reasons of others come with later refreshes.
_MARKS_EACH = 200

#: If parts of a checkpoint are still missing after this time, it counts as waiting for ranks.
_RANKS_SECONDS = 60.0

#: A deletion announced longer ago than this was killed; the next retention finishes it.
_DELETION_SECONDS = TAKE_OVER_SECONDS


class PlanWatch:
    """Watches a run's stored plan, and reads each new one once.

    Args:
        run: the run.

    Attributes:
        error: why the stored plan cannot be read; None if it can be, or there is none.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: ObjectInfo | None = None
        self._plan: Plan | None = None
        self.error: FormatError | None = None

    def refresh(self) -> Plan | None:
        """Return the stored plan; None if there is none, or it cannot be read.

        Raises:
            StoreError: the store cannot be read.
        """
        # The listing tells whether the plan is new; it may be large, with a thousand manifests.
        info = next((info for _, info in self._run.records(PLAN).listed()), None)
        if info is None or info != self._seen:
            self._plan, self.error = None, None
            if info is not None:
                try:
                    self._plan = self._run.records(PLAN).read()
                except ObjectNotFound:
                    return None
                except FormatError as error:
                    self.error = error
            self._seen = info
        return self._plan


class Troubles:
    """Reads the records of failures, each once.

    Args:
        run: the run.

    Attributes:
        chains: checkpoints whose chain is broken, and why; set by `RunWatch`.
        end: what is wrong with the newest trainer's end record; set by `RunWatch`.
        lost: generations beside the live line that have checkpoints but no record, ascending; set
            by `RunWatch`.
        plan: watches the plan of the newest retention.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reasons: dict[tuple[str, int], str] = {}
        self._ends: dict[int, EndRecord | None] = {}
        self._records: dict[ValidationName, ValidationRecord | None] = {}
        self.chains: dict[ManifestName, RecpointError] = {}
        self.end: FormatError | None = None
        self.lost: Sequence[int] = ()
        self.plan = PlanWatch(run)
        self._rejections = RejectionWatch(run)

    def marks(self, age: Callable[[ObjectInfo], Age]) -> tuple[ExpiringManifest, ...]:
        """Return the marked manifests, ascending by key; reads some of the new marks each time."""
        marks = dict(self._run.records(MARK).listed())
        there = {manifest: (info.key, info.modified_ms) for manifest, info in marks.items()}
        new = [one for one, mark in there.items() if mark not in self._reasons][:_MARKS_EACH]
        with ReadScheduler.of_records() as reads:
            read = zip(new, reads.results(new, self._reason), strict=True)
            known = self._reasons | {there[manifest]: reason for manifest, reason in read}
        self._reasons = {mark: known[mark] for mark in there.values() if mark in known}
        return tuple(
            ExpiringManifest(
                key=manifest, reason=self._reasons.get(there[manifest], ""), age=age(info)
            )
            for manifest, info in marks.items()
        )

    def failures(
        self,
        live: Sequence[ManifestName],
        known: Mapping[ManifestName, Verdict],
        checkpoints: Iterable[CheckpointFacts],
        *,
        training: int | None,
    ) -> tuple[Failure, ...]:
        """Return what went wrong, newest first; failures of unknown time last.

        Args:
            live: checkpoints of the live line, newest first.
            known: results of their validations.
            checkpoints: the checkpoints that were read.
            training: the generation whose trainer has not ended; None: there is none.
        """
        found = [
            *self._validations(live, known),
            *self._manifests(checkpoints),
            *self._chains(),
            *self._deletion(),
            *self._superseded(),
            *self._restarts(),
            *self._rejected(training),
            *self._records_for_people(),
            *self._lost(),
            *self._ranks(live),
        ]
        return tuple(sorted(found, key=lambda one: -(one.when_ms or 0)))

    def ends(self, generations: Iterable[int]) -> dict[int, EndRecord]:
        """Return the end records of trainers that have a successor, if any; each is read once.

        A superseded trainer has not ended: it trains on.
        """
        new = [number for number in generations if number not in self._ends]
        if new:
            with ReadScheduler.of_records() as reads:
                self._ends.update(zip(new, reads.results(new, self._end_of), strict=True))
        return {
            number: end
            for number, end in self._ends.items()
            if end is not None and end.reason != "superseded"
        }

    def bytes_per_second(
        self, live: Sequence[ManifestName], known: Mapping[ManifestName, Verdict]
    ) -> float | None:
        """Return the speed of the newest validation that read bytes; None: there is none."""
        for name in live:
            verdict = known.get(name)
            if verdict is None or not verdict.passed("sample"):
                continue
            record = self._record(name, verdict)
            if record is None or record.bytes_read == 0:
                continue
            took_ms = record.finished_ms - record.started_ms
            return None if took_ms <= 0 else 1000 * record.bytes_read / took_ms
        return None

    def _validations(
        self, live: Sequence[ManifestName], known: Mapping[ManifestName, Verdict]
    ) -> list[Failure]:
        failed = [n for n in live if n in known and known[n].result != "passed"]
        return [self._validation(name, known[name]) for name in failed[:_TOLD]]

    def _validation(self, name: ManifestName, verdict: Verdict) -> Failure:
        record = self._record(name, verdict)
        cause, when = "its record cannot be read", None
        if record is not None:
            first, when = record.findings[0], record.finished_ms
            row = "" if first.row is None else f", row {first.row}"
            cause = f"{first.subject}{row}, {first.what}: {first.found}; expected {first.expected}"
            more = len(record.findings) - 1 + record.more_findings
            cause += f"; and {more} more" if more else ""
        return Failure(
            kind="validation",
            subject=f"validation {verdict.number} ({verdict.level}) of {name}: {verdict.result}",
            cause=cause,
            when_ms=when,
            next_step=f"recpoint validate {self._run.url} --step {name.step}",
        )

    def _manifests(self, checkpoints: Iterable[CheckpointFacts]) -> list[Failure]:
        damaged = [one for one in checkpoints if one.error is not None]
        return [self._damaged(one) for one in damaged[:_TOLD]]

    def _damaged(self, one: CheckpointFacts) -> Failure:
        key = MANIFEST_KEY.of(one.step, one.generation)
        # The error is a text that names the object and a next step: both have columns of their own.
        cause, _, advice = (one.error or "").removeprefix(f"{key}: ").partition(". Next: ")
        return Failure(
            kind="manifest",
            subject=key,
            cause=cause,
            when_ms=None,
            next_step=naming_run(advice or "recpoint check URL", self._run.url),
        )

    def _chains(self) -> list[Failure]:
        return [
            Failure(
                kind="chain",
                subject=f"chain of {name}",
                cause=str(error),
                when_ms=None,
                next_step=f"recpoint check {self._run.url} --step {name.step}",
            )
            for name, error in list(self.chains.items())[:_TOLD]
        ]

    def _deletion(self) -> list[Failure]:
        next_step = f"recpoint retain {self._run.url} finishes it"
        try:
            deletion = read_deletion(self._run)
        except FormatError as error:
            return [self._unfinished(str(error), None, next_step)]
        if deletion is None:
            return []
        since = deletion.stamp.written_ms
        if time.time() - since / 1000 < _DELETION_SECONDS:
            return []
        cause = f"{len(deletion.manifests)} manifests, by process {deletion.pid} of {deletion.host}"
        return [self._unfinished(cause, since, next_step)]

    def _unfinished(self, cause: str, when_ms: int | None, next_step: str) -> Failure:
        return Failure(
            kind="deletion",
            subject=f"{DELETION_KEY}: a deletion is announced and not finished",
            cause=cause,
            when_ms=when_ms,
            next_step=next_step,
        )

    def _records_for_people(self) -> list[Failure]:
        return [
            Failure(
                kind="record",
                subject=error.subject,
                cause=f"found {error.found}; expected {error.expected}",
                when_ms=None,
                next_step=error.next_step,
            )
            for error in (self.end, self.plan.error, *self._rejections.damaged)
            if error is not None
        ]

    def _lost(self) -> list[Failure]:
        return [
            Failure(
                kind="record",
                subject=GENERATION_KEY.of(number),
                cause=f"no record of generation {number}, which has checkpoints: they are "
                "superseded, and retention keeps them",
                when_ms=None,
                next_step=naming_run(next_step_of_lost(number), self._run.url),
            )
            for number in self.lost[-_TOLD:]
        ]

    def _rejected(self, training: int | None) -> list[Failure]:
        found = [
            Failure(
                kind="rejected",
                subject=f"{one.checkpoint}" + (f" of rank {record.rank}" if record.rank else ""),
                cause=f"{one.error_type}: {one.error}",
                when_ms=one.rejected_ms,
                next_step=_next_of_rejected(
                    one.error_type, is_training=one.checkpoint.generation == training
                ),
            )
            for record in self._rejections.refresh()
            for one in record.newest
            if one.error_type != CheckpointCancelled.__name__  # the trainer wanted that
        ]
        return sorted(found, key=lambda one: -(one.when_ms or 0))[:_TOLD]

    def _ranks(self, live: Sequence[ManifestName]) -> list[Failure]:
        """Return the newest trainer's checkpoints that wait for some of their parts."""
        newest = max(self._run.generation_numbers(), default=0)
        last = max((name.step for name in live if name.generation == newest), default=-1)
        there: dict[AttemptName, dict[int, int]] = {}
        for name, info in self._run.records(PART).listed():
            if name.generation == newest and name.step > last:
                there.setdefault(name.checkpoint, {})[name.rank] = info.modified_ms
        found = []
        for attempt, modified in sorted(there.items())[-_TOLD:]:
            since = min(modified.values())
            if time.time() - since / 1000 < _RANKS_SECONDS:
                continue
            part = first_part(self._run, attempt, modified)
            if part is None:
                continue  # an agent reports the damage, and rejects the job
            missing = [number for number in range(part.parts) if number not in modified]
            if missing:
                found.append(
                    Failure(
                        kind="ranks",
                        subject=f"step {attempt.step} waits for {missing_text(missing, part)}",
                        cause=f"{parts_text(modified, part.ranks)} stored their parts; the others "
                        "did not",
                        when_ms=since,
                        next_step="read the logs of trainers and agents where parts are missing",
                    )
                )
        return found

    def _superseded(self) -> list[Failure]:
        """Return the trainer before the newest one, if it has said that it trains on superseded.

        Its record is read again each time until it says that the trainer has ended.
        """
        numbers = self._run.generation_numbers()[-2:]
        if len(numbers) < 2:
            return []
        number, newest = numbers
        end = self._ends.get(number)
        if end is None or end.reason == "superseded":
            end = self._ends[number] = self._end_of(number)
        if end is None or end.reason != "superseded":
            return []
        try:
            record = self._run.generation(number)
        except (FormatError, ObjectNotFound):
            return []
        return [
            Failure(
                kind="superseded",
                subject=f"generation {number}",
                cause=f"process {record.pid} of {record.host} trained on after generation "
                f"{newest} took over the run; nothing that it trains after step {end.step} is "
                "stored",
                when_ms=end.ended_ms,
                next_step=f"on {record.host}: stop process {record.pid}, or, if it is the one that "
                "should train, stop the other and start this one again",
            )
        ]

    def _restarts(self) -> list[Failure]:
        numbers = self._run.generation_numbers()[-_TOLD - 1 :]
        ended = self.ends(numbers[:-1])
        found = []
        for before, number in pairwise(numbers):
            if before in ended and not ended[before].reason.startswith("failed: "):
                continue
            try:
                record = self._run.generation(number)
            except (FormatError, ObjectNotFound):
                continue
            went_on = "nothing" if record.restored is None else f"step {record.restored.step}"
            found.append(
                Failure(
                    kind="restart",
                    subject=f"generation {number}",
                    cause=f"process {record.pid} of {record.host} went on from {went_on}; "
                    "its predecessor's training after that is lost",
                    when_ms=record.created_ms,
                    next_step="read the log of the previous trainer",
                )
            )
        return found

    def _record(self, name: ManifestName, verdict: Verdict) -> ValidationRecord | None:
        named = ValidationName(*name, verdict.number, verdict.level, verdict.result)
        if named not in self._records:
            if len(self._records) > 10 * _TOLD:
                self._records.clear()
            try:
                self._records[named] = self._run.records(VALIDATION).read(*named)
            except (FormatError, ObjectNotFound):
                self._records[named] = None
        return self._records[named]

    def _end_of(self, generation: int) -> EndRecord | None:
        try:
            return read_end(self._run, generation)
        except FormatError:
            return None

    def _reason(self, manifest: str) -> str:
        try:
            return self._run.records(MARK).read(manifest).reason
        except (FormatError, ObjectNotFound):
            return ""


def _next_of_rejected(error_type: str, *, is_training: bool) -> str:
    """Say what to do about a rejected checkpoint.

    Args:
        error_type: name of the error that the agent rejected it for.
        is_training: whether its trainer is the newest of the run and has not ended.
    """
    if error_type == StaleWriter.__name__:
        return (
            "nothing, if the trainer was restarted: its rows are trained again; else stop the "
            "second trainer: these rows are in no checkpoint"
        )
    if is_training:
        return "see the agent's log; the trainer stages its rows again"
    return "see the agent's log; its rows are in a later checkpoint, or trained again"
