"""Chooses a checkpoint of a run and makes it the published one, as a task."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.restore.order import Selection, candidates
from recpoint.catalog.run import publications
from recpoint.catalog.run.publications import choose
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.retention_records import Publication
from recpoint.tasks.persist import RETRIES, may_heal

__all__ = ["PublishOutcome", "publish_checkpoint"]


class PublishOutcome(NamedTuple):
    """The record that counts, whether it is new, the one before it, and what speaks against it."""

    run: str
    record: Publication
    created: bool
    before: Publication | None
    doubt: str | None


@task(
    task_run_name="publish to followers of {run_url}",
    retry_condition_fn=may_heal,
    timeout_seconds=600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def publish_checkpoint(
    run_url: str,
    selection: Selection,
    *,
    held: bool,
    release: bool,
    force: bool,
    why: str,
) -> PublishOutcome:
    """Publish the checkpoint that is named, or the newest good one; safe to run again."""
    return await asyncio.to_thread(_publish, run_url, selection, held, release, force, why)


def _publish(
    run_url: str,
    selection: Selection,
    held: bool,
    release: bool,
    force: bool,
    why: str,
) -> PublishOutcome:
    run = Run.open(open_store(run_url))
    newest = publications.newest_publication(run)
    if not selection.named and newest is not None and newest.held and not release:
        return PublishOutcome(run.id, newest, False, newest, publications.doubt_about(run, newest))
    if selection.named:
        name = candidates(run, selection)[0]
    else:
        name = choose(run, validated_only=selection.validated_only)
    publication = publications.publish(run, name, held=held, release=release, force=force, why=why)
    return PublishOutcome(
        run.id, publication.record, publication.created, newest, publication.doubt
    )
