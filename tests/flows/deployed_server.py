"""A local Prefect server of a test's own, and what is asked of it: deployments, workers, events."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from recpoint.catalog.run.run import Run
from recpoint.flows import prefect_server
from tests.forked_program import run_module
from tests.polling import SERVER_SECONDS, until
from tests.prefect_api import ask

__all__ = ["ROOT", "SECONDS", "Server", "flow_run_of", "persist_until_told", "worker_commands"]

ROOT = Path(__file__).resolve().parents[2]
#: Prefect starts a process for each flow run, and an agent leaves an API that was slow alone for up
#: to two minutes, more than once.
SECONDS = 600.0


class Server:
    """A local server of its own, and what talks to it."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.url = url
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self.environment = {
            **clean,
            **prefect_server.OFFLINE,
            "RECPOINT_HOME": str(home),
            "PREFECT_HOME": str(home / "client"),
            "PREFECT_API_URL": url,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(ROOT / "src"),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python -m` with these, in the root of the repository."""
        return run_module(arguments, environment=self.environment, directory=ROOT)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the API says; a GET without a body."""
        return ask(f"{self.url}{path}", body)

    def events(self, prefix: str) -> list[dict[str, Any]]:
        """Events whose names begin with `prefix`."""
        found: list[dict[str, Any]] = self.ask(
            "/events/filter", {"filter": {"event": {"prefix": [prefix]}}, "limit": 50}
        )["events"]
        return found

    def deployments(self) -> dict[str, dict[str, Any]]:
        """All deployments by flow and name."""
        flows = {flow["id"]: flow["name"] for flow in self.ask("/flows/filter", {})}
        return {
            f"{flows[one['flow_id']]}/{one['name']}": one
            for one in self.ask("/deployments/filter", {})
        }

    def ended(self, flow_run: dict[str, Any]) -> dict[str, Any]:
        """The flow run, once it has ended."""

        def look() -> dict[str, Any] | None:
            now: dict[str, Any] = self.ask(f"/flow_runs/{flow_run['id']}")
            return now if now["end_time"] else None

        return until(look, longest_pause=SERVER_SECONDS, seconds=SECONDS)

    def worked_off(self, flow_run: dict[str, Any], *, on_host: bool = False) -> dict[str, Any]:
        """The state of a flow run, by a worker that looks once: one for anywhere, or of the host.

        Once more where a busy server had not told it of the run.
        """
        command = worker_commands()[on_host]

        def look() -> dict[str, Any] | None:
            self.run(*command, "--run-once")
            now: dict[str, Any] = self.ask(f"/flow_runs/{flow_run['id']}")
            return now["state"] if now["state"]["type"] != "SCHEDULED" else None

        until(look, seconds=SECONDS)
        state: dict[str, Any] = self.ended(flow_run)["state"]
        return state

    def events_of(self, run: Run, event: str) -> list[dict[str, Any]]:
        """Events of that name, of a run of ours, newest first."""
        resource = f"recpoint.run.{run.id}"
        found = self.events(f"recpoint.checkpoint.{event}")
        return [one for one in found if one["resource"]["prefect.resource.id"] == resource]


def worker_commands() -> list[list[str]]:
    """The commands that start workers, as prefect.yaml tells them: for anywhere, for one host."""
    lines = (ROOT / "prefect.yaml").read_text(encoding="utf-8").splitlines()
    told = [line.lstrip("# ") for line in lines if line.startswith("#   prefect worker start")]
    return [command.partition("#")[0].split() for command in told]


def flow_run_of(
    server: Server, deployed: dict[str, dict[str, Any]], name: str, parameters: dict[str, Any]
) -> dict[str, Any]:
    """A flow run of a deployment, asked for as a person does in the UI."""
    path = f"/deployments/{deployed[name]['id']}/create_flow_run"
    made: dict[str, Any] = server.ask(path, {"parameters": parameters})
    return made


def _gone(job: Path) -> bool:
    return not job.exists()


def persist_until_told(
    server: Server, run: Run, event: str, stage_one: Callable[[int], Path], steps: Iterator[int]
) -> dict[str, Any]:
    """Have an agent do jobs until a flow of it tells `event` of one; the newest such event.

    Not the first job for sure: on a busy machine an API is slow enough now and then to be given
    up for a while, and a job that is done without Prefect tells nobody.
    """

    def told(step: int) -> dict[str, Any] | None:
        found = server.events_of(run, event)
        return next((one for one in found if one["payload"]["step"] == step), None)

    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        step = next(steps)
        until(partial(_gone, stage_one(step)), seconds=SECONDS)
        with contextlib.suppress(TimeoutError):
            return until(partial(told, step), longest_pause=SERVER_SECONDS, seconds=20)
    raise TimeoutError(f"no {event} of {run.url} was told within {SECONDS:.0f} s")
