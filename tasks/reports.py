"""Tells Prefect what people see: artifacts and their keys, progress bars, events, reports.

Events of checkpoints, with their run as the resource. Automations wait for them. Flows and the
agent send events; a trainer never does. A thread of Prefect's sends them, so the caller does not
wait.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Final, Literal, NamedTuple
from uuid import UUID

import httpx
from prefect import task
from prefect.artifacts import Artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_API_URL

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.run.committed import Committed
from recpoint.format.job import Job
from recpoint.format.manifest import CacheUse, CopiedAhead
from recpoint.tasks.job_name import job_name
from recpoint.tasks.persist import run_name
from recpoint.units import bytes_text, cache_text, copied_text, counted, duration_text

__all__ = [
    "ARTIFACT_PREFIX",
    "Checkpoint",
    "CheckpointEvent",
    "EVENT_PREFIX",
    "ProgressBar",
    "RESOURCE_PREFIX",
    "TAG",
    "artifact_key",
    "emit",
    "report",
    "run_title",
    "table_rows",
]


#: The keys of all artifacts of recpoint begin with it.
ARTIFACT_PREFIX = "recpoint-"

_ID_CHARACTERS = 12


def artifact_key(run_url: str, run_id: str, kind: str) -> str:
    """Return the key of one thing that a run shows, such as its lag or a checkpoint's table.

    Prefect takes artifacts with one key for versions of one thing. Runs of the same name, each in a
    folder or bucket of its own, must never share a key, so it holds some characters of the id.

    Args:
        run_url: the run; its last part is in the key, for people.
        run_id: 32 hexadecimal digits.
        kind: lower-case letters, digits and dashes.

    Returns:
        The key, with at most 80 characters of the name between `recpoint-` and the id.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run_title(run_url).lower()).strip("-")[:80] or "run"
    return f"{ARTIFACT_PREFIX}{name}-{run_id[:_ID_CHARACTERS]}-{kind}"


def run_title(run_url: str) -> str:
    """Return the name that people use for the run: the last part of its URL."""
    return run_url.rstrip("/").rpartition("/")[2] or "run"


EVENT_PREFIX = "recpoint.checkpoint."
RESOURCE_PREFIX = "recpoint.run."

#: Every flow run of recpoint has this tag. Code that watches or removes flow runs relies on it.
TAG = "recpoint"

CheckpointEvent = Literal[
    "committed",
    "failed",
    "lagging",
    "ended",
    "consolidated",
    "retained",
    "validated",
    "validation_failed",
    "published",
]

#: Prefect refuses events beyond 1.5 MB; only texts of errors are long.
_LONGEST_TEXT = 2000


def emit(
    event: CheckpointEvent,
    run_id: str,
    run_url: str,
    **payload: str | int | float | dict[str, float] | None,
) -> None:
    """Hand an event to Prefect's own sender; return at once, and raise nothing if sending fails.

    Args:
        event: what happened; it is sent as `recpoint.checkpoint.<event>`.
        run_id: the run's id; the resource is `recpoint.run.<run id>`.
        run_url: where the run is; the resource's name.
        payload: figures and texts of the event; long texts are cut.
    """
    if not PREFECT_API_URL.value():
        return  # Prefect would start a server for it, which takes many seconds
    emit_event(
        f"{EVENT_PREFIX}{event}",
        resource={
            "prefect.resource.id": f"{RESOURCE_PREFIX}{run_id}",
            "prefect.resource.name": run_url,
        },
        payload={
            name: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in payload.items()
        },
    )


_LOG = logging.getLogger("recpoint.progress")

#: Work that takes no longer needs no bar, and the server is asked no more often than this.
_EVERY_SECONDS: Final = 5.0


class ProgressBar:
    """A progress artifact of the current flow or task run: made if it takes long, changed in place.

    If Prefect fails, or the host has no thread left to tell Prefect from, only the bar ends.

    Args:
        key: of the artifact.
        description: what is being done.
    """

    def __init__(self, key: str, description: str) -> None:
        self._key = key
        self._description = description
        self._artifact: UUID | None = None
        self._told_seconds = time.monotonic()
        self._ended = False
        self._teller: threading.Thread | None = None

    def show(self, done_bytes: int, total: int) -> None:
        """Show that `done_bytes` of `total` is done; both in one unit."""
        if self._is_due():
            self._tell(100.0 * min(done_bytes, total) / max(1, total))

    def show_meanwhile(self, done_bytes: int, total: int) -> None:
        """As `show`, and as `finish` if all is done, but the caller never waits.

        Threads, one at a time, ask the server. They end with the process at the latest. Call this
        from one thread only.
        """
        at_work = self._teller is not None and self._teller.is_alive()
        if done_bytes >= total:
            if at_work or self._artifact is not None:
                self._meanwhile(self.finish)
        elif not at_work and self._is_due():
            self._meanwhile(partial(self._tell, 100.0 * done_bytes / total))

    def finish(self) -> None:
        """All is done: fill the bar if it was shown."""
        if self._artifact is not None and not self._ended:
            self._tell(100.0)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if self._ended or now - self._told_seconds < _EVERY_SECONDS:
            return False
        self._told_seconds = now
        return True

    def _meanwhile(self, tell: Callable[[], None]) -> None:
        last_teller = self._teller

        def in_turn() -> None:
            if last_teller is not None:
                last_teller.join()
            tell()

        context = copy_context()  # which flow run this is, and where its server is
        teller = threading.Thread(
            target=context.run, args=(in_turn,), name="recpoint-progress", daemon=True
        )
        try:
            teller.start()
        except (RuntimeError, MemoryError) as error:  # python's: can't start new thread
            self._end(error)
            return
        self._teller = teller

    def _tell(self, percent: float) -> None:
        try:
            # Given settings, Prefect makes a new client, not the client of the flow run's thread.
            settings = {"timeout": PREFECT_API_REQUEST_TIMEOUT.value()}
            with get_client(settings, sync_client=True) as client:
                if self._artifact is not None:
                    client.update_artifact(self._artifact, ArtifactUpdate(data=percent))
                    return
                task, flow = task_run.get_id(), flow_run.get_id()
                artifact = client.create_artifact(
                    ArtifactCreate(
                        type="progress",
                        key=self._key,
                        description=self._description,
                        data=percent,
                        task_run_id=None if task is None else UUID(task),
                        flow_run_id=None if flow is None else UUID(flow),
                    )
                )
                self._artifact = artifact.id
        except (PrefectException, httpx.HTTPError) as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._ended = True
        _LOG.info("%s is no longer shown: %s", self._key, error)


#: Artifacts of this process by key, so that an update costs one request.
_known: dict[str, UUID] = {}
_MOST_KNOWN = 1000


class Checkpoint(NamedTuple):
    """What is shown of a checkpoint; times in milliseconds since the epoch."""

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
    copied_ahead: CopiedAhead | None
    cache: CacheUse | None = None


def _checkpoint_of(job: Job, committed: Committed) -> Checkpoint:
    """Return what is shown once `job` is committed."""
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
        copied_ahead=job.copied_ahead,
        cache=job.cache,
    )


@task(
    task_run_name=run_name,
    timeout_seconds=20,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def report(job: PersistJob, committed: Committed) -> None:
    """Show the checkpoint as a table of its own, and update the run's lag in place."""
    name, checkpoint = job_name(str(job.path)), _checkpoint_of(job.job, committed)
    # A backtick would end the code span, and the text after it would be taken for markup.
    url = checkpoint.run_url.replace("`", "'")
    key = partial(artifact_key, checkpoint.run_url, checkpoint.run_id)
    lag_seconds = _lag_seconds(checkpoint)
    async with get_client() as client:
        await asyncio.gather(
            # Made once: a job is reported after its removal, so never a second time.
            Artifact(
                type="table",
                key=key(f"g{name.generation}-step-{name.step}-r{name.rank}"),
                description=f"Checkpoint {name.step} of `{url}`",
                data=[
                    {"what": label, "value": value}
                    for label, value in table_rows(name.step, checkpoint)
                ],
            ).acreate(client),
            _update(
                client,
                key(f"r{name.rank}-lag"),
                f"Step {name.step} of `{url}`: a trainer that dies now loses "
                f"**{duration_text(lag_seconds)}** and the "
                f"{checkpoint.interval_batches:,} batches of an interval, and what it has trained "
                "since.",
                f"{duration_text(lag_seconds)} behind at step {name.step}, rank {name.rank}: "
                f"`{url}`",
            ),
        )


def table_rows(step: int, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return the table of a checkpoint: what, value."""
    ratio = checkpoint.stored_bytes / checkpoint.full_bytes if checkpoint.full_bytes else 0.0
    return [
        ("step", str(step)),
        ("kind", f"{checkpoint.kind} (chain of {checkpoint.chain_length})"),
        ("rows", f"{checkpoint.rows:,}"),
        ("stored", f"{bytes_text(checkpoint.stored_bytes)}, {counted(checkpoint.chunks, 'chunk')}"),
        ("of a full exact checkpoint", f"{ratio:.1%}"),
        ("stall", duration_text(checkpoint.stall_us / 1e6)),
        *_copied_rows(checkpoint.copied_ahead),
        *([("cache", cache_text(checkpoint.cache))] if checkpoint.cache is not None else []),
        ("staged after", duration_text((checkpoint.staged_ms - checkpoint.snapshot_ms) / 1000)),
        ("lag (committed after)", duration_text(_lag_seconds(checkpoint))),
        ("batches since the checkpoint before", f"{checkpoint.interval_batches:,}"),
    ]


def _copied_rows(copied: CopiedAhead | None) -> list[tuple[str, str]]:
    if copied is None:
        return []
    return [("rows copied ahead", copied_text(copied.rows_before, copied.rows_in_stall))]


def _lag_seconds(checkpoint: Checkpoint) -> float:
    return max(0, checkpoint.committed_ms - checkpoint.snapshot_ms) / 1000


async def _update(client: PrefectClient, key: str, text: str, description: str) -> None:
    """Show `text` in the markdown artifact `key`: replace its text, or make the artifact."""
    if key not in _known:
        stored = await Artifact.aget(key, client)
        if stored is not None and stored.id is not None:
            _known[key] = stored.id
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
