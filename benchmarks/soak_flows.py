"""The flow `retain` as it is, in a process where times of seconds are allowed: for the soak.

The floor of an hour is for readers without a lease, and there are none in a soak. What a killed
retention began is taken over after a minute: no process there is stopped and goes on.
"""

from __future__ import annotations

import os

from benchmarks.soak_processes import IN_A_SOAK
from recpoint.catalog.prune import execute
from recpoint.catalog.prune_plan import plan_prune
from recpoint.flows.retain import retain

__all__ = ["retain"]

if os.environ.get(IN_A_SOAK):
    assert plan_prune.__kwdefaults__ is not None
    plan_prune.__kwdefaults__["grace_floor_seconds"] = 0.0
    assert execute.__kwdefaults__ is not None
    execute.__kwdefaults__["take_over_seconds"] = 60.0
