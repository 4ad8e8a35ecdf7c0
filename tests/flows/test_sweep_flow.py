"""The flow `sweep`: what is staged is finished, orphans go, what a staged job needs stays."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.exceptions import ParameterTypeError

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.agent_lock import AGENT, DRAIN, AgentLock, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.flows.drain import drain
from recpoint.flows.sweep import sweep
from tests.catalog_builder import build, tables, upload
from tests.job_builder import stage
from tests.persisted import store_groups
from tests.polling import until

pytestmark = pytest.mark.usefixtures("prefect_api")


def _created(artifact: Artifact) -> str:
    return str(artifact.created)


def chunk_keys(run: Run) -> set[str]:
    return {info.key for info in run.store.list("chunks/")}


def test_orphans_go_and_staged_attempts_stay(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    persist.persist_job(stage(run, staging, tables(), step=1, generation=1))
    committed = chunk_keys(run)
    orphan = build(run, tables(), step=2, generation=1)
    upload(run.store, orphan)
    job_file = stage(run, staging, tables(), step=3, generation=1)
    store_groups(persist.PersistJob.open(job_file))
    wanted = chunk_keys(run) - set(orphan.chunks)
    assert wanted > committed
    for chunk in chunk_keys(run):
        os.utime(Path(run.url) / chunk, (1, 1))

    with pytest.raises(ParameterTypeError, match="grace_seconds"):
        asyncio.run(sweep(run.url, staging=str(staging), grace_seconds=3599.0))
    # From a host that stages nothing of the run: the newest trainer may have both staged.
    asyncio.run(sweep(run.url, staging=str(tmp_path / "laptop"), grace_seconds=3600.0))
    assert chunk_keys(run) == wanted | set(orphan.chunks)

    asyncio.run(sweep(run.url, staging=str(staging), grace_seconds=3600.0, dry_run=True))
    assert chunk_keys(run) == wanted | set(orphan.chunks)
    assert list((job_file.parent.parent / "spool").iterdir())

    with AgentLock(staging):
        asyncio.run(sweep(run.url, staging=str(staging), grace_seconds=3600.0))
    assert chunk_keys(run) == wanted and job_file.exists()
    # Where no agent is, it is finished.
    asyncio.run(sweep(run.url, staging=str(staging), grace_seconds=3600.0))
    assert not job_file.exists() and not list((job_file.parent.parent / "spool").iterdir())
    assert [name.step for name in run.live_line()] == [3, 1]
    assert check(run, level="full").ok
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(any_=[f"recpoint-run-{run.id[:12]}-sweep"])
        shown = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    # The laptop's, the dry run and the sweeps, and nothing of another run of this name.
    data = [str(one.data).strip('"') for one in sorted(shown, key=_created)]
    assert [text.partition(",")[0].partition(":")[0] for text in data] == [
        "Removed 0 objects",
        f"Would remove {len(orphan.chunks)} objects",
        f"Removed {len(orphan.chunks)} objects",
        "Removed 0 objects",
    ]
    for text, fate in zip(
        data, ("Nothing is staged", "would finish", "waits for its agent", "committed"), strict=True
    ):
        assert fate in text


def test_a_sweep_leaves_the_spool_to_a_living_agent(run: Run, tmp_path: Path) -> None:
    job_file = stage(run, tmp_path, tables(), step=1, generation=1)
    job = persist.PersistJob.open(job_file)
    job.encode(job.groups[0])
    with AgentLock(tmp_path):
        asyncio.run(sweep(run.url, staging=str(tmp_path), grace_seconds=3600.0))
    assert list((job_file.parent.parent / "spool").iterdir())


def test_a_drain_is_left_to_who_does_the_jobs_of_all_runs(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def drained() -> str:
        called: Any = drain(staging=str(tmp_path), return_state=True)
        return str((await called).message)

    job_file = stage(run, tmp_path, tables(), step=1, generation=1)
    for who in (AGENT, DRAIN):
        with AgentLock(tmp_path, who):
            left = f"left to the {who.kind} that serves {tmp_path}: 1 jobs"
            assert asyncio.run(drained()) == left
    assert job_file.exists()
    # A sweep of another run leaves them, and ends by itself.
    caplog.set_level(logging.INFO, "recpoint.agent")
    sweeps = AgentLock(tmp_path, sweep_of(StagedRun(tmp_path / "other-0123456789ab")))
    assert sweeps.take() is None

    def end() -> None:
        until(lambda: "waiting for process" in caplog.text)
        sweeps.release()

    ends = threading.Thread(target=end, daemon=True)
    ends.start()
    assert asyncio.run(drained()) == "1 jobs done, 0 still staged"
    ends.join()
    assert not job_file.exists()
