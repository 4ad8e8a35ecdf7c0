"""Processes forked from a server that has imported everything: real ones, started in milliseconds.

There is one such server for each test process, and what it preloads is settled when it starts: so
all tests that fork take their context from here.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

__all__ = ["forked"]

_PRELOADED = [
    "torch._dynamo",  # imported by the first optimizer otherwise, for seconds
    "recpoint.trainer_plugin.checkpointer",
    "recpoint.flows.agent",
    "recpoint.flows.persist",
    "prefect.client.orchestration",
    "prefect.flow_engine",
    "prefect.main",
    "prefect.task_engine",
    "recpoint.catalog.sweep",
    "recpoint.catalog.s3_store",
    "tests.persist_process",
    "tests.fault.lives",
]


def forked() -> ForkServerContext:
    """The context; it pickles targets by name: they must live in a module, not in a test file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
