"""An agent in a process of its own, as it runs on a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.polling import PATIENCE_SECONDS

__all__ = ["AgentProcess"]

_PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
from recpoint.testing.die_at import install_from_environment
install_from_environment()
from recpoint.flows.agent import run_agent
after = int(sys.argv[4]) or None
once = sys.argv[2] == "once"
sys.exit(run_agent(sys.argv[1], once=once, prefect=sys.argv[3], consolidate_after=after))
"""


class AgentProcess:
    """A running agent; killed at the end of the `with` block.

    Args:
        staging: the staging area it serves.
        log: file for what it logs.
        once: let it end when nothing is left to do.
        prefect: as for `run_agent`.
        die_at: the durable step at which it is killed.
        consolidate_after: as for `run_agent`.
    """

    def __init__(
        self,
        staging: Path,
        log: Path,
        *,
        once: bool = False,
        prefect: Literal["auto", "off"] = "off",
        die_at: int | None = None,
        consolidate_after: int | None = None,
    ) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"}
        if die_at is not None:
            environment["RECPOINT_DIE_AT"] = str(die_at)
        self._log = log
        settings = "once" if once else "", prefect, str(consolidate_after or 0)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(staging), *settings],
                stdout=file,
                stderr=file,
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()

    def logged(self, text: str) -> int:
        """How often it has logged `text`."""
        return self._log.read_text(errors="replace").count(text)

    def terminate(self) -> int:
        """Send SIGTERM and wait; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)
