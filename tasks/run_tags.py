"""Gives the current flow run the tag of its run, by which people find it in Prefect's UI."""

from __future__ import annotations

import logging
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from recpoint.tasks.job_name import run_tag

__all__ = ["tag_flow_run"]

_LOG = logging.getLogger("recpoint.tags")


async def tag_flow_run(*run_urls: str) -> None:
    """Add the tags of these runs to the current flow run, unless it has them.

    At first the flow run of a deployment has the deployment's tags only, because its run is a
    parameter. If Prefect fails, the flow goes on without the tags.

    Args:
        run_urls: each run, as its store names it.
    """
    identity = flow_run.get_id()
    if identity is None:
        return
    tags_wanted = [run_tag(url) for url in run_urls]
    try:
        tags = flow_run.get_tags()
        if missing := [tag for tag in tags_wanted if tag not in tags]:
            async with get_client() as client:
                await client.update_flow_run(UUID(identity), tags=[*tags, *missing])
    except (PrefectException, httpx.HTTPError) as error:
        _LOG.warning("the flow run may lack the tags %s: %s", ", ".join(tags_wanted), error)
