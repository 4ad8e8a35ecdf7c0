"""Runs an agent in a process, and imports nothing that the agent would not import."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal

from recpoint.catalog.consolidate.plan import ConsolidationTriggers
from recpoint.flows.agent.agent import run_agent
from recpoint.testing.die_at import install_from_environment

__all__ = ["serve"]


def serve(
    staging: str, once: bool, prefect: Literal["auto", "off"], consolidate_after: int | None
) -> None:
    """Call `run_agent` with its log on standard error."""
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    install_from_environment()
    triggers = ConsolidationTriggers.chosen(links=consolidate_after)
    sys.exit(run_agent(staging, once=once, prefect=prefect, consolidate_when=triggers))


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
