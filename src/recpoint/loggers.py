"""The loggers of recpoint: what a handler raises ends what is logged, and nothing else.

A handler is the user's, and one that sends its lines somewhere may fail just as the store does: the
line that says so must not end the training, or the thread that follows a run. Python's own handlers
print what went wrong and go on; so does a logger of recpoint for all others, and for filters.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import Final

__all__ = ["NAMES", "guard"]

#: All that recpoint logs to.
NAMES: Final = (
    "recpoint",
    "recpoint.agent",
    "recpoint.consolidate",
    "recpoint.dashboard",
    "recpoint.forget",
    "recpoint.leases",
    "recpoint.metrics",
    "recpoint.persist",
    "recpoint.progress",
    "recpoint.restore",
    "recpoint.retention",
    "recpoint.serving",
    "recpoint.sweep",
)


class _Guarded(logging.Logger):
    """A logger that prints what its handlers and filters raise, as `Handler.handleError` does."""

    def handle(self, record: logging.LogRecord) -> None:
        """Call filters and handlers; `KeyboardInterrupt` and its like pass."""
        try:
            super().handle(record)
        except Exception:
            # Nor may what keeps it from being printed: where standard error was a pipe that nobody
            # reads any more, the handler that writes to it has just failed.
            with suppress(Exception):
                if logging.raiseExceptions and sys.stderr:
                    sys.stderr.write(f"a handler failed at {record.msg!r:.500} of {self.name}:\n")
                    traceback.print_exc()


def guard() -> None:
    """Guard all loggers of recpoint, also those that were configured before it was imported."""
    for name in NAMES:
        logger = logging.getLogger(name)
        kind = type(logger)
        if not isinstance(logger, _Guarded):
            logger.__class__ = (
                _Guarded if kind is logging.Logger else type("Guarded", (_Guarded, kind), {})
            )
