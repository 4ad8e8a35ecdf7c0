"""Starts, kills and restarts the processes of the soak, and reads how much memory they take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.workload import ROOT
from recpoint.flows import prefect_server

__all__ = ["IN_A_SOAK", "Child", "LocalPrefect", "environment", "wait_until_logged"]

#: Set only in the processes of a soak: without it, importing `soak_flows` changes nothing.
IN_A_SOAK = "RECPOINT_SOAK_LIFTS_THE_GRACE_FLOOR"


def environment(scratch: Path, staging: Path, store: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process of the soak, without the user's Prefect settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "AWS_"))}
    return {
        **clean,
        **prefect_server.OFFLINE,
        **store,
        "RECPOINT_HOME": str(scratch / "home"),
        "RECPOINT_STAGING": str(staging),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        IN_A_SOAK: "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Schedules of a minute need a scheduler that runs more often than once a minute.
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "10",
    }


class Child:
    """A process that can be killed and started again.

    Args:
        arguments: of the Python interpreter.
        log: file for stdout and stderr.
        variables: its whole environment.
    """

    def __init__(self, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        self._arguments = [sys.executable, *arguments]
        self.log = log
        self._variables = dict(variables)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begins = 0

    def start(self) -> None:
        """Start the process, without waiting for anything."""
        with self.log.open("ab") as output:
            self._log_begins = output.tell()
            self._process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._variables,
                cwd=self.log.parent,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def output(self) -> str:
        """The output of the process since its newest start."""
        with self.log.open("rb") as log:
            log.seek(self._log_begins)
            return log.read().decode(errors="replace")

    @property
    def rss_mb(self) -> float | None:
        """Return its resident memory in MB; None while it does not run."""
        try:
            return None if self.pid is None else psutil.Process(self.pid).memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            return None

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL; all have ended when this returns."""
        if self._process is None:
            return
        below: list[psutil.Process] = []
        if self.pid is not None:
            below = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        for process in below:
            if process.is_running():
                process.kill()

    def terminate(self, seconds: float) -> int | None:
        """Send SIGTERM; return the exit code, or None if it had to be killed after `seconds`."""
        if self._process is None or self.pid is None:
            return None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None


class LocalPrefect:
    """The local Prefect server of the agent: it is killed here, and the agent starts it again.

    The server is found by `RECPOINT_HOME`, which must be set in this process.
    """

    @property
    def url(self) -> str | None:
        """Return the URL of its API; None: its process is not alive."""
        server = prefect_server.running_server()
        return None if server is None else server.url

    @property
    def answers(self) -> bool:
        """Whether the server answers now."""
        return self.url is not None and prefect_server.is_healthy(self.url)

    def kill(self) -> None:
        """Kill the server and its child with SIGKILL."""
        server = prefect_server.running_server()
        if server is not None:
            os.killpg(server.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait until the server answers; raise RuntimeError with the end of its log if not."""
        deadline = time.monotonic() + seconds
        while not self.answers:
            if time.monotonic() > deadline:
                log = prefect_server.server_directory() / "server.log"
                raise RuntimeError(f"no Prefect server:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)


def wait_until_logged(child: Child, text: str, seconds: float) -> None:
    """Wait until a child has written `text` since its newest start.

    Raises:
        RuntimeError: the child ended, or did not write it in time; has the end of its output.
    """
    deadline = time.monotonic() + seconds
    while text not in child.output:
        if child.pid is None or time.monotonic() > deadline:
            raise RuntimeError(f"{child.log.name}:\n{child.output[-3000:]}")
        time.sleep(0.05)
