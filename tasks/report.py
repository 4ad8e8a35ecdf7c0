"""Task: what a person sees of a checkpoint in Prefect's UI."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple
from uuid import UUID

from prefect import task
from prefect.artifacts import Artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import ObjectNotFound

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.runs.committed import Committed
from recpoint.format.job import Job
from recpoint.tasks.artifact_key import artifact_key
from recpoint.tasks.job_name import job_name
from recpoint.tasks.persist_task import run_name

__all__ = ["Checkpoint", "report", "table_rows"]

#: Artifacts of this process by key, so that an update costs one request.
_known: dict[str, UUID] = {}
_MOST_KNOWN = 1000


class Checkpoint(NamedTuple):
    """What is told about a checkpoint; times in milliseconds since the epoch."""

    run_url: str
    run_id: str
    kind: str
    chain_length: int
    rows: int
    stored_bytes: int
    full_bytes: int
    chunks: int
    stall_us: int
    snapshot_ms: int
    staged_ms: int
    committed_ms: int
    interval_batches: int


def _checkpoint_of(job: Job, committed: Committed) -> Checkpoint:
    """What there is to tell once `job` is committed."""
    return Checkpoint(
        run_url=job.run_url,
        run_id=job.run,
        kind=job.kind,
        chain_length=job.chain_length,
        rows=job.dirty_rows,
        stored_bytes=committed.stored_bytes,
        full_bytes=job.full_bytes,
        chunks=committed.chunks,
        stall_us=job.stall_us,
        snapshot_ms=job.snapshot_ms,
        staged_ms=job.staged_ms,
        committed_ms=committed.committed_ms,
        interval_batches=job.interval_batches,
    )


@task(
    task_run_name=run_name,
    timeout_seconds=20,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def report(job: PersistJob, committed: Committed) -> None:
    """Show the checkpoint as a table of its own, and bring the run's lag up to date in place."""
    name, checkpoint = job_name(str(job.path)), _checkpoint_of(job.job, committed)
    # A backtick would end the code span, and what follows would be taken for markup.
    url = checkpoint.run_url.replace("`", "'")
    key = partial(artifact_key, checkpoint.run_url, checkpoint.run_id)
    async with get_client() as client:
        await asyncio.gather(
            # Made once: a job is reported after it has been removed, so never a second time.
            Artifact(
                type="table",
                key=key(f"g{name.generation}-step-{name.step}-r{name.rank}"),
                description=f"Checkpoint {name.step} of `{url}`",
                data=[
                    {"what": what, "value": value}
                    for what, value in table_rows(name.step, checkpoint)
                ],
            ).acreate(client),
            _update(
                client,
                key(f"r{name.rank}-lag"),
                f"`{url}`, step {name.step}: a trainer that dies now loses "
                f"**{_lag_seconds(checkpoint):.1f} s** and the {checkpoint.interval_batches} "
                "batches of an interval, and what it has trained since.",
                f"How far the last checkpoint of `{url}` was behind",
            ),
        )


def table_rows(step: int, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """The table of a checkpoint: what, value."""
    ratio = checkpoint.stored_bytes / checkpoint.full_bytes if checkpoint.full_bytes else 0.0
    return [
        ("step", str(step)),
        ("kind", f"{checkpoint.kind} (chain of {checkpoint.chain_length})"),
        ("rows", str(checkpoint.rows)),
        ("stored", f"{checkpoint.stored_bytes} bytes in {checkpoint.chunks} chunks"),
        ("of a full exact checkpoint", f"{ratio:.4f}"),
        ("stall", f"{checkpoint.stall_us / 1000:.1f} ms"),
        ("staged after", f"{(checkpoint.staged_ms - checkpoint.snapshot_ms) / 1000:.2f} s"),
        ("lag (committed after)", f"{_lag_seconds(checkpoint):.2f} s"),
        ("batches since the one before", str(checkpoint.interval_batches)),
    ]


def _lag_seconds(checkpoint: Checkpoint) -> float:
    return max(0, checkpoint.committed_ms - checkpoint.snapshot_ms) / 1000


async def _update(client: PrefectClient, key: str, text: str, description: str) -> None:
    """Show `text` in place of what the markdown artifact `key` showed, if there is one."""
    if key not in _known:
        there = await Artifact.aget(key, client)
        if there is not None and there.id is not None:
            _known[key] = there.id
    if key in _known:
        try:
            return await client.update_artifact(
                _known[key], ArtifactUpdate(data=text, description=description)
            )
        except ObjectNotFound:
            del _known[key]  # somebody has removed it
    artifact = Artifact(type="markdown", key=key, description=description, data=text)
    created = await artifact.acreate(client)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    if created.id is not None:
        _known[key] = created.id
