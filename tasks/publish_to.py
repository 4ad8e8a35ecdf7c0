"""Brings a store that serving reads to the newest checkpoint, as a task.

One flow run at a time publishes to a sink. Each sink has a concurrency limit of Prefect's, so
publications to different sinks do not wait for each other. A publisher outside Prefect knows
nothing of it: then the sink itself refuses one of them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import httpx
from prefect import task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError, concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import SinkError
from recpoint.serving.goal import Channel
from recpoint.serving.sinks.opening import open_sink, shown_url
from recpoint.serving.sinks.publisher import Budget, SinkPublisher
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.tasks.persist import RETRIES, may_heal
from recpoint.tasks.reports import ProgressBar, artifact_key

__all__ = ["publish_version", "sink_mark", "sink_slot"]

_MARK_CHARACTERS: Final = 12
#: Options of a sink's URL that name other rows. All others say how a publisher works.
_NAMING_OPTIONS: Final = ("db", "prefix")


async def sink_mark(sink_url: str | None, sink_url_secret: str | None) -> str:
    """Return what tells a sink from all others in the names of artifacts and limits.

    Args:
        sink_url: the sink.
        sink_url_secret: instead, the name of a Secret block with its URL.

    Returns:
        Hexadecimal digits, the same for each flow run; they do not depend on a password.

    Raises:
        ValueError: there is no such block.
    """
    parts = urlsplit(shown_url(await _url(sink_url, sink_url_secret)))
    options = [option for option in parse_qsl(parts.query) if option[0] in _NAMING_OPTIONS]
    host = parts.netloc.rpartition("@")[2].lower()
    named = urlunsplit((parts.scheme, host, parts.path, urlencode(sorted(options)), ""))
    return hashlib.sha256(named.encode()).hexdigest()[:_MARK_CHARACTERS]


@asynccontextmanager
async def sink_slot(mark: str) -> AsyncIterator[bool]:
    """Hold the one slot of a sink, in a `with` block; the block is told whether it has it.

    If this process is killed, Prefect takes the slot back after five minutes. If Prefect cannot be
    reached meanwhile, the block goes on: the sink refuses publishers that have been overtaken.

    Args:
        mark: of `sink_mark`.
    """
    name = f"recpoint-sink-{mark}"
    async with get_client() as client:
        try:
            await client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # another flow run made it meanwhile
                await client.create_global_concurrency_limit(
                    GlobalConcurrencyLimitCreate(name=name, limit=1)
                )
    async with AsyncExitStack() as stack:
        has_slot = True
        try:
            await stack.enter_async_context(
                concurrency(name, strict=True, max_retries=0, raise_on_lease_renewal_failure=False)
            )
        except ConcurrencySlotAcquisitionError as error:
            answer = error.__cause__
            if not isinstance(answer, httpx.HTTPStatusError):
                raise
            if answer.response.status_code != httpx.codes.LOCKED:
                raise
            has_slot = False
        yield has_slot


def _may_heal(task: Any, run: Any, state: Any) -> bool:
    """Whether to try again; a sink that is away, or that another publisher has, may come back."""
    return isinstance(state.data, SinkError) or may_heal(task, run, state)


@task(
    task_run_name="publish {run_url} to a sink",
    retry_condition_fn=_may_heal,
    timeout_seconds=8 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def publish_version(
    run_url: str,
    sink_url: str | None,
    sink_url_secret: str | None,
    mark: str,
    channel: Channel,
    tables: Sequence[str] | None,
    replace: bool,
    budget_bytes: int | None,
) -> CommittedVersion | None:
    """Return the version that readers of the sink see now; None: there is none to publish."""
    url = await _url(sink_url, sink_url_secret)
    return await asyncio.to_thread(
        _publish, run_url, url, mark, channel, tables, replace, budget_bytes
    )


async def _url(sink_url: str | None, sink_url_secret: str | None) -> str:
    if sink_url is not None:
        return sink_url
    assert sink_url_secret is not None  # the flow has checked that
    block: Secret[str] = await Secret.aload(sink_url_secret)
    return str(block.get())


def _publish(
    run_url: str,
    sink_url: str,
    mark: str,
    channel: Channel,
    tables: Sequence[str] | None,
    replace: bool,
    budget_bytes: int | None,
) -> CommittedVersion | None:
    run = Run.open(open_store(run_url))
    key = artifact_key(run.url, run.id, f"sink-{mark}-progress")
    bar = ProgressBar(key, "publishing to a sink")
    budget = None if budget_bytes is None else Budget(budget_bytes)
    with open_sink(sink_url) as sink:
        publisher = SinkPublisher(
            run_url, sink, tables=tables, channel=channel, replace=replace, budget=budget
        )
        committed = publisher.poll(on_progress=bar.show)
    bar.finish()
    return committed
