"""Processes forked from a server that has imported everything: real ones, started in milliseconds.

There is one such server for each test process, and what it preloads is settled when it starts: so
all tests that fork take their processes from here.
"""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

__all__ = ["ForkedProcess"]

_PRELOADED = [
    "tests.fork_server_begins",
    "torch._dynamo",  # imported by the first optimizer otherwise, for seconds
    "recpoint.trainer_plugin.checkpointer",
    "recpoint.flows.agent.agent",
    "recpoint.flows.persist",
    "recpoint.cli.application",
    "recpoint.flows.automations",
    "recpoint.flows.consolidate",
    "prefect.cli.deploy",
    "prefect.cli.work_pool",
    "prefect.cli.worker",
    "prefect.client.orchestration",
    "prefect.flow_engine",
    "prefect.main",
    "prefect.task_engine",
    "recpoint.catalog.consolidate.merge",
    "recpoint.catalog.retention.prune",
    "recpoint.catalog.retention.sweep",
    "tests.forked_program",
    "tests.forked_shell",
    "tests.other_user",
    "tests.persist_process",
    "tests.fault.lives",
    "tests.fault.mesh_lives",
    "tests.fault.own_state_lives",
    "tests.fault.rank_lives",
    "tests.fault.retention_lives",
    "tests.fork_server",
]

# A start looks for processes that have ended, also those that other threads wait for; an exit code
# can be read once only.
_one_at_a_time = threading.RLock()


class ForkedProcess(ForkServerProcess):
    """A process of that server; many threads may start such and wait for theirs.

    Targets are pickled by name: they must live in a module, not in a test file.
    """

    def start(self) -> None:
        """Fork it from the server, which is started with the first."""
        with _one_at_a_time:
            _server().set_forkserver_preload(_PRELOADED)
            super().start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for at most `timeout` seconds."""
        if connection.wait([self.sentinel], timeout):
            with _one_at_a_time:
                super().join()

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        with _one_at_a_time:
            return super().is_alive()

    @property
    def exitcode(self) -> int | None:
        """Of one that has ended, less than 0 where a signal ended it; else None."""
        with _one_at_a_time:
            return super().exitcode


def _server() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")
