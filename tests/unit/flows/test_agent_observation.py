"""Which runs an agent is seen to have, and what is told of each."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.catalog.store.contract import now_ms
from recpoint.dashboards import catalog_watch
from recpoint.dashboards.catalog_watch import CatalogWatch, look_up
from recpoint.flows.agent.ended_trainings import tell_ended_trainings
from recpoint.flows.agent.observation import AgentObservation, observe_agent
from recpoint.flows.agent.runs import RunState
from recpoint.format.naming import VALIDATION_KEY, ValidationLevel, ValidationResult
from tests.catalog_builder import new_run
from tests.interposed_store import InterposedStore
from tests.no_threads import no_threads
from tests.polling import until

URL = "s3://bucket/ads"


def observe(staging: Path, state: RunState) -> AgentObservation:
    run_dir = StagedRun.of(staging, URL).path
    return observe_agent(
        staging, {StagedRun(run_dir): state}, prefect=False, consolidations=lambda _: 0
    )


def run_directory(staging: Path) -> Path:
    run_dir = StagedRun.of(staging, URL).path
    StagedRun(run_dir).jobs_directory.mkdir(parents=True)
    return run_dir


def age_note(run_dir: Path, hours: float) -> None:
    note = json.loads((run_dir / "trainer.json").read_text())
    note["at_ms"] -= int(hours * 3_600_000)
    (run_dir / "trainer.json").write_text(json.dumps(note))


def test_a_run_that_ended_is_shown_for_an_hour_and_longer_while_something_is_staged(
    tmp_path: Path,
) -> None:
    run_dir = run_directory(tmp_path)
    write_trainer_note(StagedRun(run_dir), URL, "ended")
    (run,) = observe(tmp_path, RunState()).runs
    assert (run.run, run.trainer, run.staged_jobs, run.queue_age_seconds) == (URL, "ended", 0, 0)
    age_note(run_dir, 0.9)
    assert observe(tmp_path, RunState()).runs
    age_note(run_dir, 0.2)
    assert not observe(tmp_path, RunState()).runs
    StagedRun(run_dir).job_path(1, 5, 0).write_text("a job")
    (run,) = observe(tmp_path, RunState()).runs
    assert run.staged_jobs == 1 and 0 <= run.queue_age_seconds < 60


def test_a_run_whose_trainer_was_killed_is_shown_until_somebody_takes_it_up(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path)
    write_trainer_note(StagedRun(run_dir), URL, "training")
    age_note(run_dir, 100)
    (run,) = observe(tmp_path, RunState()).runs
    assert run.trainer == "lost"


def test_a_run_has_the_name_of_its_directory_until_somebody_tells_its_url(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path)
    StagedRun(run_dir).job_path(1, 5, 0).write_text("a job")
    (run,) = observe(tmp_path, RunState()).runs
    assert (run.run, run.has_url, run.trainer) == (run_dir.name, False, "unknown")
    (run,) = observe(tmp_path, RunState(run_url="s3://key:secret@bucket/ads")).runs
    assert not run.has_url, "a credential is nothing to show"
    (run,) = observe(tmp_path, RunState(run_url=URL)).runs
    assert (run.run, run.has_url) == (URL, True)


def test_a_staging_area_that_is_gone_has_no_size(tmp_path: Path) -> None:
    seen = observe(tmp_path / "none", RunState())
    assert seen.staging_free_bytes is seen.staging_size_bytes is None
    there = observe(tmp_path, RunState())
    assert 0 < (there.staging_free_bytes or 0) <= (there.staging_size_bytes or 0)


def test_catalogs_are_watched_as_long_as_their_runs_are_there(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    runs = [run.url]
    watch = CatalogWatch(lambda: list(runs), refresh_seconds=0.02)

    def watching() -> set[str]:
        return {thread.name for thread in threading.enumerate() if "catalog /" in thread.name}

    try:
        facts = until(lambda: watch.facts(run.url))
        assert facts.created_ms == run.record.created_ms
        assert facts.overview.live_checkpoints == 0 and facts.last_validation_ms is None
        later = until(lambda: (now := watch.facts(run.url)) is not facts and now or None)
        assert later.overview.refreshed_ms <= now_ms()
        assert set(watch.failures(run.url).values()) == {0}
        runs.append(str(tmp_path / "missing"))
        until(lambda: watch.failures(runs[1])["run_missing"] > 1)
        runs.clear()
        until(lambda: not watching())
        assert watch.facts(run.url) is None
        assert set(watch.failures(run.url).values()) == {0}
    finally:
        watch.stop()


def test_whatever_a_look_raises_is_told_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "run")
    looks, told = [0], [0]

    def runs() -> list[str]:
        told[0] += 1
        if told[0] == 1:
            raise KeyError("a run that goes while it is counted")
        return [run.url]

    def before(call: str, key: str) -> None:
        if call == "get":
            looks[0] += 1
            if looks[0] <= 2:
                raise LookupError("nobody thought of this")

    store = InterposedStore(run.store, before=before)
    monkeypatch.setattr(catalog_watch, "open_store", lambda url: store)
    began_ms = now_ms()
    watch = CatalogWatch(runs, refresh_seconds=0.02)
    try:
        until(lambda: watch.facts(run.url))
        assert watch.failures(run.url)["other"] == 2
        assert began_ms <= (watch.since_ms(run.url) or 0) <= now_ms()
    finally:
        watch.stop()
    said = [one for one in caplog.records if one.exc_info is not None]
    assert [one.exc_info[0] for one in said if one.exc_info] == [KeyError, *[LookupError] * 2]
    assert f"{run.url}: the catalog cannot be read: LookupError: nobody thought" in caplog.text


def test_a_run_whose_thread_could_not_be_started_is_watched_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "run")
    runs: list[str] = []
    watch = CatalogWatch(lambda: list(runs), refresh_seconds=0.02)
    try:
        with no_threads():
            runs.append(run.url)
            until(lambda: caplog.text.count("start new thread") >= 2)
        until(lambda: watch.facts(run.url))
    finally:
        watch.stop()


def test_only_a_validation_of_bytes_that_passed_makes_the_last_one_young(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    watch = RunWatch(run)

    def last_ms(level: ValidationLevel, result: ValidationResult, number: int) -> int | None:
        run.store.put(VALIDATION_KEY.of(10, 1, number, level, result), b"by its key")
        return look_up(watch).last_validation_ms

    assert last_ms("metadata", "passed", 1) is None
    assert last_ms("full", "failed", 2) is None
    assert last_ms("sample", "stateless", 3) is None
    assert last_ms("sample", "passed", 4) is not None
    assert last_ms("full", "passed", 5) is not None


def test_an_end_that_cannot_be_told_ends_no_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = run_directory(tmp_path)
    write_trainer_note(StagedRun(run_dir), URL, "ended")
    StagedRun(run_dir).jobs_directory.rmdir()
    StagedRun(run_dir).jobs_directory.write_text("no directory any more")
    state = RunState()
    state.run_id, state.run_url = "0" * 32, URL
    tell_ended_trainings({StagedRun(run_dir): state})
    assert state.end_told_ms is None and "Not a directory" in caplog.text
