"""What a crash would cost, against histories of commits, ends, kills and restarts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recpoint.catalog.overview.alarms import alarms
from recpoint.catalog.overview.overview import RunOverview
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import add_record
from recpoint.format.history import History
from recpoint.format.manifest import Manifest
from recpoint.format.naming import GENERATION_KEY, MANIFEST_KEY, ManifestName
from recpoint.format.record_kinds import END
from recpoint.format.records import EndRecord, pack_record
from recpoint.format.validation import ValidationFinding, ValidationRecord
from tests.catalog_builder import build, new_run, tables
from tests.example_counts import examples

START_MS = 1_760_000_000_000
DAY_MS = 86_400_000

Word = Literal["finished", "terminated", "killed"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Batches trained before it, how long its commit takes; None: it is never committed."""

    batches: int
    took_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Life:
    """One trainer.

    Attributes:
        cuts: its checkpoints.
        more_batches: trained after the last of them.
        word: how it ends.
        waits_ms: for its agent, before it says that it has ended.
        pause_ms: until the next one starts.
        condemns: the newest checkpoint that restores fails a validation right after its start.
    """

    cuts: tuple[Cut, ...]
    more_batches: int
    word: Word
    waits_ms: int
    pause_ms: int
    condemns: bool


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a trainer has done: from when and which step to when and which step."""

    start_ms: int
    start_step: int
    stop_ms: int
    stop_step: int


cuts = st.builds(
    Cut,
    batches=st.integers(1, 30),
    took_ms=st.one_of(st.integers(0, 20_000), st.none()),
)
lives = st.builds(
    Life,
    cuts=st.lists(cuts, max_size=3).map(tuple),
    more_batches=st.integers(0, 40),
    word=st.sampled_from(("finished", "terminated", "killed")),
    waits_ms=st.integers(0, 60_000),
    pause_ms=st.integers(1, 100_000),
    condemns=st.booleans(),
)


class Played:
    """Plays lives on a run: every batch takes as long, and all clocks agree."""

    def __init__(self, directory: Path, batch_ms: int) -> None:
        self.run = new_run(directory)
        self.batch_ms = batch_ms
        self.now_ms = START_MS
        self.line: list[Manifest] = []  # oldest first
        self.condemned: set[ManifestName] = set()
        self.trained: dict[int, Trained] = {}
        self.longest_ms = 0  # from a cut, or a start, to the commit of the next

    @property
    def safe(self) -> Manifest | None:
        good = [m for m in self.line if ManifestName(m.step, m.generation) not in self.condemned]
        return good[-1] if good else None

    def live(self, life: Life) -> None:
        restored = self.safe
        if restored is None:
            self.line = []
        else:
            self.line = self.line[: self.line.index(restored) + 1]
        record = self.run.claim(None if restored is None else restored.ref)
        key = GENERATION_KEY.of(record.generation)
        self.run.store.put(key, pack_record(record.model_copy(update={"created_ms": self.now_ms})))
        self._dated(key, self.now_ms)
        if life.condemns and restored is not None:
            self._condemn(restored)
        start_ms = self.now_ms
        start_step = step = 0 if restored is None else restored.step
        total = sum(cut.batches for cut in life.cuts) + life.more_batches
        stop_ms = start_ms + total * self.batch_ms
        waits_ms = 0 if life.word == "killed" else life.waits_ms
        next_ms = stop_ms + waits_ms + life.pause_ms
        since_ms = self.now_ms
        for cut in life.cuts:
            step += cut.batches
            self.now_ms += cut.batches * self.batch_ms
            if cut.took_ms is None or self.now_ms + cut.took_ms >= next_ms:
                continue  # what comes after the next start counts for nothing
            self._commit(step, record.generation, self.now_ms, cut.took_ms)
            self.longest_ms = max(self.longest_ms, self.now_ms - since_ms + cut.took_ms)
            since_ms = self.now_ms
        step += life.more_batches
        self.trained[record.generation] = Trained(
            start_ms=start_ms, start_step=start_step, stop_ms=stop_ms, stop_step=step
        )
        if life.word != "killed":
            end = EndRecord(
                run=self.run.id,
                generation=record.generation,
                step=step,
                reason=life.word,
                ended_ms=stop_ms + waits_ms,
            )
            self.run.records(END).put(end, record.generation)
        self.now_ms = next_ms

    def _commit(self, step: int, generation: int, cut_ms: int, took_ms: int) -> None:
        history = History(trained_ms=0, lossy_restores=0, precision=None, due_batches=10)
        built = build(self.run, tables(rows=2), step=step, generation=generation, history=history)
        times = {"snapshot_ms": cut_ms, "staged_ms": cut_ms, "committed_ms": cut_ms + took_ms}
        manifest = built.manifest.model_copy(update=times)
        key = MANIFEST_KEY.of(step, generation)
        self.run.store.create(key, pack_record(manifest))  # no figure depends on its chunks
        self._dated(key, manifest.committed_ms)
        self.line.append(manifest)

    def _condemn(self, manifest: Manifest) -> None:
        self.condemned.add(ManifestName(manifest.step, manifest.generation))
        finding = ValidationFinding(
            subject="items", row=0, what="values", found="1", expected="2", bound="0"
        )
        record = ValidationRecord(
            run=self.run.id,
            checkpoint=manifest.ref,
            level="full",
            result="failed",
            links_read=1,
            chunks_read=1,
            bytes_read=1,
            rows_compared=1,
            worst_ppm=0,
            digests=(),
            findings=(finding,),
            more_findings=0,
            evaluated_by="",
            started_ms=self.now_ms,
            finished_ms=self.now_ms,
            writer="tests",
        )
        add_record(self.run, record)

    def _dated(self, key: str, when_ms: int) -> None:
        os.utime(Path(self.run.url) / key, ns=(when_ms * 10**6,) * 2)

    def seen(self, at_ms: int) -> RunOverview:
        """As somebody sees it then who has not looked before."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("recpoint.catalog.overview.watch.time.time", lambda: at_ms / 1000)
            # No time passes while it looks.
            patched.setattr("recpoint.catalog.overview.watch.time.monotonic", lambda: 0.0)
            return RunWatch(Run.open(self.run.store)).refresh()


@contextmanager
def played(batch_ms: int, told: list[Life]) -> Iterator[Played]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="recpoint-lag-", dir=memory))
    try:
        history = Played(directory, batch_ms)
        for life in told:
            history.live(life)
        yield history
    finally:
        shutil.rmtree(directory)


quickly = settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def lost(history: Played) -> tuple[int, float]:
    """Batches that the newest trainer had and that do not restore; seconds that they took."""
    newest = history.trained[max(history.trained)]
    safe = 0 if history.safe is None else history.safe.step
    batches = newest.stop_step - safe
    return batches, batches * history.batch_ms / 1000


def silences(seen: RunOverview) -> list[str]:
    return [alarm.next_step for alarm in alarms(seen) if alarm.trouble == "no_commit"]


@quickly
@given(st.sampled_from((10, 100, 500)), st.lists(lives, min_size=1, max_size=4))
def test_what_an_ended_training_has_lost_stands_still(batch_ms: int, told: list[Life]) -> None:
    if told[-1].word == "killed":
        told[-1] = replace(told[-1], word="finished")
    with played(batch_ms, told) as history:
        batches, seconds = lost(history)
        ended_ms = history.now_ms
        first, later = history.seen(ended_ms), history.seen(ended_ms + DAY_MS)
        for seen in (first, later):
            assert seen.ended is not None and not seen.lag.overdue
            newest = history.trained[max(history.trained)]
            is_uncounted = newest.stop_step == 0 and history.safe is None
            assert seen.lag.at_risk_batches == (None if is_uncounted else batches)
            if is_uncounted:  # it may have trained all along
                assert seen.lag.at_risk_seconds <= history.now_ms / 1000
            elif batches == 0:
                assert seen.lag.at_risk_seconds == 0.0
            elif any(one.interval_seconds for one in seen.checkpoints):
                assert seen.lag.at_risk_seconds == pytest.approx(seconds, abs=0.002)
            else:  # how long a batch takes is not known
                waited = told[-1].waits_ms / 1000
                ran = (newest.stop_ms - newest.start_ms) / 1000
                assert seen.lag.at_risk_seconds <= ran + waited + 0.002
        assert later.lag.at_risk_seconds == first.lag.at_risk_seconds
        advice = silences(later)
        assert len(advice) == (batches > 0 or is_uncounted)
        assert not any("alive" in one for one in advice)


@quickly
@given(st.sampled_from((10, 100, 500)), st.lists(lives, min_size=1, max_size=4))
def test_of_a_training_that_goes_on_the_loss_is_what_it_has_trained(
    batch_ms: int, told: list[Life]
) -> None:
    told[-1] = replace(told[-1], word="killed", pause_ms=DAY_MS)  # much later: it still trains
    with played(batch_ms, told) as history:
        newest = history.trained[max(history.trained)]
        batches, seconds = lost(history)
        there = history.seen(max(newest.stop_ms, newest_commit_ms(history)))
        late_ms = max(0, newest_commit_ms(history) - newest.stop_ms)
        known = any(one.interval_seconds for one in there.checkpoints)
        if known and not late_ms:
            assert there.lag.at_risk_seconds == pytest.approx(seconds, abs=0.002)
            if not there.lag.overdue:
                assert there.lag.at_risk_batches is not None
                assert abs(there.lag.at_risk_batches - batches) <= 1
        # It has been killed, which the catalog cannot know: it says what it does not know.
        dead = history.seen(history.now_ms)
        assert dead.lag.at_risk_batches is None and dead.lag.overdue == known_wait(history, dead)
        assert len(silences(dead)) == 1
        for at_ms in range(newest.stop_ms, newest.stop_ms + 60_000, 20_000):
            lag = history.seen(at_ms).lag
            if at_ms >= newest_commit_ms(history) and lag.at_risk_batches is not None:
                longest = max(history.longest_ms, 10 * batch_ms + 20_000)
                assert lag.at_risk_batches <= batches + longest / batch_ms + 1


def newest_commit_ms(history: Played) -> int:
    return max((m.committed_ms for m in history.line), default=0)


def known_wait(history: Played, seen: RunOverview) -> bool:
    """Whether anything tells how long a checkpoint takes to come."""
    return seen.lag.interval_seconds is not None or any(
        one.interval_seconds is not None for one in seen.checkpoints
    )


@quickly
@given(st.sampled_from((10, 100, 500)), st.lists(lives, min_size=1, max_size=4))
def test_before_a_commit_no_more_was_at_risk_than_was_trained(
    batch_ms: int, told: list[Life]
) -> None:
    with played(batch_ms, told) as history:
        seen = history.seen(history.now_ms)
        committed = {ManifestName(m.step, m.generation): m for m in history.line}
        for one in seen.checkpoints:
            if one.interval_batches is None:
                continue
            trained = history.trained[one.generation]
            since = one.step - one.interval_batches
            made = committed[ManifestName(one.step, one.generation)]
            until_ms = min(trained.stop_ms, made.committed_ms)
            then = trained.start_step + (until_ms - trained.start_ms) / batch_ms
            assert one.at_risk_batches is not None and one.at_risk_seconds is not None
            word = told[one.generation - 1].word
            if word != "killed" or made.committed_ms <= trained.stop_ms:
                assert abs(one.at_risk_batches - (then - since)) <= 1
                batches = one.at_risk_seconds * 1000 / batch_ms
                assert abs(batches - (then - since)) <= 1
