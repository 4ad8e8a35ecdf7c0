"""The flow `validate`: the result is in the catalog, in the run's state, and there to be seen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import verdicts
from recpoint.flows.validate import validate
from recpoint.format.naming import METRIC_KEY, ManifestName
from recpoint.tasks import reports
from tests.catalog_builder import tables
from tests.flows.test_persist_flow import artifacts
from tests.job_builder import stage

pytestmark = pytest.mark.usefixtures("prefect_api")


def call(run: Run, **options: Any) -> Any:
    async def state() -> Any:
        called: Any = validate(run.url, **options, return_state=True)
        return await called

    return asyncio.run(state())


def shown(run: Run, step: int) -> list[Any]:
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(any_=[f"recpoint-run-{run.id[:12]}-g1-step-{step}-validation"])
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=key))


def test_a_checkpoint_is_validated_and_the_result_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flow_evaluation.py").write_text(
        "def size(state):\n    return sum(t.numel() for t in state.values())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(reports, "_EVERY_SECONDS", 0.0)
    for step in (1, 2):
        job = stage(run, tmp_path / "s", tables(bits=8), step=step, generation=1, samples=20)
        assert persist.persist_job(job).result == "committed"

    state = call(run, level="full", evaluate_with="flow_evaluation:size")
    assert state.is_completed() and "passed (full)" in state.message
    assert str(verdicts(run)[ManifestName(2, 1)]) == "full"
    run.store.size(METRIC_KEY.of(2, 1, "size"))
    (artifact,) = shown(run, 2)
    assert "**passed** (full)" in str(artifact.description)
    assert "rows compared" in str(artifact.data) and "size" in str(artifact.data)

    bars = artifacts(f"recpoint-run-{run.id[:12]}-g1-step-2-%progress")
    assert {str(bar.key).rpartition("step-2-")[2] for bar in bars} == {
        "validation-full-progress",
        "evaluation-progress",
    }
    assert {float(str(bar.data)) for bar in bars} == {100.0}

    entry = next(e for e in run.manifest(1, 1).chunks if e.content == "rows")
    run.store.put(entry.key, run.store.get(entry.key, max_bytes=1 << 20)[:-1] + b"x")
    state = call(run, step=1)
    assert state.is_failed() and "failed (sample)" in state.message
    assert verdicts(run)[ManifestName(1, 1)].result == "failed"
    (artifact,) = shown(run, 1)
    assert "crc32c" in str(artifact.data)

    state = call(run, step=7)
    assert state.is_failed() and "NothingToRestore" in state.message
    assert ManifestName(7, 1) not in verdicts(run)
