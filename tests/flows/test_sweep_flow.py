"""The flow `sweep`: orphans go, and what a staged job still needs stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact

from recpoint.catalog import persist, staged
from recpoint.catalog.check import check
from recpoint.catalog.run import Run
from recpoint.flows.sweep import sweep
from tests.catalog_builder import build, tables, upload
from tests.job_builder import stage

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
    for group in persist.groups_of(job_file):
        persist.encode_step(job_file, group.index)
        persist.upload_step(job_file, group.index)
    wanted = chunk_keys(run) - set(orphan.chunks)
    assert wanted > committed

    asyncio.run(sweep(run.url, staging=str(staging), grace_seconds=0.0, dry_run=True))
    assert chunk_keys(run) == wanted | set(orphan.chunks)
    assert list((job_file.parent.parent / "spool").iterdir())

    asyncio.run(sweep(run.url, staging=str(staging), grace_seconds=0.0))
    assert chunk_keys(run) == wanted
    assert not (job_file.parent.parent / "spool").exists()
    assert persist.persist_job(job_file).result == "committed"
    assert check(run, level="full").ok
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(any_=[f"recpoint-run-{run.id[:12]}-sweep"])
        shown = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    # The dry run and the sweep, and nothing of another run of this name.
    assert ["Removed" in str(one.data) for one in sorted(shown, key=_created)] == [False, True]


def test_a_sweep_leaves_the_spool_to_a_living_agent(run: Run, tmp_path: Path) -> None:
    job_file = stage(run, tmp_path, tables(), step=1, generation=1)
    persist.encode_step(job_file, 0)
    with staged.AgentLock(tmp_path):
        asyncio.run(sweep(run.url, staging=str(tmp_path), grace_seconds=0.0))
    assert list((job_file.parent.parent / "spool").iterdir())
