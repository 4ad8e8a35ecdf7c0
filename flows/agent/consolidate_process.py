"""Consolidates a run as the agent's child process: lowest priority, ends with the agent.

The agent can stop the process anywhere. If it is killed, the next one continues its work.

    python -m recpoint.flows.agent.consolidate_process RUN_URL TRIGGERS_JSON PARENT_PID

Runs the flow if `PREFECT_API_URL` is set. If it is not set, or Prefect fails, calls the same
functions without Prefect. Its answer has `done`, `nothing`, or `error` with its `damage`.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from recpoint.catalog.consolidate.choice import choose_consolidation
from recpoint.catalog.consolidate.consolidate import (
    NOTHING_DONE,
    consolidate_around_damage,
    passed_over_words,
)
from recpoint.catalog.consolidate.plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    newest_checkpoint,
)
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import RecpointError
from recpoint.flows.agent.children import begin, damage_of, run_flow, tell_agent
from recpoint.units import bytes_text

__all__ = ["main"]


_LOG = logging.getLogger("recpoint.consolidate")


def main(arguments: list[str]) -> int:
    """Consolidate the newest checkpoint of a run if that pays.

    Returns:
        Exit status: 0, or 1 if it failed.
    """
    run_url, parent = arguments[0], int(arguments[2])
    triggers = ConsolidationTriggers(**json.loads(arguments[1]))
    begin(parent)
    try:
        done = _consolidate(run_url, triggers)
    except (RecpointError, OSError, MemoryError) as error:
        return tell_agent(error=str(error), damage=damage_of(error))
    return tell_agent(nothing=done) if done.startswith(NOTHING_DONE) else tell_agent(done=done)


def _consolidate(run_url: str, triggers: ConsolidationTriggers) -> str:
    told = run_flow(lambda: _flow(run_url, triggers), _LOG)
    if told is not None:
        return told
    run = Run.open(open_store(run_url))
    name = newest_checkpoint(run)
    if name is None:
        return f"{NOTHING_DONE}: there is no checkpoint"
    plan, done = consolidate_around_damage(
        run,
        lambda avoid: choose_consolidation(run, name, triggers=triggers, avoid=avoid),
        only_if_it_pays=True,
        on_plan=_log_plan,
    )
    around = passed_over_words(plan)
    if done is None:
        return f"{NOTHING_DONE}: {plan.reason}{around}"
    wrote = f"{bytes_text(done.written_bytes)} in {done.seconds:.1f} s"
    return f"{done.outcome}: {done.key}, {wrote}{around}"


def _log_plan(plan: ConsolidationPlan) -> None:
    _LOG.info("%s, without Prefect: %s%s", plan.target.key, plan.reason, passed_over_words(plan))


def _flow(run_url: str, triggers: ConsolidationTriggers) -> Any:
    from recpoint.flows.consolidate import run_consolidate

    return run_consolidate(
        run_url,
        only_if_it_pays=True,
        after_links=triggers.links,
        after_ratio=triggers.restore_ratio,
        after_dead_share=triggers.dead_share,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
