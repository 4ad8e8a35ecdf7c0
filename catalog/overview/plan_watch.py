"""Watches the stored plan of a run's newest retention."""

from __future__ import annotations

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.record_kinds import PLAN
from recpoint.format.retention_records import Plan

__all__ = [
    "PlanWatch",
]


class PlanWatch:
    """Watches a run's stored plan, and reads each new one once.

    Args:
        run: the run.

    Attributes:
        error: why the stored plan cannot be read; None if it can be, or there is none.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: ObjectInfo | None = None
        self._plan: Plan | None = None
        self.error: FormatError | None = None

    def refresh(self) -> Plan | None:
        """Return the stored plan; None if there is none, or it cannot be read.

        Raises:
            StoreError: the store cannot be read.
        """
        # The listing tells whether the plan is new; it may be large, with a thousand manifests.
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
