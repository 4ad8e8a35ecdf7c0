"""Tells people how a trainer starts: what was restored, and what is left behind."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from recpoint.catalog.restore.restore import RestoreReport
from recpoint.catalog.run.line_to_go_on import left_by_going_back
from recpoint.catalog.run.run import Run
from recpoint.errors import (
    RecpointError,
)
from recpoint.format.records import GenerationRecord

__all__ = ["announce_start", "tell_grown", "tell_imported", "tell_left", "tell_restored"]

_log = logging.getLogger("recpoint")


def tell_restored(run: Run, report: RestoreReport) -> None:
    """Log what was restored, newer checkpoints that were skipped, and damaged forms of this one."""
    verdict = report.validation
    state = verdict.in_words if verdict else "not validated"
    _log.info("%s is restored: %s", report.restored, state)
    for name, error in report.skipped:
        _log.warning("%s is not restored: %s", name, error)
    for key, error in report.passed_over:
        _log.warning("restored without %s: %s", key, error)


def tell_imported(run: Run, report: RestoreReport, path: str) -> None:
    """Log that a job begins with an imported checkpoint, and what it does not have.

    Args:
        run: the run.
        report: report of the restore.
        path: path of the other tool's checkpoint.
    """
    tell_restored(run, report)
    _log.warning(
        "%s was imported from %s, and has tables and dense tensors only: optimizers, schedulers, "
        "reader, extras and random generators begin as the script has made them. Next: nothing; "
        'Seed(..., optimizer_states="carry") in a new run also loads optimizer state',
        report.restored,
        path,
    )


def tell_grown(report: RestoreReport, grown: Mapping[str, int]) -> None:
    """Log which tables have more rows than the checkpoint.

    Args:
        report: report of the restore.
        grown: name of such a table -> rows that the checkpoint has.
    """
    for name, stored_rows in grown.items():
        _log.info(
            "table %r has more rows than the %d of %s: those begin with their first values, and "
            "the next checkpoint is a full",
            name,
            stored_rows,
            report.restored,
        )


def announce_start(
    run_url: str,
    report: RestoreReport | None,
    *,
    seeded_from: str | None,
    resumed: bool,
    left_count: int,
) -> None:
    """Print one line about the start to stderr, which people see without any logging set up.

    Args:
        run_url: URL of the run.
        report: report of the restore; None: nothing was restored.
        seeded_from: path of another tool's checkpoint whose parts were loaded; None: of none.
        resumed: whether training goes on where that checkpoint was cut.
        left_count: number of checkpoints that are left behind because training goes back.
    """
    if seeded_from is not None:
        line = f"{run_url} begins with parts of {seeded_from}"
    elif report is None:
        line = f"{run_url} begins: nothing is restored"
    elif not resumed:
        line = f"{run_url} begins with parts of {report.restored}"
    elif left_count:
        line = (
            f"{run_url} goes back to {report.restored}: {left_count} checkpoint(s) are left behind"
        )
    else:
        line = f"{run_url} is restored: {report.restored}"
    if sys.stderr is None:
        return
    try:
        print(f"recpoint: {line}", file=sys.stderr, flush=True)
    except Exception as error:
        # stderr may be closed, have no reader, or be a user's object; training can begin all the
        # same.
        _log.warning("a line could not be printed to stderr: %s", error)


def tell_left(run: Run, record: GenerationRecord) -> int:
    """Log the checkpoints that going back leaves behind.

    If the script names a step in each start, each restart goes back there.

    Returns:
        Number of checkpoints that are left behind.
    """
    try:
        left_out = left_by_going_back(run, record)
    except RecpointError:  # the line is damaged, and the user has chosen a step for that reason
        return 0
    if left_out:
        _log.warning(
            "%d checkpoint(s) that counted, up to %s, are left behind for %s. Next: remove the "
            "step from restore() before the next start, which would otherwise go back there again",
            len(left_out),
            left_out[0],
            record.restored,
        )
    return len(left_out)
