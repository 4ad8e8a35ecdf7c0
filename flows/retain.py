"""Flow: keep what the policy keeps of a run, mark the rest, and delete it after the grace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from prefect import State, flow
from prefect.artifacts import Artifact
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import BaseModel, Field

from recpoint.catalog.retention.keep import BestBy, RetentionPolicy
from recpoint.catalog.staging import area
from recpoint.catalog.store.store import open_store
from recpoint.flows.parameters import NO_RESULTS, GraceSeconds, RunUrl, StagingArea
from recpoint.tasks.reports import artifact_key, emit
from recpoint.tasks.retain import Retained, retain_store

__all__ = ["Best", "Keep", "retain"]


#: Rows of the table that people see; Prefect refuses artifacts of megabytes.
_MOST_ROWS = 500


def _newest_of_each(units: str) -> Any:
    return Field(
        default=0,
        ge=0,
        description=f"The newest one of each of the last so many {units} that have any, in UTC, "
        "by the trainers' stamps and again by the store's times, so that one wrong clock never "
        "deletes where each has its own: up to twice as many. 0: this rule keeps none.",
    )


class Best(BaseModel):
    """Keep the best checkpoints by a metric that was recorded."""

    metric: str = Field(
        min_length=1, description="Its name, as `recpoint metric` or an evaluation recorded it."
    )
    direction: Literal["max", "min"] = Field(
        description="max: the greatest are the best. min: the least are."
    )
    count: int = Field(default=1, ge=1, description="So many of them.")


class Keep(BaseModel):
    """Which checkpoints to keep; any rule keeps. Pinned ones are always kept."""

    last: int = Field(default=0, ge=0, description="The newest so many. 0: this rule keeps none.")
    within_seconds: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="All that were taken at most so many seconds before the newest, superseded "
        "ones too, by either of the two clocks. 0: this rule keeps none.",
    )
    hourly: int = _newest_of_each("hours")
    daily: int = _newest_of_each("days")
    weekly: int = _newest_of_each("weeks, which begin on Monday,")
    monthly: int = _newest_of_each("months")
    best: list[Best] = Field(
        default_factory=list, description="The best by metrics that were recorded of them."
    )
    require_validated: bool = Field(
        default=True,
        description="Drop nothing unless a validated checkpoint stays. If not set: unless one does "
        "that restores as far as its chunks tell.",
    )

    def policy(self) -> RetentionPolicy:
        """The same as the catalog takes it.

        Raises:
            SettingsError: no rule at all, or one that cannot be.
        """
        return RetentionPolicy(
            keep_last=self.last,
            keep_within_seconds=self.within_seconds,
            keep_hourly=self.hourly,
            keep_daily=self.daily,
            keep_weekly=self.weekly,
            keep_monthly=self.monthly,
            best_by=tuple(BestBy(one.metric, one.direction, one.count) for one in self.best),
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
    """Mark manifests that no rule keeps and no kept chain needs; delete what was marked before.

    Args:
        run_url: the run.
        keep: the rules.
        grace_seconds: what is marked is deleted so many seconds later, an hour at least.
        staging: the staging area of this host; the default one if None. Attempts that its jobs
            name are kept; so is, on any host, what the newest trainer may still commit.
        dry_run: only say what would be done.

    Returns:
        Completed; its message says what was done, or why the rules drop nothing yet: nothing that
        they would keep has been validated.

    Raises:
        RecpointError: of `recpoint.catalog.retention.prune`.
    """
    policy = keep.policy()
    root = area.default_staging_root() if staging is None else Path(staging)
    run_dir = area.run_directory(root, open_store(run_url).url)
    staged_here = await asyncio.to_thread(area.staged_attempts, run_dir)
    found = await retain_store(run_url, policy, grace_seconds, sorted(staged_here), dry_run)
    if found.refused:
        return Completed(name="Refused", message=found.refused)
    if not dry_run:
        emit("retained", found.run, run_url, summary=found.summary, manifests=len(found.rows))
    await _show(run_url, found, dry_run=dry_run)
    return Completed(message=found.summary)


async def _show(run_url: str, found: Retained, *, dry_run: bool) -> None:
    url = run_url.replace("`", "'")  # a backtick would end the code span
    left = len(found.rows) - _MOST_ROWS
    more = f" The first {_MOST_ROWS} of {len(found.rows)} manifests." if left > 0 else ""
    # What is deleted or marked first, where a cut would hide it.
    rows = sorted(found.rows, key=lambda row: row["action"] == "keep")[:_MOST_ROWS]
    await Artifact(
        type="table",
        key=artifact_key(run_url, found.run, "retention"),
        description=f"`{url}`: {found.summary}{' (dry run)' if dry_run else ''}{more}",
        data=rows,
    ).acreate()
