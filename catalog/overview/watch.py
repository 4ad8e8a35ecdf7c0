"""Refreshes the overview of a run: reads each manifest once, estimates the age of objects."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog.overview.alarms import clock_note
from recpoint.catalog.overview.appearances import Appearances
from recpoint.catalog.overview.figures import (
    ManifestFigures,
    ended_lag,
    expected_interval_seconds,
    gone_lag,
    kept,
    lag_of,
    pace,
    restore_estimate,
    state_of,
    totals,
    unreadable,
    with_risk,
)
from recpoint.catalog.overview.overview import (
    Age,
    CheckpointFacts,
    Ended,
    Generation,
    Lag,
    RunOverview,
    ServersSeen,
    StagedRisk,
    Validated,
)
from recpoint.catalog.overview.troubles import Troubles
from recpoint.catalog.run.chain import Chain, resolve_chain
from recpoint.catalog.run.ends import read_end
from recpoint.catalog.run.lineage import Representation, by_checkpoint
from recpoint.catalog.run.pins import pinned
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts, Verdict, verdicts
from recpoint.catalog.staging.agent_trouble import read_trouble
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job_files import read_job
from recpoint.catalog.staging.servers import read_servers
from recpoint.catalog.staging.trainer_note import TrainerNote, read_trainer_note, trainer_state
from recpoint.catalog.store.contract import ObjectInfo, now_ms
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ChainError, FormatError, ObjectNotFound, StagingRefused
from recpoint.format.job import Job
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName, parse_job_stem
from recpoint.format.record_kinds import GENERATION, MANIFEST
from recpoint.format.records import EndRecord

__all__ = [
    "RunWatch",
]


#: Number of the newest checkpoints of the live line that are read; others are only counted.
NEWEST = 500

#: Number of checkpoints that are tried before the overview says that none restores.
_TRIED = 50

#: Number of the newest manifests read that are kept whole, because the chain may need them.
_KEPT_WHOLE = 64


@dataclass(frozen=True, kw_only=True)
class _Safe:
    """The checkpoint that a restore would choose, and the chain that it would read."""

    name: ManifestName
    chain: Chain


class _CatalogListing(NamedTuple):
    """The listings of a refresh."""

    manifests: Mapping[ManifestName, ObjectInfo]  # checkpoints' own, no consolidated ones
    generations: Mapping[int, ObjectInfo]
    forms: Mapping[ManifestName, Sequence[Representation]]
    live: Sequence[ManifestName]
    verdicts: Mapping[ManifestName, Verdict]


class RunWatch:
    """Makes overviews of one run; later ones cost less than the first. For one thread at a time.

    It keeps a few numbers for each of the newest `NEWEST` checkpoints, and the manifests of the
    chain that a restore would read.

    Args:
        run: the run.
        staging: a staging area of this host, which may know that the newest trainer is gone, and
            what it has staged; None: only the catalog is read.
    """

    def __init__(self, run: Run, *, staging: Path | None = None) -> None:
        self.run = run
        self._staging = staging
        self._read: dict[tuple[str, int, int], ManifestFigures] = {}
        self._whole: dict[Representation, Manifest] = {}
        self._safe: _Safe | None = None
        self._signature: object = None
        self._manifests_before: Mapping[ManifestName, ObjectInfo] = {}
        self._generations: Mapping[int, ObjectInfo] = {}
        self._troubles = Troubles(run)
        self._appearances = Appearances()

    def refresh(self) -> RunOverview:
        """Return an overview of the run as it is now.

        Raises:
            NothingToRestore: the run is not there any more.
            FormatError, GenerationRecordLost: the live line cannot be followed.
            StoreError: the store cannot be read.
        """
        listing = self._list()
        checkpoints, safe = self._checkpoints(listing), self._safe_one(listing)
        pinned_names = pinned(self.run)
        expiring = self._troubles.marks(self._appearances.age)
        doomed = {one.key for one in expiring}
        facts = tuple(
            self._facts(listing, name, read, pinned_names, doomed) for name, read in checkpoints
        )
        generation = self._generation(listing)
        newest = 0 if generation is None else generation.number
        end = self._end(newest)
        ends = self._troubles.ends({one.generation for one in facts} - {newest})
        facts = with_risk(facts, self.run, ends if end is None else {**ends, newest: end})
        readable = next((read for _, read in checkpoints if read.error is None), None)
        interval = expected_interval_seconds(readable, facts)
        ended = _ended(end, facts)
        lag = self._lag(listing, facts, generation, safe, interval)
        rate = pace(facts)
        note = self._note_here(generation)
        gone_ms = None if note is None or ended is not None else self._gone_ms(note)
        if generation is not None and ended is not None:
            lag = ended_lag(
                lag,
                ended,
                None if safe is None else safe.name.step,
                most_seconds=_seconds_until(ended.ended_ms, generation, safe, rate),
                pace=rate,
            )
        elif generation is not None and gone_ms is not None:
            lag = gone_lag(
                lag,
                most_seconds=_seconds_until(gone_ms, generation, safe, rate),
                earlier_batches=_earlier_batches(generation, safe),
                pace=rate,
            )
        staged = None
        if generation is not None and note is not None:
            job = self._staged_job(generation.number, 0 if safe is None else safe.name.step)
            staged = None if job is None else self._staged_risk(job, ended, gone_ms, rate)
        speed = self._troubles.bytes_per_second(listing.live, listing.verdicts)
        return RunOverview(
            url=self.run.url,
            run=self.run.id,
            refreshed_ms=now_ms(),
            checkpoints=facts,
            live_checkpoints=len(listing.live),
            superseded_checkpoints=len(listing.forms) - len(listing.live),
            last_validated=next(
                (
                    Validated(*name, verdict)
                    for name in listing.live
                    if (verdict := listing.verdicts.get(name)) is not None
                ),
                None,
            ),
            generation=generation,
            restarts=self.run.restarts(newest) if newest else 0,
            ended=ended,
            gone_ms=gone_ms,
            staged=staged,
            servers=None if note is None else self._servers(generation, note),
            lag=lag,
            restore=None if safe is None else restore_estimate(safe.chain, speed),
            totals=totals(facts),
            plan=self._troubles.plan.refresh(),
            expiring=expiring,
            failures=self._troubles.failures(
                listing.live,
                listing.verdicts,
                facts,
                training=None if generation is None or ended is not None else generation.number,
            ),
        )

    def _list(self) -> _CatalogListing:
        began = time.monotonic()
        # Generations first, own manifests before consolidated ones (format §6.3, read order,
        # rule 3).
        generations = dict(self.run.records(GENERATION).listed())
        if not generations:
            # A missing local directory lists as empty; this raises if the run is gone.
            Run.open(self.run.store)
        if any(generations.get(number) != info for number, info in self._generations.items()):
            self.run = Run(self.run.store, self.run.record)  # drops the records it has cached
        self._generations = generations
        manifests = dict(self.run.records(MANIFEST).listed())
        forms = [Representation(name) for name in manifests]
        consolidated = self.run.consolidated()
        forms += [form for merged in consolidated.values() for form in merged]
        by_name = by_checkpoint(forms)
        numbers = sorted(generations)
        keys = {info.key for info in (*generations.values(), *manifests.values())}
        self._appearances.note_listing(keys, began)
        live = self.run.line_of(numbers, by_name)
        self._troubles.lost = self.run.lost_generations(
            (name.generation for name in by_name), listed=numbers
        )
        return _CatalogListing(
            manifests=manifests,
            generations=generations,
            forms=by_name,
            live=live,
            verdicts=verdicts(self.run),
        )

    def _checkpoints(self, listing: _CatalogListing) -> list[tuple[ManifestName, ManifestFigures]]:
        """Return the figures of the newest checkpoints, newest first; reads only new manifests."""
        wanted = [self._preferred(listing, name) for name in listing.live[:NEWEST]]
        fresh: dict[Representation, Manifest] = {}

        def read(at: int) -> ManifestFigures | None:
            form, identity = wanted[at]
            known = self._read.get(identity)
            if known is not None and known.error is None:
                return known
            try:
                manifest = self.run.read_manifest(form)
            except ObjectNotFound:
                return None  # deleted after the listing
            except FormatError as error:
                return unreadable(error)
            if at < _KEPT_WHOLE:
                fresh[form] = manifest
            return kept(manifest)

        with ReadScheduler.of_records() as reads:
            found = list(reads.results(range(len(wanted)), read))
        self._read = {
            identity: one for (_, identity), one in zip(wanted, found, strict=True) if one
        }
        self._whole.update(fresh)
        return [(name, one) for name, one in zip(listing.live[:NEWEST], found, strict=True) if one]

    def _preferred(
        self, listing: _CatalogListing, name: ManifestName
    ) -> tuple[Representation, tuple[str, int, int]]:
        """Return a checkpoint's own manifest, or else a consolidated one; and its identity."""
        own = Representation(name)
        forms = listing.forms[name]
        form = own if own in forms else forms[0]
        info = listing.manifests.get(name)
        return form, (form.key, info.size_bytes if info else 0, info.modified_ms if info else 0)

    def _safe_one(self, listing: _CatalogListing) -> _Safe | None:
        """Return what a restore would choose: the newest with a sound chain and no bad validation.

        It is searched again only if something was added, removed or validated, or if the newest was
        passed over, because that may have been repaired.
        """
        signature = (listing.manifests, listing.forms, listing.live, listing.verdicts)
        live = listing.live
        if signature == self._signature and self._safe and live and self._safe.name == live[0]:
            self._whole = {form: self._whole[form] for form in _chain_forms(self._safe.chain)}
            return self._safe
        self._forget_changed(listing)
        self._safe = None
        self._troubles.chains = {}
        doubts = Doubts(self.run, validated_only=False, known=listing.verdicts)
        for name in live[:_TRIED]:
            try:
                chain = resolve_chain(self.run, name, read=self._manifest)
            except (ChainError, FormatError, ObjectNotFound) as error:
                self._troubles.chains[name] = error
                continue
            if doubts.about(name) is None:
                self._safe = _Safe(name=name, chain=chain)
                break
        safe = self._safe
        self._whole = (
            {}
            if safe is None
            else {form: self._manifest(form) for form in _chain_forms(safe.chain)}
        )
        self._signature = signature
        return safe

    def _forget_changed(self, listing: _CatalogListing) -> None:
        """Forget whole manifests that are gone or were replaced."""
        before, now = self._manifests_before, listing.manifests
        self._whole = {
            form: manifest
            for form, manifest in self._whole.items()
            if form in listing.forms.get(form.name, ())
            and (form.form != "own" or before.get(form.name) in (None, now.get(form.name)))
        }
        self._manifests_before = listing.manifests

    def _manifest(self, form: Representation) -> Manifest:
        known = self._whole.get(form)
        if known is None:
            known = self._whole[form] = self.run.read_manifest(form)
        return known

    def _facts(
        self,
        listing: _CatalogListing,
        name: ManifestName,
        read: ManifestFigures,
        pins: Mapping[ManifestName, tuple[str, ...]],
        doomed: set[str],
    ) -> CheckpointFacts:
        forms = listing.forms[name]
        verdict = listing.verdicts.get(name)
        return CheckpointFacts(
            step=name.step,
            generation=name.generation,
            kind=read.kind,
            chain_length=read.chain_length,
            state=state_of(read, verdict),
            validation=verdict,
            pins=pins.get(name, ()),
            expires=all(form.key in doomed for form in forms),
            merged=any(form.form != "own" for form in forms),
            snapshot_ms=read.snapshot_ms,
            staged_ms=read.staged_ms,
            committed_ms=read.committed_ms,
            stall_seconds=read.stall_us / 1e6,
            lag_seconds=max(0, read.committed_ms - read.snapshot_ms) / 1000,
            interval_seconds=None,
            interval_batches=None,
            at_risk_seconds=None,
            at_risk_batches=None,
            stored_bytes=read.stored_bytes,
            full_bytes=read.full_bytes,
            copied_ahead=read.copied_ahead,
            cache=read.cache,
            widths=read.widths,
            keyed=read.keyed,
            loss=read.loss,
            error=read.error,
        )

    def _generation(self, listing: _CatalogListing) -> Generation | None:
        if not listing.generations:
            return None
        newest = max(listing.generations)
        record = self.run.generation(newest)
        return Generation(
            number=newest,
            host=record.host,
            pid=record.pid,
            created_ms=record.created_ms,
            age=self._appearances.age(listing.generations[newest]),
            restored_step=None if record.restored is None else record.restored.step,
        )

    def _note_here(self, generation: Generation | None) -> TrainerNote | None:
        """Return the newest trainer's note in this host's staging area; None if it is not here."""
        if (
            self._staging is None
            or generation is None
            or generation.host != socket.gethostname()[:255]
        ):
            return None
        note = read_trainer_note(StagedRun.of(self._staging, self.run.url))
        # A trainer writes its note after its generation's record, by the same clock. An older note
        # is of an earlier trainer: the newest may stage in another area.
        return None if note is None or note.at_ms < generation.created_ms else note

    def _gone_ms(self, note: TrainerNote) -> int | None:
        """Return the last sign of life of a trainer that was killed; None: it was not."""
        assert self._staging is not None  # the note is from there
        staged_run = StagedRun.of(self._staging, self.run.url)
        return note.seen_ms if trainer_state(staged_run, note) == "lost" else None

    def _staged_job(self, generation: int, after: int) -> Job | None:
        """Return the newest whole checkpoint that is staged here, if its step is above `after`.

        It is the job of one part. None too if the staging area does not say.
        """
        assert self._staging is not None  # it has the trainer's note
        staged_run = StagedRun.of(self._staging, self.run.url)
        parts: dict[int, list[Path]] = {}  # by step
        try:
            for path in staged_run.staged_jobs():
                name = parse_job_stem(path.stem)
                if name is not None and name[0] == generation and name[1] > after:
                    parts.setdefault(name[1], []).append(path)
            for step in sorted(parts, reverse=True):
                job = read_job(parts[step][0])
                if job.parts == len(parts[step]) and job.run == self.run.id:
                    return job
        except (OSError, FormatError, StagingRefused):
            return None
        return None

    def _staged_risk(
        self, job: Job, ended: Ended | None, gone_ms: int | None, pace: float | None
    ) -> StagedRisk:
        """Return what the trainer of a staged job has trained after its cut."""
        assert self._staging is not None  # it has the job
        until_ms = now_ms() if gone_ms is None else gone_ms
        if ended is not None:
            until_ms = ended.ended_ms
        seconds = max(0, until_ms - job.snapshot_ms) / 1000
        batches = None if pace is None else round(pace * seconds)
        if ended is not None:
            batches = max(0, ended.step - job.step)
            seconds = seconds if batches else 0.0
        return StagedRisk(
            step=job.step,
            at_risk_seconds=seconds,
            at_risk_batches=batches,
            trouble=read_trouble(StagedRun.of(self._staging, self.run.url), self.run.url),
        )

    def _servers(self, generation: Generation | None, note: TrainerNote) -> ServersSeen | None:
        """Return what the newest trainer has said last of its embedding servers, if it has any."""
        assert self._staging is not None  # it has the trainer's note
        staged_run = StagedRun.of(self._staging, self.run.url)
        # First: what a trainer that has ended by then has written is not taken for what is now.
        lives = trainer_state(staged_run, note) in ("training", "unknown")
        try:
            record = read_servers(staged_run)
        except (OSError, FormatError, StagingRefused) as error:
            return ServersSeen(servers=None, age_seconds=0.0, trainer_lives=lives, error=str(error))
        if record is None or generation is None or record.generation != generation.number:
            return None
        age = max(0, now_ms() - record.at_ms) / 1000
        return ServersSeen(servers=record.servers, age_seconds=age, trainer_lives=lives)

    def _end(self, generation: int) -> EndRecord | None:
        """Return the end record of the newest trainer; None if there is none or it is damaged."""
        self._troubles.end = None
        try:
            return read_end(self.run, generation) if generation else None
        except FormatError as error:
            self._troubles.end = error
            return None

    def _lag(
        self,
        listing: _CatalogListing,
        facts: Sequence[CheckpointFacts],
        generation: Generation | None,
        safe: _Safe | None,
        interval: float | None,
    ) -> Lag:
        if generation is None:
            return lag_of(None, 0.0, "store")
        earlier = _earlier_batches(generation, safe)
        if safe is None:
            age = generation.age
            return lag_of(
                None,
                age.seconds,
                age.clock,
                facts=facts,
                interval_seconds=interval,
                earlier_batches=earlier,
            )
        newest = safe.chain.newest
        info = listing.manifests.get(safe.name)
        if info is None:  # it has only a consolidated manifest; its own was deleted
            store_seconds = time.time() - newest.committed_ms / 1000
            age, note = Age.of(store_seconds=store_seconds, least=0.0, most=None), ""
        else:
            age = self._appearances.age(info)
            note = clock_note(
                store_less_trainer_seconds=(info.modified_ms - newest.committed_ms) / 1000,
                ahead_seconds=info.modified_ms / 1000 - time.time(),
            )
        # The time from cut to commit is by one host's clock.
        seconds = age.seconds + max(0, newest.committed_ms - newest.snapshot_ms) / 1000
        silent = seconds
        if generation.number > safe.name.generation:
            silent = min(silent, generation.age.seconds)
        return lag_of(
            seconds,
            silent,
            age.clock,
            facts=facts,
            interval_seconds=interval,
            earlier_batches=earlier,
            note=note,
        )


def _ended(end: EndRecord | None, facts: Sequence[CheckpointFacts]) -> Ended | None:
    """Return the newest trainer's end; None if it has not ended, or has continued after that."""
    if end is None or (facts and facts[0].step > end.step):
        return None
    reason, _, error = end.reason.partition(": ")
    return Ended(step=end.step, reason=reason, ended_ms=end.ended_ms, error=error)


def _earlier_batches(generation: Generation, safe: _Safe | None) -> int:
    """Return how many of the batches that the newest trainer restored do not restore any more."""
    restorable = 0 if safe is None else safe.name.step
    return max(0, (generation.restored_step or 0) - restorable)


def _seconds_until(
    end_ms: int, generation: Generation, safe: _Safe | None, pace: float | None
) -> float:
    """Return the most time that the training took that does not restore, until the trainer's end.

    It is measured by the newest trainer's clock; for earlier trainers it is computed from `pace`,
    in batches per second.
    """
    since_ms = generation.created_ms
    if safe is not None and safe.name.generation == generation.number:
        since_ms = safe.chain.newest.snapshot_ms
    earlier = _earlier_batches(generation, safe) / pace if pace else 0.0
    return max(0, end_ms - since_ms) / 1000 + earlier


def _chain_forms(chain: Chain) -> list[Representation]:
    return [Representation.of(link) for link in chain.all_manifests]
