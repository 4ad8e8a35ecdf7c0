"""The process in which the agent consolidates: of the lowest priority, and gone when the agent is.

A process of its own, since then its memory is its own, a persist never waits for its interpreter,
and the agent can stop it in the middle of anything. Killed anywhere, the next one goes on.

    python -m recpoint.flows.consolidate_process RUN_URL AFTER_LINKS PARENT_PID

Runs the flow where `PREFECT_API_URL` is set, and the same functions bare where it is not or where
Prefect fails. The first line on stdout is `ready`: from then on it may be stopped, since nothing
can leave it behind. The last one is JSON: `done`, `nothing`, or `error` and its `damage`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from typing import Any

from recpoint.catalog.consolidate_around import consolidate_around_damage, passed_over_words
from recpoint.catalog.consolidate_choice import choose_consolidation, newest_checkpoint
from recpoint.catalog.consolidate_plan import ConsolidationPlan, ConsolidationTriggers
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.errors import (
    ChainError,
    CommitConflict,
    FormatError,
    ObjectNotFound,
    RecpointError,
)

__all__ = ["NOTHING_DONE", "READY", "damage_of", "main"]

_LOG = logging.getLogger("recpoint.consolidate")

READY = "ready"
#: How what is said begins where there was nothing to merge, with Prefect and without.
NOTHING_DONE = "nothing done"

_LOWEST = 19
_END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def main(arguments: list[str]) -> int:
    """Consolidate the newest checkpoint of a run if that pays; 0, or 1 where it failed."""
    run_url, after_links, parent = arguments[0], int(arguments[1]), int(arguments[2])
    _give_way(parent)
    print(READY, flush=True)
    lines = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=lines)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        done = _consolidate(run_url, after_links)
    except (RecpointError, OSError, MemoryError) as error:
        print(json.dumps({"error": str(error), "damage": damage_of(error)}), flush=True)
        return 1
    what = "nothing" if done.startswith(NOTHING_DONE) else "done"
    print(json.dumps({what: done}), flush=True)
    return 0


def damage_of(error: BaseException) -> str | None:
    """What is wrong with a chain, which waiting does not mend; None: it is something else.

    The same for each checkpoint that needs what is damaged.
    """
    if not isinstance(error, ChainError | CommitConflict | FormatError | ObjectNotFound):
        return None
    return f"{type(error).__name__}: {error.found}"


def _give_way(parent: int) -> None:
    """Take the processor last, and end with the agent, also where that is killed."""
    try:
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    except AttributeError:
        pass  # not Linux: an orphan finishes what it is at, which harms nobody
    if os.getppid() != parent:
        sys.exit(1)  # the agent ended before that
    os.nice(_LOWEST)


def _consolidate(run_url: str, after_links: int) -> str:
    if os.environ.get("PREFECT_API_URL"):
        told = _with_prefect(run_url, after_links)
        if told is not None:
            return told
    run = Run.open(open_store(run_url))
    name = newest_checkpoint(run)
    if name is None:
        return f"{NOTHING_DONE}: there is no checkpoint"
    triggers = ConsolidationTriggers(links=after_links)
    plan, done = consolidate_around_damage(
        run,
        lambda avoid: choose_consolidation(run, name, triggers=triggers, avoid=avoid),
        only_if_it_pays=True,
        on_plan=_say,
    )
    around = passed_over_words(plan)
    if done is None:
        return f"{NOTHING_DONE}: {plan.reason}{around}"
    wrote = f"{done.written_bytes} bytes in {done.seconds:.1f} s"
    return f"{done.outcome}: {done.key}, {wrote}{around}"


def _say(plan: ConsolidationPlan) -> None:
    _LOG.info("%s, without Prefect: %s%s", plan.target.key, plan.reason, passed_over_words(plan))


def _with_prefect(run_url: str, after_links: int) -> str | None:
    """Run the flow; what it did, or None where Prefect, not the consolidation, failed."""
    try:
        from recpoint.flows.consolidate import run_consolidate

        state = run_consolidate(run_url, only_if_it_pays=True, after_links=after_links)
        failed: Any = None if state.is_completed() else state.result(raise_on_failure=False)
    except Exception as error:  # of Prefect, its client or its server, in a hundred forms
        failed, state = error, None
    if isinstance(failed, RecpointError):
        raise failed
    if state is not None and failed is None:
        return state.message or "done"
    _LOG.warning("going on without Prefect: %s", failed)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
