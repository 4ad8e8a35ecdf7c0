"""Runs an agent in its own process, as on a host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.agent_program import serve
from tests.forked_program import ForkedProgram
from tests.polling import PATIENCE_SECONDS

__all__ = ["AgentProcess"]

_ROOT = Path(__file__).parents[1]


class AgentProcess:
    """A running agent; killed at the end of the `with` block.

    Args:
        staging: the staging area that the agent serves.
        log: file for its log.
        once: whether the agent ends when no job is left.
        prefect: as for `run_agent`.
        die_at: the durable step at which the agent is killed; None: never.
        consolidate_after: chains with so many manifests are consolidated.
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
        settings = str(staging), once, prefect, consolidate_after
        self.process: ForkedProgram | subprocess.Popen[bytes]
        if prefect == "off":
            output = log, log
            self.process = ForkedProgram(serve, settings, environment=environment, output=output)
            return
        # With Prefect, the process must import it after its environment is set.
        path = f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.agent_program", json.dumps(settings)],
                stdout=file,
                stderr=file,
                env={**environment, "PYTHONPATH": path},
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
        """Return how often the agent has logged `text`."""
        return self._log.read_text(errors="replace").count(text)

    def terminate(self) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)
