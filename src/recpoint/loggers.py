"""Keeps what log handlers raise away from training: recpoint's loggers print it and go on.

Handlers are the user's. One that sends its lines over a network may fail when the store does; the
line that reports this must not end the training, or the thread that follows a run. Python's own
handlers print their errors and go on; recpoint's loggers do so for all handlers and filters.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import Final

__all__ = ["NAMES", "guard"]

#: The names of all loggers of recpoint.
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
    "recpoint.tags",
)


class _Guarded(logging.Logger):
    """A logger that prints what its handlers and filters raise, as `Handler.handleError` does."""

    def handle(self, record: logging.LogRecord) -> None:
        """Call filters and handlers; `KeyboardInterrupt` and its like pass through."""
        try:
            super().handle(record)
        except Exception:
            # Printing may fail too: if standard error is a pipe that nobody reads any more, the
            # handler that writes to it has just failed.
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
