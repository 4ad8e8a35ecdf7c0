"""The flows that delete, as they are, in a process that allows times of seconds: for the soak.

The floor of an hour is for readers without a lease, and there are none in a soak. What a killed
retention began is taken over after a minute: no process there is stopped and goes on.
"""

from __future__ import annotations

import os

from benchmarks.soak_processes import IN_A_SOAK
from recpoint.catalog.grace import require_grace
from recpoint.catalog.prune import execute
from recpoint.catalog.prune_plan import plan_prune
from recpoint.flows.retain import retain
from recpoint.flows.sweep import sweep

__all__ = ["retain", "sweep"]

if os.environ.get(IN_A_SOAK):
    assert require_grace.__kwdefaults__ is not None
    require_grace.__kwdefaults__["floor_seconds"] = 0.0
    assert plan_prune.__kwdefaults__ is not None
    plan_prune.__kwdefaults__["grace_floor_seconds"] = 0.0
    assert execute.__kwdefaults__ is not None
    execute.__kwdefaults__["take_over_seconds"] = 60.0
