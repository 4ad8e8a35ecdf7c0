"""Works on runs in the background: a thread, one child process at a time, and tries of each run.

Consolidations and sweeps run in child processes, so that a persist never waits for their memory or
interpreter lock, and so that they end with the agent, however it ends. `children.py` is the child's
side.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from recpoint.flows.agent.children import READY, answer_of, environment_of
from recpoint.flows.agent.gate import growing_pause

__all__ = ["BackgroundThread", "ChildProcess", "RunTries"]

_END_SECONDS: Final = 3.0


@dataclass
class RunTries:
    """The background work on one run by this agent, for its status file.

    Attributes:
        failures: failed tries in a row.
        retry_at: no try before this time, by the monotonic clock.
        done: number of tries that succeeded.
        last: the outcome of the last of these.
        last_error: why the last try failed; None: it succeeded.
    """

    failures: int = 0
    retry_at: float = 0.0
    done: int = 0
    last: str | None = None
    last_error: str | None = None

    def succeed(self, outcome: str) -> None:
        """Count a try that succeeded."""
        self.failures, self.last_error = 0, None
        self.done += 1
        self.last = outcome

    def fail(self, error: str) -> None:
        """Count a try that failed."""
        self.failures += 1
        self.last_error = error

    def pause(self, *, first: float, longest: float) -> float:
        """Begin the pause after the last failure; return its seconds, which double each time."""
        pause = growing_pause(self.failures - 1, first=first, longest=longest)
        self.retry_at = time.monotonic() + pause
        return pause

    def status(self, state: str) -> dict[str, object]:
        """Return the entry in a status file."""
        return {
            "state": state,
            "done": self.done,
            "last": self.last,
            "last_error": self.last_error,
        }


class ChildProcess:
    """Runs a module as a child process of the agent, one process at a time.

    Args:
        module: the module; see `children`.
        prefect_url: returns the URL at which Prefect answers now; None: it does not answer.
    """

    def __init__(self, module: str, *, prefect_url: Callable[[], str | None]) -> None:
        self._module = module
        self._prefect_url = prefect_url
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # if stopped before it is ready, it would outlive a killed agent
        self._is_killed = False
        self.is_paused = False

    def run(self, *arguments: str) -> dict[str, Any]:
        """Run the module with these arguments and the agent's process id; return its answer."""
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, *arguments, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment_of(self._prefect_url()),
        )
        try:
            with self._lock:
                self._process = process
                if self._is_killed:
                    self._signal(signal.SIGKILL)
            assert process.stdout is not None
            first_line = process.stdout.readline()
            if first_line.strip() == READY.encode():
                first_line = b""
                with self._lock:
                    self._is_ready = True
                    if self.is_paused:
                        self._signal(signal.SIGSTOP)
            output, _ = process.communicate()
            return answer_of(first_line + output, process.returncode)
        finally:
            with self._lock:
                self._process, self._is_ready = None, False

    def pause(self, is_paused: bool) -> None:
        """Stop the process (SIGSTOP), and those that begin meanwhile; or continue it."""
        with self._lock:
            if is_paused == self.is_paused:
                return
            self.is_paused = is_paused
            if self._is_ready:
                self._signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, and any that begins later."""
        with self._lock:
            self._is_killed = True
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class BackgroundThread:
    """Looks for work again and again until it is stopped.

    Args:
        name: name of the thread.
        look: looks once, and does the work that is due; it raises nothing.
        every_seconds: the pause before each look.
        child: the process that does the work.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], None],
        *,
        every_seconds: float,
        child: ChildProcess,
    ) -> None:
        self._look = look
        self._every_seconds = every_seconds
        self._child = child
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End the thread and kill the process; the next agent continues unfinished work."""
        self._stop.set()
        self._child.kill()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _keep_looking(self) -> None:
        while not self._stop.wait(self._every_seconds):
            self._look()
