"""Stores the plan of a run's newest retention, with rules and reasons, for people (format §6.6)."""

from __future__ import annotations

import logging
import math
import os
import socket

from recpoint.catalog.retention.plan import PrunePlan, PruneRow
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import StoreError
from recpoint.format.record_kinds import PLAN
from recpoint.format.retention_records import (
    MAX_PLANNED,
    Plan,
    PlannedManifest,
    PlannedRules,
    RuleBest,
)

__all__ = [
    "leave_plan",
]


_LOG = logging.getLogger("recpoint.retention")
_ACTIONS = ("keep", "mark", "wait", "delete")
_MOST_RULES = 100
_MOST_MS = 2**53 - 1


def leave_plan(run: Run, made: PrunePlan) -> None:
    """Store a retention's plan before it is executed; if the store refuses, log it.

    Args:
        run: the run.
        made: the plan from `plan_prune`.
    """
    rows = list(made.rows())
    count = {action: sum(row.action == action for row in rows) for action in _ACTIONS}
    record = Plan(
        run=run.id,
        rules=_rules(made.retention.policy),
        grace_ms=_ms(made.grace_seconds),
        keep=count["keep"],
        mark=count["mark"],
        wait=count["wait"],
        delete=count["delete"],
        manifests=tuple(
            PlannedManifest(manifest=row.key, action=row.action, reason=row.reason[:1024])
            for row in _newest_rows(rows)
        ),
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        planned_ms=now_ms(),
    )
    try:
        run.records(PLAN).put(record)
    except StoreError as error:
        # Nothing depends on the record, and a retention that frees a full store must go on.
        _LOG.info("the plan of this retention could not be stored: %s", error)


def _newest_rows(rows: list[PruneRow]) -> list[PruneRow]:
    """Return the newest rows in order, at most MAX_PLANNED; both kept ones and others have room."""
    going = [row for row in rows if row.action != "keep"]
    kept_count = len(rows) - len(going)
    most_going = max(MAX_PLANNED - kept_count, MAX_PLANNED // 2)
    rooms = {True: most_going, False: MAX_PLANNED - min(len(going), most_going)}
    newest = []
    for row in rows:
        goes = row.action != "keep"
        if rooms[goes] > 0:
            rooms[goes] -= 1
            newest.append(row)
    return newest


def _rules(policy: RetentionPolicy) -> PlannedRules:
    return PlannedRules(
        last=policy.keep_last,
        within_ms=_ms(policy.keep_within_seconds),
        hourly=policy.keep_hourly,
        daily=policy.keep_daily,
        weekly=policy.keep_weekly,
        monthly=policy.keep_monthly,
        best=tuple(
            RuleBest(metric=best_rule.metric, direction=best_rule.direction, count=best_rule.count)
            for best_rule in policy.best_by[:_MOST_RULES]
        ),
        require_validated=policy.require_validated,
    )


def _ms(seconds: float) -> int:
    return min(_MOST_MS, math.ceil(1000 * seconds))
