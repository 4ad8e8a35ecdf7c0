"""What the processes that an agent starts beside persists have in common: their place, their word.

A process of its own, since then its memory is its own, a persist never waits for its interpreter,
and it is gone when the agent is, however that ends. Its last line on stdout is JSON.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from recpoint.errors import ChainError, CommitConflict, FormatError, ObjectNotFound, RecpointError

__all__ = [
    "READY",
    "answer_of",
    "damage_of",
    "environment_of",
    "give_way",
    "log_to_stderr",
    "run_flow",
]


#: A child's first line: from then on it may be stopped, since nothing can leave it behind.
READY: Final = "ready"

_LOWEST: Final = 19
_END_WITH_PARENT: Final = 1  # prctl's PR_SET_PDEATHSIG


def environment_of(prefect_url: str | None) -> dict[str, str]:
    """Of a child that runs its flow at `prefect_url`; None: that does without Prefect."""
    environment = dict(os.environ)
    environment.pop("PREFECT_API_URL", None)
    if prefect_url is not None:
        environment["PREFECT_API_URL"] = prefect_url
    return environment


def answer_of(said: bytes, returncode: int) -> dict[str, Any]:
    """What a child has said on its last line; an `error` where that is no answer."""
    lines = said.decode(errors="replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or not answer:
        return {"error": f"its process ended with {returncode} and {lines[-1:]}"}
    return answer


def give_way(parent: int) -> None:
    """Take the processor last, and end with the agent, also where that is killed."""
    try:
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    except AttributeError:
        pass  # not Linux: an orphan finishes what it is at, which harms nobody
    if os.getppid() != parent:
        sys.exit(1)  # the agent ended before that
    os.nice(_LOWEST)


def log_to_stderr() -> None:
    """Have the log of the child in that of the agent, but for a line for each request."""
    lines = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=lines)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def run_flow(call: Callable[[], Any], log: logging.Logger) -> str | None:
    """Run a flow; its message, or None where Prefect, not the work, failed, or there is none.

    Args:
        call: imports and calls the flow; its final state.
        log: told what of Prefect failed.

    Raises:
        RecpointError: of the work.
    """
    if not os.environ.get("PREFECT_API_URL"):
        return None
    try:
        state = call()
        failed: Any = None if state.is_completed() else state.result(raise_on_failure=False)
    except Exception as error:  # of Prefect, its client or its server, in a hundred forms
        failed, state = error, None
    if isinstance(failed, RecpointError):
        raise failed
    if state is not None and failed is None:
        return str(state.message or "done")
    log.warning("going on without Prefect: %s", failed)
    return None


def damage_of(error: BaseException) -> str | None:
    """What is wrong with a chain, which waiting does not mend; None: it is something else.

    The same for each checkpoint that needs what is damaged.
    """
    if not isinstance(error, ChainError | CommitConflict | FormatError | ObjectNotFound):
        return None
    return f"{type(error).__name__}: {error.found}"
