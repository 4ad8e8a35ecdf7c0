"""The processes of the soak: each can be killed and started again, and says how large it is."""

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

#: Set in the processes of a soak alone, for `soak_flows`: whoever else imports it changes nothing.
IN_A_SOAK = "RECPOINT_SOAK_LIFTS_THE_GRACE_FLOOR"


def environment(scratch: Path, staging: Path, store: Mapping[str, str]) -> dict[str, str]:
    """What every process of the soak has in its environment: nothing of the user's Prefect."""
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
        # Schedules of a minute need a scheduler that looks more often than once a minute.
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "10",
    }


class Child:
    """A process that is started again after it was killed; its output goes to `log`.

    Args:
        arguments: of this Python.
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
        """Start it; returns at once."""
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
        """Its process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def output(self) -> str:
        """What it has written since its newest start."""
        with self.log.open("rb") as log:
            log.seek(self._log_begins)
            return log.read().decode(errors="replace")

    @property
    def rss_mb(self) -> float | None:
        """Memory that it has in main memory; None while it does not run."""
        try:
            return None if self.pid is None else psutil.Process(self.pid).memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            return None

    def kill(self) -> None:
        """SIGKILL, also for what it has started itself; it has ended when this returns."""
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
        """SIGTERM, and the exit code; it is killed, and None, when it does not end in time."""
        if self._process is None or self.pid is None:
            return None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None


class LocalPrefect:
    """The local server that the agent keeps: killed here, brought back by the agent.

    The module finds it by `RECPOINT_HOME`, which has to be set in this process.
    """

    @property
    def url(self) -> str | None:
        """Its API, if its process is alive."""
        server = prefect_server.running_server()
        return None if server is None else server.url

    @property
    def answers(self) -> bool:
        """Whether it answers now."""
        return self.url is not None and prefect_server.is_healthy(self.url)

    def kill(self) -> None:
        """SIGKILL for the server and its child."""
        server = prefect_server.running_server()
        if server is not None:
            os.killpg(server.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait until it answers; RuntimeError with the end of its log if it does not."""
        deadline = time.monotonic() + seconds
        while not self.answers:
            if time.monotonic() > deadline:
                log = prefect_server.server_directory() / "server.log"
                raise RuntimeError(f"no Prefect server:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)


def wait_until_logged(child: Child, text: str, seconds: float) -> None:
    """Wait until a child has written `text` since its newest start.

    Raises:
        RuntimeError: it ended, or has not; with the end of what it wrote.
    """
    deadline = time.monotonic() + seconds
    while text not in child.output:
        if child.pid is None or time.monotonic() > deadline:
            raise RuntimeError(f"{child.log.name}:\n{child.output[-3000:]}")
        time.sleep(0.05)
