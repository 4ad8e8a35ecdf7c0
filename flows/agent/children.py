"""Gives the agent's child processes what they share: environment, priority, flow run and answer.

    python -m MODULE ARGUMENTS … PARENT_PID

A child has the lowest priority and ends with the agent, however the agent ends. Its first line on
stdout is `ready`: from then on it may be stopped (SIGSTOP), because it ends with the agent in any
case. Its last line is JSON: the answer.
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
    "begin",
    "give_way",
    "run_flow",
    "tell_agent",
]


#: A child's first line. From then on it may be stopped (SIGSTOP), because it now ends with the
#: agent in any case.
READY: Final = "ready"

_LOWEST: Final = 19
_END_WITH_PARENT: Final = 1  # prctl's PR_SET_PDEATHSIG


def environment_of(prefect_url: str | None) -> dict[str, str]:
    """Return the environment of a child that runs its flow at `prefect_url`; None: no Prefect."""
    environment = dict(os.environ)
    environment.pop("PREFECT_API_URL", None)
    if prefect_url is not None:
        environment["PREFECT_API_URL"] = prefect_url
    return environment


def answer_of(said: bytes, returncode: int) -> dict[str, Any]:
    """Return the answer on a child's last line of stdout, or an `error` if it is not an answer.

    Args:
        said: all of the child's stdout.
        returncode: its exit status.
    """
    lines = said.decode(errors="replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or not answer:
        return {"error": f"its process ended with status {returncode}; its last line: {lines[-1:]}"}
    return answer


def give_way(parent: int) -> None:
    """Give this process the lowest priority, and have the kernel end it when the agent ends.

    Args:
        parent: process id of the agent.
    """
    try:
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    except AttributeError:
        pass  # not Linux: an orphan finishes its work, which does no harm
    if os.getppid() != parent:
        sys.exit(1)  # the agent ended before the call to prctl
    os.nice(_LOWEST)


def begin(parent: int) -> None:
    """Begin as a child of the agent: give way, say that it is ready, and log to stderr.

    Args:
        parent: process id of the agent.
    """
    give_way(parent)
    print(READY, flush=True)
    _log_to_stderr()


def tell_agent(**answer: object) -> int:
    """Print the answer; return the exit status: 1 if it has an `error`, else 0."""
    print(json.dumps(answer), flush=True)
    return 1 if "error" in answer else 0


def _log_to_stderr() -> None:
    """Log to stderr, which the agent shares, without a line for each HTTP request."""
    lines = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=lines)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def run_flow(call: Callable[[], Any], log: logging.Logger) -> str | None:
    """Run a flow with Prefect, if there is one.

    Args:
        call: imports and calls the flow, and returns its final state.
        log: gets a warning if Prefect failed.

    Returns:
        The message of the final state; None: no Prefect is configured, or Prefect failed, so the
        caller does the work without it.

    Raises:
        RecpointError: the work itself failed.
    """
    if not os.environ.get("PREFECT_API_URL"):
        return None
    try:
        state = call()
        failed: Any = None if state.is_completed() else state.result(raise_on_failure=False)
    except Exception as error:  # Prefect, its client and its server raise many types
        failed, state = error, None
    if isinstance(failed, RecpointError):
        raise failed
    if state is not None and failed is None:
        return str(state.message or "done")
    log.warning("going on without Prefect: %s", failed)
    return None


def damage_of(error: BaseException) -> str | None:
    """Return what is damaged in a chain; None: another error, which may pass.

    The text is equal for all checkpoints that need the damaged object.
    """
    if not isinstance(error, ChainError | CommitConflict | FormatError | ObjectNotFound):
        return None
    return f"{type(error).__name__}: {error.found}"
