"""What the log says of a start: what was restored, without what, and what is left behind."""

from __future__ import annotations

import logging

from recpoint.catalog.restoring.restore import RestoreReport
from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.superseded import left_by_going_back
from recpoint.errors import RecpointError
from recpoint.format.records import GenerationRecord

__all__ = ["tell_left", "tell_restored"]

_log = logging.getLogger("recpoint")


def tell_restored(run: Run, report: RestoreReport) -> None:
    """Log what was restored, and what without: newer checkpoints, damaged forms of this one."""
    known = report.validation
    state = known.in_words if known else "not validated"
    _log.info("%s is restored: %s", report.restored, state)
    for name, error in report.skipped:
        _log.warning("%s is not restored: %s", name, error)
    for key, error in report.passed_over:
        _log.warning("restored without %s: %s", key, error)


def tell_left(run: Run, record: GenerationRecord) -> None:
    """Log what going back leaves behind: in a script that always does, each restart does it."""
    try:
        left = left_by_going_back(run, record)
    except RecpointError:  # from a line that is damaged, a person has named a way on
        return
    if left:
        _log.warning(
            "%d checkpoint(s) that counted, up to %s, are left behind for %s. Next: take the step "
            "out of restore() before the next start, which would go back there once more",
            len(left),
            left[0],
            record.restored,
        )
