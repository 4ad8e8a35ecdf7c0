"""Brings a store that serving reads to the newest checkpoint of a run, as a flow."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import State, flow
from prefect.artifacts import Artifact
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError
from recpoint.flows.parameters import NO_RESULTS, RunUrl
from recpoint.serving.goal import Channel
from recpoint.serving.sinks.opening import shown_url
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.tasks.publish_to import publish_version, sink_mark, sink_slot
from recpoint.tasks.reports import artifact_key
from recpoint.tasks.run_tags import tag_flow_run

__all__ = ["publish_to"]


def _run_name() -> str:
    return f"publish {flow_run.get_parameters()['run_url']} to a sink"


@flow(
    name="publish-to",
    flow_run_name=_run_name,
    timeout_seconds=18 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def publish_to(
    run_url: RunUrl,
    sink_url: Annotated[str, Field(min_length=1, max_length=4096)] | None = None,
    sink_url_secret: Annotated[str, Field(min_length=1, max_length=255)] | None = None,
    channel: Channel = "newest",
    tables: list[str] | None = None,
    replace: bool = False,
    budget_bytes: Annotated[int, Field(ge=1)] | None = None,
) -> State[Any]:
    """Bring a store that serving reads to the newest checkpoint, whole and exactly once.

    Args:
        run_url: the run.
        sink_url: the sink, without a password: whoever sees the flow run sees its parameters.
        sink_url_secret: instead, the name of a Secret block of Prefect that holds the sink's URL.
        channel: newest: the newest checkpoint that no validation speaks against. validated: the
            newest checkpoint that a validation of its bytes has passed. published: the one that was
            published last.
        tables: the tables that the sink is to hold; all if not set.
        replace: take a sink that holds another run.
        budget_bytes: of each version, so many bytes of rows and ids: those that changed most. If
            not set, all rows come, also those that an earlier version has deferred.

    Returns:
        Completed; its message names the version that readers see. If another flow run publishes to
        the sink, nothing is done, and the message says so.

    Raises:
        SettingsError: not one of `sink_url` and `sink_url_secret` is given, or it has a password.
        NothingToRestore: there is no run.
        ForeignObject: the sink holds another run.
        RecpointError: the store or the sink cannot be used. Readers see the sink's last version.
    """
    store = open_store(run_url)
    await tag_flow_run(store.url)
    _require_sink(sink_url, sink_url_secret)
    mark = await sink_mark(sink_url, sink_url_secret)
    async with sink_slot(mark) as has_slot:
        if not has_slot:
            return Completed(message="another flow run publishes to this sink")
        committed = await publish_version(
            run_url, sink_url, sink_url_secret, mark, channel, tables or None, replace, budget_bytes
        )
    if committed is None:
        return Completed(message="nothing to publish yet")
    await _show(store.url, mark, committed)
    checkpoint = committed.version.checkpoint
    return Completed(message=f"readers see {checkpoint}, version {committed.number} of the sink")


def _require_sink(sink_url: str | None, sink_url_secret: str | None) -> None:
    if (sink_url is None) == (sink_url_secret is None):
        raise SettingsError(
            "the sink",
            found="neither sink_url nor sink_url_secret" if sink_url is None else "both",
            expected="one of them",
            next_step="set sink_url, or sink_url_secret if the URL has a password",
        )
    if sink_url is not None and shown_url(sink_url) != sink_url:
        raise SettingsError(
            "sink_url",
            found="a URL with a password, which is shown with the flow run",
            expected="a URL without one",
            next_step="store the URL in a Secret block, and name the block in sink_url_secret; "
            "then change the password",
        )


async def _show(run_url: str, mark: str, committed: CommittedVersion) -> None:
    """Show the version that readers see, unless the sink's newest artifact does so already."""
    version = committed.version
    url = run_url.replace("`", "'")  # a backtick would end the code span
    key = artifact_key(run_url, version.run, f"sink-{mark}")
    description = (
        f"Readers of the sink see step {version.checkpoint.step} "
        f"(version {committed.number}): `{url}`"
    )
    rows = [
        {"table": change.table, "rows": change.rows_put, "deleted": change.rows_deleted}
        for change in committed.changes
    ]
    shown = await Artifact.aget(key)
    if shown is None or shown.description != description:
        await Artifact(type="table", key=key, description=description, data=rows).acreate()
