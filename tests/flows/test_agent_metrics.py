"""Metrics of a real agent process: what it knows, what the catalog says, and no waiting for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import locks
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.cli.application import app
from recpoint.dashboards.metrics.table import AGENT_METRICS
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage, stage_chain
from tests.keyed_run import KeyedTrainer
from tests.polling import PATIENCE_SECONDS, until
from tests.scraping import MetricsAgent, Samples, scrape, value
from tests.unit.dashboards.test_trainer_metrics import exposed

runner = CliRunner()


_LOST = "recpoint_agent_trainer_lost"


def of_run(samples: Samples, run: str, name: str, **labels: str) -> float | None:
    return value(samples, name, run=run, **labels)


def test_an_agent_tells_what_it_has_done_and_what_the_catalog_says(
    run: Run, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    stage_chain(run, staging, count=3)
    bad = stage(run, staging, tables(), step=9, generation=1, slot=9)
    bad.write_bytes(b"\xff" * 100)
    write_trainer_note(StagedRun.of_job(bad), run.url, "training")
    with MetricsAgent(staging, tmp_path / "log") as agent:

        def is_read() -> Samples | None:
            found = scrape(agent.url)
            done = of_run(found, run.url, "recpoint_agent_jobs_total", result="rejected")
            read = of_run(found, run.url, "recpoint_catalog_checkpoints")
            return found if done == 1 and read == 3 else None

        found = until(is_read)
        results = {
            result: of_run(found, run.url, "recpoint_agent_jobs_total", result=result)
            for result in ("committed", "rejected", "cancelled")
        }
        assert results == {"committed": 3, "rejected": 1, "cancelled": 0}
        assert of_run(found, run.url, "recpoint_agent_failures_total", cause="damaged") == 1
        stored = sum(run.manifest(*name).stored_bytes for name in run.live_line())
        assert stored == sum(
            of_run(found, run.url, "recpoint_agent_stored_bytes_total", kind=kind) or 0
            for kind in ("full", "increment")
        )
        newest = run.manifest(*run.live_line()[0])
        committed = of_run(found, run.url, "recpoint_agent_last_commit_timestamp_seconds") or 0
        assert committed == pytest.approx(newest.committed_ms / 1000, abs=60)
        assert of_run(found, run.url, "recpoint_agent_staged_jobs") == 0
        assert of_run(found, run.url, "recpoint_agent_chain_length") == 3
        assert of_run(found, run.url, "recpoint_catalog_restore_manifests") == 3
        assert of_run(found, run.url, "recpoint_agent_commit_lag_seconds_count") == 3
        assert of_run(found, run.url, "recpoint_catalog_restarts") == 0
        assert of_run(found, run.url, "recpoint_agent_trainer_lost") == 1
        assert of_run(found, run.url, "recpoint_catalog_last_validation_timestamp_seconds") is None
        assert value(found, "recpoint_agent_prefect_up") == 0
        created = of_run(found, run.url, "recpoint_catalog_created_timestamp_seconds")
        assert created == run.record.created_ms / 1000

        began = time.time()
        assert runner.invoke(app, ["validate", run.url]).exit_code == 0
        name = "recpoint_catalog_last_validation_timestamp_seconds"
        validated = until(lambda: of_run(scrape(agent.url), run.url, name))
        assert began - 1 <= validated <= time.time() + 1
        found = scrape(agent.url)
        of_keys = {name for name in exposed(AGENT_METRICS) if "key" in name}
        assert exposed(AGENT_METRICS) - {name for name, _ in found} == of_keys
        assert {name for name, _ in found if "recpoint" in name} <= exposed(AGENT_METRICS)
        labels = {label for _, have in found for label, _ in have}
        assert labels <= {"run", "result", "cause", "kind", "le", "version"}


def test_an_agent_tells_what_the_keys_of_tables_did(run: Run, tmp_path: Path) -> None:
    trainer = KeyedTrainer(run)
    trainer.commit("full")
    trainer.commit()
    staging = tmp_path / "staging"
    staged = StagedRun.of(staging, run.url)
    staged.path.mkdir(parents=True)
    write_trainer_note(staged, run.url, "training")
    with MetricsAgent(staging, tmp_path / "log") as agent:

        def of_table(name: str, **labels: str) -> float | None:
            return of_run(scrape(agent.url), run.url, name, table="users", **labels)

        until(lambda: of_table("recpoint_catalog_keyed_rows") == len(trainer.rows))
        assert of_table("recpoint_catalog_keyed_capacity_rows") == 11
        counts = {"inserted": trainer.inserted, "refused": trainer.refused}
        counts["evicted"] = trainer.inserted - len(trainer.rows)
        for result, count in counts.items():
            assert of_table("recpoint_catalog_keys", result=result) == count


def test_a_store_that_is_away_makes_values_old_and_counts_failures(
    run: Run, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    (first,) = stage_chain(run, staging, count=1)
    write_trainer_note(StagedRun.of_job(first), run.url, "training")
    with MetricsAgent(staging, tmp_path / "log") as agent:
        until(lambda: of_run(scrape(agent.url), run.url, "recpoint_catalog_checkpoints") == 1)
        (tmp_path / "run").rename(tmp_path / "away")
        stage(run, staging, tables(), step=7, generation=1, slot=7)
        name = "recpoint_agent_failures_total"
        missing = "run_missing"
        until(lambda: (of_run(scrape(agent.url), run.url, name, cause=missing) or 0) > 0)
        failures = "recpoint_catalog_refresh_failures_total"
        until(lambda: (of_run(scrape(agent.url), run.url, failures, cause=missing) or 0) > 0)
        old = scrape(agent.url)
        assert of_run(old, run.url, "recpoint_agent_staged_jobs") == 1
        assert (of_run(old, run.url, "recpoint_agent_queue_age_seconds") or 0) > 0
        assert of_run(old, run.url, "recpoint_catalog_checkpoints") == 1
        read = "recpoint_catalog_refresh_timestamp_seconds"
        assert of_run(scrape(agent.url), run.url, read) == of_run(old, run.url, read)
        (tmp_path / "away").rename(tmp_path / "run")
        until(lambda: of_run(scrape(agent.url), run.url, "recpoint_catalog_checkpoints") == 2)
        until(lambda: of_run(scrape(agent.url), run.url, "recpoint_agent_staged_jobs") == 0)


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A store that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_scrape_waits_for_no_store(tmp_path: Path, black_hole: str) -> None:
    staging = tmp_path / "staging"
    url = "s3://bucket/hangs"
    run_dir = StagedRun.of(staging, url).path
    run_dir.mkdir(parents=True)
    write_trainer_note(StagedRun(run_dir), url, "training")
    credentials = {"AWS_ENDPOINT_URL": black_hole, "AWS_ACCESS_KEY_ID": "a"}
    credentials["AWS_SECRET_ACCESS_KEY"] = "b"
    log = tmp_path / "log"
    with MetricsAgent(staging, log, environment=credentials) as agent:
        until(lambda: of_run(scrape(agent.url), url, "recpoint_agent_trainer_lost") == 1)
        for _ in range(50):
            found = scrape(agent.url)
        assert of_run(found, url, "recpoint_agent_staged_jobs") == 0
        assert of_run(found, url, "recpoint_catalog_checkpoints") is None
        # What the alert for a store that says nothing goes by.
        watch = "recpoint_catalog_watch_start_timestamp_seconds"
        began = until(lambda: of_run(scrape(agent.url), url, watch))
        assert 0 <= time.time() - began < PATIENCE_SECONDS
        agent.process.terminate()
        assert agent.process.wait(PATIENCE_SECONDS) == 0


def test_trainers_that_live_end_or_get_lost(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run = new_run(tmp_path / "run")
    run_dir = StagedRun.of(staging, run.url).path
    run_dir.mkdir(parents=True)

    def state(agent: MetricsAgent) -> tuple[float | None, float | None]:
        found = scrape(agent.url)
        running = of_run(found, run.url, "recpoint_agent_trainer_running")
        return running, of_run(found, run.url, "recpoint_agent_trainer_lost")

    with MetricsAgent(staging, tmp_path / "log") as agent:
        assert state(agent) == (None, None)
        lock = locks.acquire(StagedRun(run_dir).trainer_lock_path(), expected="", next_step="")
        write_trainer_note(StagedRun(run_dir), run.url, "training")
        until(lambda: state(agent) == (1, 0))
        locks.release(lock)
        assert state(agent) == (0, 1)
        write_trainer_note(StagedRun(run_dir), run.url, "ended")
        assert state(agent) == (0, 0)


def test_a_run_whose_name_is_not_text_costs_no_other_its_metrics(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    for url in (str(tmp_path / "run"), str(tmp_path / os.fsdecode(b"mod\xe8le"))):
        (run_dir := StagedRun.of(staging, url).path).mkdir(parents=True)
        write_trainer_note(StagedRun(run_dir), url, "training")  # as one of an earlier version did
    with MetricsAgent(staging, tmp_path / "log") as agent:

        def there() -> bool:
            return of_run(scrape(agent.url), str(tmp_path / "run"), _LOST) == 1

        until(there)
        assert len({label for one in scrape(agent.url) for label in one[1] if "run" in label}) == 1


def test_a_port_that_is_taken_is_wrong_usage(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ["--prefect", "off", "--once", "--metrics-port", port, "--json"]
        done = runner.invoke(app, ["agent", "--staging", str(tmp_path / "s"), *options])
    assert done.exit_code == 2
    assert f"metrics at 127.0.0.1:{port}" in done.stdout
