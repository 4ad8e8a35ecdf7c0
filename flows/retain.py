"""Applies a retention policy to a run as a flow: marks checkpoints, and deletes marked ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from prefect import State, flow
from prefect.artifacts import Artifact
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import BaseModel, Field

from recpoint.catalog.retention.rules import BestBy, RetentionPolicy
from recpoint.catalog.staging import area, job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.flows.parameters import NO_RESULTS, GraceSeconds, RunUrl, StagingArea
from recpoint.tasks.reports import artifact_key, emit
from recpoint.tasks.retain import Retained, retain_store
from recpoint.tasks.run_tags import tag_flow_run

__all__ = ["Best", "Keep", "retain"]


#: Rows of the table that people see; Prefect refuses artifacts of megabytes.
_MOST_ROWS = 500


def _newest_of_each(units: str) -> Any:
    return Field(
        default=0,
        ge=0,
        description=f"Keep the newest checkpoint of each of this many last {units} that have any, "
        "in UTC. Applied by the trainers' clocks and again by the store's, so that one wrong clock "
        "deletes nothing; so up to twice as many are kept. 0: this rule keeps none.",
    )


class Best(BaseModel):
    """Keep the best checkpoints by a metric that was recorded."""

    metric: str = Field(
        min_length=1, description="Name of a metric that `recpoint metric` or an evaluation stored."
    )
    direction: Literal["max", "min"] = Field(
        description="max: the greatest values are the best. min: the least values are the best."
    )
    count: int = Field(default=1, ge=1, description="How many of the best checkpoints to keep.")


class Keep(BaseModel):
    """Which checkpoints to keep: all that at least one rule keeps, and all pinned ones."""

    last: int = Field(
        default=0, ge=0, description="Keep this many newest checkpoints. 0: this rule keeps none."
    )
    within_seconds: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Keep all checkpoints taken at most this many seconds before the newest, by "
        "the trainers' or the store's clock, superseded ones too. 0: this rule keeps none.",
    )
    hourly: int = _newest_of_each("hours")
    daily: int = _newest_of_each("days")
    weekly: int = _newest_of_each("weeks, which begin on Monday,")
    monthly: int = _newest_of_each("months")
    best: list[Best] = Field(
        default_factory=list, description="Keep the best checkpoints by recorded metrics."
    )
    require_validated: bool = Field(
        default=True,
        description="Delete only if a validated checkpoint stays. If not set: only if a checkpoint "
        "stays that restores, as far as its chunks show.",
    )

    def policy(self) -> RetentionPolicy:
        """Return the same rules as a policy of the catalog.

        Raises:
            SettingsError: there is no rule, or an impossible one.
        """
        return RetentionPolicy(
            keep_last=self.last,
            keep_within_seconds=self.within_seconds,
            keep_hourly=self.hourly,
            keep_daily=self.daily,
            keep_weekly=self.weekly,
            keep_monthly=self.monthly,
            best_by=tuple(BestBy(rule.metric, rule.direction, rule.count) for rule in self.best),
            require_validated=self.require_validated,
        )


def _run_name() -> str:
    return f"retain {flow_run.get_parameters()['run_url']}"


@flow(
    name="retain",
    flow_run_name=_run_name,
    timeout_seconds=9 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def retain(
    run_url: RunUrl,
    keep: Keep,
    grace_seconds: GraceSeconds = 24 * 3600.0,
    staging: StagingArea | None = None,
    dry_run: bool = False,
) -> State[Any]:
    """Mark checkpoints that no rule keeps and no kept chain needs; delete those marked before.

    Args:
        run_url: the run.
        keep: the rules.
        grace_seconds: seconds between marking and deletion; at least an hour.
        staging: the staging area of this host; the default one if None. The chunks of jobs staged
            there are kept; so is, on any host, what the newest trainer may still commit.
        dry_run: only report what would be done.

    Returns:
        Completed; its message says what was done, or why nothing may be deleted yet: no checkpoint
        that the rules keep has been validated.

    Raises:
        RecpointError: as from `recpoint.catalog.retention.prune`.
    """
    policy = keep.policy()
    root = area.default_staging_root() if staging is None else Path(staging)
    store_url = open_store(run_url).url
    await tag_flow_run(store_url)
    staged_run = StagedRun.of(root, store_url)
    staged_here = await asyncio.to_thread(job_files.staged_attempts, staged_run)
    retained = await retain_store(run_url, policy, grace_seconds, sorted(staged_here), dry_run)
    if retained.refused:
        return Completed(name="Refused", message=retained.refused)
    if not dry_run:
        emit(
            "retained",
            retained.run,
            run_url,
            summary=retained.summary,
            manifests=len(retained.rows),
        )
    await _show(run_url, retained, dry_run=dry_run)
    return Completed(message=retained.summary)


async def _show(run_url: str, retained: Retained, *, dry_run: bool) -> None:
    url = run_url.replace("`", "'")  # a backtick would end the code span
    hidden_rows = len(retained.rows) - _MOST_ROWS
    more = f" The first {_MOST_ROWS} of {len(retained.rows)} manifests." if hidden_rows > 0 else ""
    # Deleted and marked checkpoints first, so that the cut does not hide them.
    rows = sorted(retained.rows, key=lambda row: row["action"] == "keep")[:_MOST_ROWS]
    await Artifact(
        type="table",
        key=artifact_key(run_url, retained.run, "retention"),
        description=f"{retained.summary}{' (dry run)' if dry_run else ''}: `{url}`.{more}",
        data=rows,
    ).acreate()
