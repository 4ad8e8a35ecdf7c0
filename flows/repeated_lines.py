"""What Prefect logs of a flow run that failed with an error of ours, which the agent says itself.

Of each try it writes the error as a tuple, that its result could not be written, and its state with
the error once more. Prefect keeps all that, and shows it with the run; in an agent's log it looks
like several faults. Nothing here imports Prefect.
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
    """A result that Prefect would store, and that is not to be: no fault, see `NO_RESULTS`."""


def is_repeated(record: logging.LogRecord) -> bool:
    """Whether a record says of a flow run what the agent's own lines say."""
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
