"""Tells people of a start: what was restored, without what, and what is left behind."""

from __future__ import annotations

import logging
import sys

from recpoint.catalog.restoring.restore import RestoreReport
from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.superseded import left_by_going_back
from recpoint.errors import RecpointError
from recpoint.format.records import GenerationRecord

__all__ = ["announce_start", "tell_left", "tell_restored"]

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


def announce_start(run_url: str, report: RestoreReport | None, *, resumed: bool, left: int) -> None:
    """Print one line to stderr, which people see without any logging set up.

    Args:
        run_url: of the run.
        report: of what was restored; None: nothing was.
        resumed: whether training goes on where that checkpoint was cut.
        left: how many checkpoints are left behind, where training goes back.
    """
    if report is None:
        line = f"{run_url} begins: nothing is restored"
    elif not resumed:
        line = f"{run_url} begins with parts of {report.restored}"
    elif left:
        line = f"{run_url} goes back to {report.restored}: {left} checkpoint(s) are left behind"
    else:
        line = f"{run_url} is restored: {report.restored}"
    if sys.stderr is None:
        return
    try:
        print(f"recpoint: {line}", file=sys.stderr, flush=True)
    except Exception as error:
        # It is closed, or nobody reads it, or it is the user's own: training can begin.
        _log.warning("a line could not be printed to stderr: %s", error)


def tell_left(run: Run, record: GenerationRecord) -> int:
    """Log what going back leaves behind: in a script that always does, each restart does it.

    Returns:
        How many checkpoints are left behind.
    """
    try:
        left = left_by_going_back(run, record)
    except RecpointError:  # from a line that is damaged, a person has named a way on
        return 0
    if left:
        _log.warning(
            "%d checkpoint(s) that counted, up to %s, are left behind for %s. Next: take the step "
            "out of restore() before the next start, which would go back there once more",
            len(left),
            left[0],
            record.restored,
        )
    return len(left)
