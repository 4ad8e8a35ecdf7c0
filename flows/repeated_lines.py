"""Recognises Prefect's log lines that repeat an error which the agent logs itself.

For each failed try Prefect logs the error as a tuple, then that the result could not be written,
and then the state with the error again. Prefect keeps these lines and shows them with the flow run;
in an agent's log they would look like several faults. Nothing here imports Prefect.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from recpoint import errors
from recpoint.errors import RecpointError

__all__ = ["ResultNotStored", "is_repeated"]

_FLOW_RUNS: Final = "prefect.flow_runs"
_AWAITS: Final = "Finished in state AwaitingRetry("
_ENDED: Final = re.compile(r"Finished in state \w+\('Flow run encountered an exception: (\w+): ")


class ResultNotStored(OSError):
    """Raised instead of storing a result for Prefect; not a fault, see `NO_RESULTS`."""


def is_repeated(record: logging.LogRecord) -> bool:
    """Whether a log record repeats an error of a flow run that the agent logs itself."""
    if record.name != _FLOW_RUNS:
        return False
    if record.exc_info and isinstance(record.exc_info[1], RecpointError):
        return True
    if isinstance(record.args, tuple) and any(isinstance(a, ResultNotStored) for a in record.args):
        return True
    if isinstance(record.msg, str) and record.msg.startswith(_AWAITS):
        return True
    ended = _ENDED.match(record.msg) if isinstance(record.msg, str) else None
    kind = None if ended is None else getattr(errors, ended[1], None)
    return isinstance(kind, type) and issubclass(kind, RecpointError)
