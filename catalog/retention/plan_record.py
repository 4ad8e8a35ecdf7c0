"""The plan of a run's newest retention, left for people: which rules, what goes and why (§6.6)."""

from __future__ import annotations

import logging
import math
import os
import socket

from recpoint.catalog.retention.prune_plan import PrunePlan, PruneRow
from recpoint.catalog.retention.retention_rules import RetentionPolicy
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.stores.store_contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound, StoreError
from recpoint.format.record_kinds import PLAN
from recpoint.format.retention_records import (
    MAX_PLANNED,
    Plan,
    PlannedManifest,
    PlannedRules,
    RuleBest,
)

__all__ = ["PlanWatch", "leave_plan"]

_LOG = logging.getLogger("recpoint.retention")

_ACTIONS = ("keep", "mark", "wait", "delete")
_MOST_RULES = 100
_MOST_MS = 2**53 - 1


def leave_plan(run: Run, made: PrunePlan) -> None:
    """Write what a retention is about to carry out; a store that refuses is logged, not raised.

    Args:
        run: the run.
        made: of `plan_prune`.
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
        # Nothing depends on it, and what frees a store that is full must not fail for it.
        _LOG.info("the plan of this retention is not left in the store: %s", error)


class PlanWatch:
    """Reads a run's plan again and again, each once.

    Args:
        run: the run.

    Attributes:
        error: why the one that is there cannot be read; None: it can, or there is none.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: ObjectInfo | None = None
        self._plan: Plan | None = None
        self.error: FormatError | None = None

    def refresh(self) -> Plan | None:
        """The plan that is there; None: there is none, or it cannot be read.

        Raises:
            StoreError: the store cannot be read.
        """
        # A listing, so that a plan of a thousand manifests is read when it is new only.
        info = next((info for _, info in self._run.records(PLAN).listed()), None)
        if info is None or info != self._seen:
            self._plan, self.error = None, None
            if info is not None:
                try:
                    self._plan = self._run.records(PLAN).read()
                except ObjectNotFound:
                    return None
                except FormatError as error:
                    self.error = error
            self._seen = info
        return self._plan


def _newest_rows(rows: list[PruneRow]) -> list[PruneRow]:
    """The newest, in their order: not only those that go, nor only those that stay."""
    going = [row for row in rows if row.action != "keep"]
    kept = len(rows) - len(going)
    most_going = max(MAX_PLANNED - kept, MAX_PLANNED // 2)
    left = {True: most_going, False: MAX_PLANNED - min(len(going), most_going)}
    newest = []
    for row in rows:
        goes = row.action != "keep"
        if left[goes] > 0:
            left[goes] -= 1
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
            RuleBest(metric=one.metric, direction=one.direction, count=one.count)
            for one in policy.best_by[:_MOST_RULES]
        ),
        require_validated=policy.require_validated,
    )


def _ms(seconds: float) -> int:
    return min(_MOST_MS, math.ceil(1000 * seconds))
