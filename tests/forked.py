"""Starts real processes in milliseconds, by forking them from a server that has imported all.

Each test process has one such server, whose preloaded modules are fixed when it starts. Therefore
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
    "torch._dynamo",  # otherwise the first optimizer would import it, which takes seconds
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
    "recpoint.catalog.consolidate.consolidate",
    "recpoint.catalog.retention.prune",
    "recpoint.catalog.retention.sweep",
    "tests.forked_program",
    "tests.forked_shell",
    "tests.other_user",
    "tests.persist_process",
    "tests.fault.cached_lives",
    "tests.fault.lives",
    "tests.fault.mesh_lives",
    "tests.fault.own_state_lives",
    "tests.fault.rank_lives",
    "tests.fault.retention_lives",
    "tests.server_lives",
    "tests.fork_server",
]

# Starting a process also polls ended processes for which other threads wait; an exit code can be
# read only once.
_one_at_a_time = threading.RLock()


class ForkedProcess(ForkServerProcess):
    """A process forked from that server; many threads may start and join their own processes.

    Targets are pickled by name: they must live in a module, not in a test file.
    """

    def start(self) -> None:
        """Fork the process from the server; the first call starts the server."""
        with _one_at_a_time:
            _server().set_forkserver_preload(_PRELOADED)
            super().start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, for at most `timeout` seconds."""
        if connection.wait([self.sentinel], timeout):
            with _one_at_a_time:
                super().join()

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        with _one_at_a_time:
            return super().is_alive()

    @property
    def exitcode(self) -> int | None:
        """The exit code, less than 0 if a signal ended the process; None: it has not ended."""
        with _one_at_a_time:
            return super().exitcode


def _server() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")
