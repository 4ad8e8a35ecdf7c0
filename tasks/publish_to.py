"""Brings a store that serving reads to the newest checkpoint, as a task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import SinkError
from recpoint.serving.goal import Channel
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import SinkPublisher
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.tasks.persist import RETRIES, may_heal
from recpoint.tasks.reports import ProgressBar, artifact_key

__all__ = ["publish_version"]


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
    channel: Channel,
    tables: Sequence[str] | None,
    replace: bool,
) -> CommittedVersion | None:
    """Return the version that readers of the sink see now; None: there is none to publish."""
    if sink_url is None:
        assert sink_url_secret is not None  # the flow has checked that
        sink_url = str((await _secret(sink_url_secret)).get())
    return await asyncio.to_thread(_publish, run_url, sink_url, channel, tables, replace)


async def _secret(name: str) -> Secret[str]:
    block: Secret[str] = await Secret.aload(name)
    return block


def _publish(
    run_url: str, sink_url: str, channel: Channel, tables: Sequence[str] | None, replace: bool
) -> CommittedVersion | None:
    run = Run.open(open_store(run_url))
    bar = ProgressBar(artifact_key(run.url, run.id, "sink-progress"), "publishing to a sink")
    with open_sink(sink_url) as sink:
        publisher = SinkPublisher(run_url, sink, tables=tables, channel=channel, replace=replace)
        committed = publisher.poll(on_progress=bar.show)
    bar.finish()
    return committed
