"""Refreshes the overview of a run: reads each manifest once, estimates when objects appeared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recpoint.catalog.overview.overview import (
    Age,
    CheckpointFacts,
    Ended,
    Generation,
    Lag,
    ManifestFigures,
    RunOverview,
    Validated,
    clock_note,
    ended_lag,
    expected_interval_seconds,
    kept,
    lag_of,
    pace,
    restore_estimate,
    state_of,
    totals,
    unreadable,
    with_risk,
)
from recpoint.catalog.overview.troubles import Troubles
from recpoint.catalog.run.chain import Chain, resolve_chain
from recpoint.catalog.run.lineage import Representation, by_checkpoint
from recpoint.catalog.run.pins import pinned
from recpoint.catalog.run.run import Run, read_end
from recpoint.catalog.run.validations import Doubts, Verdict, verdicts
from recpoint.catalog.store.contract import ObjectInfo, now_ms
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ChainError, FormatError, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.record_kinds import GENERATION, MANIFEST
from recpoint.format.records import EndRecord

__all__ = ["RunWatch"]


# Between which looks an object has appeared, and how old it is for that, whatever clocks say.


class Appearances:
    """Of the objects that looks have found. For one thread at a time."""

    def __init__(self) -> None:
        # Monotonic times: between which an object that was not there at first has appeared.
        self._appeared: dict[str, tuple[float, float]] = {}
        self._known: set[str] = set()
        self._first_seen: float | None = None
        self._last_began = 0.0

    def note_listing(self, keys: set[str], began: float) -> None:
        """A look that began then, on the monotonic clock, has found these keys and no others."""
        now = time.monotonic()
        if self._first_seen is None:
            self._first_seen = now
        else:
            for key in keys - self._known:
                self._appeared[key] = (self._last_began, now)
            for key in self._known - keys:
                self._appeared.pop(key, None)
        self._known, self._last_began = keys, began

    def age(self, info: ObjectInfo) -> Age:
        """Of an object: what its store says, within what was seen here."""
        now = time.monotonic()
        store_seconds = time.time() - info.modified_ms / 1000
        if info.key in self._appeared:
            after, seen = self._appeared[info.key]
            return Age.of(store_seconds=store_seconds, least=now - seen, most=now - after)
        first = now if self._first_seen is None else self._first_seen
        least = now - first if info.key in self._known else 0.0
        return Age.of(store_seconds=store_seconds, least=least, most=None)


# Reading a run's overview again and again, each manifest once (format §2, §5, §10).
#
# A refresh lists the records of a run and reads only those manifests that it has not read before:
# what it costs follows what is new, and not how long the run has been going.


#: So many checkpoints of the live line are read; the others are only counted.
NEWEST = 500

#: So many checkpoints are tried before it is said that none restores.
_TRIED = 50

#: Manifests of one refresh that are kept for the chain, which needs them whole.
_KEPT_WHOLE = 64


@dataclass(frozen=True, kw_only=True)
class _Safe:
    """What a restore would take, and the chain it would read."""

    name: ManifestName
    chain: Chain


class _Listing(NamedTuple):
    """What a refresh has listed, and on which clocks."""

    manifests: Mapping[ManifestName, ObjectInfo]  # of checkpoints' own, no consolidated ones
    generations: Mapping[int, ObjectInfo]
    forms: Mapping[ManifestName, Sequence[Representation]]
    live: Sequence[ManifestName]
    verdicts: Mapping[ManifestName, Verdict]


class RunWatch:
    """Overviews of one run, each cheaper than the first. For one thread at a time.

    Keeps a few numbers for each of the newest `NEWEST` checkpoints, and the manifests of the chain
    that a restore would read.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._read: dict[tuple[str, int, int], ManifestFigures] = {}
        self._whole: dict[Representation, Manifest] = {}
        self._safe: _Safe | None = None
        self._signature: object = None
        self._manifests_before: Mapping[ManifestName, ObjectInfo] = {}
        self._generations: Mapping[int, ObjectInfo] = {}
        self._troubles = Troubles(run)
        self._appearances = Appearances()

    def refresh(self) -> RunOverview:
        """The run as it is now.

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
        if generation is not None and ended is not None:
            rate = pace(facts)
            lag = ended_lag(
                lag,
                ended,
                None if safe is None else safe.name.step,
                most_seconds=_seconds_to_end(ended, generation, safe, rate),
                pace=rate,
            )
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

    # --- listing -------------------------------------------------------------------------------

    def _list(self) -> _Listing:
        began = time.monotonic()
        # Generations first, own manifests before consolidated ones (format §6.3, read order,
        # rule 3).
        generations = dict(self.run.records(GENERATION).listed())
        if not generations:
            # A local directory that is gone lists as empty: a run that is away is not a new one.
            Run.open(self.run.store)
        if any(generations.get(number) != info for number, info in self._generations.items()):
            self.run = Run(self.run.store, self.run.record)  # it keeps records that it has read
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
        return _Listing(
            manifests=manifests,
            generations=generations,
            forms=by_name,
            live=live,
            verdicts=verdicts(self.run),
        )

    # --- manifests -----------------------------------------------------------------------------

    def _checkpoints(self, listing: _Listing) -> list[tuple[ManifestName, ManifestFigures]]:
        """Of the newest of the live line, newest first; only what is new is read."""
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
                return None  # let go of since it was listed
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
        self, listing: _Listing, name: ManifestName
    ) -> tuple[Representation, tuple[str, int, int]]:
        """A checkpoint's own manifest, else a consolidated one; and what tells it from others."""
        own = Representation(name)
        forms = listing.forms[name]
        form = own if own in forms else forms[0]
        info = listing.manifests.get(name)
        return form, (form.key, info.size_bytes if info else 0, info.modified_ms if info else 0)

    def _safe_one(self, listing: _Listing) -> _Safe | None:
        """What a restore would take: the newest whose chain joins up and that nothing is against.

        Looked for again only when something has been added, removed or validated; or when the
        newest was passed over, which may be mended.
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

    def _forget_changed(self, listing: _Listing) -> None:
        """Forget whole manifests that are gone, or are not those that were read."""
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

    # --- figures -------------------------------------------------------------------------------

    def _facts(
        self,
        listing: _Listing,
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
            error=read.error,
        )

    def _generation(self, listing: _Listing) -> Generation | None:
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

    def _end(self, generation: int) -> EndRecord | None:
        """The word of the newest trainer that it has ended; None: there is none to go by."""
        self._troubles.end = None
        try:
            return read_end(self.run, generation) if generation else None
        except FormatError as error:
            self._troubles.end = error
            return None

    def _lag(
        self,
        listing: _Listing,
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
        if info is None:  # consolidated, and its own manifest let go of
            store_seconds = time.time() - newest.committed_ms / 1000
            age, note = Age.of(store_seconds=store_seconds, least=0.0, most=None), ""
        else:
            age = self._appearances.age(info)
            note = clock_note(
                store_less_trainer_seconds=(info.modified_ms - newest.committed_ms) / 1000,
                ahead_seconds=info.modified_ms / 1000 - time.time(),
            )
        # From cut to commit: one host's clock.
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
    """The newest trainer's word that it has ended; not if it has gone on nevertheless."""
    if end is None or (facts and facts[0].step > end.step):
        return None
    return Ended(step=end.step, reason=end.reason, ended_ms=end.ended_ms)


def _earlier_batches(generation: Generation, safe: _Safe | None) -> int:
    """How many batches the newest trainer went on from that do not restore any more."""
    restorable = 0 if safe is None else safe.name.step
    return max(0, (generation.restored_step or 0) - restorable)


def _seconds_to_end(
    ended: Ended, generation: Generation, safe: _Safe | None, pace: float | None
) -> float:
    """How long what was trained until the end, and does not restore, can have taken.

    Of the newest trainer by its own clock, of those before it at the pace of batches a second.
    """
    since_ms = generation.created_ms
    if safe is not None and safe.name.generation == generation.number:
        since_ms = safe.chain.newest.snapshot_ms
    earlier = _earlier_batches(generation, safe) / pace if pace else 0.0
    return max(0, ended.ended_ms - since_ms) / 1000 + earlier


def _chain_forms(chain: Chain) -> list[Representation]:
    return [Representation.of(link) for link in chain.manifests]
