"""Runs the flows that delete with grace times of seconds, for the soak.

The usual minimum of an hour protects readers without a lease; a soak has none. Another retention
takes over the work of a killed one after a minute, because no process is paused and continued
later.
"""

from __future__ import annotations

import os
from functools import update_wrapper
from types import FunctionType
from typing import Any

from prefect import Flow
from prefect.utilities.callables import parameter_schema

from benchmarks.soak_processes import IN_A_SOAK
from recpoint.catalog.retention.grace import require_grace
from recpoint.catalog.retention.plan import plan_prune
from recpoint.catalog.retention.prune import execute
from recpoint.flows import retain as retaining
from recpoint.flows import sweep as sweeping

__all__ = ["retain", "sweep"]


def _with_any_grace(task: Flow[..., Any]) -> Flow[..., Any]:
    """Return the same flow, whose parameter `grace_seconds` may be any number."""
    was = task.fn
    assert isinstance(was, FunctionType) and "grace_seconds" in was.__annotations__
    fn = FunctionType(was.__code__, was.__globals__, was.__name__, was.__defaults__)
    fn.__kwdefaults__, fn.__doc__, fn.__module__ = was.__kwdefaults__, was.__doc__, was.__module__
    fn.__annotations__ = {**was.__annotations__, "grace_seconds": float}
    own_task = task.with_options()
    update_wrapper(own_task, fn)
    own_task.fn, own_task.parameters = fn, parameter_schema(fn)
    return own_task


retain = _with_any_grace(retaining.retain)
sweep = _with_any_grace(sweeping.sweep)

if os.environ.get(IN_A_SOAK):
    assert require_grace.__kwdefaults__ is not None
    require_grace.__kwdefaults__["floor_seconds"] = 0.0
    assert plan_prune.__kwdefaults__ is not None
    plan_prune.__kwdefaults__["grace_floor_seconds"] = 0.0
    assert execute.__kwdefaults__ is not None
    execute.__kwdefaults__["take_over_seconds"] = 60.0
